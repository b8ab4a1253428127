"""Tokens of rows that want more than the argmax, by five launches that never sort the vocabulary:

1. survey: every piece of every row is shaped once for its largest logit; where a filter cuts, also the largest of every
   chunk of it, and what the chunk weighs in the softmax.
2. cut: one program a row puts the pieces together. A greedy row is done. Where top-k or top-p cut, an edge is found
   that no token below survives; the chunks whose largest logit stands above it are gathered, the filters are applied to
   their tokens above the edge, and the row is drawn.
3. search: where those are too many, the cut is searched in the whole row.
4. draw: rows that are left get their noise over the whole vocabulary behind the cut, in fp32, for the best of every
   chunk.
5. choose: the one or two chunks that may hold the best token are gone through again in fp64.

What is kept is told by one integer: the order of a token is (logit, lower id first) in 52 bits, and a token is kept if
its order is not below the row's cut. The specification is reference.py.

Legend: R rows, C vocabulary, S sequence indices, N pieces of a row, M chunks of a row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.sampling.gpu.greedy import finite, first_best
from hybserve_kernels.sampling.gpu.noise import gumbel, gumbel_about, position_key
from hybserve_kernels.sampling.gpu.shape import heat_of, number, order_of, shape, value_of
from hybserve_kernels.sampling.gpu.table import FLOOR, PENALISED, STREAM, TEMPERATURE, TOP_K, TOP_P, SamplingTable


class Shape(NamedTuple):
    """Logits of a piece, and the warps that survey it and draw in it."""

    piece: int
    survey_warps: int
    draw_warps: int


SHAPE = Shape(4096, 8, 8)
#: Logits of a chunk; chunks that are gathered at a time; most candidates of a row.
_CHUNK, _GATHER, _CANDIDATES = 128, 32, 4096
#: Logits that the search reads at a time.
_STRETCH = 4096
#: Candidates that most rows have at most.
_FEW = tl.constexpr(1024)
_ORDER_BITS = tl.constexpr(52)
_ID_BITS = tl.constexpr(20)
#: In place of a cut: the row is done, or its cut must be searched.
_DONE, _OPEN = tl.constexpr(-1), tl.constexpr(-2)
#: Noise lies between -3.7 and 37.5, so no token this far below the likeliest (in nats) is ever drawn.
_HOPELESS = tl.constexpr(-42.0)
#: More than the scores of the draw can be off.
_SLACK = tl.constexpr(0.004)


@triton.jit
def _survey_kernel(
    logits_ptr, stride_r, seqs_ptr, outputs_ptr, records_ptr, record_words, counts_ptr, counts_words,
    best_ptr, at_ptr, finite_ptr, mass_ptr, maxima_ptr,
    vocab, pieces, chunks, PIECE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    piece, row = tl.program_id(0), tl.program_id(1)
    seq = tl.load(seqs_ptr + row).to(tl.int64)
    if seq < 0:
        return
    record_ptr = records_ptr + seq * record_words
    ids = piece * PIECE + tl.arange(0, PIECE)
    mask = ids < vocab
    raw = tl.load(logits_ptr + row.to(tl.int64) * stride_r + ids, mask=mask, other=0.0).to(tl.float32)
    good = tl.min(finite(raw).to(tl.int32), 0)
    values = shape(raw, ids, mask, record_ptr, counts_ptr + seq * counts_words, tl.load(outputs_ptr + row))
    high, lowest = first_best(values, ids, 0x7FFFFFFF)
    out = row * pieces + piece
    tl.store(best_ptr + out, high)
    tl.store(at_ptr + out, lowest)
    tl.store(finite_ptr + out, good.to(tl.int8))
    top_k = tl.load(record_ptr + TOP_K)
    counted = (top_k > 0) & (top_k < vocab)
    weighed = (number(record_ptr + TOP_P) < 1.0) & (counted == 0)
    if (number(record_ptr + TEMPERATURE) > 0.0) & (counted | weighed):
        chunk = piece * (PIECE // CHUNK) + tl.arange(0, PIECE // CHUNK)
        chunk_at = row.to(tl.int64) * chunks + chunk
        tops = tl.max(tl.reshape(values, [PIECE // CHUNK, CHUNK]), 1)
        tl.store(maxima_ptr + chunk_at, tops, mask=chunk < chunks)
        if weighed:
            weights = tl.exp(heat_of(values, high.to(tl.float64), record_ptr))
            weights = tl.where(values > float("-inf"), weights, 0.0)
            masses = tl.sum(tl.reshape(weights, [PIECE // CHUNK, CHUNK]), 1)
            tl.store(mass_ptr + chunk_at, masses, mask=chunk < chunks)


@triton.jit
def _cut_kernel(
    logits_ptr, stride_r, seqs_ptr, outputs_ptr, records_ptr, record_words, counts_ptr, counts_words,
    best_ptr, at_ptr, finite_ptr, mass_ptr, maxima_ptr, list_ptr, candidates_ptr,
    tokens_ptr, finite_rows_ptr, high_ptr, total_ptr, cut_ptr,
    vocab, pieces, chunks,
    PIECES: tl.constexpr, CHUNKS: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr,
    GATHER: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Writes the token and _DONE, the cut of a row that must be drawn over the vocabulary, or _OPEN."""
    row = tl.program_id(0)
    seq = tl.load(seqs_ptr + row).to(tl.int64)
    tl.store(cut_ptr + row, _DONE)
    if seq < 0:
        tl.store(tokens_ptr + row, 0)
        tl.store(finite_rows_ptr + row, 1)
        return
    record_ptr = records_ptr + seq * record_words
    row_counts_ptr = counts_ptr + seq * counts_words
    row_ptr = logits_ptr + row.to(tl.int64) * stride_r
    output = tl.load(outputs_ptr + row)

    piece = tl.arange(0, PIECES)
    at = row * pieces + piece
    bests = tl.load(best_ptr + at, mask=piece < pieces, other=float("-inf"))
    lowest = tl.load(at_ptr + at, mask=piece < pieces, other=0x7FFFFFFF)
    good = tl.min(tl.load(finite_ptr + at, mask=piece < pieces, other=1).to(tl.int32), 0)
    top, token = first_best(bests, lowest, 0)
    tl.store(finite_rows_ptr + row, good.to(tl.int8))
    if (good == 0) | (number(record_ptr + TEMPERATURE) == 0.0):
        _take(tl.where(good == 0, 0, token), row, record_ptr, row_counts_ptr, tokens_ptr)
        return

    high = tl.where(top > float("-inf"), top.to(tl.float64), 0.0)
    tl.store(high_ptr + row, high)
    top_k = tl.load(record_ptr + TOP_K)
    top_p = number(record_ptr + TOP_P)
    counted = (top_k > 0) & (top_k < vocab)
    if (top_p >= 1.0) & (counted == 0):
        tl.store(cut_ptr + row, 0)
        return

    # the edge (32 bits of an order): so many chunks reach it that top-k is full, or they weigh enough for top-p even if
    # each holds but its largest above the edge and all the others at it
    chunk = tl.arange(0, CHUNKS)
    chunk_at = row.to(tl.int64) * chunks + chunk
    maxima = tl.load(maxima_ptr + chunk_at, mask=chunk < chunks, other=float("-inf"))
    reach = tl.where(chunk < chunks, order_of(maxima, 0) >> _ID_BITS, -1)
    edge = tl.full([], 0, tl.int64)
    total = tl.full([], 0.0, tl.float64)
    if counted:
        for step in range(32):
            trial = edge | (tl.full([], 1, tl.int64) << (31 - step))
            edge = tl.where(tl.sum((reach >= trial).to(tl.int32), 0) >= top_k, trial, edge)
    else:
        of_piece = tl.load(
            best_ptr + row * pieces + chunk // (PIECE // CHUNK), mask=chunk < chunks, other=float("-inf")
        )
        masses = tl.load(mass_ptr + chunk_at, mask=chunk < chunks, other=0.0)
        masses *= tl.exp(tl.where(masses > 0.0, heat_of(of_piece, high, record_ptr), 0.0))
        tops = tl.exp(heat_of(maxima, high, record_ptr))
        total = tl.sum(masses, 0)
        tl.store(total_ptr + row, total)
        for step in range(32):
            trial = edge | (tl.full([], 1, tl.int64) << (31 - step))
            level, _ = value_of(trial << _ID_BITS)
            rest = masses - (CHUNK - 1) * tl.exp(heat_of(level, high, record_ptr))
            least = tl.sum(tl.where(reach >= trial, tl.maximum(rest, tops), 0.0), 0)
            edge = tl.where(least >= top_p * total, trial, edge)

    standing = (reach >= edge).to(tl.int32)
    row_list_ptr = list_ptr + row.to(tl.int64) * chunks
    tl.store(row_list_ptr + tl.cumsum(standing, 0) - 1, chunk, mask=standing > 0)
    tl.debug_barrier()
    listed = tl.sum(standing, 0)
    row_candidates_ptr = candidates_ptr + row.to(tl.int64) * CANDIDATES
    found = tl.full([], 0, tl.int32)
    for low in range(0, listed, GATHER):
        if found <= CANDIDATES:
            line = low + tl.arange(0, GATHER)
            which = tl.load(row_list_ptr + line, mask=line < listed, other=chunks)
            ids = tl.reshape(which[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :], [GATHER * CHUNK])
            mask = ids < vocab
            values = tl.load(row_ptr + ids, mask=mask, other=0.0).to(tl.float32)
            order = order_of(shape(values, ids, mask, record_ptr, row_counts_ptr, output), ids)
            above = (mask & ((order >> _ID_BITS) >= edge)).to(tl.int32)
            place = found + tl.cumsum(above, 0) - 1
            tl.store(row_candidates_ptr + place, order, mask=(above > 0) & (place < CANDIDATES))
            found += tl.sum(above, 0)
    tl.debug_barrier()
    drawn = tl.full([], -1, tl.int32)
    if found <= _FEW:
        drawn = _draw_of(row_candidates_ptr, found, record_ptr, high, total, counted, output, _FEW)
    elif found <= CANDIDATES:
        drawn = _draw_of(row_candidates_ptr, found, record_ptr, high, total, counted, output, CANDIDATES)
    if drawn >= 0:
        _take(drawn, row, record_ptr, row_counts_ptr, tokens_ptr)
    else:
        tl.store(cut_ptr + row, _OPEN)


