"""Which form of an op runs where. Today every op has a torch form for CPU tensors and nothing else."""

import torch


def require_cpu(op: str, *tensors: torch.Tensor) -> None:
    """Refuse tensors that no form of the op can read. Raises NotImplementedError that names the op and the device."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise NotImplementedError(f"{op}: no form for device {tensor.device}; this version computes on CPU only")
