"""Products of a few up to some hundred rows by programs that stay: each streams its equal share of all weights without
a break, through tensor descriptors, and goes on to its next tile while the last one is being stored.

A share is a span of blocks (tile after tile, inputs fastest), so it may begin and end within a tile. Partial sums of
such tiles go through a workspace, and the last program to finish a tile adds them in a fixed order, so that the bits do
not depend on which one it was.

Legend: M rows, N outputs, K inputs, F half of the outputs of [gate | up].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hybserve_kernels.attention.gpu.dot import dot
from hybserve_kernels.linear.gpu.counts import MOST_COUNTS, counts_of
from hybserve_kernels.linear.gpu.finish import finished
from hybserve_kernels.overlap import overlaps_at
from hybserve_kernels.overlap.gpu import begin, prefetch

#: Nothing runs side by side there.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Stream(NamedTuple):
    """A tile is ``outputs`` × ``rows`` (powers of two), ``depth`` inputs at a time; ``programs`` share the blocks."""

    outputs: int
    rows: int
    depth: int
    warps: int
    stages: int
    programs: int


@triton.jit
def _meet(THREADS: tl.constexpr):
    """A barrier of the program that the compiler still pipelines a loop around, unlike ``tl.debug_barrier``."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.u32 $0, $1;", "=r,r", [tl.arange(0, THREADS)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["M"])
