"""Causal attention of the prefill rows of a step over the pages of the pool, all rows in one launch.

A program holds some tokens of a row with all query heads of one kv head, so that keys and values serve the whole group
and little is computed beyond the diagonal. It visits the keys of its share in blocks and joins them by a running
maximum (Milakov & Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691). Blocks in front of the tokens need no mask and
come as boxes of the pool's memory seen as one matrix of rows of d elements; blocks on the diagonal are masked, and
values that no token of the row has written are zeroed before use.

Where there are too few programs for the multiprocessors, each is several, which share the history of its tokens
equally; a second launch joins what they leave. The running maximum is a whole number of powers of two: the weights are
then rounded alike however the keys are shared, and cold and warm rows agree but for the order of sums in fp32.

Scores that are not finite show: a weight of NaN stays NaN in sum and output.

Legend: T packed tokens, R rows, X tiles of TILE tokens, H query heads, J kv heads, d head dim, P pages, G tokens per
page.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.attention.gpu import prefill_warpgroups
from hybserve_kernels.attention.gpu.dot import dot
from hybserve_kernels.attention.gpu.lanes import lanes_inside
from hybserve_kernels.attention.gpu.memory import box
from hybserve_kernels.rows import TILE, PrefillRows

_LOG2E = 1.4426950408889634
#: Processors of an H200 (few in the interpreter), and bytes of keys and values that its L2 keeps.
_PROCESSORS, _CACHED = 12 if triton.knobs.runtime.interpret else 132, 24 << 20
#: Most programs that share a history, and the fewest blocks of keys that one of them is started for.
_SHARES, _LEAST = 32, 4
#: Queries that a program of the second launch joins.
_JOINED = 4


class Shape(NamedTuple):
    """How a launch is cut: queries of a program (tokens times heads), keys of a block, warps, blocks in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


def shape_of(dtype: torch.dtype, dim: int) -> Shape:
    """Found by the sweep of ``bench/kernels/attention.py`` on an H200. Groups of few heads make fewer queries."""
    if dtype == torch.float32:
        return Shape(64, 16, 16, 1) if dim > 64 else Shape(64, 32, 8, 2)
    return Shape(128, 64, 8, 2 if dim > 128 else 3)


