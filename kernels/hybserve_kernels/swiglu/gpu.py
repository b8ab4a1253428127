"""silu(gate) · up in Triton.

Legend: T tokens, F half of [gate | up].
"""

import torch
import triton
import triton.language as tl

from hybserve_kernels.overlap import overlaps_at
from hybserve_kernels.overlap.gpu import begin

_BLOCK, _WARPS = 1024, 4


@triton.jit
def rounded_swiglu(gate, up, dtype: tl.constexpr):
    """silu(gate) · up in ``dtype``, the activation rounded before the product; ``gate`` and ``up`` in ``dtype``."""
    wide = gate.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(dtype).to(tl.float32)
    return (activated * up.to(tl.float32)).to(dtype)


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, F, x_stride, BF: tl.constexpr, EARLY: tl.constexpr):
    """``x`` [T, 2F], the last dimension contiguous; ``out`` [T, F], contiguous."""
    row = tl.program_id(0).to(tl.int64)
    o_f = tl.program_id(1) * BF + tl.arange(0, BF)
    mask = o_f < F
    p_x = x_ptr + row * x_stride + o_f
    begin(EARLY)
    gate, up = tl.load(p_x, mask=mask), tl.load(p_x + F, mask=mask)
    tl.store(out_ptr + row * F + o_f, rounded_swiglu(gate, up, x_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2F] to [..., F], a new tensor; ``gate_up`` has one stride for all of its rows."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    assert rows.stride(1) == 1
    size = rows.shape[1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    early = overlaps_at(rows.device, rows.shape[0])
    _swiglu_kernel[(rows.shape[0], triton.cdiv(size, _BLOCK))](
        rows, out, size, rows.stride(0), BF=_BLOCK, EARLY=early, num_warps=_WARPS, launch_pdl=early
    )
    return out
