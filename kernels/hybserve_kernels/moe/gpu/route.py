"""Routing and the order of work: which (token, choice) pairs each expert runs, found without a look from the host.

A first launch chooses the experts of chunks of tokens, counts the choices of each chunk and numbers them within it; a
second one adds the counts of the chunks before, puts the pairs in order of (expert, token) and cuts each expert's run
into blocks of rows. Nothing depends on the order in which programs run, and no counters have to be zero beforehand.

Legend: T tokens (upper bound), E experts, X = top_k, Z chunks of tokens, B blocks of rows. Pair = token · X + choice.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

#: Tokens chosen for at a time by a program, and most chunks that the second launch looks through.
_TOKENS, _MOST_CHUNKS = 8, 128
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
):
    """A program chooses for BT · ROUNDS tokens. A probability and the expert's id are compared as one integer, so that
    ties go to the lower id, and probabilities that are no numbers come first."""
    chunk = tl.program_id(0)
    tokens = tl.minimum(tl.load(tokens_ptr), T)
    o_e, o_x = tl.arange(0, BE), tl.arange(0, BX)
    seen = tl.zeros([BE], dtype=tl.int32)
    for turn in range(ROUNDS):
        o_t = (chunk * ROUNDS + turn) * BT + tl.arange(0, BT)
        real = o_t < tokens
        o_t = o_t.to(tl.int64)
        p_scores = scores_ptr + o_t[:, None] * scores_stride + o_e[None, :]
        scores = tl.load(p_scores, mask=real[:, None] & (o_e < E)[None, :], other=0.0).to(tl.float32)
        scores = tl.where((o_e < E)[None, :], scores, float("-inf"))
        probability = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        probability /= tl.sum(probability, axis=1)[:, None]
        bits = tl.where(probability == probability, probability.to(tl.int32, bitcast=True), 0x7FC00000)
        key = (bits.to(tl.int64) << 32) | (BE - 1 - o_e)[None, :].to(tl.int64)
        key = tl.where((o_e < E)[None, :], key, -1)
        experts = tl.zeros([BT, BX], dtype=tl.int32)
        weights = tl.zeros([BT, BX], dtype=tl.float32)
        for choice in tl.static_range(X):
            best = tl.max(key, axis=1)
            key = tl.where(key == best[:, None], -1, key)
            here = (o_x == choice)[None, :]
            experts = tl.where(here, (BE - 1 - (best & 0x7FFFFFFF).to(tl.int32))[:, None], experts)
            weights = tl.where(here, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)[:, None], weights)
        if NORMALISE:
            weights /= tl.sum(weights, axis=1)[:, None]
        inside = real[:, None] & (o_x < X)[None, :]
        o_tx = o_t[:, None] * X + o_x[None, :]
        tl.store(experts_ptr + o_tx, experts, mask=inside)
        tl.store(weights_ptr + o_tx, weights.to(weights_ptr.dtype.element_ty), mask=inside)
        if COUNT:
            chosen = ((key == -1) & (o_e < E)[None, :] & real[:, None]).to(tl.int32)
            before = tl.cumsum(chosen, axis=0) - chosen + seen[None, :]
            tl.store(ranks_ptr + o_tx, tl.gather(before, experts, 1), mask=inside)
            seen += tl.sum(chosen, axis=0)
    if COUNT:
        tl.store(counts_ptr + chunk * E + o_e, seen, mask=o_e < E)


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
    BE: tl.constexpr,
    BZ: tl.constexpr,
    BP: tl.constexpr,
    BB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program places the pairs of one chunk of CHUNK tokens, and writes its share of the blocks."""
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
    begin = end - total

    base = begin + before
    pairs_end = tl.minimum(tl.load(tokens_ptr), tl.minimum(T, (chunk + 1) * CHUNK)) * X
    for first in range(chunk * CHUNK * X, pairs_end, BP):
        o_p = first + tl.arange(0, BP)
        mask = o_p < pairs_end
        expert = tl.load(experts_ptr + o_p, mask=mask, other=0)
        rank = tl.load(ranks_ptr + o_p, mask=mask, other=0)
        tl.store(pairs_ptr + tl.gather(base, expert, 0) + rank, o_p, mask=mask)

    own_blocks = (total + BM - 1) // BM
    block_end = tl.cumsum(own_blocks, axis=0)
    block_begin = block_end - own_blocks
    real_blocks = tl.sum(own_blocks, axis=0)
    for first in range(chunk * BB, blocks, chunks * BB):
        o_b = first + tl.arange(0, BB)
        real = o_b < real_blocks
        expert = tl.sum((block_end[None, :] <= o_b[:, None]).to(tl.int32), axis=1)
        expert = tl.where(real, expert, 0)
        row = tl.gather(begin, expert, 0) + (o_b - tl.gather(block_begin, expert, 0)) * BM
        rows = tl.minimum(tl.gather(end, expert, 0) - row, BM)
        tl.store(blocks_ptr + o_b, expert, mask=o_b < blocks)
        tl.store(blocks_ptr + blocks + o_b, row, mask=o_b < blocks)
        tl.store(blocks_ptr + 2 * blocks + o_b, tl.where(real, rows, 0), mask=o_b < blocks)


def route_pairs(scores_TE: torch.Tensor, top_k: int, normalise: bool, tokens_1: torch.Tensor) -> Routes:
    """The choices alone, one launch."""
    routes = _empty_routes(scores_TE, top_k)
    _launch_route(routes, scores_TE, normalise, tokens_1, None, None, 1, 1)
    return routes


def route_blocks(
    scores_TE: torch.Tensor, top_k: int, normalise: bool, tokens_1: torch.Tensor, rows: int
) -> tuple[Routes, Work]:
    """The choices, and their pairs in order of the experts in blocks of at most ``rows``; two launches."""
    tokens, count = scores_TE.shape
    turns = triton.next_power_of_2(triton.cdiv(tokens, _TOKENS * _MOST_CHUNKS))
    chunks = triton.cdiv(tokens, _TOKENS * turns)
    pairs = tokens * top_k
    blocks = min(pairs, count) + pairs // rows
    routes = _empty_routes(scores_TE, top_k)
    ranks = torch.empty_like(routes.experts_TX)
    counts = ranks.new_empty(chunks, count)
    work = Work(ranks.new_empty(pairs), ranks.new_empty(3, blocks))
    _launch_route(routes, scores_TE, normalise, tokens_1, ranks, counts, _TOKENS, turns)
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
        BE=triton.next_power_of_2(count),
        BZ=_CHUNKS_AT_ONCE,
        BP=_PAIRS_AT_ONCE,
        BB=_BLOCKS_AT_ONCE,
        CHUNK=_TOKENS * turns,
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
        num_warps=1 if at_once == 1 else 4,
    )
