"""The noise of ``noise.py``, bit for bit the same uniform numbers, in Triton."""

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * tl.full([], _MIX_1, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full([], _MIX_2, tl.uint64)
    return bits ^ (bits >> 31)


@triton.jit
def position_key(stream, position):
    """uint64 key of one output position of a stream (int64)."""
    key = stream.to(tl.uint64, bitcast=True) ^ position.to(tl.uint64)
    return _mix(key + tl.full([], _GOLDEN, tl.uint64))


@triton.jit
def gumbel(key, ids):
    """Standard Gumbel noise in fp64 of token ids under a key."""
    bits = _mix(key + (ids.to(tl.uint64) + 1) * tl.full([], _GOLDEN, tl.uint64))
    uniform = ((bits >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
    return -tl.log(-tl.log(uniform))