@triton.jit
def _draw_of(candidates_ptr, found, record_ptr, high, total, counted, output, MOST: tl.constexpr):
    """The token drawn of the candidates that the filters keep; -1 if they do not weigh enough."""
    place = tl.arange(0, MOST)
    order = tl.load(candidates_ptr + place, mask=place < found, other=-1)
    values, ids = value_of(order)
    scaled = heat_of(tl.where(order >= 0, values, float("-inf")), high, record_ptr)
    cut = tl.full([], 0, tl.int64)
    if counted:
        top_k = tl.load(record_ptr + TOP_K)
        for step in range(_ORDER_BITS):
            trial = cut | (tl.full([], 1, tl.int64) << (_ORDER_BITS - 1 - step))
            cut = tl.where(tl.sum((order >= trial).to(tl.int32), 0) >= top_k, trial, cut)
    enough = tl.full([], 1, tl.int32)
    top_p = number(record_ptr + TOP_P)
    if top_p < 1.0:
        weights = tl.where(order >= cut, tl.exp(scaled), 0.0)
        held = tl.sum(weights, 0)
        goal = top_p * tl.where(counted, held, total)
        enough = tl.where(held >= goal, 1, 0)
        nucleus = tl.full([], 0, tl.int64)
        for step in range(_ORDER_BITS):
            trial = nucleus | (tl.full([], 1, tl.int64) << (_ORDER_BITS - 1 - step))
            nucleus = tl.where(tl.sum(tl.where(order >= trial, weights, 0.0), 0) >= goal, trial, nucleus)
        cut = tl.maximum(cut, nucleus)
    cut = tl.minimum(cut, tl.max(order, 0))
    kept = (order >= cut) & (scaled >= number(record_ptr + FLOOR))
    key = position_key(tl.load(record_ptr + STREAM), output)
    _, token = first_best(tl.where(kept, scaled + gumbel(key, ids), float("-inf")), ids, 0)
    return tl.where(enough > 0, token, -1)


