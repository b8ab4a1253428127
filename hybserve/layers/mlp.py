"""The dense SwiGLU block.

Legend: T tokens, D model dim, F this rank's part of the width.
"""

import torch
from hybserve_kernels.linear import norm_linear_swiglu
from hybserve_kernels.swiglu import swiglu

from hybserve.layers.linear import Linear, ReducedLinear
from hybserve.layers.norm import RMSNorm
from hybserve.layers.params import Params
from hybserve.parallel.mesh import Mesh


class Mlp:
    def __init__(self, params: Params, name: str, hidden: int, ffn: int, mesh: Mesh) -> None:
        self._gate_up = Linear(params, f"{name}.gate_up", hidden, 2 * ffn)
        self._down = ReducedLinear(params, f"{name}.down", ffn, hidden, mesh)

    def bind(self) -> None:
        self._gate_up.bind()
        self._down.bind()

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self._down(swiglu(self._gate_up(x_TD)))

    def add_to(self, hidden_TD: torch.Tensor, norm: RMSNorm) -> None:
        """Add the block's output for the norm of the residual stream to it, in place (Triton form)."""
        self._down.add_to(hidden_TD, norm_linear_swiglu(hidden_TD, norm.scale, norm.eps, self._gate_up.weight))
