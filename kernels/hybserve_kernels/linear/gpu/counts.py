"""Counters of the programs that have finished a tile of a product that several of them share."""

import torch

#: As many are kept for each device.
MOST_COUNTS = 4096

_counts: dict[torch.device, torch.Tensor] = {}


def counts_of(device: torch.device) -> torch.Tensor:
    """Zeros to count in. One stream at a time: they are zero again only when a launch has ended. A graph must not be
    the first to ask for them, so whoever captures launches once before."""
    if device not in _counts:
        _counts[device] = torch.zeros(MOST_COUNTS, dtype=torch.int32, device=device)
    return _counts[device]
