"""Runs of bytes (pages, slots) copied and checked by a fixed number of programs, which share out what is to be done:
the launch is sized for the card and not for the most pairs that there could be.

Legend: P runs of a pool, B bytes of a run, X pairs or ids (an upper bound; the unused ones are 0).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Shape(NamedTuple):
    """Programs, 32-bit words that a program moves at a time, and its warps."""

    programs: int
    words: int
    warps: int


SHAPE = Shape(132 * 8, 4096, 8)


class SlotCells(NamedTuple):
    """Where the floats of a slot lie, in bytes: per layer a matrix state, and a conv window behind it."""

    layers: int
    layer_bytes: int  # distance between layers
    matrix_bytes: int
    state_dtype: torch.dtype
    window_offset: int  # from the start of the layer
    window_bytes: int
    conv_dtype: torch.dtype


@triton.jit
def _copy_kernel(words_ptr, stride_p, pairs_ptr, pairs, words, pieces, WORDS: tl.constexpr):
    """Copies ``words`` 32-bit words from run pairs[x, 0] to run pairs[x, 1]; nothing where that is 0."""
    for item in range(tl.program_id(0), pairs * pieces, tl.num_programs(0)):
        pair = item // pieces
        target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
        if target != 0:
            source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
            at = (item - pair * pieces) * WORDS + tl.arange(0, WORDS)
            values = tl.load(words_ptr + source * stride_p + at, mask=at < words)
            tl.store(words_ptr + target * stride_p + at, values, mask=at < words)


@triton.jit
def _check_kernel(
    words_ptr,
    stride_p,
    ids_ptr,
    bad_ptr,
    runs,
    layers,
    layer_words,
    matrix_words,
    matrix_high,
    matrix_low,
    window_from,
    window_to,
    window_high,
    window_low,
    pieces,
    WORDS: tl.constexpr,
):
    """``high`` and ``low``: exponent bits of the floats in a 32-bit word, the lower one 0 if it holds one float. All of
    them set is infinity or NaN."""
    for item in range(tl.program_id(0), runs * layers * pieces, tl.num_programs(0)):
        part = item // pieces
        run = part // layers
        slot = tl.load(ids_ptr + run).to(tl.int64)
        if slot != 0:
            at = (item - part * pieces) * WORDS + tl.arange(0, WORDS)
            offset = (part - run * layers).to(tl.int64) * layer_words + at
            values = tl.load(words_ptr + slot * stride_p + offset, mask=at < layer_words, other=0)
            matrix = at < matrix_words
            high = tl.where(matrix, matrix_high, window_high)
            low = tl.where(matrix, matrix_low, window_low)
            bad = ((values & high) == high) | ((low != 0) & ((values & low) == low))
            bad = bad & (matrix | ((at >= window_from) & (at < window_to)))
            if tl.max(bad.to(tl.int32), 0) != 0:
                tl.store(bad_ptr + run, 1)


def copy_runs(runs_PB: torch.Tensor, pairs_X2: torch.Tensor, shape: Shape = SHAPE) -> None:
    """Copy run ``pairs_X2[x, 0]`` to run ``pairs_X2[x, 1]`` (int32 or int64), all at once, in no order: no target may
    be part of another pair. A pair with target 0 is skipped. ``runs_PB``: uint8, B a multiple of 16."""
    assert pairs_X2.is_contiguous(), "pairs must be contiguous"
    pairs, words = pairs_X2.shape[0], runs_PB.shape[1] // 4
    if pairs and words:
        pieces = triton.cdiv(words, shape.words)
        _copy_kernel[(min(shape.programs, pairs * pieces),)](
            _words(runs_PB), words, pairs_X2, pairs, words, pieces, shape.words, num_warps=shape.warps
        )


def runs_finite(runs_SB: torch.Tensor, ids_X: torch.Tensor, cells: SlotCells, shape: Shape = SHAPE) -> torch.Tensor:
    """Whether all floats of slot ``ids_X[x]`` are finite, bool [X]; true for id 0."""
    offsets = (cells.layer_bytes, cells.matrix_bytes, cells.window_offset, cells.window_bytes)
    assert not any(offset % 4 for offset in offsets), f"cells must be made of whole 32-bit words: {cells}"
    assert ids_X.is_contiguous(), "ids must be contiguous"
    runs = ids_X.shape[0]
    bad_X = torch.zeros(runs, dtype=torch.int32, device=runs_SB.device)
    if runs and cells.layers:
        layer_words = cells.layer_bytes // 4
        pieces = triton.cdiv(layer_words, shape.words)
        _check_kernel[(min(shape.programs, runs * cells.layers * pieces),)](
            _words(runs_SB),
            runs_SB.shape[1] // 4,
            ids_X,
            bad_X,
            runs,
            cells.layers,
            layer_words,
            cells.matrix_bytes // 4,
            *_EXPONENTS[cells.state_dtype],
            cells.window_offset // 4,
            (cells.window_offset + cells.window_bytes) // 4,
            *_EXPONENTS[cells.conv_dtype],
            pieces,
            shape.words,
            num_warps=shape.warps,
        )
    return bad_X == 0


#: Exponent bits of the upper and the lower float of a 32-bit word.
_EXPONENTS = {
    torch.float32: (0x7F800000, 0),
    torch.bfloat16: (0x7F800000, 0x7F80),
    torch.float16: (0x7C000000, 0x7C00),
}


def _words(runs_PB: torch.Tensor) -> torch.Tensor:
    """32-bit words of runs whose bytes are a multiple of 16, so that 16 of them move at once."""
    assert runs_PB.dtype == torch.uint8, f"runs are bytes, not {runs_PB.dtype}"
    assert runs_PB.shape[1] % 16 == 0, f"runs of {runs_PB.shape[1]} bytes are not whole pieces of 16"
    assert runs_PB.is_contiguous(), "runs must follow one another"
    return runs_PB.view(torch.int32)
