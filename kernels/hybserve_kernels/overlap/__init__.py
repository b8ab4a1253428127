"""Kernels beside others: those that begin while the one before them on the stream still ends (programmatic dependent
launch), and streams for what others wait for."""

import functools

import torch

__all__ = ["overlaps", "overlaps_at", "urgent_stream"]

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


@functools.cache
def urgent_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """A stream beside the usual one whose programs go first where both could use a multiprocessor; one for each
    purpose, so that one may be used inside another."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
