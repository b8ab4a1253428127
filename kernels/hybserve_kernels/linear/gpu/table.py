"""Which kernel multiplies at which shape: measured choices for an H200, and a sane one for every other shape.

A choice depends on the shape alone, never on a measurement at run time. None = the library's own product.
"""

import functools

import torch
import triton

from hybserve_kernels.linear.gpu.gemv import Gemv
from hybserve_kernels.linear.gpu.tiles import MOST_SPLIT_TILES, Tiles

#: What is computed: "plain" (stored or added), "swiglu", and both behind a norm ("norm", "norm_swiglu").
Choices = tuple[tuple[int, "Gemv | Tiles | None"], ...]

#: (kind, outputs, inputs) to (most rows, choice), rising. Outputs are those stored: half of the weight's for swiglu.
_H200: dict[tuple[str, int, int], Choices] = {}

#: Programs that an H200 should have at least, two on each of its processors.
_PROGRAMS = 264
#: Rows from which the library is not worse at an unknown shape.
_MANY_ROWS = 64


def choose(
    kind: str, device: torch.device, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> Gemv | Tiles | None:
    """For 16-bit tensors on a GPU; None for all others."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    return chosen(kind, rows, outputs, inputs)


@functools.cache
def chosen(kind: str, rows: int, outputs: int, inputs: int) -> Gemv | Tiles | None:
    for most, choice in _H200.get((kind, outputs, inputs), ()):
        if rows <= most:
            return choice
    if rows == 1:
        return _default_gemv(kind, inputs)
    if rows > _MANY_ROWS or kind.startswith("norm") or inputs % 64:
        return None
    return _default_tiles(kind, rows, outputs, inputs)


def _default_gemv(kind: str, inputs: int) -> Gemv | None:
    whole = triton.next_power_of_2(inputs)
    if kind.startswith("norm"):
        return Gemv(2, whole, 8) if whole <= 8192 else None
    return Gemv(1, min(1024, whole), 4)


def _default_tiles(kind: str, rows: int, outputs: int, inputs: int) -> Tiles:
    height, depth = max(16, triton.next_power_of_2(rows)), 64 if inputs % 128 else 128
    tiles = triton.cdiv(outputs, 64)
    splits = max(1, min(_PROGRAMS // tiles, 8, inputs // (2 * depth))) if tiles <= MOST_SPLIT_TILES else 1
    return Tiles(64, height, depth, 4, 3 if kind == "swiglu" else 4, splits)
