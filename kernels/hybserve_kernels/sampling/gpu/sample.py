"""Tokens of rows that want more than the argmax, by four launches that never sort the vocabulary:

1. survey: every piece of every row is shaped once for its largest logit; where a filter cuts, also the largest of every
   chunk of it, and what it weighs in the softmax.
2. cut: one program a row puts the pieces together. A greedy row is done. Where top-k or top-p cut, the few chunks whose
   largest logits stand out hold everything that can be kept: their best are gathered, the filters are applied to them,
   and the row is drawn. If they are too many or weigh too little, the cut is searched in the whole row.
3. draw, 4. choose: rows that are left are drawn over the whole vocabulary behind the cut.

What is kept is told by one integer: the order of a token is (logit, lower id first) in 52 bits, and a token is kept if
its order is not below the row's cut. The specification is reference.py.

Legend: R rows, C vocabulary, S sequence indices, N pieces of a row, M chunks of a row.
"""

import torch
import triton
import triton.language as tl

from hybserve_kernels.sampling.gpu.greedy import finite, first_best
from hybserve_kernels.sampling.gpu.noise import gumbel, position_key
from hybserve_kernels.sampling.gpu.shape import heat_of, number, order_of, shape, value_of
from hybserve_kernels.sampling.gpu.table import FLOOR, PENALISED, STREAM, TEMPERATURE, TOP_K, TOP_P, SamplingTable

