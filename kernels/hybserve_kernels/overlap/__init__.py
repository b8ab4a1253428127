"""Kernels that begin while the one before them on the stream still ends (programmatic dependent launch)."""

import functools

import torch

__all__ = ["overlaps", "overlaps_at"]

#: Rows of a step at which the kernels between its states and attention gain from it on an H200: with fewer, waiting
#: programs take room from those that stream weights; with more, the library's products, which wait, come between.
_ROWS = range(9, 65)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a launch on ``device`` may ask for it: the option ``launch_pdl``, told to the kernel as ``EARLY``."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlaps_at(device: torch.device, rows: int) -> bool:
    """Whether a launch for ``rows`` tokens is better for it."""
    return rows in _ROWS and overlaps(device)