def _stream_kernel(
    x_desc,  # [M, K]
    w_desc,  # [N, K] or [2N, K] if SWIGLU
    w_ptr,
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [M, N]; read and added to if ADD
    partial_ptr,  # fp32 [programs, 2 (the first tile of the program, the last), 1 or 2, BN, BM]
    count_ptr,  # int32 [programs], zero between launches
    M,
    N,
    K,
    w_stride,
    out_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PIECES: tl.constexpr,  # that a tile may be in
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,  # cache lines of a row of the weight that are prefetched
    THREADS: tl.constexpr,
):
    PLACES: tl.constexpr = BN * BM
    SLOT: tl.constexpr = (2 if SWIGLU else 1) * PLACES
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, blocks = tl.cdiv(M, BM), tl.cdiv(K, BK)
    units = tiles_m * tl.cdiv(N, BN) * blocks
    first, end = units * program // programs, units * (program + 1) // programs

    o_ahead = tl.minimum(first // blocks // tiles_m * BN + tl.arange(0, BN), N - 1).to(tl.int64)
    k_ahead = tl.minimum(first % blocks * BK + tl.arange(0, AHEAD) * 64, K - 1)
    prefetch(w_ptr + o_ahead[:, None] * w_stride + k_ahead[None, :], EARLY)
    if SWIGLU:
        prefetch(w_ptr + (o_ahead + N)[:, None] * w_stride + k_ahead[None, :], EARLY)
    begin(EARLY)
    inside = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    acc_up = tl.zeros([BN, BM], dtype=tl.float32)
    for unit in tl.range(first, end, num_stages=STAGES):
        tile, block = unit // blocks, unit % blocks
        m, n = tile % tiles_m * BM, tile // tiles_m * BN
        x = tl.trans(x_desc.load([m, block * BK]))
        acc = dot(w_desc.load([n, block * BK]), x, acc)
        if SWIGLU:
            acc_up = dot(w_desc.load([n + N, block * BK]), x, acc_up)
        if (block == blocks - 1) | (unit == end - 1):
            last = True
            if PIECES > 1:
                opener = ((tile * blocks + 1) * programs - 1) // units
                pieces = ((tile + 1) * blocks * programs - 1) // units - opener + 1
                if pieces > 1:
                    # Slot 0 is for the tile that a program begins with.
                    slot = (first // blocks != tile).to(tl.int32)
                    p_mine = partial_ptr + inside + (program * 2 + slot).to(tl.int64) * SLOT
                    tl.store(p_mine, acc, cache_modifier=".cg")
                    if SWIGLU:
                        tl.store(p_mine + PLACES, acc_up, cache_modifier=".cg")
                    _meet(THREADS)
                    last = tl.atomic_add(count_ptr + opener, 1, sem="acq_rel") == pieces - 1
                    if last:
                        tl.store(count_ptr + opener, 0)
                        open_slot = (units * opener // programs // blocks != tile).to(tl.int32)
                        p_first = partial_ptr + (opener * 2).to(tl.int64) * SLOT + inside
                        acc = tl.load(p_first + open_slot * SLOT, cache_modifier=".cg")
                        for piece in tl.static_range(1, PIECES):
                            if piece < pieces:
                                acc += tl.load(p_first + piece * 2 * SLOT, cache_modifier=".cg")
                        if SWIGLU:
                            acc_up = tl.load(p_first + open_slot * SLOT + PLACES, cache_modifier=".cg")
                            for piece in tl.static_range(1, PIECES):
                                if piece < pieces:
                                    acc_up += tl.load(p_first + piece * 2 * SLOT + PLACES, cache_modifier=".cg")
            if last:
                o_m, o_n = m + tl.arange(0, BM), n + tl.arange(0, BN)
                mask = (o_n < N)[:, None] & (o_m < M)[None, :]
                bias = tl.load(bias_ptr + o_n, mask=o_n < N, other=0.0)[:, None] if BIAS else 0.0
                p_out = out_ptr + o_m.to(tl.int64)[None, :] * out_stride + o_n[:, None]
                tl.store(p_out, finished(acc, acc_up, bias, p_out, mask, SWIGLU, BIAS, ADD), mask=mask)
            acc = tl.zeros([BN, BM], dtype=tl.float32)
            acc_up = tl.zeros([BN, BM], dtype=tl.float32)


def pieces_of(tiles: int, blocks: int, programs: int) -> int:
    """In how many programs' shares a tile may lie, as a power of two."""
    programs = min(programs, tiles * blocks)
    if tiles % programs == 0:
        return 1
    pieces: int = triton.next_power_of_2((blocks - 1) // (tiles * blocks // programs) + 2)
    return pieces


def stream(
    config: Stream,
    x_MK: torch.Tensor,
    weight: torch.Tensor,
    out_MN: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    swiglu: bool = False,
    add: bool = False,
) -> None:
    """Writes, or with ``add`` adds, the product to ``out_MN``. ``swiglu``: ``weight`` is [gate | up]. Rows of ``x`` and
    ``weight`` begin at multiples of 16 bytes."""
    rows, outputs = out_MN.shape
    inputs = x_MK.shape[1]
    tiles, blocks = -(-rows // config.rows) * -(-outputs // config.outputs), -(-inputs // config.depth)
    programs = min(config.programs, tiles * blocks)
    assert programs <= MOST_COUNTS
    pieces = pieces_of(tiles, blocks, programs)
    partial = counts = x_MK
    if pieces > 1:
        size = programs * 2 * (1 + swiglu) * config.outputs * config.rows
        partial = torch.empty(size, dtype=torch.float32, device=x_MK.device)
        counts = counts_of(x_MK.device)
    early = overlaps_at(x_MK.device, rows)
    _stream_kernel[(programs,)](
        TensorDescriptor(x_MK, [rows, inputs], [x_MK.stride(0), 1], [config.rows, config.depth]),
        TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [config.outputs, config.depth]),
        weight,
        x_MK if bias_N is None else bias_N,
        out_MN,
        partial,
        counts,
        rows,
        outputs,
        inputs,
        weight.stride(0),
        out_MN.stride(0),
        BM=config.rows,
        BN=config.outputs,
        BK=config.depth,
        STAGES=config.stages,
        PIECES=pieces,
        SWIGLU=swiglu,
        BIAS=bias_N is not None,
        ADD=add,
        EARLY=early,
        AHEAD=max(1, triton.next_power_of_2(config.depth * config.stages // 64) // 2),
        THREADS=32 * config.warps,
        launch_pdl=early,
        num_warps=config.warps,
    )
