"""Logits of a row as its record shapes them, and their order, in Triton.

The order of a token is (logit, lower id first) as one integer of 52 bits: 32 of the logit, 20 of the id.
"""

import triton
import triton.language as tl

from hybserve_kernels.sampling.gpu.table import (
    ENTRIES,
    FREQUENCY,
    LISTED,
    MIN_TOKENS,
    PENALISED,
    PRESENCE,
    REPETITION,
    STOPS,
    TEMPERATURE,
)

_LAST_ID = tl.constexpr((1 << 20) - 1)


@triton.jit
def number(word_ptr):
    """The fp64 in a word of a record."""
    return tl.load(word_ptr).to(tl.float64, bitcast=True)


@triton.jit
def shape(values, ids, mask, record_ptr, counts_ptr, output):
    """fp32 logits after penalties, biases and the masking of stop ids; -inf outside of ``mask``."""
    if tl.load(record_ptr + PENALISED) != 0:
        seen = tl.load(counts_ptr + ids, mask=mask, other=0)
        repetition = number(record_ptr + REPETITION).to(tl.float32)
        frequency = number(record_ptr + FREQUENCY).to(tl.float32)
        presence = number(record_ptr + PRESENCE).to(tl.float32)
        lower = tl.where(values > 0, tl.div_rn(values, repetition + tl.zeros_like(values)), values * repetition)
        lower -= (seen - 1).to(tl.float32) * frequency + tl.where(seen > 1, presence, 0.0)
        values = tl.where(seen > 0, lower, values)
    listed = tl.load(record_ptr + LISTED).to(tl.int32)
    if listed > 0:
        stops = tl.load(record_ptr + STOPS).to(tl.int32)
        masked = tl.where(output < tl.load(record_ptr + MIN_TOKENS), float("-inf"), 0.0)
        first, last = tl.min(ids, 0), tl.max(ids, 0)
        for entry in range(listed):
            word = tl.load(record_ptr + ENTRIES + entry)
            token = (word & 0xFFFFFFFF).to(tl.int32)
            if (token >= first) & (token <= last):
                bias = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                values = tl.where(ids == token, values + tl.where(entry < stops, masked, bias), values)
    return tl.where(mask, values, float("-inf"))


@triton.jit
def heat_of(values, high, record_ptr):
    """What the softmax takes: logits less the row's largest, over the temperature, in fp64."""
    return (values.to(tl.float64) - high) / number(record_ptr + TEMPERATURE)


@triton.jit
def order_of(values, ids):
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # one zero, not two
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((bits.to(tl.int64) + 0x80000000) << 20) - ids + _LAST_ID


@triton.jit
def value_of(order):
    """Logits and ids of orders."""
    bits = ((order >> 20) - 0x80000000).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), ((order & _LAST_ID) ^ _LAST_ID).to(tl.int32)