#: Logits of a piece and of a chunk; chunks that are gathered at a time; candidates that a program keeps at hand.
_PIECE, _CHUNK, _GATHER, _CANDIDATES = 4096, 128, 8, 1024
#: How many chunks are looked into for top-p at first.
_NUCLEUS = tl.constexpr(64)
_ORDER_BITS = tl.constexpr(52)
_ID_BITS = tl.constexpr(20)


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
    weighed = number(record_ptr + TOP_P) < 1.0
    if (number(record_ptr + TEMPERATURE) > 0.0) & (counted | weighed):
        chunk = piece * (PIECE // CHUNK) + tl.arange(0, PIECE // CHUNK)
        tops = tl.max(tl.reshape(values, [PIECE // CHUNK, CHUNK]), 1)
        tl.store(maxima_ptr + row.to(tl.int64) * chunks + chunk, tops, mask=chunk < chunks)
        if weighed:
            weights = tl.exp(heat_of(values, high.to(tl.float64), record_ptr))
            tl.store(mass_ptr + out, tl.sum(tl.where(values > float("-inf"), weights, 0.0), 0))


@triton.jit
def _cut_kernel(
    logits_ptr, stride_r, seqs_ptr, outputs_ptr, records_ptr, record_words, counts_ptr, counts_words,
    best_ptr, at_ptr, finite_ptr, mass_ptr, maxima_ptr, list_ptr, candidates_ptr,
    tokens_ptr, finite_rows_ptr, high_ptr, cut_ptr,
    vocab, pieces, chunks,
    PIECES: tl.constexpr, CHUNKS: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr,
    GATHER: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Writes the token and the cut -1, or (where the row must be drawn over the vocabulary) its cut."""
    row = tl.program_id(0)
    seq = tl.load(seqs_ptr + row).to(tl.int64)
    tl.store(cut_ptr + row, -1)
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

    # chunks whose largest logit is among the largest ones hold at least as many tokens above that edge
    depth = tl.where(counted, top_k, _NUCLEUS)
    chunk = tl.arange(0, CHUNKS)
    maxima = tl.load(maxima_ptr + row.to(tl.int64) * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    orders = tl.where(chunk < chunks, order_of(maxima, 0) >> _ID_BITS, -1)
    edge = tl.full([], 0, tl.int64)
    for step in range(32):
        trial = edge | (tl.full([], 1, tl.int64) << (31 - step))
        edge = tl.where(tl.sum((orders >= trial).to(tl.int32), 0) >= depth, trial, edge)
    standing = (orders >= edge).to(tl.int32)
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

    known = tl.where(top_p < 1.0, pieces, 0)
    masses = tl.load(mass_ptr + at, mask=piece < known, other=0.0)
    total = tl.sum(masses * tl.exp(tl.where(masses > 0.0, heat_of(bests, high, record_ptr), 0.0)), 0)
    settled = found <= CANDIDATES
    if settled:
        place = tl.arange(0, CANDIDATES)
        order = tl.load(row_candidates_ptr + place, mask=place < found, other=-1)
        values, ids = value_of(order)
        scaled = heat_of(tl.where(order >= 0, values, float("-inf")), high, record_ptr)
        cut = tl.full([], 0, tl.int64)
        if counted:
            for step in range(_ORDER_BITS):
                trial = cut | (tl.full([], 1, tl.int64) << (_ORDER_BITS - 1 - step))
                cut = tl.where(tl.sum((order >= trial).to(tl.int32), 0) >= top_k, trial, cut)
        if top_p < 1.0:
            weights = tl.where((order >= cut) & (order >= 0), tl.exp(scaled), 0.0)
            reach = tl.sum(weights, 0)
            goal = top_p * tl.where(counted, reach, total)
            settled = reach >= goal
            nucleus = tl.full([], 0, tl.int64)
            for step in range(_ORDER_BITS):
                trial = nucleus | (tl.full([], 1, tl.int64) << (_ORDER_BITS - 1 - step))
                nucleus = tl.where(tl.sum(tl.where(order >= trial, weights, 0.0), 0) >= goal, trial, nucleus)
            cut = tl.maximum(cut, nucleus)
        if settled:
            cut = tl.minimum(cut, tl.max(order, 0))
            kept = (order >= cut) & (order >= 0) & (scaled >= number(record_ptr + FLOOR))
            key = position_key(tl.load(record_ptr + STREAM), output)
            _, token = first_best(tl.where(kept, scaled + gumbel(key, ids), float("-inf")), ids, 0)
            _take(token, row, record_ptr, row_counts_ptr, tokens_ptr)
    if settled == 0:
        cut = tl.full([], 0, tl.int64)
        if counted:
            goal = top_k.to(tl.float64)
            cut, _ = _search(row_ptr, record_ptr, row_counts_ptr, output, vocab, high, cut, goal, False, PIECE)
            _, total = _search(row_ptr, record_ptr, row_counts_ptr, output, vocab, high, cut, goal, True, PIECE)
        if top_p < 1.0:
            goal = top_p * total
            nucleus, _ = _search(row_ptr, record_ptr, row_counts_ptr, output, vocab, high, cut, goal, True, PIECE)
            cut = tl.maximum(cut, nucleus)
        first = order_of(top, token)
        tl.store(cut_ptr + row, tl.minimum(cut, first))


@triton.jit
def _search(
    row_ptr, record_ptr, counts_ptr, output, vocab, high, least, goal, WEIGH: tl.constexpr, PIECE: tl.constexpr
):
    """The largest order such that the tokens from it on (and from ``least`` on) are ``goal`` or more, or weigh it; and
    what all from ``least`` on are or weigh. Two bits of the order a pass."""
    cut = tl.full([], 0, tl.int64)
    above = tl.full([], 0.0, tl.float64)
    everything = tl.full([], 0.0, tl.float64)
    for step in range(_ORDER_BITS // 2):
        shift = _ORDER_BITS - 2 - 2 * step
        sum_0 = tl.zeros([PIECE], tl.float64)
        sum_1 = tl.zeros([PIECE], tl.float64)
        sum_2 = tl.zeros([PIECE], tl.float64)
        sum_3 = tl.zeros([PIECE], tl.float64)
        for low in range(0, vocab, PIECE):
            ids = low + tl.arange(0, PIECE)
            mask = ids < vocab
            values = tl.load(row_ptr + ids, mask=mask, other=0.0).to(tl.float32)
            values = shape(values, ids, mask, record_ptr, counts_ptr, output)
            order = order_of(values, ids)
            if WEIGH:
                weights = tl.where(values > float("-inf"), tl.exp(heat_of(values, high, record_ptr)), 0.0)
            else:
                weights = tl.full([PIECE], 1.0, tl.float64)
            digit = (order >> shift) - (cut >> shift)  # the cut's lower bits are not set yet
            digit = tl.where(mask & (order >= least), digit, -1)
            sum_0 += tl.where(digit == 0, weights, 0.0)
            sum_1 += tl.where(digit == 1, weights, 0.0)
            sum_2 += tl.where(digit == 2, weights, 0.0)
            sum_3 += tl.where(digit == 3, weights, 0.0)
        from_3 = above + tl.sum(sum_3, 0)
        from_2 = from_3 + tl.sum(sum_2, 0)
        from_1 = from_2 + tl.sum(sum_1, 0)
        if step == 0:
            everything = from_1 + tl.sum(sum_0, 0)
        digit = tl.where(from_3 >= goal, 3, tl.where(from_2 >= goal, 2, tl.where(from_1 >= goal, 1, 0)))
        above = tl.where(digit == 3, above, tl.where(digit == 2, from_3, tl.where(digit == 1, from_2, from_1)))
        cut = cut | (digit.to(tl.int64) << shift)
    return cut, everything


@triton.jit
def _draw_kernel(
    logits_ptr, stride_r, seqs_ptr, outputs_ptr, records_ptr, record_words, counts_ptr, counts_words,
    best_ptr, high_ptr, cut_ptr, score_ptr, at_ptr,
    vocab, pieces, PIECE: tl.constexpr,
):  # fmt: skip
    piece, row = tl.program_id(0), tl.program_id(1)
    cut = tl.load(cut_ptr + row)
    if cut < 0:
        return
    out = row * pieces + piece
    if order_of(tl.load(best_ptr + out), 0) < cut:
        tl.store(score_ptr + out, float("-inf"))
        return
    seq = tl.load(seqs_ptr + row).to(tl.int64)
    record_ptr = records_ptr + seq * record_words
    output = tl.load(outputs_ptr + row)
    ids = piece * PIECE + tl.arange(0, PIECE)
    mask = ids < vocab
    values = tl.load(logits_ptr + row.to(tl.int64) * stride_r + ids, mask=mask, other=0.0).to(tl.float32)
    values = shape(values, ids, mask, record_ptr, counts_ptr + seq * counts_words, output)
    scaled = heat_of(values, tl.load(high_ptr + row), record_ptr)
    kept = mask & (order_of(values, ids) >= cut) & (scaled >= number(record_ptr + FLOOR))
    key = position_key(tl.load(record_ptr + STREAM), output)
    score, token = first_best(tl.where(kept, scaled + gumbel(key, ids), float("-inf")), ids, 0x7FFFFFFF)
    tl.store(score_ptr + out, score)
    tl.store(at_ptr + out, token)


@triton.jit
def _choose_kernel(
    seqs_ptr, records_ptr, record_words, counts_ptr, counts_words, cut_ptr, score_ptr, at_ptr, tokens_ptr, pieces,
    PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(cut_ptr + row) < 0:
        return
    seq = tl.load(seqs_ptr + row).to(tl.int64)
    piece = tl.arange(0, PIECES)
    scores = tl.load(score_ptr + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    ids = tl.load(at_ptr + row * pieces + piece, mask=piece < pieces, other=0x7FFFFFFF)
    _, token = first_best(scores, ids, 0)
    _take(token, row, records_ptr + seq * record_words, counts_ptr + seq * counts_words, tokens_ptr)


@triton.jit
def _take(token, row, record_ptr, counts_ptr, tokens_ptr):
    """The row's token is found: write it, and count it where penalties want that."""
    tl.store(tokens_ptr + row, token.to(tl.int64))
    if tl.load(record_ptr + PENALISED) != 0:
        seen = tl.load(counts_ptr + token)
        tl.store(counts_ptr + token, tl.maximum(seen, 1) + 1)


def sample_rows(
    logits_RC: torch.Tensor, seqs_R: torch.Tensor, outputs_R: torch.Tensor, table: SamplingTable
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
    pieces, chunks = triton.cdiv(vocab, _PIECE), triton.cdiv(vocab, _CHUNK)
    best_RN = torch.empty(rows, pieces, dtype=torch.float32, device=device)
    at_RN = torch.empty(rows, pieces, dtype=torch.int32, device=device)
    good_RN = torch.empty(rows, pieces, dtype=torch.int8, device=device)
    mass_RN = torch.empty(rows, pieces, dtype=torch.float64, device=device)
    maxima_RM = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    list_RM = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    candidates_R = torch.empty(rows, _CANDIDATES, dtype=torch.int64, device=device)
    high_R = torch.empty(rows, dtype=torch.float64, device=device)
    cut_R = torch.empty(rows, dtype=torch.int64, device=device)
    records, counts = table.records_S, table.counts_SC
    inputs = (logits_RC, logits_RC.stride(0), seqs_R, outputs_R)
    book = (records, records.stride(0), counts, counts.stride(0))
    padded = triton.next_power_of_2(pieces)
    _survey_kernel[(pieces, rows)](
        *inputs, *book, best_RN, at_RN, good_RN, mass_RN, maxima_RM, vocab, pieces, chunks, _PIECE, _CHUNK,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _cut_kernel[(rows,)](
        *inputs, *book, best_RN, at_RN, good_RN, mass_RN, maxima_RM, list_RM, candidates_R,
        tokens_R, finite_R.view(torch.int8), high_R, cut_R,
        vocab, pieces, chunks, padded, triton.next_power_of_2(chunks), _PIECE, _CHUNK, _GATHER, _CANDIDATES,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    score_RN = mass_RN
    _draw_kernel[(pieces, rows)](
        *inputs, *book, best_RN, high_R, cut_R, score_RN, at_RN, vocab, pieces, _PIECE,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _choose_kernel[(rows,)](seqs_R, *book, cut_R, score_RN, at_RN, tokens_R, pieces, padded, num_warps=1)
    return tokens_R, finite_R
