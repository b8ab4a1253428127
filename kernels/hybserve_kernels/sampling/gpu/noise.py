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
def _bits(key, ids):
    """53 random bits of token ids under a key."""
    return _mix(key + (ids.to(tl.uint64) + 1) * tl.full([], _GOLDEN, tl.uint64)) >> 11


@triton.jit
def gumbel(key, ids):
    """Standard Gumbel noise in fp64 of token ids under a key."""
    uniform = (_bits(key, ids).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
    return -tl.log(-tl.log(uniform))


@triton.jit
def gumbel_about(key, ids):
    """``gumbel`` in fp32, off by less than 1e-4: close to 1 the uniform is told by what it lacks to 1."""
    bits = _bits(key, ids).to(tl.int64)
    uniform = (bits.to(tl.float32) + 0.5) * 1.1102230246251565e-16
    lack = ((bits ^ 0x1FFFFFFFFFFFFF).to(tl.float32) + 0.5) * 1.1102230246251565e-16
    series = lack * (1.0 + lack * (0.5 + lack * (1.0 / 3.0 + lack * 0.25)))
    return -tl.log(tl.where(lack < 0.0078125, series, -tl.log(uniform)))