@triton.jit
def _search_kernel(
    logits_ptr, stride_r, seqs_ptr, outputs_ptr, records_ptr, record_words, counts_ptr, counts_words,
    best_ptr, at_ptr, high_ptr, total_ptr, cut_ptr, vocab, pieces, PIECES: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """The cut of rows that are open."""
    row = tl.program_id(0)
    if tl.load(cut_ptr + row) != _OPEN:
        return
    seq = tl.load(seqs_ptr + row).to(tl.int64)
    record_ptr = records_ptr + seq * record_words
    row_counts_ptr = counts_ptr + seq * counts_words
    row_ptr = logits_ptr + row.to(tl.int64) * stride_r
    output = tl.load(outputs_ptr + row)
    high = tl.load(high_ptr + row)
    total = tl.load(total_ptr + row)
    top_k = tl.load(record_ptr + TOP_K)
    top_p = number(record_ptr + TOP_P)
    cut = tl.full([], 0, tl.int64)
    if (top_k > 0) & (top_k < vocab):
        goal = top_k.to(tl.float64)
        cut = _search(row_ptr, record_ptr, row_counts_ptr, output, vocab, high, cut, goal, False, STRETCH)
        held = tl.zeros([STRETCH], tl.float64)
        for low in range(0, vocab, STRETCH):
            order, weights = _weigh(row_ptr, record_ptr, row_counts_ptr, output, low, vocab, high, STRETCH)
            held += tl.where(order >= cut, weights, 0.0)
        total = tl.sum(held, 0)
    if top_p < 1.0:
        goal = top_p * total
        nucleus = _search(row_ptr, record_ptr, row_counts_ptr, output, vocab, high, cut, goal, True, STRETCH)
        cut = tl.maximum(cut, nucleus)
    piece = tl.arange(0, PIECES)
    bests = tl.load(best_ptr + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    lowest = tl.load(at_ptr + row * pieces + piece, mask=piece < pieces, other=0x7FFFFFFF)
    top, token = first_best(bests, lowest, 0)
    tl.store(cut_ptr + row, tl.minimum(cut, order_of(top, token)))


@triton.jit
def _weigh(row_ptr, record_ptr, counts_ptr, output, low, vocab, high, STRETCH: tl.constexpr):
    """Orders (-1 beyond the row) and softmax weights of a stretch."""
    ids = low + tl.arange(0, STRETCH)
    mask = ids < vocab
    values = tl.load(row_ptr + ids, mask=mask, other=0.0).to(tl.float32)
    values = shape(values, ids, mask, record_ptr, counts_ptr, output)
    weights = tl.where(values > float("-inf"), tl.exp(heat_of(values, high, record_ptr)), 0.0)
    return tl.where(mask, order_of(values, ids), -1), weights


@triton.jit
def _search(
    row_ptr, record_ptr, counts_ptr, output, vocab, high, least, goal, WEIGH: tl.constexpr, STRETCH: tl.constexpr
):
    """The largest order such that the tokens from it on (and from ``least`` on) are ``goal`` or more, or weigh as much.
    Two bits of it a pass."""
    cut = tl.full([], 0, tl.int64)
    above = tl.full([], 0.0, tl.float64)
    for step in range(_ORDER_BITS // 2):
        shift = _ORDER_BITS - 2 - 2 * step
        sum_1 = tl.zeros([STRETCH], tl.float64)
        sum_2 = tl.zeros([STRETCH], tl.float64)
        sum_3 = tl.zeros([STRETCH], tl.float64)
        for low in range(0, vocab, STRETCH):
            order, weights = _weigh(row_ptr, record_ptr, counts_ptr, output, low, vocab, high, STRETCH)
            if not WEIGH:
                weights = tl.full([STRETCH], 1.0, tl.float64)
            digit = (order >> shift) - (cut >> shift)  # the cut's lower bits are not set yet
            weights = tl.where(order >= least, weights, 0.0)
            sum_1 += tl.where(digit == 1, weights, 0.0)
            sum_2 += tl.where(digit == 2, weights, 0.0)
            sum_3 += tl.where(digit == 3, weights, 0.0)
        from_3 = above + tl.sum(sum_3, 0)
        from_2 = from_3 + tl.sum(sum_2, 0)
        from_1 = from_2 + tl.sum(sum_1, 0)
        digit = tl.where(from_3 >= goal, 3, tl.where(from_2 >= goal, 2, tl.where(from_1 >= goal, 1, 0)))
        above = tl.where(digit == 3, above, tl.where(digit == 2, from_3, tl.where(digit == 1, from_2, from_1)))
        cut = cut | (digit.to(tl.int64) << shift)
    return cut


@triton.jit
def _draw_kernel(
    logits_ptr, stride_r, seqs_ptr, outputs_ptr, records_ptr, record_words, counts_ptr, counts_words,
    best_ptr, high_ptr, cut_ptr, score_ptr,
    vocab, pieces, chunks, PIECE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest score of every chunk, about: logit over temperature + noise."""
    piece, row = tl.program_id(0), tl.program_id(1)
    cut = tl.load(cut_ptr + row)
    if cut < 0:
        return
    seq = tl.load(seqs_ptr + row).to(tl.int64)
    record_ptr = records_ptr + seq * record_words
    high = tl.load(high_ptr + row)
    best = tl.load(best_ptr + row * pieces + piece)
    chunk = piece * (PIECE // CHUNK) + tl.arange(0, PIECE // CHUNK)
    row_score_ptr = score_ptr + row.to(tl.int64) * chunks
    if (order_of(best, 0) < cut) | (heat_of(best, high, record_ptr) < _HOPELESS):
        tl.store(row_score_ptr + chunk, float("-inf"), mask=chunk < chunks)
        return
    output = tl.load(outputs_ptr + row)
    ids = piece * PIECE + tl.arange(0, PIECE)
    mask = ids < vocab
    values = tl.load(logits_ptr + row.to(tl.int64) * stride_r + ids, mask=mask, other=0.0).to(tl.float32)
    values = shape(values, ids, mask, record_ptr, counts_ptr + seq * counts_words, output)
    scaled = heat_of(values, high, record_ptr)
    kept = mask & (order_of(values, ids) >= cut) & (scaled >= number(record_ptr + FLOOR))
    key = position_key(tl.load(record_ptr + STREAM), output)
    scores = tl.where(kept, scaled.to(tl.float32) + gumbel_about(key, ids), float("-inf"))
    tops = tl.max(tl.reshape(scores, [PIECE // CHUNK, CHUNK]), 1)
    tl.store(row_score_ptr + chunk, tops, mask=chunk < chunks)


@triton.jit
def _choose_kernel(
    logits_ptr, stride_r, seqs_ptr, outputs_ptr, records_ptr, record_words, counts_ptr, counts_words,
    high_ptr, cut_ptr, score_ptr, tokens_ptr, vocab, chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    cut = tl.load(cut_ptr + row)
    if cut < 0:
        return
    seq = tl.load(seqs_ptr + row).to(tl.int64)
    record_ptr = records_ptr + seq * record_words
    row_counts_ptr = counts_ptr + seq * counts_words
    row_ptr = logits_ptr + row.to(tl.int64) * stride_r
    output = tl.load(outputs_ptr + row)
    high = tl.load(high_ptr + row)
    key = position_key(tl.load(record_ptr + STREAM), output)
    chunk = tl.arange(0, CHUNKS)
    scores = tl.load(score_ptr + row.to(tl.int64) * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    top = tl.max(scores, 0)
    # where nothing is left at all, no chunk
    standing = tl.where((scores >= top - _SLACK) & (scores > float("-inf")), chunk, CHUNKS)
    best = tl.full([], float("-inf"), tl.float64)
    token = tl.full([], 0, tl.int32)
    for _ in range(tl.sum((standing < CHUNKS).to(tl.int32), 0)):
        which = tl.min(standing, 0)  # ascending, so that of equal scores the lower id stays
        standing = tl.where(standing == which, CHUNKS, standing)
        ids = which * CHUNK + tl.arange(0, CHUNK)
        mask = ids < vocab
        values = tl.load(row_ptr + ids, mask=mask, other=0.0).to(tl.float32)
        values = shape(values, ids, mask, record_ptr, row_counts_ptr, output)
        scaled = heat_of(values, high, record_ptr)
        kept = mask & (order_of(values, ids) >= cut) & (scaled >= number(record_ptr + FLOOR))
        score, first = first_best(tl.where(kept, scaled + gumbel(key, ids), float("-inf")), ids, 0)
        token = tl.where(score > best, first, token)
        best = tl.where(score > best, score, best)
    _take(token, row, record_ptr, row_counts_ptr, tokens_ptr)


@triton.jit
def _take(token, row, record_ptr, counts_ptr, tokens_ptr):
    """The row's token is found: write it, and count it where penalties want that."""
    tl.store(tokens_ptr + row, token.to(tl.int64))
    if tl.load(record_ptr + PENALISED) != 0:
        seen = tl.load(counts_ptr + token)
        tl.store(counts_ptr + token, tl.maximum(seen, 1) + 1)


def sample_rows(
    logits_RC: torch.Tensor,
    seqs_R: torch.Tensor,
    outputs_R: torch.Tensor,
    table: SamplingTable,
    shape: Shape = SHAPE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, int64 [R], as the records of ``table`` ask for, and whether its logits were finite, bool [R].

    ``logits_RC``: any float dtype; rows may lie apart. ``seqs_R`` int32: the row's sequence; negative = padding (token
    0, finite). ``outputs_R`` int32: 0-based numbers of the outputs. A row that is not finite gives token 0. Counts the
    tokens of penalised sequences, so no sequence may stand twice."""
    assert logits_RC.stride(1) == 1, "logits of a row must be contiguous"
    rows, vocab = logits_RC.shape
    assert vocab == table.vocab, f"logits of {vocab} tokens, a table of {table.vocab}"
    assert seqs_R.shape == outputs_R.shape == (rows,), "one sequence and one output number per row"
    device = logits_RC.device
    tokens_R = torch.empty(rows, dtype=torch.int64, device=device)
    finite_R = torch.empty(rows, dtype=torch.bool, device=device)
    if not rows:
        return tokens_R, finite_R
    pieces, chunks = triton.cdiv(vocab, shape.piece), triton.cdiv(vocab, _CHUNK)
    best_RN = torch.empty(rows, pieces, dtype=torch.float32, device=device)
    at_RN = torch.empty(rows, pieces, dtype=torch.int32, device=device)
    good_RN = torch.empty(rows, pieces, dtype=torch.int8, device=device)
    maxima_RM = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    mass_RM = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    list_RM = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    candidates_R = torch.empty(rows, _CANDIDATES, dtype=torch.int64, device=device)
    high_R = torch.empty(rows, dtype=torch.float64, device=device)
    total_R = torch.empty(rows, dtype=torch.float64, device=device)
    cut_R = torch.empty(rows, dtype=torch.int64, device=device)
    records, counts = table.records_S, table.counts_SC
    inputs = (
        logits_RC, logits_RC.stride(0), seqs_R, outputs_R, records, records.stride(0), counts, counts.stride(0)
    )  # fmt: skip
    padded_pieces, padded_chunks = triton.next_power_of_2(pieces), triton.next_power_of_2(chunks)
    _survey_kernel[(pieces, rows)](
        *inputs, best_RN, at_RN, good_RN, mass_RM, maxima_RM, vocab, pieces, chunks, shape.piece, _CHUNK,
        num_warps=shape.survey_warps, enable_fp_fusion=False,
    )  # fmt: skip
    _cut_kernel[(rows,)](
        *inputs, best_RN, at_RN, good_RN, mass_RM, maxima_RM, list_RM, candidates_R,
        tokens_R, finite_R.view(torch.int8), high_R, total_R, cut_R,
        vocab, pieces, chunks, padded_pieces, padded_chunks, shape.piece, _CHUNK, _GATHER, _CANDIDATES,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    _search_kernel[(rows,)](
        *inputs, best_RN, at_RN, high_R, total_R, cut_R, vocab, pieces, padded_pieces, _STRETCH,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    score_RM = maxima_RM
    _draw_kernel[(pieces, rows)](
        *inputs, best_RN, high_R, cut_R, score_RM, vocab, pieces, chunks, shape.piece, _CHUNK,
        num_warps=shape.draw_warps, enable_fp_fusion=False,
    )  # fmt: skip
    _choose_kernel[(rows,)](
        *inputs, high_R, cut_R, score_RM, tokens_R, vocab, chunks, padded_chunks, _CHUNK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens_R, finite_R
