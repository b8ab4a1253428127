"""Attention of decode rows, one query each, over the pages of the pool.

The keys of all rows and kv heads form one list of blocks, [row, kv head, block of the row's tokens], which is cut into
equal shares, one a program, so that a long row is spread over many programs and short rows share one. A program walks
through the pieces of rows in its share. A row that lies in one share is finished there; of others each program leaves
what it summed (in the scratch at the index program + row · J + kv head, which no two pieces share, because from one
piece to the next at least one of the two grows), and a second launch joins the pieces.

Everything stands in device tensors, so a launch captured once serves all lengths. Scores that are not finite show: a
weight of NaN stays NaN in sum and output.

Legend: T packed tokens, N rows, H query heads, J kv heads, d head dim, P pages, G tokens per page.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.attention.gpu.dot import dot
from hybserve_kernels.attention.gpu.lanes import lanes_inside
from hybserve_kernels.rows import DecodeRows

_LOG2E = 1.4426950408889634


class Shape(NamedTuple):
    """How a launch is cut: programs per multiprocessor, tokens of a block, warps, blocks in flight."""

    programs: int
    keys: int
    warps: int
    stages: int


def shape_of(dtype: torch.dtype, dim: int) -> Shape:
    """Found by the sweep of ``bench/kernels/attention.py`` on an H200."""
    if dtype == torch.float32:
        return Shape(4, 16, 4, 2)
    return Shape(2, 64, 4, 2 if dim > 128 else 3)


@cache
def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter runs three programs after one another, so that rows are cut there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def decode_rows(
    q_THd: torch.Tensor,
    pool_P2JGd: torch.Tensor,
    rows: DecodeRows,
    scale: float,
    gate_THd: torch.Tensor | None,
    out_TX: torch.Tensor,
    shape: Shape | None = None,
) -> None:
    """Writes attention, times sigmoid(gate), of the rows with a length to ``out_TX`` [T, H·d]; other tokens are left.

    ``q_THd`` contiguous; keys and values of the rows' own tokens are in the pool already. The output is rounded to its
    dtype before the gate, the sigmoid too (as ``attended * sigmoid(gate)`` rounds)."""
    heads, dim = q_THd.shape[1:]
    kv_heads, page = pool_P2JGd.shape[2:4]
    assert q_THd.is_contiguous()
    assert out_TX.stride(1) == 1
    assert gate_THd is None or gate_THd.stride(2) == 1
    assert pool_P2JGd[0].is_contiguous()
    assert page % 64 == 0
    per_processor, keys, warps, stages = shape or shape_of(q_THd.dtype, dim)
    programs = per_processor * _multiprocessors(q_THd.device)
    group = heads // kv_heads
    pieces = programs + rows.rows * kv_heads
    sums = torch.empty((pieces, group, dim), dtype=torch.float32, device=q_THd.device)
    peaks = torch.empty((pieces, 2, group), dtype=torch.float32, device=q_THd.device)
    gate = q_THd if gate_THd is None else gate_THd
    rows_block = max(256, triton.next_power_of_2(rows.rows))
    _attend[(programs,)](
        q_THd,
        pool_P2JGd,
        rows.lengths_N,
        rows.tables_NM,
        gate,
        out_TX,
        sums,
        peaks,
        rows.rows,
        pool_P2JGd.stride(0),
        rows.tables_NM.stride(0),
        gate.stride(0),
        gate.stride(1),
        out_TX.stride(0),
        scale * _LOG2E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        LANES=triton.next_power_of_2(dim),
        PAGE=page,
        KEYS=keys,
        ROWS=rows_block,
        QUERIES=max(16, triton.next_power_of_2(group)),
        GATED=gate_THd is not None,
        num_warps=warps,
        num_stages=stages,
    )
    few = rows.rows * heads <= 512  # and so, perhaps, cut into many pieces
    together = 1 if few else group
    _join[(rows.rows * heads // together,)](
        rows.lengths_N,
        gate,
        out_TX,
        sums,
        peaks,
        rows.rows,
        gate.stride(0),
        gate.stride(1),
        out_TX.stride(0),
        programs,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        LANES=triton.next_power_of_2(dim),
        KEYS=keys,
        ROWS=rows_block,
        TOGETHER=together,
        PIECES=64 if few else 16,
        GATED=gate_THd is not None,
        num_warps=8 if few else 4,
    )


@triton.jit
def _blocks(lengths, rows, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """Blocks of every row (and kv head)."""
    index = tl.arange(0, ROWS)
    return tl.cdiv(tl.load(lengths + index, mask=index < rows, other=0), KEYS)


@triton.jit
def _gated(result, gates, mask, GATED: tl.constexpr):
    if GATED:
        factor = tl.sigmoid(tl.load(gates, mask=mask, other=0.0).to(tl.float32)).to(result.dtype)
        result = (result.to(tl.float32) * factor.to(tl.float32)).to(result.dtype)
    return result


@triton.jit(do_not_specialize=["rows", "table_stride"], do_not_specialize_on_alignment=["lengths", "tables"])
def _attend(
    q,
    pool,
    lengths,
    tables,
    gate,
    out,
    sums,
    peaks,
    rows,
    page_stride,
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
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    GATED: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    program = tl.program_id(0)
    blocks_N = _blocks(lengths, rows, KEYS, ROWS) * KV_HEADS
    ends_N = tl.cumsum(blocks_N)
    total = tl.sum(blocks_N)
    share = tl.cdiv(total, tl.num_programs(0))
    at = program * share
    last = tl.minimum(at + share, total)

    tokens = tl.arange(0, KEYS)
    dims = tl.arange(0, LANES)
    inside = lanes_inside(DIM, LANES)[None, :]
    members = tl.arange(0, QUERIES)
    own = (members < GROUP)[:, None] & inside
    while at < last:
        row = tl.sum((ends_N <= at).to(tl.int32))
        length = tl.load(lengths + row)
        blocks = tl.cdiv(length, KEYS)
        since = at - tl.sum(tl.where(tl.arange(0, ROWS) < row, blocks_N, 0))
        kv_head = since // blocks
        begin = since % blocks
        end = tl.minimum(blocks, begin + last - at)

        heads = (kv_head * GROUP + members)[:, None]
        token = row.to(tl.int64)
        queries = tl.load(q + (token * HEADS + heads) * DIM + dims[None, :], mask=own, other=0.0)
        table = tables + token * table_stride
        of_head = pool + kv_head * (PAGE * DIM) + tokens[:, None] * DIM + dims[None, :]
        peak = tl.full([QUERIES], float("-inf"), tl.float32)
        total_weight = tl.zeros([QUERIES], tl.float32)
        summed = tl.zeros([QUERIES, LANES], tl.float32)
        page = tl.load(table + begin * KEYS // PAGE).to(tl.int64)
        for block in tl.range(begin, end):
            first = block * KEYS
            place = of_head + (page * page_stride + first % PAGE * DIM)
            page = tl.load(table + tl.minimum(first + KEYS, length - 1) // PAGE).to(tl.int64)
            written = first + tokens < length
            keys = tl.load(place, mask=written[:, None] & inside, other=0.0)
            scores = dot(queries, keys.T, tl.zeros([QUERIES, KEYS], tl.float32)) * scale
            scores = tl.where(written[None, :], scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            carry = tl.exp2(peak - higher)
            total_weight = total_weight * carry + tl.sum(weights, 1)
            values = tl.load(place + KV_HEADS * PAGE * DIM, mask=written[:, None] & inside, other=0.0)
            summed = dot(weights.to(values.dtype), values, summed * carry[:, None])
            peak = higher

        if end - begin == blocks:
            result = (summed / total_weight[:, None]).to(out.dtype.element_ty)
            result = _gated(
                result, gate + token * gate_token_stride + heads * gate_head_stride + dims[None, :], own, GATED
            )
            tl.store(out + token * out_stride + heads * DIM + dims[None, :], result, mask=own)
        else:
            piece = (program + row * KV_HEADS + kv_head).to(tl.int64)
            tl.store(sums + (piece * GROUP + members)[:, None] * DIM + dims[None, :], summed, mask=own)
            tl.store(peaks + piece * 2 * GROUP + members, peak, mask=members < GROUP)
            tl.store(peaks + (piece * 2 + 1) * GROUP + members, total_weight, mask=members < GROUP)
        at += end - begin


@triton.jit(do_not_specialize=["rows", "programs"], do_not_specialize_on_alignment=["lengths"])
def _join(
    lengths,
    gate,
    out,
    sums,
    peaks,
    rows,
    gate_token_stride,
    gate_head_stride,
    out_stride,
    programs,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    PIECES: tl.constexpr,
    GATED: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0) // (HEADS // TOGETHER)
    first_head = tl.program_id(0) % (HEADS // TOGETHER) * TOGETHER
    kv_head = first_head // GROUP
    blocks = tl.cdiv(tl.load(lengths + row), KEYS)
    if blocks == 0:
        return
    blocks_N = _blocks(lengths, rows, KEYS, ROWS) * KV_HEADS
    share = tl.cdiv(tl.sum(blocks_N), programs)
    begin = tl.sum(tl.where(tl.arange(0, ROWS) < row, blocks_N, 0)) + kv_head * blocks
    first = begin // share
    count = (begin + blocks - 1) // share - first + 1
    if count == 1:
        return
    first_piece = (first + row * KV_HEADS + kv_head).to(tl.int64)
    lanes = tl.arange(0, PIECES)
    dims = tl.arange(0, LANES)
    inside = lanes_inside(DIM, LANES)
    for member in range(TOGETHER):
        head = first_head + member
        peak = float("-inf")
        total = 0.0
        summed = tl.zeros([LANES], tl.float32)
        for at in range(0, count, PIECES):
            there = at + lanes < count
            pieces = first_piece + at + lanes
            peaks_here = tl.load(peaks + pieces * 2 * GROUP + head % GROUP, mask=there, other=float("-inf"))
            totals = tl.load(peaks + (pieces * 2 + 1) * GROUP + head % GROUP, mask=there, other=0.0)
            parts = (pieces * GROUP + head % GROUP)[:, None] * DIM + dims[None, :]
            parts = tl.load(sums + parts, mask=there[:, None] & inside[None, :], other=0.0)
            higher = tl.maximum(peak, tl.max(peaks_here))
            weights = tl.exp2(peaks_here - higher)
            carry = tl.exp2(peak - higher)
            total = total * carry + tl.sum(tl.where(there, weights * totals, 0.0))
            summed = summed * carry + tl.sum(tl.where(there[:, None], weights[:, None] * parts, 0.0), 0)
            peak = higher
        result = (summed / total).to(out.dtype.element_ty)
        token = row.to(tl.int64)
        result = _gated(result, gate + token * gate_token_stride + head * gate_head_stride + dims, inside, GATED)
        tl.store(out + token * out_stride + head * DIM + dims, result, mask=inside)
