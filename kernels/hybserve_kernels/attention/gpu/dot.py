"""Products of tiles, exact ones for fp32."""

import triton
import triton.language as tl

#: The interpreter multiplies 16-bit floats as if they were integers.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(left, right, sums):
    """``sums`` + left · right, in fp32."""
    if _INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums)
    return tl.dot(left, right, sums, input_precision="ieee")
