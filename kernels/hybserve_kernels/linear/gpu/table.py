"""Which kernel multiplies at which shape: measured choices for an H200, and a sane one for every other shape.

A choice depends on the shape alone, never on a measurement at run time. None = the library's own product.
"""

import functools

import torch
import triton

from hybserve_kernels.linear.gpu.counts import MOST_COUNTS
from hybserve_kernels.linear.gpu.gemv import Gemv
from hybserve_kernels.linear.gpu.tiles import Tiles

Choice = Gemv | Tiles

#: (kind, outputs, inputs) to (most rows, choice), rising; the library from there. The kind is "plain" (stored or added)
#: or "swiglu". Outputs are those stored: half of the weight's for swiglu.
_H200: dict[tuple[str, int, int], tuple[tuple[int, Choice | None], ...]] = {
    ("swiglu", 12288, 4096): (
        (1, Gemv(1, 512, 8)),
        (16, Tiles(128, 16, 128, 4, 3, more=64)),
        (32, Tiles(128, 32, 128, 4, 3, more=64)),
        (64, Tiles(128, 64, 128, 4, 3, more=64, late=4)),
        (128, Tiles(128, 128, 64, 8, 5, more=64)),
    ),
    ("plain", 4096, 12288): (
        (1, Gemv(4, 2048, 8)),
        (16, Tiles(64, 16, 128, 4, 6, 2, late=4)),
        (32, Tiles(64, 32, 128, 4, 5, 2, late=4)),
        (64, Tiles(64, 64, 128, 4, 4, 2, late=4)),
    ),
    ("plain", 12352, 4096): (
        (1, Gemv(1, 512, 4)),
        (16, Tiles(64, 16, 128, 4, 6, late=4)),
        (32, Tiles(64, 32, 128, 4, 4, late=4)),
        (64, Tiles(64, 64, 128, 4, 3)),
    ),
    ("plain", 10240, 4096): (
        (1, Gemv(1, 512, 4)),
        (16, None),
        (32, Tiles(64, 32, 128, 4, 4)),
    ),
    ("plain", 4096, 4096): (
        (1, Gemv(4, 512, 2)),
        (16, Tiles(64, 16, 256, 4, 3, 2)),
        (32, Tiles(64, 32, 128, 4, 6, 2)),
    ),
    ("plain", 248320, 4096): (
        (1, Gemv(1, 512, 4)),
        (16, Tiles(128, 16, 128, 4, 4)),
        (32, Tiles(128, 32, 128, 4, 4)),
        (64, Tiles(64, 64, 128, 4, 3)),
    ),
    ("plain", 12352, 2048): (
        (1, Gemv(4, 512, 4)),
        (16, Tiles(32, 16, 256, 2, 4)),
        (32, Tiles(128, 32, 64, 4, 6)),
        (64, Tiles(64, 64, 128, 4, 3)),
    ),
    ("plain", 9216, 2048): ((1, Gemv(4, 1024, 4)),),
    ("plain", 2048, 4096): (
        (1, Gemv(2, 1024, 4)),
        (16, Tiles(64, 16, 128, 4, 6, 4)),
        (32, Tiles(64, 32, 256, 4, 3, 4)),
        (64, Tiles(64, 64, 128, 4, 4, 4)),
    ),
    ("plain", 272, 2048): (
        (1, Gemv(1, 1024, 8)),
        (16, Tiles(64, 16, 128, 4, 6, 8)),
        (32, Tiles(64, 32, 128, 4, 6, 8)),
    ),
    ("swiglu", 512, 2048): (
        (1, Gemv(1, 1024, 4)),
        (16, Tiles(128, 16, 128, 4, 4, 8)),
        (32, Tiles(128, 32, 128, 4, 3, 8)),
    ),
    ("plain", 2048, 512): (
        (1, Gemv(4, 512, 8)),
        (16, Tiles(16, 16, 256, 1, 5)),
    ),
    ("plain", 248320, 2048): (
        (1, Gemv(4, 1024, 4)),
        (16, Tiles(128, 16, 128, 4, 4)),
        (32, Tiles(128, 32, 128, 4, 4)),
    ),
}

#: Programs that an H200 should have at least, two on each of its processors.
_PROGRAMS = 264
#: Rows from which the library is not worse at an unknown shape.
_MANY_ROWS = 32


def choose(kind: str, x_MK: torch.Tensor, outputs: int) -> Choice | None:
    """For 16-bit tensors on a GPU; None for all others."""
    if not x_MK.is_cuda or x_MK.dtype.itemsize != 2:
        return None
    return chosen(kind, x_MK.shape[0], outputs, x_MK.shape[1])


#: Below these there is no work for programs of our own (and Triton takes an N of 1 for a constant).
_FEW_OUTPUTS = 16


@functools.cache
def chosen(kind: str, rows: int, outputs: int, inputs: int) -> Choice | None:
    measured = _H200.get((kind, outputs, inputs))
    if measured is not None:
        return next((choice for most, choice in measured if rows <= most), None)
    if outputs < _FEW_OUTPUTS:
        return None
    if rows == 1:
        return Gemv(1, min(1024, triton.next_power_of_2(inputs)), 4)
    if rows > _MANY_ROWS or inputs % 64:
        return None
    return _default_tiles(kind, rows, outputs, inputs)


def _default_tiles(kind: str, rows: int, outputs: int, inputs: int) -> Tiles:
    height, depth = max(16, triton.next_power_of_2(rows)), 64 if inputs % 128 else 128
    tiles = triton.cdiv(outputs, 64)
    splits = max(1, min(_PROGRAMS // tiles, 8, inputs // (2 * depth))) if tiles <= MOST_COUNTS else 1
    return Tiles(128, height, depth, 4, 3, splits) if kind == "swiglu" else Tiles(64, height, depth, 4, 4, splits)
