"""Routing and the order of work: which (token, choice) pairs each expert runs, found without a look from the host.

A first launch chooses the experts of chunks of tokens, counts the choices of each chunk and numbers them within it; a
second one adds the counts of the chunks before, puts the pairs in order of (expert, token) and cuts each expert's run
into blocks of rows. Nothing depends on the order in which programs run, and no counters have to be zero beforehand. For
few tokens one program does it all.

Legend: T tokens (upper bound), E experts, X = top_k, Z chunks of tokens, B blocks of rows. Pair = token · X + choice.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.overlap import overlaps_at
from hybserve_kernels.overlap.gpu import begin

#: Tokens chosen for at a time by a program, and most chunks that the second launch looks through.
_TOKENS, _MOST_CHUNKS = 8, 128
#: Most tokens that one program chooses for and puts in order alone, at two a warp.
_ALONE = 32
#: Chunks, pairs and blocks at a time in the second launch.
_CHUNKS_AT_ONCE, _PAIRS_AT_ONCE, _BLOCKS_AT_ONCE = 16, 256, 32


class Routes(NamedTuple):
    """What was chosen; rows of padded tokens are not written."""

    experts_TX: torch.Tensor  # int32, best first
    weights_TX: torch.Tensor  # in the dtype of the scores


class Work(NamedTuple):
    """Blocks of rows of one expert each. Row r stands for the pair ``pairs[r]``; those of an expert are contiguous."""

    pairs: torch.Tensor  # int32 [T · X]; as many as are real are written
    blocks_3B: torch.Tensor  # int32: expert, first row, rows (0 = no block)

    @property
    def blocks(self) -> int:
        return self.blocks_3B.shape[1]


@triton.jit
def _choose(
    scores_ptr,
    experts_ptr,
    weights_ptr,
    o_t,
    real,
    scores_stride,
    E: tl.constexpr,
    X: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BX: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Stores the choices of tokens, and gives them as [BT, BX] experts and as [BT, BE] numbers of the choices, X where
    an expert is none. Probabilities are compared as integers, which keeps their order; ties go to the lower id, and
    probabilities that are no numbers come first."""
    o_e, o_x = tl.arange(0, BE), tl.arange(0, BX)
    o_t = o_t.to(tl.int64)
    p_scores = scores_ptr + o_t[:, None] * scores_stride + o_e[None, :]
    scores = tl.load(p_scores, mask=real[:, None] & (o_e < E)[None, :], other=0.0).to(tl.float32)
    scores = tl.where((o_e < E)[None, :], scores, float("-inf"))
    probability = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    probability /= tl.sum(probability, axis=1)[:, None]
    bits = tl.where(probability == probability, probability.to(tl.int32, bitcast=True), 0x7FC00000)
    bits = tl.where((o_e < E)[None, :], bits, -1)
    number = tl.full([BT, BE], X, dtype=tl.int32)
    experts = tl.zeros([BT, BX], dtype=tl.int32)
    weights = tl.zeros([BT, BX], dtype=tl.float32)
    for choice in tl.static_range(X):
        best = tl.max(bits, axis=1)
        expert = tl.min(tl.where(bits == best[:, None], o_e[None, :], BE), axis=1)
        taken = o_e[None, :] == expert[:, None]
        number = tl.where(taken, choice, number)
        bits = tl.where(taken, -1, bits)
        here = (o_x == choice)[None, :]
        experts = tl.where(here, expert[:, None], experts)
        weights = tl.where(here, best.to(tl.float32, bitcast=True)[:, None], weights)
    if NORMALISE:
        weights /= tl.sum(weights, axis=1)[:, None]
    inside = real[:, None] & (o_x < X)[None, :]
    o_tx = o_t[:, None] * X + o_x[None, :]
    tl.store(experts_ptr + o_tx, experts, mask=inside)
    tl.store(weights_ptr + o_tx, weights.to(weights_ptr.dtype.element_ty), mask=inside)
    return experts, number


