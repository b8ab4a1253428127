"""The likeliest token of each row, and whether the row is finite: each row split over many programs, then combined.

Legend: R rows, C vocabulary, N pieces of a row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Shape(NamedTuple):
    """Logits of a piece, how many of them a program reads at a time, and its warps."""

    piece: int
    block: int
    warps: int


#: The best for 8 to 256 rows on an H200; for one row none is better.
SHAPE = Shape(4096, 2048, 4)


@triton.jit
def finite(values):
    """Neither infinite nor NaN."""
    return tl.abs(values) < float("inf")


@triton.jit
def first_best(values, ids, none):
    """The largest value and the lowest id that has it; ``none`` where all values are -inf or NaN."""
    best = tl.max(values, 0)
    lowest = tl.min(tl.where(values == best, ids, 0x7FFFFFFF), 0)
    return best, tl.where(best > float("-inf"), lowest, none)


@triton.jit
def _pieces_kernel(
    logits_ptr, stride_r, best_ptr, at_ptr, finite_ptr, vocab, pieces, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    piece = tl.program_id(0)
    row = tl.program_id(1)
    base_ptr = logits_ptr + row.to(tl.int64) * stride_r
    start = piece * PIECE
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    good = tl.full([BLOCK], 1, tl.int32)
    for low in tl.static_range(0, PIECE, BLOCK):
        ids = start + low + tl.arange(0, BLOCK)
        mask = ids < vocab
        values = tl.load(base_ptr + ids, mask=mask, other=0.0).to(tl.float32)
        good = good & finite(values).to(tl.int32)
        better = mask & (values > best)
        at = tl.where(better, ids, at)
        best = tl.where(better, values, best)
    high, lowest = first_best(best, at, 0x7FFFFFFF)
    out = row * pieces + piece
    tl.store(best_ptr + out, high)
    tl.store(at_ptr + out, lowest)
    tl.store(finite_ptr + out, tl.min(good, 0).to(tl.int8))


@triton.jit
def _best_kernel(best_ptr, at_ptr, finite_ptr, tokens_ptr, finite_rows_ptr, pieces, PIECES: tl.constexpr):
    row = tl.program_id(0)
    piece = tl.arange(0, PIECES)
    mask = piece < pieces
    at = row * pieces + piece
    best = tl.load(best_ptr + at, mask=mask, other=float("-inf"))
    ids = tl.load(at_ptr + at, mask=mask, other=0x7FFFFFFF)
    good = tl.min(tl.load(finite_ptr + at, mask=mask, other=1).to(tl.int32), 0)
    _, token = first_best(best, ids, 0)
    tl.store(tokens_ptr + row, tl.where(good > 0, token, 0).to(tl.int64))
    tl.store(finite_rows_ptr + row, good.to(tl.int8))


def greedy_rows(logits_RC: torch.Tensor, shape: Shape = SHAPE) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest token of each row (lowest id on a tie), int64 [R], and whether all its logits are finite, bool [R].
    A row that is not finite gives token 0. ``logits_RC``: any float dtype; rows may lie apart."""
    assert logits_RC.stride(1) == 1, "logits of a row must be contiguous"
    rows, vocab = logits_RC.shape
    device = logits_RC.device
    pieces = triton.cdiv(vocab, shape.piece)
    best_RN = torch.empty(rows, pieces, dtype=torch.float32, device=device)
    at_RN = torch.empty(rows, pieces, dtype=torch.int32, device=device)
    good_RN = torch.empty(rows, pieces, dtype=torch.int8, device=device)
    tokens_R = torch.empty(rows, dtype=torch.int64, device=device)
    finite_R = torch.empty(rows, dtype=torch.bool, device=device)
    if rows:
        _pieces_kernel[(pieces, rows)](
            logits_RC,
            logits_RC.stride(0),
            best_RN,
            at_RN,
            good_RN,
            vocab,
            pieces,
            shape.piece,
            shape.block,
            num_warps=shape.warps,
        )
        padded = triton.next_power_of_2(pieces)
        _best_kernel[(rows,)](best_RN, at_RN, good_RN, tokens_R, finite_R.view(torch.int8), pieces, padded, num_warps=1)
    return tokens_R, finite_R
