"""Head dims that are no powers of two: tiles are as wide as the next power, and lanes beyond the dim stay zero."""

import triton
import triton.language as tl


@triton.jit
def lanes_inside(DIM: tl.constexpr, LANES: tl.constexpr):
    """Which of [LANES] belong to the head; all of them, as a constant that costs nothing, where that is so."""
    if DIM == LANES:
        inside = tl.full([LANES], 1, tl.int1)
    else:
        inside = tl.arange(0, LANES) < DIM
    return inside
