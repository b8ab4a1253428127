"""Kernels that begin while the one before them on the stream still ends (programmatic dependent launch)."""

import functools

import torch

__all__ = ["overlaps"]


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a launch on ``device`` may ask for it: the option ``launch_pdl``, told to the kernel as ``EARLY``."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
