"""Stochastic rounding of states to bf16: unbiased, so that small steps of a long recurrence are not lost.

The noise is a hash of (position, element), not a running generator: a state after equal tokens rounds alike wherever
and whenever it is written.
"""

import triton
import triton.language as tl


@triton.jit
def _mixed(x):
    """The finalizer of MurmurHash3 (Austin Appleby, public domain): of uint32, every bit depends on every bit."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def round_to_bf16(values, position, row, column):
    """``values`` fp32 [R, C] up or down to a neighbour in bf16, with the odds of their distance. ``position``: of the
    token after which they are written; ``row`` [R] (head · K + k) and ``column`` [C] (v) say which elements."""
    by_row = _mixed(_mixed(position.to(tl.uint32)) + row.to(tl.uint32))
    by_column = _mixed(column.to(tl.uint32) + 0x9E3779B9) | 1  # odd: the product is as evenly spread as its factor
    noise = (by_row[:, None] * by_column[None, :]) >> 16
    # Of a NaN as arithmetic makes it the noise would make zero.
    bits = tl.minimum(values.to(tl.int32, bitcast=True), 0x7FF00000).to(tl.uint32, bitcast=True) + noise
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
