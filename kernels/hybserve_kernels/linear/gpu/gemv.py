"""Products of one row without matrix units: a program streams a few whole rows of the weight once.

At one row the time is that of reading the weight, so a program issues as many loads as it can before it needs one.

Legend: N outputs, K inputs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.linear.gpu.finish import finished
from hybserve_kernels.overlap import overlaps_at
from hybserve_kernels.overlap.gpu import begin


class Gemv(NamedTuple):
    """``outputs`` a program, and ``depth`` inputs at a time: powers of two."""

    outputs: int
    depth: int
    warps: int


@triton.jit
def _gemv_kernel(
    x_ptr,  # [K]
    w_ptr,  # [N, K] or [2N, K] if SWIGLU
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [N]; read and added to if ADD
    N,
    w_stride,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    EVEN: tl.constexpr = K % BK == 0
    zero: tl.constexpr = None if EVEN else 0.0
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    r_n = tl.minimum(o_n, N - 1).to(tl.int64)
    acc = tl.zeros([BN, BK], dtype=tl.float32)
    acc_up = tl.zeros([BN, BK], dtype=tl.float32)
    for first in tl.static_range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        inside = None if EVEN else (o_k < K)[None, :]
        p_w = w_ptr + r_n[:, None] * w_stride + o_k[None, :]
        w = tl.load(p_w, mask=inside, other=zero)
        if SWIGLU:
            w_up = tl.load(p_w + N.to(tl.int64) * w_stride, mask=inside, other=zero)
        if first == 0:
            begin(EARLY)
        # Loaded for each output again, from the cache, in the layout of the weights: nothing to exchange.
        x = tl.load(x_ptr + r_n[:, None] * 0 + o_k[None, :], mask=inside, other=zero).to(tl.float32)
        acc += w.to(tl.float32) * x
        if SWIGLU:
            acc_up += w_up.to(tl.float32) * x
    total = tl.sum(acc, axis=1)
    total_up = tl.sum(acc_up, axis=1) if SWIGLU else total
    bias = tl.load(bias_ptr + r_n) if BIAS else 0.0
    mask, p_out = o_n < N, out_ptr + o_n
    tl.store(p_out, finished(total, total_up, bias, p_out, mask, SWIGLU, BIAS, ADD), mask=mask)


def gemv(
    config: Gemv,
    x_1K: torch.Tensor,
    weight: torch.Tensor,
    out_1N: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    swiglu: bool = False,
    add: bool = False,
) -> None:
    """Writes, or with ``add`` adds, the product of one row to ``out_1N``. ``swiglu``: ``weight`` is [gate | up]."""
    outputs, inputs = out_1N.shape[1], x_1K.shape[1]
    early = overlaps_at(x_1K.device, 1)
    _gemv_kernel[(-(-outputs // config.outputs),)](
        x_1K,
        weight,
        x_1K if bias_N is None else bias_N,
        out_1N,
        outputs,
        weight.stride(0),
        K=inputs,
        BN=config.outputs,
        BK=config.depth,
        SWIGLU=swiglu,
        BIAS=bias_N is not None,
        ADD=add,
        EARLY=early,
        launch_pdl=early,
        num_warps=config.warps,
    )
