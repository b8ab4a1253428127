"""Rotary position embedding: the angles of a step once (``rotary_tables``), then in place per layer (``rotary_``)."""

from typing import NamedTuple

import torch

from hybserve_kernels.device import require_cpu

__all__ = ["RotaryTables", "inverse_frequencies", "rotary_", "rotary_tables"]


class RotaryTables(NamedTuple):
    """fp32 [T, 1, rotary_dim] each. ``sin`` carries the sign of its half: minus in the first, plus in the second."""

    cos: torch.Tensor
    sin: torch.Tensor


def inverse_frequencies(rotary_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """theta^(-2i/rotary_dim) for the first half twice, minus in front, so that sin of the angles comes out signed."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    frequencies = 1.0 / theta**exponents
    return torch.cat((-frequencies, frequencies))


def rotary_tables(positions_T: torch.Tensor, frequencies: torch.Tensor) -> RotaryTables:
    """The turn of every token; ``frequencies`` from ``inverse_frequencies``."""
    require_cpu("rotary_tables", positions_T, frequencies)
    angles = positions_T[:, None, None].float() * frequencies
    return RotaryTables(angles.cos(), angles.sin())


def rotary_(x_THd: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Turns the first rotary_dim elements of every head of the fp32 tensor in place and returns it."""
    require_cpu("rotary_", x_THd)
    if x_THd.dtype != torch.float32:
        raise TypeError(f"rotary_ turns fp32 heads in place, got {x_THd.dtype}")
    rotary_dim = tables.cos.shape[-1]
    turning = x_THd[..., :rotary_dim]
    swapped = turning.roll(rotary_dim // 2, -1)
    turning.mul_(tables.cos).addcmul_(swapped, tables.sin)
    return x_THd
