"""The kernel of ``prefill.py`` for 16-bit heads of 256 elements on GPUs with warpgroup products (sm_90).

The same shares of the same blocks, the last block first. While the weights of one block are formed, the tensor cores
have the scores of the next block and the sums of the block before to do.
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
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hybserve_kernels.attention.gpu.memory import matrix_shape

#: Triton 3.6 and later ones name it differently.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
#: Queries of a program and keys of a block.
QUERIES, KEYS = 128, 64


def fits(q_THd: torch.Tensor) -> bool:
    """16-bit heads of 256 elements on a GPU with warpgroup products."""
    return q_THd.dtype.itemsize == 2 and q_THd.shape[2] == 256 and _has_warpgroups(q_THd.device)


@cache
def _has_warpgroups(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def box(pool_P2JGd: torch.Tensor) -> TensorDescriptor:
    """Boxes of KEYS tokens of the pool as ``memory.box`` has them."""
    rows, dim = matrix_shape(pool_P2JGd)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(pool_P2JGd, [rows, dim], [dim, 1], [KEYS, dim], layout)


@gluon.jit
def _sigmoid(x):
    """Good to some units in the last place of fp32, which is rounded to 16 bits."""
    ones = 1.0 + gl.exp2(x * -1.4426950408889634)
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [ones], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _place(table, block, page_rows, head_row, PAGE: gl.constexpr, KEYS: gl.constexpr):
    """Row of ``memory`` where the keys of a block begin; a block before the first is the first."""
    first = gl.maximum(block, 0) * KEYS
    return gl.load(table + first // PAGE) * page_rows + head_row + first % PAGE


@gluon.jit
def _fetch(memory, place, ready, target, pred):
    mbarrier.expect(ready, memory.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(memory, [place, 0], ready, target, pred=pred)


@gluon.jit
def _weigh(scores, peak, total, scale, TYPE: gl.constexpr, WEIGHTS: gl.constexpr, SUMS: gl.constexpr):
    """One step of the running maximum: weights, the factor for what was summed so far, new maximum, new total."""
    higher = gl.maximum(peak, gl.ceil(gl.max(scores, 1) * scale))
    weights = gl.exp2(scores * scale - higher[:, None])
    carry = gl.exp2(peak - higher)
    total = total * carry + gl.sum(weights, 1)
    weights = gl.convert_layout(weights.to(TYPE), WEIGHTS)
    return weights, gl.convert_layout(carry, gl.SliceLayout(1, SUMS))[:, None], higher, total


@gluon.jit(
    do_not_specialize=["tiles", "shares", "together", "table_stride"],
    do_not_specialize_on_alignment=["begins", "counts", "starts", "tables", "tile_rows", "tile_offsets"],
)
def prefill(
    q,
    memory,
    pool,
    begins,
    counts,
    starts,
    tables,
    tile_rows,
    tile_offsets,
    gate,
    out,
    sums,
    peaks,
    tiles,
    shares,
    together,
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
    TOKENS: gl.constexpr,
    MEMBERS: gl.constexpr,
    KEYS: gl.constexpr,
    LEAST: gl.constexpr,
    GATED: gl.constexpr,
):
    GROUP: gl.constexpr = HEADS // KV_HEADS
    QUERIES: gl.constexpr = TOKENS * MEMBERS
    PARTS: gl.constexpr = 64 // TOKENS
    KIND: gl.constexpr = q.dtype.element_ty
    WARPS: gl.constexpr = QUERIES // 16
    share = gl.program_id(0) % shares
    at = gl.program_id(0) // shares
    each = tiles * PARTS * together
    kv_head = at // each * together + at % together
    part = tiles * PARTS - 1 - at % each // together
    tile = part // PARTS
    row = gl.load(tile_rows + tile)
    if row < 0:
        return
    offset = gl.load(tile_offsets + tile) + part % PARTS * TOKENS
    count = gl.load(counts + row)
    start = gl.load(starts + row)
    if offset >= count:
        return
    begin = gl.load(begins + row)
    table = tables + row.to(gl.int64) * table_stride
    end = start + gl.minimum(offset + TOKENS, count)
    blocks = (end + KEYS - 1) // KEYS
    each_share = gl.maximum((blocks + shares - 1) // shares, LEAST)
    last = gl.minimum(share * each_share + each_share, blocks) - 1
    steps = last + 1 - share * each_share
    if steps <= 0:
        return

    run_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    lines = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, run_layout))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, run_layout))
    tokens = (begin + offset + lines // MEMBERS).to(gl.int64)
    heads = kv_head * GROUP + lines % MEMBERS
    own = ((offset + lines // MEMBERS < count) & (lines % MEMBERS < GROUP))[:, None]
    queries = gl.load(q + (tokens * HEADS + heads)[:, None] * DIM + dims[None, :], mask=own, other=0.0)
    head_row = kv_head * PAGE
    key_place_0 = _place(table, last, page_rows, head_row, PAGE, KEYS)
    key_place_1 = _place(table, last - 1, page_rows, head_row, PAGE, KEYS)
    key_place_2 = _place(table, last - 2, page_rows, head_row, PAGE, KEYS)
    key_place = _place(table, last - 3, page_rows, head_row, PAGE, KEYS)

    q_mem = gl.allocate_shared_memory(KIND, [QUERIES, DIM], memory.layout)
    k_mem = gl.allocate_shared_memory(KIND, [3, KEYS, DIM], memory.layout)
    v_mem = gl.allocate_shared_memory(KIND, [2, KEYS, DIM], memory.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(3):
        mbarrier.init(k_ready.index(slot), count=1)
    for slot in gl.static_range(2):
        mbarrier.init(v_ready.index(slot), count=1)
    fence_async_shared()
    _barrier()
    VALUES: gl.constexpr = KV_HEADS * PAGE
    _fetch(memory, key_place_0, k_ready.index(0), k_mem.index(0), True)
    _fetch(memory, key_place_1, k_ready.index(1), k_mem.index(1), steps > 1)
    _fetch(memory, key_place_0 + VALUES, v_ready.index(0), v_mem.index(0), True)
    _fetch(memory, key_place_1 + VALUES, v_ready.index(1), v_mem.index(1), steps > 1)
    _fetch(memory, key_place_2, k_ready.index(2), k_mem.index(2), steps > 2)
    q_mem.store(queries)
    fence_async_shared()
    _barrier()

    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    peak = gl.full([QUERIES], float("-inf"), gl.float32, layout=row_layout)
    total = gl.zeros([QUERIES], gl.float32, layout=row_layout)
    nothing = gl.zeros([QUERIES, KEYS], gl.float32, layout=score_layout)

    mbarrier.wait(k_ready.index(0), 0)
    scores = warpgroup_mma(q_mem, k_mem.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    positions = start + offset + gl.arange(0, QUERIES, layout=row_layout) // MEMBERS
    lanes = last * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, score_layout))
    scores = gl.where(lanes[None, :] <= positions[:, None], scores, float("-inf"))
    if last * KEYS + KEYS > end:
        mbarrier.wait(v_ready.index(0), 0)
        for piece in gl.static_range(KEYS // 16):
            values = v_mem.index(0).slice(piece * 16, 16)
            places = last * KEYS + piece * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, run_layout))
            values.store(gl.where((places < end)[:, None], values.load(run_layout), 0.0))
        fence_async_shared()
        _barrier()

    weights, carry, peak, total = _weigh(scores, peak, total, scale, KIND, weight_layout, sum_layout)
    summed = gl.zeros([QUERIES, DIM], gl.float32, layout=sum_layout)
    # Keys have one of three slots, values one of two; the places are those of the blocks to be fetched.
    # (Two names for one value, of which one becomes the other in the loop, would be taken for constants.)
    value_place = key_place_1 + VALUES
    middle_place = key_place_2 + VALUES
    slot = 1
    phase = 0
    mbarrier.wait(k_ready.index(1), 0, pred=steps > 1)
    for step in range(steps - 1):
        scoring = warpgroup_mma(q_mem, k_mem.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        _barrier()
        free = gl.where(slot == 0, 2, slot - 1)
        v_slot = step & 1
        _fetch(memory, key_place, k_ready.index(free), k_mem.index(free), step + 3 < steps)
        _fetch(memory, value_place, v_ready.index(v_slot ^ 1), v_mem.index(v_slot ^ 1), step > 0)
        value_place = middle_place
        middle_place = key_place + VALUES
        key_place = _place(table, last - 4 - step, page_rows, head_row, PAGE, KEYS)

        summed = gl.inline_asm_elementwise(
            "mul.f32 $0, $1, $2;", "=f,f,f", [summed, carry], dtype=gl.float32, is_pure=False, pack=1
        )
        mbarrier.wait(v_ready.index(v_slot), step >> 1 & 1)
        summing = warpgroup_mma(weights, v_mem.index(v_slot), summed, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scoring])
        coming, carry, peak, total = _weigh(scores, peak, total, scale, KIND, weight_layout, sum_layout)
        # A wait for a barrier here keeps the assembler from waiting for the sums before the weights are formed.
        phase = gl.where(slot == 2, phase ^ 1, phase)
        slot = gl.where(slot == 2, 0, slot + 1)
        mbarrier.wait(k_ready.index(slot), phase, pred=step + 2 < steps)
        summed, weights = warpgroup_mma_wait(0, deps=[summing, weights])
        weights = coming
    if GATED:  # on its way while the last sums are formed
        gates = gate + (tokens * gate_token_stride + heads * gate_head_stride)[:, None] + dims[None, :]
        gated = gl.load(gates, mask=own & (each_share >= blocks), other=0.0)
    v_slot = (steps - 1) & 1
    mbarrier.wait(v_ready.index(v_slot), (steps - 1) >> 1 & 1)
    summing = warpgroup_mma(weights, v_mem.index(v_slot), summed * carry, is_async=True)
    summed = warpgroup_mma_wait(0, deps=[summing])

    if each_share >= blocks:
        # Through the memory of the queries into a layout of long runs.
        share_of = gl.convert_layout(1.0 / total, gl.SliceLayout(1, sum_layout))
        q_mem.store((summed * share_of[:, None]).to(KIND))
        _barrier()
        result = q_mem.load(run_layout)
        if GATED:
            factor = _sigmoid(gated.to(gl.float32)).to(KIND)
            result = (result.to(gl.float32) * factor.to(gl.float32)).to(KIND)
        gl.store(out + (tokens * out_stride + heads * DIM)[:, None] + dims[None, :], result, mask=own)
    else:
        number = ((part * KV_HEADS + kv_head) * shares + share).to(gl.int64)
        places = number * QUERIES + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, sum_layout))
        columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, sum_layout))
        gl.store(sums + places[:, None] * DIM + columns[None, :], summed)
        places = number * 2 * QUERIES + gl.arange(0, QUERIES, layout=row_layout)
        gl.store(peaks + places, peak)
        gl.store(peaks + places + QUERIES, total)
