"""Kernels that begin while the one before them on the stream still ends (programmatic dependent launch)."""

import functools

import torch

__all__ = ["overlaps", "overlaps_at"]

#: Rows of a step up to which the kernels between its states and attention gain from it on an H200, 14 % at one row
#: and less with more: the library's products, which wait, come between.
_MOST_ROWS = 256


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a launch on ``device`` may ask for it: the option ``launch_pdl``, told to the kernel as ``EARLY``."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlaps_at(device: torch.device, rows: int) -> bool:
    """Whether a launch for ``rows`` tokens is better for it."""
    return rows <= _MOST_ROWS and overlaps(device)
