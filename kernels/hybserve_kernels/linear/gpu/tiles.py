"""Products of a few up to some hundred rows with matrix units: weights stream through a pipeline of tiles, few outputs
wide, and are the left operand, so that few rows fill the units.

Where there are fewer tiles than the processors can hold, the inputs are split over several programs; their partial sums
go through a workspace, and the last program to finish a tile adds them in a fixed order, so that the bits do not depend
on which one it was.

Of [gate | up] a tile takes 8 rows of the one and 8 of the other by turns, so that a thread comes to hold both sums of
an output.

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
from hybserve_kernels.overlap.gpu import let_next, prefetch, wait


class Tiles(NamedTuple):
    """A tile is ``outputs`` rows of the weight (two of them to an output for swiglu) × ``rows`` of the input (powers of
    two), ``depth`` inputs at a time, which divide K.

    ``more``: further rows of the weight, 0 or a power of two: tiles of 128 + 64 divide 2 · 12288 of them among 128 of
    the 132 processors of an H200. ``late``: the next kernel is launched so many blocks of inputs before the end, so
    that what it brings into the cache is not displaced again; 0 for at once."""

    outputs: int
    rows: int
    depth: int
    warps: int
    stages: int
    splits: int = 1
    more: int = 0
    late: int = 0


#: Blocks of inputs that a program brings into the cache before it begins. (More of them, or some in the loop too, cost
#: more than they gain.)
_AHEAD = 2


@triton.jit
def _weight_rows(first, COUNT: tl.constexpr, N, SWIGLU: tl.constexpr):
    """Rows of the weight, int64, at ``COUNT`` rows of tiles from ``first`` on; the last one for those that are not."""
    o_r = first + tl.arange(0, COUNT)
    if SWIGLU:
        o_n = o_r // 16 * 8 + o_r % 8
        return tl.minimum(o_n, N - 1).to(tl.int64) + (o_r // 8 % 2).to(tl.int64) * N
    return tl.minimum(o_r, N - 1).to(tl.int64)


@triton.jit
def _fetch(w_ptr, r_w, w_stride, block, end, BK: tl.constexpr):
    """Block ``block`` of inputs, or the last before ``end``, of some rows of the weight."""
    o_k = tl.minimum(block, end - 1) * BK + tl.arange(0, (BK + 63) // 64) * 64
    prefetch(w_ptr + r_w[:, None] * w_stride + o_k[None, :])


@triton.jit
def _store(
    acc, first, o_m, out_ptr, out_stride, bias_ptr, M, N, SWIGLU: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr
):
    """What becomes of the sums ``acc`` [rows of the weight from ``first`` on, BM]."""
    BN: tl.constexpr = acc.shape[0]
    BM: tl.constexpr = acc.shape[1]
    if SWIGLU:
        pairs = tl.permute(tl.reshape(acc, [BN // 16, 2, 8, BM]), 0, 2, 3, 1)
        gate, up = tl.split(pairs)
        total, total_up = tl.reshape(gate, [BN // 2, BM]), tl.reshape(up, [BN // 2, BM])
        o_n = first // 2 + tl.arange(0, BN // 2)
    else:
        total, total_up = acc, acc
        o_n = first + tl.arange(0, BN)
    mask = (o_n < N)[:, None] & (o_m < M)[None, :]
    bias = tl.load(bias_ptr + tl.minimum(o_n, N - 1))[:, None] if BIAS else 0.0
    p_out = out_ptr + o_m.to(tl.int64)[None, :] * out_stride + o_n[:, None]
    tl.store(p_out, finished(total, total_up, bias, p_out, mask, SWIGLU, BIAS, ADD), mask=mask)


@triton.jit
def _leave(acc, p_tile, split, stride):
    """The partial sums of a program, in the workspace."""
    o_n, o_m = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    tl.store(p_tile + split * stride + o_n[:, None] * acc.shape[1] + o_m[None, :], acc, cache_modifier=".cg")


@triton.jit
def _collect(acc, p_tile, splits, stride):
    """The partial sums of all programs of a tile, added in their order."""
    o_n, o_m = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    p_part = p_tile + o_n[:, None] * acc.shape[1] + o_m[None, :]
    acc = tl.load(p_part, cache_modifier=".cg")
    for other in tl.range(1, splits):
        acc += tl.load(p_part + other * stride, cache_modifier=".cg")
    return acc


@triton.jit(do_not_specialize=["M"])
def _tiles_kernel(
    x_ptr,  # [M, K], the last dimension contiguous
    w_ptr,  # [N, K] or [2N, K] if SWIGLU
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [M, N]; read and added to if ADD
    partial_ptr,  # fp32 [splits, tiles, BN + MORE, BM] if SPLIT
    count_ptr,  # int32 [tiles], zero between launches
    M,
    N,
    K,
    x_stride,
    w_stride,
    out_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MORE: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,  # blocks of BK inputs
    LATE: tl.constexpr,  # likewise
):
    tiles_m = tl.cdiv(M, BM)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    split, splits = tl.program_id(1), tl.num_programs(1)
    o_m = (tile % tiles_m) * BM + tl.arange(0, BM)
    r_m = tl.minimum(o_m, M - 1).to(tl.int64)
    first_w = (tile // tiles_m) * (BN + MORE)
    r_w = _weight_rows(first_w, BN, N, SWIGLU)
    if MORE:
        r_more = _weight_rows(first_w + BN, MORE, N, SWIGLU)
    blocks = K // BK
    first, end = blocks * split // splits, blocks * (split + 1) // splits

    o_k = first * BK + tl.arange(0, BK)
    p_x = x_ptr + r_m[None, :] * x_stride + o_k[:, None]
    p_w = w_ptr + r_w[:, None] * w_stride + o_k[None, :]
    if MORE:
        p_more = w_ptr + r_more[:, None] * w_stride + o_k[None, :]
    if EARLY:
        for block in tl.range(first, first + AHEAD, num_stages=1):
            _fetch(w_ptr, r_w, w_stride, block, end, BK)
            if MORE:
                _fetch(w_ptr, r_more, w_stride, block, end, BK)
    wait(EARLY)
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    acc_more = tl.zeros([MORE if MORE else 1, BM], dtype=tl.float32)
    launch = tl.maximum(first, end - LATE) if LATE else first
    for block in tl.range(first, end, num_stages=STAGES):
        let_next(block == launch, EARLY)
        w, x = tl.load(p_w), tl.load(p_x)
        acc = dot(w, x, acc)
        if MORE:
            acc_more = dot(tl.load(p_more), x, acc_more)
            p_more += BK
        p_w += BK
        p_x += BK

    last = True
    if SPLIT:
        p_tile = partial_ptr + tile.to(tl.int64) * (BN + MORE) * BM
        stride = tiles.to(tl.int64) * (BN + MORE) * BM
        _leave(acc, p_tile, split, stride)
        if MORE:
            _leave(acc_more, p_tile + BN * BM, split, stride)
        tl.debug_barrier()
        last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == splits - 1
        if last:
            tl.store(count_ptr + tile, 0)
            acc = _collect(acc, p_tile, splits, stride)
            if MORE:
                acc_more = _collect(acc_more, p_tile + BN * BM, splits, stride)
    if last:
        _store(acc, first_w, o_m, out_ptr, out_stride, bias_ptr, M, N, SWIGLU, BIAS, ADD)
        if MORE:
            _store(acc_more, first_w + BN, o_m, out_ptr, out_stride, bias_ptr, M, N, SWIGLU, BIAS, ADD)


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
    height = config.outputs + config.more
    # Of [gate | up] tiles take whole groups of 8 outputs.
    count = triton.cdiv(rows, config.rows) * triton.cdiv(triton.cdiv(outputs, 8) * 16 if swiglu else outputs, height)
    partial = counts = x_MK
    if config.splits > 1:
        assert count <= MOST_COUNTS
        partial = torch.empty(config.splits * count * height * config.rows, dtype=torch.float32, device=x_MK.device)
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
        MORE=config.more,
        BK=config.depth,
        STAGES=config.stages,
        SPLIT=config.splits > 1,
        SWIGLU=swiglu,
        BIAS=bias_N is not None,
        ADD=add,
        EARLY=early,
        AHEAD=_AHEAD,
        LATE=config.late,
        launch_pdl=early,
        num_warps=config.warps,
    )
