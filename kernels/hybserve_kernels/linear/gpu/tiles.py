"""Products of a few up to some hundred rows with matrix units: weights stream through a pipeline of tiles, few outputs
wide, and are the left operand, so that few rows fill the units.

Where there are fewer tiles than the processors can hold, the inputs are split over several programs; their partial sums
go through a workspace, and the last program to finish a tile adds them in a fixed order, so that the bits do not depend
on which one it was.

Legend: M rows, N outputs, K inputs, F half of the outputs of [gate | up].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.attention.gpu.dot import dot
from hybserve_kernels.linear.gpu.counts import MOST_COUNTS, counts_of
from hybserve_kernels.linear.gpu.finish import finished
from hybserve_kernels.overlap import overlaps_at
from hybserve_kernels.overlap.gpu import begin, prefetch


class Tiles(NamedTuple):
    """A tile is ``outputs`` × ``rows`` (powers of two), ``depth`` inputs at a time, which divide K."""

    outputs: int
    rows: int
    depth: int
    warps: int
    stages: int
    splits: int = 1


@triton.jit(do_not_specialize=["M"])
def _tiles_kernel(
    x_ptr,  # [M, K], the last dimension contiguous
    w_ptr,  # [N, K] or [2N, K] if SWIGLU
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [M, N]; read and added to if ADD
    partial_ptr,  # fp32 [splits, tiles, 1 or 2, BN, BM] if SPLIT
    count_ptr,  # int32 [tiles], zero between launches
    M,
    N,
    K,
    x_stride,
    w_stride,
    out_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,  # cache lines of a row of the weight that are prefetched
):
    HALVES: tl.constexpr = 2 if SWIGLU else 1
    tiles_m = tl.cdiv(M, BM)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    split, splits = tl.program_id(1), tl.num_programs(1)
    o_m = (tile % tiles_m) * BM + tl.arange(0, BM)
    o_n = (tile // tiles_m) * BN + tl.arange(0, BN)
    r_m = tl.minimum(o_m, M - 1).to(tl.int64)
    r_n = tl.minimum(o_n, N - 1).to(tl.int64)
    blocks = K // BK
    first, end = blocks * split // splits, blocks * (split + 1) // splits

    o_k = first * BK + tl.arange(0, BK)
    p_x = x_ptr + r_m[None, :] * x_stride + o_k[:, None]
    p_w = w_ptr + r_n[:, None] * w_stride + o_k[None, :]
    p_up = p_w + N.to(tl.int64) * w_stride
    ahead = tl.minimum(first * BK + tl.arange(0, AHEAD) * 64, K - 1)
    prefetch(w_ptr + r_n[:, None] * w_stride + ahead[None, :], EARLY)
    if SWIGLU:
        prefetch(w_ptr + (r_n + N)[:, None] * w_stride + ahead[None, :], EARLY)
    begin(EARLY)
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    acc_up = tl.zeros([BN, BM], dtype=tl.float32)
    for _ in tl.range(first, end, num_stages=STAGES):
        w, x = tl.load(p_w), tl.load(p_x)
        acc = dot(w, x, acc)
        if SWIGLU:
            acc_up = dot(tl.load(p_up), x, acc_up)
            p_up += BK
        p_w += BK
        p_x += BK

    last = True
    if SPLIT:
        inside = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        p_part = partial_ptr + tile.to(tl.int64) * HALVES * BN * BM + inside
        stride = tiles.to(tl.int64) * HALVES * BN * BM
        tl.store(p_part + split * stride, acc, cache_modifier=".cg")
        if SWIGLU:
            tl.store(p_part + split * stride + BN * BM, acc_up, cache_modifier=".cg")
        tl.debug_barrier()
        last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == splits - 1
        if last:
            tl.store(count_ptr + tile, 0)
            acc = tl.load(p_part, cache_modifier=".cg")
            for other in tl.range(1, splits):
                acc += tl.load(p_part + other * stride, cache_modifier=".cg")
            if SWIGLU:
                acc_up = tl.load(p_part + BN * BM, cache_modifier=".cg")
                for other in tl.range(1, splits):
                    acc_up += tl.load(p_part + other * stride + BN * BM, cache_modifier=".cg")
    if last:
        mask = (o_n < N)[:, None] & (o_m < M)[None, :]
        bias = tl.load(bias_ptr + r_n)[:, None] if BIAS else 0.0
        p_out = out_ptr + o_m.to(tl.int64)[None, :] * out_stride + o_n[:, None]
        tl.store(p_out, finished(acc, acc_up, bias, p_out, mask, SWIGLU, BIAS, ADD), mask=mask)


def tiles(
    config: Tiles,
    x_MK: torch.Tensor,
    weight: torch.Tensor,
    out_MN: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    swiglu: bool = False,
    add: bool = False,
) -> None:
    """Writes, or with ``add`` adds, the product to ``out_MN``. ``swiglu``: ``weight`` is [gate | up]."""
    rows, outputs = out_MN.shape
    inputs = x_MK.shape[1]
    assert inputs % config.depth == 0
    count = triton.cdiv(rows, config.rows) * triton.cdiv(outputs, config.outputs)
    partial = counts = x_MK
    if config.splits > 1:
        assert count <= MOST_COUNTS
        size = config.splits * count * (1 + swiglu) * config.outputs * config.rows
        partial = torch.empty(size, dtype=torch.float32, device=x_MK.device)
        counts = counts_of(x_MK.device)
    early = overlaps_at(x_MK.device, rows)
    _tiles_kernel[(count, config.splits)](
        x_MK,
        weight,
        x_MK if bias_N is None else bias_N,
        out_MN,
        partial,
        counts,
        rows,
        outputs,
        inputs,
        x_MK.stride(0),
        weight.stride(0),
        out_MN.stride(0),
        BM=config.rows,
        BN=config.outputs,
        BK=config.depth,
        STAGES=config.stages,
        SPLIT=config.splits > 1,
        SWIGLU=swiglu,
        BIAS=bias_N is not None,
        ADD=add,
        EARLY=early,
        AHEAD=max(1, triton.next_power_of_2(config.depth * config.stages // 64) // 2),
        launch_pdl=early,
        num_warps=config.warps,
    )
