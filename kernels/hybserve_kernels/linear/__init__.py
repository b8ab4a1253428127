"""Linear maps over packed rows, with the norm before and the activation or the residual sum after them.

Few rows are multiplied by kernels of our own that take in what follows; for all other shapes, dtypes and devices the
same functions run one op after another. Either way the normed rows and the product are rounded to the model dtype
before what follows (reference.py), so both differ in nothing but the order of sums, except where ``linear_add_`` says.

Legend: M rows, N outputs, K inputs, F half of the outputs of a merged projection [gate | up].
"""

import torch
import torch.nn.functional as F

from hybserve_kernels.linear.gpu.gemv import Gemv, gemv
from hybserve_kernels.linear.gpu.table import Choice, choose
from hybserve_kernels.linear.gpu.tiles import tiles
from hybserve_kernels.rms_norm import rms_norm
from hybserve_kernels.swiglu import swiglu

__all__ = ["linear", "linear_add_", "linear_swiglu", "norm_linear", "norm_linear_swiglu"]


def linear(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, out_MN: torch.Tensor | None = None
) -> torch.Tensor:
    """x · weight^T (+ bias), accumulated in fp32; into ``out_MN`` if given. The rows of ``x`` may be strided."""
    _check(x_MK, weight_NK)
    choice = choose("plain", x_MK, weight_NK.shape[0])
    if choice is None:
        if out_MN is None:
            return F.linear(x_MK, weight_NK, bias_N)
        if bias_N is None:
            return torch.mm(x_MK, weight_NK.T, out=out_MN)
        return torch.addmm(bias_N, x_MK, weight_NK.T, out=out_MN)
    if out_MN is None:
        out_MN = x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0])
    launch(choice, x_MK, weight_NK, out_MN, bias_N)
    return out_MN


def linear_add_(
    hidden_MN: torch.Tensor, x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """hidden += linear(x), in place; returns ``hidden``. The library's product on a GPU adds in fp32 and rounds the sum
    once, where all others round the product too."""
    _check(x_MK, weight_NK)
    choice = choose("plain", x_MK, weight_NK.shape[0])
    if choice is not None:
        launch(choice, x_MK, weight_NK, hidden_MN, bias_N, add=True)
        return hidden_MN
    if bias_N is None and x_MK.is_cuda:
        return hidden_MN.addmm_(x_MK, weight_NK.T)
    return hidden_MN.add_(F.linear(x_MK, weight_NK, bias_N))


def linear_swiglu(x_MK: torch.Tensor, gate_up_2FK: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of the product with a merged projection, [M, F]."""
    _check(x_MK, gate_up_2FK)
    outputs = gate_up_2FK.shape[0] // 2
    choice = choose("swiglu", x_MK, outputs)
    if choice is None:
        return swiglu(linear(x_MK, gate_up_2FK))
    out_MF = x_MK.new_empty(x_MK.shape[0], outputs)
    launch(choice, x_MK, gate_up_2FK, out_MF, swiglu=True)
    return out_MF


def norm_linear(
    hidden_MK: torch.Tensor,
    scale_K: torch.Tensor,
    eps: float,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """linear(rms_norm(hidden)), [M, N]; ``scale_K`` in fp32."""
    return linear(rms_norm(hidden_MK, scale_K, eps), weight_NK, bias_N)


def norm_linear_swiglu(
    hidden_MK: torch.Tensor, scale_K: torch.Tensor, eps: float, gate_up_2FK: torch.Tensor
) -> torch.Tensor:
    """linear_swiglu(rms_norm(hidden)), [M, F]; ``scale_K`` in fp32."""
    return linear_swiglu(rms_norm(hidden_MK, scale_K, eps), gate_up_2FK)


def launch(
    choice: Choice,
    x_MK: torch.Tensor,
    weight: torch.Tensor,
    out_MN: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    swiglu: bool = False,
    add: bool = False,
) -> None:
    """By the kernel of ``choice``: ``linear``, ``linear_swiglu`` or ``linear_add_`` into ``out_MN``."""
    if isinstance(choice, Gemv):
        gemv(choice, x_MK, weight, out_MN, bias_N, swiglu, add)
    else:
        tiles(choice, x_MK, weight, out_MN, bias_N, swiglu, add)


def _check(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> None:
    assert x_MK.shape[1] == weight_NK.shape[1], (x_MK.shape, weight_NK.shape)
    assert x_MK.dtype == weight_NK.dtype, (x_MK.dtype, weight_NK.dtype)
