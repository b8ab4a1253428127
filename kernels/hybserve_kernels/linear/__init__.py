"""Linear maps over packed rows, with the norm before and the activation or the residual sum after them.

Few rows are multiplied by kernels of our own that take the neighbours in; for all other shapes, dtypes and devices the
same functions run one op after another. Either way the normed rows and the product are rounded to the model dtype
before what follows (reference.py), so both differ in nothing but the order of sums.

Legend: M rows, N outputs, K inputs, F half of the outputs of a merged projection [gate | up].
"""

import torch
import torch.nn.functional as F

from hybserve_kernels.linear.gpu.gemv import Gemv, gemv
from hybserve_kernels.linear.gpu.table import choose
from hybserve_kernels.linear.gpu.tiles import tiles
from hybserve_kernels.rms_norm import rms_norm
from hybserve_kernels.swiglu import swiglu

__all__ = ["linear", "linear_add_", "linear_swiglu", "norm_linear", "norm_linear_swiglu"]


def linear(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, out_MN: torch.Tensor | None = None
) -> torch.Tensor:
    """x · weight^T (+ bias), accumulated in fp32; into ``out_MN`` if given. The rows of ``x`` may be strided."""
    _check(x_MK, weight_NK)
    rows, outputs = x_MK.shape[0], weight_NK.shape[0]
    choice = choose("plain", x_MK.device, x_MK.dtype, rows, outputs, x_MK.shape[1])
    if choice is None:
        if out_MN is None:
            return F.linear(x_MK, weight_NK, bias_N)
        if bias_N is None:
            return torch.mm(x_MK, weight_NK.T, out=out_MN)
        return torch.addmm(bias_N, x_MK, weight_NK.T, out=out_MN)
    if out_MN is None:
        out_MN = x_MK.new_empty(rows, outputs)
    if isinstance(choice, Gemv):
        gemv(choice, x_MK, weight_NK, out_MN, bias_N)
    else:
        tiles(choice, x_MK, weight_NK, out_MN, bias_N)
    return out_MN


def linear_add_(
    hidden_MN: torch.Tensor, x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """hidden += linear(x), in place; returns ``hidden``."""
    _check(x_MK, weight_NK)
    choice = choose("plain", x_MK.device, x_MK.dtype, x_MK.shape[0], weight_NK.shape[0], x_MK.shape[1])
    if choice is None:
        return hidden_MN.add_(F.linear(x_MK, weight_NK, bias_N))
    if isinstance(choice, Gemv):
        gemv(choice, x_MK, weight_NK, hidden_MN, bias_N, add=True)
    else:
        tiles(choice, x_MK, weight_NK, hidden_MN, bias_N, add=True)
    return hidden_MN


def linear_swiglu(x_MK: torch.Tensor, gate_up_2FK: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of the product with a merged projection, [M, F]."""
    _check(x_MK, gate_up_2FK)
    rows, outputs = x_MK.shape[0], gate_up_2FK.shape[0] // 2
    choice = choose("swiglu", x_MK.device, x_MK.dtype, rows, outputs, x_MK.shape[1])
    if choice is None:
        return swiglu(linear(x_MK, gate_up_2FK))
    out_MF = x_MK.new_empty(rows, outputs)
    if isinstance(choice, Gemv):
        gemv(choice, x_MK, gate_up_2FK, out_MF, swiglu=True)
    else:
        tiles(choice, x_MK, gate_up_2FK, out_MF, swiglu=True)
    return out_MF


def norm_linear(
    hidden_MK: torch.Tensor,
    scale_K: torch.Tensor,
    eps: float,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """linear(rms_norm(hidden)), [M, N]; ``scale_K`` in fp32."""
    _check(hidden_MK, weight_NK)
    rows, outputs = hidden_MK.shape[0], weight_NK.shape[0]
    choice = choose("norm", hidden_MK.device, hidden_MK.dtype, rows, outputs, hidden_MK.shape[1])
    if not isinstance(choice, Gemv):
        return linear(rms_norm(hidden_MK, scale_K, eps), weight_NK, bias_N)
    out_MN = hidden_MK.new_empty(rows, outputs)
    gemv(choice, hidden_MK, weight_NK, out_MN, bias_N, (scale_K, eps))
    return out_MN


def norm_linear_swiglu(
    hidden_MK: torch.Tensor, scale_K: torch.Tensor, eps: float, gate_up_2FK: torch.Tensor
) -> torch.Tensor:
    """linear_swiglu(rms_norm(hidden)), [M, F]; ``scale_K`` in fp32."""
    _check(hidden_MK, gate_up_2FK)
    rows, outputs = hidden_MK.shape[0], gate_up_2FK.shape[0] // 2
    choice = choose("norm_swiglu", hidden_MK.device, hidden_MK.dtype, rows, outputs, hidden_MK.shape[1])
    if not isinstance(choice, Gemv):
        return linear_swiglu(rms_norm(hidden_MK, scale_K, eps), gate_up_2FK)
    out_MF = hidden_MK.new_empty(rows, outputs)
    gemv(choice, hidden_MK, gate_up_2FK, out_MF, None, (scale_K, eps), swiglu=True)
    return out_MF


def _check(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> None:
    assert x_MK.shape[1] == weight_NK.shape[1], (x_MK.shape, weight_NK.shape)
    assert x_MK.dtype == weight_NK.dtype, (x_MK.dtype, weight_NK.dtype)
