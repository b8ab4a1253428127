"""Parameters by name. A layer declares the ones it holds when it is built, and binds them once they are filled."""

import torch


class Params:
    """Names, shapes and dtypes of one rank's parameters, in the order of declaration."""

    def __init__(self, dtype: torch.dtype, device: torch.device, triton: bool = False) -> None:
        """``triton``: the layers will compute through the Triton forms of the ops."""
        self.dtype = dtype
        self.device = device
        self.triton = triton
        self.tensors: dict[str, torch.Tensor] = {}

    def declare(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        """Unfilled memory; the model's dtype unless told otherwise."""
        assert name not in self.tensors, f"parameter {name} declared twice"
        self.tensors[name] = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def get(self, name: str) -> torch.Tensor | None:
        return self.tensors.get(name)
