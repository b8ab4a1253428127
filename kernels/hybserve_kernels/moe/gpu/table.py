"""Which form runs where: measured choices for an H200, and a sane one for every other shape.

Legend: T tokens (the upper bound), D model dim, E experts, F expert width, X = top_k.
"""

import functools

import torch
import triton

from hybserve_kernels.moe.gpu.blocks import Blocks
from hybserve_kernels.moe.gpu.groups import Groups, Tile
from hybserve_kernels.moe.gpu.pairs import Pairs

#: (E, X, D, F) to (most tokens, form) for 16-bit dtypes, rising; the last has no limit.
_H200: dict[tuple[int, int, int, int], tuple[tuple[int, Pairs | Groups | Blocks], ...]] = {
    (256, 8, 2048, 512): (
        (8, Pairs(2, 2048, 4, 4, 512, 4)),
        (256, Groups(16, Tile(64, 128, 4, 2), Tile(64, 128, 4, 3))),
        (512, Groups(32, Tile(64, 128, 4, 3), Tile(64, 128, 4, 4))),
        (2047, Blocks(64, 32, 64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 4))),
        (1 << 30, Blocks(128, 32, 64, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4))),
    ),
}


@functools.cache
def choose(dtype: torch.dtype, tokens: int, count: int, top_k: int, dim: int, width: int) -> Pairs | Groups | Blocks:
    """The form for T = ``tokens``: by the shape alone, never by a measurement at run time."""
    if dtype.itemsize == 2:
        for most, form in _H200.get((count, top_k, dim, width), ()):
            if tokens <= most:
                return form
    if tokens * top_k <= count:
        return Pairs(2, _depth(dim, 1024), 4, 4, _depth(width, 512), 4)
    if dtype.itemsize > 2:
        return Groups(16, Tile(32, _depth(dim, 32), 4, 2), Tile(32, _depth(width, 32), 4, 2))
    rows = min(128, max(16, triton.next_power_of_2(tokens * top_k // count)))
    return Groups(rows, Tile(64, _depth(dim, 64), 4, 3), Tile(64, _depth(width, 64), 4, 3))


def _depth(inputs: int, most: int) -> int:
    depth: int = triton.next_power_of_2(inputs)
    return max(16, min(most, depth))
