"""Counter-based random numbers: a value is a pure function of (seed, choice, output position, token id).

Nothing is carried from one draw to the next, so a token does not depend on what else is in the batch, on how often a
sequence was parked, or on which tokens were filtered out. The mixer is SplitMix64's finaliser (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014); the number of token ``i`` is output ``i`` of the SplitMix64
generator whose state is the key of (seed, choice, position).
"""

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The two's complement reading of 64 bits, as torch's int64 wants it."""
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _fold(key: int, value: int) -> int:
    return _mix(((key ^ (value & _MASK)) + _GOLDEN) & _MASK)


def stream_key(seed: int, choice: int) -> int:
    """The key of one choice of one request; computed once per sequence."""
    return _fold(_fold(0, seed), choice)


def position_key(stream: int, position: int) -> int:
    """The key of one output position of a stream, as a signed 64-bit integer."""
    return _signed(_fold(stream, position))


def gumbel(keys_R: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise in fp64 for token ids [M] or [R, M] under the keys of R rows, as [R, M].

    The uniform underneath has 53 bits and is never 0 or 1.
    """
    bits = (ids + 1).mul_(_signed(_GOLDEN)) + keys_R[:, None]
    spare = torch.empty_like(bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        # a logical shift: torch's is arithmetic on int64
        torch.bitwise_right_shift(bits, shift, out=spare)
        bits.bitwise_xor_(spare.bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    uniform = bits.double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()