@triton.jit(do_not_specialize=["T"])
def _route_kernel(
    scores_ptr,  # [T, E], the last dimension contiguous
    tokens_ptr,  # int32 [1]
    experts_ptr,  # int32 [T, X]
    weights_ptr,  # [T, X]
    ranks_ptr,  # int32 [T, X], written if COUNT
    counts_ptr,  # int32 [Z, E], written if COUNT
    T,
    scores_stride,
    E: tl.constexpr,
    X: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BX: tl.constexpr,
    ROUNDS: tl.constexpr,
    NORMALISE: tl.constexpr,
    COUNT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program chooses for BT · ROUNDS tokens."""
    begin(EARLY)
    chunk = tl.program_id(0)
    tokens = tl.minimum(tl.load(tokens_ptr), T)
    o_e, o_x = tl.arange(0, BE), tl.arange(0, BX)
    seen = tl.zeros([BE], dtype=tl.int32)
    for turn in range(ROUNDS):
        o_t = (chunk * ROUNDS + turn) * BT + tl.arange(0, BT)
        real = o_t < tokens
        experts, number = _choose(
            scores_ptr, experts_ptr, weights_ptr, o_t, real, scores_stride, E, X, BT, BE, BX, NORMALISE
        )
        if COUNT:
            chosen = ((number < X) & real[:, None]).to(tl.int32)
            before = tl.cumsum(chosen, axis=0) - chosen + seen[None, :]
            o_tx = o_t.to(tl.int64)[:, None] * X + o_x[None, :]
            tl.store(ranks_ptr + o_tx, tl.gather(before, experts, 1), mask=real[:, None] & (o_x < X)[None, :])
            seen += tl.sum(chosen, axis=0)
    if COUNT:
        tl.store(counts_ptr + chunk * E + o_e, seen, mask=o_e < E)


@triton.jit(do_not_specialize=["T", "blocks"])
def _alone_kernel(
    scores_ptr,  # [T, E], the last dimension contiguous
    tokens_ptr,  # int32 [1]
    experts_ptr,  # int32 [T, X]
    weights_ptr,  # [T, X]
    pairs_ptr,  # int32 [T · X]
    blocks_ptr,  # int32 [3, B]
    T,
    blocks,
    scores_stride,
    E: tl.constexpr,
    X: tl.constexpr,
    BM: tl.constexpr,
    MORE: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BX: tl.constexpr,
    BB: tl.constexpr,
    NORMALISE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The only program, for BT tokens and BB blocks."""
    begin(EARLY)
    o_t, o_e, o_b = tl.arange(0, BT), tl.arange(0, BE), tl.arange(0, BB)
    real = o_t < tl.minimum(tl.load(tokens_ptr), T)
    _, number = _choose(scores_ptr, experts_ptr, weights_ptr, o_t, real, scores_stride, E, X, BT, BE, BX, NORMALISE)
    chosen = (number < X) & real[:, None]
    ones = chosen.to(tl.int32)
    total = tl.sum(ones, axis=0)
    first_row = tl.cumsum(total, axis=0) - total
    rank = tl.cumsum(ones, axis=0) - ones
    tl.store(pairs_ptr + first_row[None, :] + rank, o_t[:, None] * X + number, mask=chosen)

    own_blocks = tl.maximum((total - MORE + BM - 1) // BM, tl.minimum(total, 1))
    block = tl.cumsum(own_blocks, axis=0) - own_blocks
    for at in tl.static_range((BT + BM - 1) // BM):
        mask = own_blocks > at
        tl.store(blocks_ptr + block + at, o_e, mask=mask)
        tl.store(blocks_ptr + blocks + block + at, first_row + at * BM, mask=mask)
        rows = tl.where(own_blocks > at + 1, BM, total - at * BM)
        tl.store(blocks_ptr + 2 * blocks + block + at, rows, mask=mask)
    tl.store(blocks_ptr + 2 * blocks + o_b, 0, mask=(o_b >= tl.sum(own_blocks, axis=0)) & (o_b < blocks))


@triton.jit(do_not_specialize=["T", "chunks", "blocks"])
def _order_kernel(
    tokens_ptr,  # int32 [1]
    experts_ptr,  # int32 [T, X]
    ranks_ptr,  # int32 [T, X]
    counts_ptr,  # int32 [Z, E]
    pairs_ptr,  # int32 [T · X]
    blocks_ptr,  # int32 [3, B]
    T,
    chunks,
    blocks,
    E: tl.constexpr,
    X: tl.constexpr,
    BM: tl.constexpr,
    MORE: tl.constexpr,
    BE: tl.constexpr,
    BZ: tl.constexpr,
    BP: tl.constexpr,
    BB: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program places the pairs of one chunk of CHUNK tokens, and writes its share of the blocks."""
    begin(EARLY)
    chunk = tl.program_id(0)
    o_e = tl.arange(0, BE)
    total = tl.zeros([BE], dtype=tl.int32)
    before = tl.zeros([BE], dtype=tl.int32)
    for first in range(0, chunks, BZ):
        o_z = first + tl.arange(0, BZ)
        mask = (o_z < chunks)[:, None] & (o_e < E)[None, :]
        counts = tl.load(counts_ptr + o_z[:, None] * E + o_e[None, :], mask=mask, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((o_z < chunk)[:, None], counts, 0), axis=0)
    end = tl.cumsum(total, axis=0)
    first_row = end - total

    base = first_row + before
    pairs_end = tl.minimum(tl.load(tokens_ptr), tl.minimum(T, (chunk + 1) * CHUNK)) * X
    for first in range(chunk * CHUNK * X, pairs_end, BP):
        o_p = first + tl.arange(0, BP)
        mask = o_p < pairs_end
        expert = tl.load(experts_ptr + o_p, mask=mask, other=0)
        rank = tl.load(ranks_ptr + o_p, mask=mask, other=0)
        tl.store(pairs_ptr + tl.gather(base, expert, 0) + rank, o_p, mask=mask)

    own_blocks = tl.maximum((total - MORE + BM - 1) // BM, tl.minimum(total, 1))
    block_end = tl.cumsum(own_blocks, axis=0)
    block_begin = block_end - own_blocks
    real_blocks = tl.sum(own_blocks, axis=0)
    for first in range(chunk * BB, blocks, chunks * BB):
        o_b = first + tl.arange(0, BB)
        real = o_b < real_blocks
        expert = tl.sum((block_end[None, :] <= o_b[:, None]).to(tl.int32), axis=1)
        expert = tl.where(real, expert, 0)
        row = tl.gather(first_row, expert, 0) + (o_b - tl.gather(block_begin, expert, 0)) * BM
        rows = tl.where(o_b + 1 < tl.gather(block_end, expert, 0), BM, tl.gather(end, expert, 0) - row)
        tl.store(blocks_ptr + o_b, expert, mask=o_b < blocks)
        tl.store(blocks_ptr + blocks + o_b, row, mask=o_b < blocks)
        tl.store(blocks_ptr + 2 * blocks + o_b, tl.where(real, rows, 0), mask=o_b < blocks)


def route_pairs(scores_TE: torch.Tensor, top_k: int, normalise: bool, tokens_1: torch.Tensor) -> Routes:
    """The choices alone, one launch."""
    routes = _empty_routes(scores_TE, top_k)
    _launch_route(routes, scores_TE, normalise, tokens_1, None, None, 1, 1)
    return routes


def route_blocks(
    scores_TE: torch.Tensor, top_k: int, normalise: bool, tokens_1: torch.Tensor, rows: int, more: int = 0
) -> tuple[Routes, Work]:
    """The choices, and their pairs in order of the experts in blocks of ``rows``, the last of an expert up to ``more``
    longer, or shorter; one or two launches."""
    tokens, count = scores_TE.shape
    pairs = tokens * top_k
    blocks = min(pairs, count) + pairs // rows
    early = overlaps_at(scores_TE.device, tokens)
    routes = _empty_routes(scores_TE, top_k)
    work = Work(routes.experts_TX.new_empty(pairs), routes.experts_TX.new_empty(3, blocks))
    if tokens <= _ALONE:
        at_once = max(2, triton.next_power_of_2(tokens))
        _alone_kernel[(1,)](
            scores_TE,
            tokens_1,
            *routes,
            *work,
            tokens,
            blocks,
            scores_TE.stride(0),
            E=count,
            X=top_k,
            BM=rows,
            MORE=more,
            BT=at_once,
            BE=triton.next_power_of_2(count),
            BX=triton.next_power_of_2(top_k),
            BB=triton.next_power_of_2(blocks),
            NORMALISE=normalise,
            EARLY=early,
            launch_pdl=early,
            num_warps=at_once // 2,
        )
        return routes, work
    chunk = max(_TOKENS, triton.next_power_of_2(triton.cdiv(tokens, _MOST_CHUNKS)))
    chunks = triton.cdiv(tokens, chunk)
    ranks = torch.empty_like(routes.experts_TX)
    counts = ranks.new_empty(chunks, count)
    _launch_route(routes, scores_TE, normalise, tokens_1, ranks, counts, _TOKENS, chunk // _TOKENS)
    _order_kernel[(chunks,)](
        tokens_1,
        routes.experts_TX,
        ranks,
        counts,
        work.pairs,
        work.blocks_3B,
        tokens,
        chunks,
        blocks,
        E=count,
        X=top_k,
        BM=rows,
        MORE=more,
        BE=triton.next_power_of_2(count),
        BZ=_CHUNKS_AT_ONCE,
        BP=_PAIRS_AT_ONCE,
        BB=_BLOCKS_AT_ONCE,
        CHUNK=chunk,
        EARLY=early,
        launch_pdl=early,
        num_warps=4,
    )
    return routes, work


def _empty_routes(scores_TE: torch.Tensor, top_k: int) -> Routes:
    weights = scores_TE.new_empty(scores_TE.shape[0], top_k)
    return Routes(torch.empty_like(weights, dtype=torch.int32), weights)


def _launch_route(
    routes: Routes,
    scores_TE: torch.Tensor,
    normalise: bool,
    tokens_1: torch.Tensor,
    ranks_TX: torch.Tensor | None,
    counts_ZE: torch.Tensor | None,
    at_once: int,
    turns: int,
) -> None:
    tokens, count = scores_TE.shape
    top_k = routes.experts_TX.shape[1]
    early = overlaps_at(scores_TE.device, tokens)
    _route_kernel[(triton.cdiv(tokens, at_once * turns),)](
        scores_TE,
        tokens_1,
        routes.experts_TX,
        routes.weights_TX,
        routes.experts_TX if ranks_TX is None else ranks_TX,
        routes.experts_TX if counts_ZE is None else counts_ZE,
        tokens,
        scores_TE.stride(0),
        E=count,
        X=top_k,
        BT=at_once,
        BE=triton.next_power_of_2(count),
        BX=triton.next_power_of_2(top_k),
        ROUNDS=turns,
        NORMALISE=normalise,
        COUNT=ranks_TX is not None,
        EARLY=early,
        launch_pdl=early,
        num_warps=max(1, at_once // 2),
    )