def prefill_rows(
    q_THd: torch.Tensor,
    pool_P2JGd: torch.Tensor,
    rows: PrefillRows,
    scale: float,
    gate_THd: torch.Tensor | None,
    out_TX: torch.Tensor,
    shape: Shape | None = None,
) -> None:
    """Writes attention, times sigmoid(gate), of every token of the rows to ``out_TX`` [T, H·d]; other tokens are left.

    ``q_THd`` contiguous; keys and values of the rows' own tokens are in the pool already. The output is rounded to its
    dtype before the gate, the sigmoid too (as ``attended * sigmoid(gate)`` rounds)."""
    heads, dim = q_THd.shape[1:]
    kv_heads, page = pool_P2JGd.shape[2:4]
    assert q_THd.is_contiguous()
    assert out_TX.stride(1) == 1
    assert gate_THd is None or gate_THd.stride(2) == 1
    assert page % TILE == 0
    lanes = triton.next_power_of_2(dim)
    group = triton.next_power_of_2(heads // kv_heads)
    warpgroups = shape is None and prefill_warpgroups.fits(q_THd)
    if warpgroups:
        shape = Shape(prefill_warpgroups.QUERIES, prefill_warpgroups.KEYS, 8, 2)
    queries, keys, warps, stages = shape or shape_of(q_THd.dtype, dim)
    tokens = min(TILE, queries // group)
    assert tokens
    if tokens * group < queries:
        queries, warps = tokens * group, max(4, warps * tokens * group // queries)
    units = rows.tiles * (TILE // tokens) * kv_heads
    shares = min(_SHARES, max(1, _PROCESSORS // units))
    pieces = units * shares if shares > 1 else 0
    sums = torch.empty((pieces, queries, dim), dtype=torch.float32, device=q_THd.device)
    peaks = torch.empty((pieces, 2, queries), dtype=torch.float32, device=q_THd.device)
    cached = rows.tiles * TILE * kv_heads * dim * 2 * q_THd.element_size() <= _CACHED
    gate = q_THd if gate_THd is None else gate_THd
    kernel: Any = prefill_warpgroups.prefill if warpgroups else _prefill
    memory: Any = pool_P2JGd
    width = {} if warpgroups else {"LANES": lanes}
    if warpgroups:
        memory = prefill_warpgroups.box(pool_P2JGd)
    elif dim == lanes:
        memory = box(pool_P2JGd, keys)
    kernel[(units * shares,)](
        q_THd,
        memory,
        pool_P2JGd,
        rows.begins_R,
        rows.counts_R,
        rows.starts_R,
        rows.tables_RM,
        rows.tile_rows_X,
        rows.tile_offsets_X,
        gate,
        out_TX,
        sums,
        peaks,
        rows.tiles,
        shares,
        kv_heads if cached else 1,
        pool_P2JGd.stride(0) // dim,
        rows.tables_RM.stride(0),
        gate.stride(0),
        gate.stride(1),
        out_TX.stride(0),
        scale * _LOG2E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        **width,
        PAGE=page,
        TOKENS=tokens,
        MEMBERS=group,
        KEYS=keys,
        LEAST=_LEAST,
        GATED=gate_THd is not None,
        num_warps=warps,
        num_stages=stages,
    )
    if pieces:
        _join[(units, triton.cdiv(queries, _JOINED))](
            rows.begins_R,
            rows.counts_R,
            rows.starts_R,
            rows.tile_rows_X,
            rows.tile_offsets_X,
            gate,
            out_TX,
            sums,
            peaks,
            shares,
            gate.stride(0),
            gate.stride(1),
            out_TX.stride(0),
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            LANES=lanes,
            TOKENS=tokens,
            MEMBERS=group,
            KEYS=keys,
            LEAST=_LEAST,
            QUERIES=_JOINED,
            SHARES=_SHARES,
            GATED=gate_THd is not None,
            num_warps=4,
        )


@triton.jit
def _weigh(scores, peak, total, scale, TYPE: tl.constexpr):
    """One step of the running maximum: weights, the factor for what was summed so far, new maximum, new total."""
    higher = tl.maximum(peak, tl.ceil(tl.max(scores, 1) * scale))
    weights = tl.exp2(scores * scale - higher[:, None])
    carry = tl.exp2(peak - higher)
    return weights.to(TYPE), carry, higher, total * carry + tl.sum(weights, 1)


@triton.jit
def _box_of(memory, row, KEYS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr):
    """Rows of the pool as [KEYS, LANES]; ``memory`` has boxes where a row is as wide as one."""
    if DIM == LANES:
        found = memory.load([row, 0])
    else:
        rows, dims = row.to(tl.int64) + tl.arange(0, KEYS), tl.arange(0, LANES)
        found = tl.load(memory + rows[:, None] * DIM + dims[None, :], mask=(dims < DIM)[None, :], other=0.0)
    return found


@triton.jit
def _gated(result, gates, mask, GATED: tl.constexpr):
    if GATED:
        factor = tl.sigmoid(tl.load(gates, mask=mask, other=0.0).to(tl.float32)).to(result.dtype)
        result = (result.to(tl.float32) * factor.to(tl.float32)).to(result.dtype)
    return result


@triton.jit(
    do_not_specialize=["tiles", "shares", "together", "table_stride"],
    do_not_specialize_on_alignment=["begins", "counts", "starts", "tables", "tile_rows", "tile_offsets"],
)
def _prefill(
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    MEMBERS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    GATED: tl.constexpr,
):
    # Late tokens, which have most to do, come first: of all kv heads, or of ``together`` of them after one another,
    # whose keys and values then stay in the L2.
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = TOKENS * MEMBERS
    PARTS: tl.constexpr = 64 // TOKENS
    share = tl.program_id(0) % shares
    place = tl.program_id(0) // shares
    each = tiles * PARTS * together
    kv_head = place // each * together + place % together
    part = tiles * PARTS - 1 - place % each // together
    tile = part // PARTS
    row = tl.load(tile_rows + tile)
    if row < 0:
        return
    offset = tl.load(tile_offsets + tile) + part % PARTS * TOKENS
    count = tl.load(counts + row)
    start = tl.load(starts + row)
    if offset >= count:
        return
    table = tables + row.to(tl.int64) * table_stride
    end = start + tl.minimum(offset + TOKENS, count)
    blocks = tl.cdiv(end, KEYS)
    each_share = tl.maximum(tl.cdiv(blocks, shares), LEAST)
    block = share * each_share
    last = tl.minimum(block + each_share, blocks)
    if block >= blocks:
        return

    lines = tl.arange(0, QUERIES)
    indices = offset + lines // MEMBERS
    tokens = (tl.load(begins + row) + indices).to(tl.int64)
    heads = kv_head * GROUP + lines % MEMBERS
    dims = tl.arange(0, LANES)
    inside = lanes_inside(DIM, LANES)[None, :]
    own = ((indices < count) & (lines % MEMBERS < GROUP))[:, None] & inside
    queries = tl.load(q + (tokens * HEADS + heads)[:, None] * DIM + dims[None, :], mask=own, other=0.0)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, LANES], tl.float32)

    nothing = tl.zeros([QUERIES, KEYS], tl.float32)
    head_row = kv_head * PAGE
    whole = tl.minimum((start + offset) // KEYS, last)
    for step in tl.range(block, whole):
        first = step * KEYS
        place = tl.load(table + first // PAGE) * page_rows + head_row + first % PAGE
        scores = dot(queries, _box_of(memory, place, KEYS, DIM, LANES).T, nothing)
        weights, carry, peak, total = _weigh(scores, peak, total, scale, q.dtype.element_ty)
        values = _box_of(memory, place + KV_HEADS * PAGE, KEYS, DIM, LANES)
        summed = dot(weights, values, summed * carry[:, None])

    lanes = tl.arange(0, KEYS)
    for step in tl.range(whole, last, num_stages=1):
        first = step * KEYS
        place = tl.load(table + first // PAGE) * page_rows + head_row + first % PAGE
        scores = dot(queries, _box_of(memory, place, KEYS, DIM, LANES).T, nothing)
        seen = first + lanes[None, :] <= start + indices[:, None]
        weights, carry, peak, total = _weigh(
            tl.where(seen, scores, float("-inf")), peak, total, scale, q.dtype.element_ty
        )
        value_rows = place.to(tl.int64) + KV_HEADS * PAGE + lanes
        written = (first + lanes < end)[:, None]
        values = tl.load(pool + value_rows[:, None] * DIM + dims[None, :], mask=written & inside, other=0.0)
        summed = dot(weights, values, summed * carry[:, None])

    if each_share >= blocks:
        result = (summed / total[:, None]).to(out.dtype.element_ty)
        gates = gate + (tokens * gate_token_stride + heads * gate_head_stride)[:, None] + dims[None, :]
        tl.store(
            out + (tokens * out_stride + heads * DIM)[:, None] + dims[None, :],
            _gated(result, gates, own, GATED),
            mask=own,
        )
    else:
        piece = ((part * KV_HEADS + kv_head) * shares + share).to(tl.int64)
        tl.store(sums + (piece * QUERIES + lines)[:, None] * DIM + dims[None, :], summed, mask=inside)
        tl.store(peaks + piece * 2 * QUERIES + lines, peak)
        tl.store(peaks + (piece * 2 + 1) * QUERIES + lines, total)


@triton.jit(
    do_not_specialize=["shares"],
    do_not_specialize_on_alignment=["begins", "counts", "starts", "tile_rows", "tile_offsets"],
)
def _join(
    begins,
    counts,
    starts,
    tile_rows,
    tile_offsets,
    gate,
    out,
    sums,
    peaks,
    shares,
    gate_token_stride,
    gate_head_stride,
    out_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    MEMBERS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    QUERIES: tl.constexpr,
    SHARES: tl.constexpr,
    GATED: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ALL: tl.constexpr = TOKENS * MEMBERS
    PARTS: tl.constexpr = 64 // TOKENS
    part = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    row = tl.load(tile_rows + part // PARTS)
    if row < 0:
        return
    offset = tl.load(tile_offsets + part // PARTS) + part % PARTS * TOKENS
    count = tl.load(counts + row)
    if offset >= count:
        return
    blocks = tl.cdiv(tl.load(starts + row) + tl.minimum(offset + TOKENS, count), KEYS)
    each_share = tl.maximum(tl.cdiv(blocks, shares), LEAST)
    if each_share >= blocks:
        return
    used = tl.cdiv(blocks, each_share)

    lines = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    first = (tl.program_id(0) * shares).to(tl.int64)
    pieces = first + tl.arange(0, SHARES)
    there = (tl.arange(0, SHARES) < used)[:, None]
    places = (pieces * 2 * ALL)[:, None] + lines[None, :]
    heights = tl.load(peaks + places, mask=there, other=float("-inf"))
    peak = tl.max(heights, 0)
    totals = tl.load(peaks + places + ALL, mask=there, other=0.0)
    total = tl.sum(tl.where(there, tl.exp2(heights - peak[None, :]) * totals, 0.0), 0)
    dims = tl.arange(0, LANES)
    inside = lanes_inside(DIM, LANES)[None, :]
    summed = tl.zeros([QUERIES, LANES], tl.float32)
    for piece in tl.range(first, first + used):
        weight = tl.exp2(tl.load(peaks + piece * 2 * ALL + lines) - peak)
        left = sums + (piece * ALL + lines)[:, None] * DIM + dims[None, :]
        summed += weight[:, None] * tl.load(left, mask=inside, other=0.0)

    indices = offset + lines // MEMBERS
    tokens = (tl.load(begins + row) + indices).to(tl.int64)
    heads = kv_head * GROUP + lines % MEMBERS
    own = ((indices < count) & (lines % MEMBERS < GROUP))[:, None] & inside
    result = (summed / total[:, None]).to(out.dtype.element_ty)
    gates = gate + (tokens * gate_token_stride + heads * gate_head_stride)[:, None] + dims[None, :]
    tl.store(
        out + (tokens * out_stride + heads * DIM)[:, None] + dims[None, :], _gated(result, gates, own, GATED), mask=own
    )
