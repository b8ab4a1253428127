"""What is done to sums of products before they are stored: each step rounds as a kernel of its own would."""

import triton
import triton.language as tl

from hybserve_kernels.swiglu.gpu import rounded_swiglu


@triton.jit
def finished(total, total_up, bias, p_out, mask, SWIGLU: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr):
    """``total`` in fp32 as it is to be stored at ``p_out``: plus ``bias``, with ``total_up`` through silu(gate) · up,
    added to what stands there."""
    dtype = p_out.dtype.element_ty
    if BIAS:
        total += bias.to(tl.float32)
    total = total.to(dtype)
    if SWIGLU:
        total = rounded_swiglu(total, total_up.to(dtype), dtype)
    if ADD:
        total = (tl.load(p_out, mask=mask, other=0.0).to(tl.float32) + total.to(tl.float32)).to(dtype)
    return total
