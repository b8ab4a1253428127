"""Causal attention of the prefill rows of a step over the pages of the pool, all rows in one launch.

A program holds a block of queries of one head, visits the keys up to its last query and joins them by a running
maximum (Milakov & Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691). Whole tiles in front of the queries need no
mask and come as boxes of the pool's memory seen as one matrix of rows of d elements; the tiles on the diagonal are
masked, and values that no token of the row has written are zeroed before use.

Scores that are not finite show: a weight of NaN stays NaN in sum and output.

Legend: T packed tokens, R rows, X tiles of TILE tokens, H query heads, J kv heads, d head dim, P pages, G tokens per
page.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.attention.gpu.dot import dot
from hybserve_kernels.attention.gpu.memory import box
from hybserve_kernels.rows import TILE, PrefillRows

_LOG2E = 1.4426950408889634
#: Processors of an H200.
_PROCESSORS = 132


class Shape(NamedTuple):
    """How a launch is cut: queries of a program (whole tiles), keys of a step, warps, steps in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


def shape_of(dtype: torch.dtype, dim: int, tiles: int) -> Shape:
    """Found by the sweep of ``bench/kernels/attention.py`` on an H200. ``tiles``: of all heads; few are programs of
    their own. Either way a query takes the same steps over its keys, so that cold and warm rows agree."""
    if dtype == torch.float32:
        return Shape(64, 16, 16, 1) if dim > 64 else Shape(64, 32, 8, 2)
    if dim > 128:
        return Shape(64, 64, 4, 2) if tiles <= _PROCESSORS else Shape(128, 64, 8, 2)
    return Shape(128, 64, 8, 3) if dim > 64 else Shape(128, 64, 4, 3)


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
    assert dim & (dim - 1) == 0
    queries, keys, warps, stages = shape or shape_of(q_THd.dtype, dim, rows.tiles * heads)
    gate = q_THd if gate_THd is None else gate_THd
    _prefill[(rows.tiles * heads,)](
        q_THd,
        box(pool_P2JGd, keys),
        pool_P2JGd,
        rows.begins_R,
        rows.counts_R,
        rows.starts_R,
        rows.tables_RM,
        rows.tile_rows_X,
        rows.tile_offsets_X,
        gate,
        out_TX,
        rows.tiles,
        pool_P2JGd.stride(0) // dim,
        rows.tables_RM.stride(0),
        gate.stride(0),
        gate.stride(1),
        out_TX.stride(0),
        scale * _LOG2E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=page,
        QUERIES=queries,
        KEYS=keys,
        GATED=gate_THd is not None,
        num_warps=warps,
        num_stages=stages,
    )


@triton.jit
def _weigh(scores, peak, total, scale, TYPE: tl.constexpr):
    """One step of the running maximum: weights, the factor for what was summed so far, new maximum, new total."""
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    carry = tl.exp2(peak - higher)
    return weights.to(TYPE), carry, higher, total * carry + tl.sum(weights, 1)


@triton.jit(
    do_not_specialize=["tiles", "table_stride"],
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
    tiles,
    page_rows,
    table_stride,
    gate_token_stride,
    gate_head_stride,
    out_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    GATED: tl.constexpr,
):
    # Heads of one kv head run side by side and find its pages in the L2; late tiles, which have most to do, come first.
    GROUP: tl.constexpr = HEADS // KV_HEADS
    each = tiles * GROUP
    program = tl.program_id(0)
    kv_head = program // each
    tile = tiles - 1 - program % each // GROUP
    head = kv_head * GROUP + program % GROUP
    row = tl.load(tile_rows + tile)
    if row < 0:
        return
    offset = tl.load(tile_offsets + tile)
    if offset % QUERIES != 0:
        return
    count = tl.load(counts + row)
    start = tl.load(starts + row)
    table = tables + row.to(tl.int64) * table_stride
    end = start + tl.minimum(offset + QUERIES, count)

    indices = offset + tl.arange(0, QUERIES)
    tokens = (tl.load(begins + row) + indices).to(tl.int64)
    dims = tl.arange(0, DIM)
    own = (indices < count)[:, None]
    queries = tl.load(q + (tokens * HEADS + head)[:, None] * DIM + dims[None, :], mask=own, other=0.0)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, DIM], tl.float32)

    nothing = tl.zeros([QUERIES, KEYS], tl.float32)
    head_row = kv_head * PAGE
    whole = (start + offset) // KEYS
    for step in tl.range(0, whole):
        first = step * KEYS
        place = tl.load(table + first // PAGE) * page_rows + head_row + first % PAGE
        scores = dot(queries, memory.load([place, 0]).T, nothing)
        weights, carry, peak, total = _weigh(scores, peak, total, scale, q.dtype.element_ty)
        summed = dot(weights, memory.load([place + KV_HEADS * PAGE, 0]), summed * carry[:, None])

    lanes = tl.arange(0, KEYS)
    for step in tl.range(whole, tl.cdiv(end, KEYS), num_stages=1):
        first = step * KEYS
        place = tl.load(table + first // PAGE) * page_rows + head_row + first % PAGE
        scores = dot(queries, memory.load([place, 0]).T, nothing)
        seen = first + lanes[None, :] <= start + indices[:, None]
        weights, carry, peak, total = _weigh(
            tl.where(seen, scores, float("-inf")), peak, total, scale, q.dtype.element_ty
        )
        value_rows = place.to(tl.int64) + KV_HEADS * PAGE + lanes
        written = (first + lanes < end)[:, None]
        values = tl.load(pool + value_rows[:, None] * DIM + dims[None, :], mask=written, other=0.0)
        summed = dot(weights, values, summed * carry[:, None])

    result = (summed / total[:, None]).to(out.dtype.element_ty)
    if GATED:
        gates = gate + tokens[:, None] * gate_token_stride + head * gate_head_stride + dims[None, :]
        factor = tl.sigmoid(tl.load(gates, mask=own, other=0.0).to(tl.float32)).to(result.dtype)
        result = (result.to(tl.float32) * factor.to(tl.float32)).to(result.dtype)
    tl.store(out + tokens[:, None] * out_stride + head * DIM + dims[None, :], result, mask=own)
