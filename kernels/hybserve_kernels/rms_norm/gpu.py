"""RMS norm in Triton, with the sum of the residual stream before it.

Legend: T tokens, H heads, D the normed dimension.
"""

import torch
import triton
import triton.language as tl

from hybserve_kernels.overlap import overlaps_at
from hybserve_kernels.overlap.gpu import begin

#: Elements that a program norms at a time, where rows are short.
_BLOCK = 2048


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr,  # [rows / HEADS, HEADS, D], the last dimension contiguous; + delta is stored here if ADD
    delta_ptr,  # [rows, D], read if ADD
    scale_ptr,  # fp32 [SCALES, D]
    out_ptr,  # [rows, D], contiguous
    rows,
    x_stride,
    head_stride,
    delta_stride,
    eps,
    HEADS: tl.constexpr,
    SCALES: tl.constexpr,  # 1 or HEADS
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    mask = (row < rows)[:, None] & (o_d < D)[None, :]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    p_x = x_ptr + token[:, None] * x_stride + (head * head_stride)[:, None] + o_d[None, :]
    # Before the sums, so that it comes while they are waited for.
    scale = tl.load(scale_ptr + (head % SCALES)[:, None] * D + o_d[None, :], mask=mask, other=0.0)
    begin(EARLY)
    x = tl.load(p_x, mask=mask, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + token[:, None] * delta_stride + o_d[None, :], mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(p_x, x, mask=mask)
    wide = x.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * D + o_d[None, :], wide * scale, mask=mask)


def rms_norm(
    x: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    delta_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x`` [T, D] or [T, H, D], strided but for the last dimension; ``scale`` fp32 [D] or [H, D]. ``delta_TD`` is
    first added to ``x`` [T, D] in place. The result is a new tensor in ``dtype`` (default: of ``x``)."""
    assert x.dim() in (2, 3)
    assert x.stride(-1) == 1
    assert scale.is_contiguous()
    assert scale.dtype == torch.float32
    assert delta_TD is None or (x.dim() == 2 and delta_TD.shape == x.shape and delta_TD.dtype == x.dtype)
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    rows, block = x.shape[0] * heads, triton.next_power_of_2(size)
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    early = overlaps_at(x.device, x.shape[0])
    at_once = max(1, _BLOCK // block)
    _rms_norm_kernel[(triton.cdiv(rows, at_once),)](
        x,
        x if delta_TD is None else delta_TD,
        scale,
        out,
        rows,
        x.stride(0),
        x.stride(1) if heads > 1 else 0,
        0 if delta_TD is None else delta_TD.stride(0),
        eps,
        HEADS=heads,
        SCALES=scale.numel() // size,
        D=size,
        BR=at_once,
        BD=block,
        ADD=delta_TD is not None,
        EARLY=early,
        launch_pdl=early,
        num_warps=warps_of(block),
    )
    return out


def warps_of(block: int) -> int:
    """16 bytes a thread and load where the row is long enough."""
    return max(4, min(16, block // 512))
