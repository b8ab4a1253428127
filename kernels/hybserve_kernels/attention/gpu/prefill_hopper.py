"""Attention of the prefill rows for 16-bit heads on GPUs with warpgroup products (sm_90).

What ``prefill.py`` computes, cut for Hopper: a program has three parts of warps that meet only at barriers in shared
memory. One warp fetches queries and tiles of keys and values into a ring, and two groups of four warps each hold 64
queries of the head and walk through the ring. While one group forms weights, the tensor cores work for the other.

Legend: T packed tokens, R rows, X tiles of TILE tokens, H query heads, J kv heads, d head dim, P pages, G tokens per
page.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hybserve_kernels.rows import PrefillRows

_LOG2E = 1.4426950408889634
#: Queries of a group of warps and keys of a tile.
_SIDE = 64
#: Tiles of keys, and as many of values, in the ring, by head dim.
_STAGES = {128: 4, 256: 2}


def layout_of(dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=dtype.itemsize * 8, rank=2)


def fits(q_THd: torch.Tensor) -> bool:
    """16-bit heads of 128 or 256 elements on a GPU with warpgroup products."""
    return q_THd.dtype.itemsize == 2 and q_THd.shape[2] in _STAGES and _has_warpgroups(q_THd.device)


@cache
def _has_warpgroups(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def prefill_rows_hopper(
    q_THd: torch.Tensor,
    pool_P2JGd: torch.Tensor,
    rows: PrefillRows,
    scale: float,
    gate_THd: torch.Tensor | None,
    out_TX: torch.Tensor,
) -> None:
    """``prefill_rows`` of queries that ``fits`` accepts."""
    heads, dim = q_THd.shape[1:]
    pages, _, kv_heads, page, _ = pool_P2JGd.shape
    page_rows = pool_P2JGd.stride(0) // dim
    length = (pages - 1) * page_rows + 2 * kv_heads * page
    assert pool_P2JGd[0].is_contiguous()
    assert pool_P2JGd.stride(0) % dim == 0
    assert length < 1 << 31
    layout = layout_of(q_THd.dtype)
    gate = q_THd if gate_THd is None else gate_THd
    _prefill[(rows.tiles * heads,)](
        TensorDescriptor(q_THd, [q_THd.shape[0], heads * dim], [heads * dim, 1], [_SIDE, dim], layout),
        TensorDescriptor(pool_P2JGd, [length, dim], [dim, 1], [_SIDE, dim], layout),
        rows.begins_R,
        rows.counts_R,
        rows.starts_R,
        rows.tables_RM,
        rows.tile_rows_X,
        rows.tile_offsets_X,
        gate,
        out_TX,
        rows.tiles,
        page_rows,
        rows.tables_RM.stride(0),
        gate.stride(0),
        gate.stride(1),
        out_TX.stride(0),
        scale * _LOG2E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=page,
        STAGES=_STAGES[dim],
        GATED=gate_THd is not None,
        num_warps=4,
    )


@gluon.jit
def _fetch(
    q_desc, kv_desc, q_mem, k_mem, v_mem, q_ready, k_ready, k_free, v_ready, v_free, table, first_token, head, head_row,
    page_rows, tiles, DIM: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SIDE: gl.constexpr = 64
    BYTES: gl.constexpr = SIDE * DIM * 2
    for side in gl.static_range(2):
        mbarrier.expect(q_ready.index(side), BYTES)
        tma.async_copy_global_to_shared(
            q_desc, [first_token + side * SIDE, head * DIM], q_ready.index(side), q_mem.index(side)
        )
    for tile in range(tiles):
        stage = tile % STAGES
        phase = (tile // STAGES & 1) ^ 1
        first = tile * SIDE
        place = gl.load(table + first // PAGE) * page_rows + head_row + first % PAGE
        mbarrier.wait(k_free.index(stage), phase)
        mbarrier.expect(k_ready.index(stage), BYTES)
        tma.async_copy_global_to_shared(kv_desc, [place, 0], k_ready.index(stage), k_mem.index(stage))
        mbarrier.wait(v_free.index(stage), phase)
        mbarrier.expect(v_ready.index(stage), BYTES)
        tma.async_copy_global_to_shared(kv_desc, [place + KV_HEADS * PAGE, 0], v_ready.index(stage), v_mem.index(stage))


@gluon.jit
def _group(
    q_mem, k_mem, v_mem, q_ready, k_ready, k_free, v_ready, v_free, gate, out, begin, offset, count, start, end, head,
    gate_token_stride, gate_head_stride, out_stride, scale, tiles, whole,
    SIDE_INDEX: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    SIDE: gl.constexpr = 64
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    kind: gl.constexpr = q_mem.dtype

    queries = q_mem.index(SIDE_INDEX)
    indices = offset + SIDE_INDEX * SIDE + gl.arange(0, SIDE, layout=row_layout)
    lanes = gl.arange(0, SIDE, layout=gl.SliceLayout(0, score_layout))
    peak = gl.full([SIDE], float("-inf"), gl.float32, layout=row_layout)
    total = gl.zeros([SIDE], gl.float32, layout=row_layout)
    nothing = gl.zeros([SIDE, SIDE], gl.float32, layout=score_layout)
    summing = warpgroup_mma_init(gl.zeros([SIDE, DIM], gl.float32, layout=sum_layout))
    mbarrier.wait(q_ready.index(SIDE_INDEX), 0)
    for tile in range(tiles):
        stage = tile % STAGES
        phase = tile // STAGES & 1
        mbarrier.wait(k_ready.index(stage), phase)
        scoring = warpgroup_mma(queries, k_mem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores, summed = warpgroup_mma_wait(0, deps=[scoring, summing])
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.arrive(v_free.index((tile + STAGES - 1) % STAGES), count=1, pred=tile > 0)
        if tile >= whole:
            seen = (tile * SIDE + lanes)[None, :] <= (start + indices)[:, None]
            scores = gl.where(seen, scores, float("-inf"))
        higher = gl.maximum(peak, gl.max(scores, 1) * scale)
        weights = gl.exp2(scores * scale - higher[:, None])
        carry = gl.exp2(peak - higher)
        total = total * carry + gl.sum(weights, 1)
        peak = higher
        weights = gl.convert_layout(weights.to(kind), weight_layout)
        summed = summed * gl.convert_layout(carry, gl.SliceLayout(1, sum_layout))[:, None]
        mbarrier.wait(v_ready.index(stage), phase)
        values = v_mem.index(stage)
        if tile * SIDE + SIDE > end:
            # Zeroed by both groups, whichever comes first.
            part_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
            for part in gl.static_range(4):
                piece = values.slice(part * 16, 16)
                places = tile * SIDE + part * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, part_layout))
                piece.store(gl.where((places < end)[:, None], piece.load(part_layout), 0.0))
            fence_async_shared()
        summing = warpgroup_mma(weights, values, summed, is_async=True)
    summed = warpgroup_mma_wait(0, deps=[summing])

    # Through the memory of the queries into a layout of long runs.
    result = summed / gl.convert_layout(total, gl.SliceLayout(1, sum_layout))[:, None]
    queries.store(result.to(kind))
    gl.thread_barrier()
    run_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    result = queries.load(run_layout)
    rows = offset + SIDE_INDEX * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, run_layout))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, run_layout))
    tokens = (begin + rows).to(gl.int64)
    own = (rows < count)[:, None]
    if GATED:
        gates = gate + tokens[:, None] * gate_token_stride + head * gate_head_stride + dims[None, :]
        gated = gl.load(gates, mask=own, other=0.0).to(gl.float32)
        factor = (1.0 / (1.0 + gl.exp(-gated))).to(kind)
        result = (result.to(gl.float32) * factor.to(gl.float32)).to(kind)
    gl.store(out + tokens[:, None] * out_stride + head * DIM + dims[None, :], result, mask=own)


@gluon.jit(
    do_not_specialize=["tiles", "table_stride"],
    do_not_specialize_on_alignment=["begins", "counts", "starts", "tables", "tile_rows", "tile_offsets"],
)
def _prefill(
    q_desc,
    kv_desc,
    begins,
    counts,
    starts,
    tables,
    tile_rows,
    tile_offsets,
    gate,
    out,
    tiles,
    page_rows,
    table_stride,
    gate_token_stride,
    gate_head_stride,
    out_stride,
    scale,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    # Heads of one kv head run side by side and find its pages in the L2; late tiles, which have most to do, come first.
    SIDE: gl.constexpr = 64
    GROUP: gl.constexpr = HEADS // KV_HEADS
    each = tiles * GROUP
    program = gl.program_id(0)
    kv_head = program // each
    tile = tiles - 1 - program % each // GROUP
    head = kv_head * GROUP + program % GROUP
    row = gl.load(tile_rows + tile)
    if row < 0:
        return
    offset = gl.load(tile_offsets + tile)
    if offset % (2 * SIDE) != 0:
        return
    begin = gl.load(begins + row)
    count = gl.load(counts + row)
    start = gl.load(starts + row)
    end = start + gl.minimum(offset + 2 * SIDE, count)
    steps = (end + SIDE - 1) // SIDE
    whole = (start + offset) // SIDE
    table = tables + row.to(gl.int64) * table_stride

    q_mem = gl.allocate_shared_memory(q_desc.dtype, [2, SIDE, DIM], q_desc.layout)
    k_mem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, SIDE, DIM], kv_desc.layout)
    v_mem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, SIDE, DIM], kv_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for side in gl.static_range(2):
        mbarrier.init(q_ready.index(side), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (
                _group,
                (
                    q_mem, k_mem, v_mem, q_ready, k_ready, k_free, v_ready, v_free, gate, out, begin, offset, count,
                    start, end, head, gate_token_stride, gate_head_stride, out_stride, scale, steps, whole,
                    0, DIM, STAGES, GATED,
                ),
            ),
            (
                _group,
                (
                    q_mem, k_mem, v_mem, q_ready, k_ready, k_free, v_ready, v_free, gate, out, begin, offset, count,
                    start, end, head, gate_token_stride, gate_head_stride, out_stride, scale, steps, whole,
                    1, DIM, STAGES, GATED,
                ),
            ),
            (
                _fetch,
                (
                    q_desc, kv_desc, q_mem, k_mem, v_mem, q_ready, k_ready, k_free, v_ready, v_free, table,
                    begin + offset, head, kv_head * PAGE, page_rows, steps, DIM, KV_HEADS, PAGE, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
