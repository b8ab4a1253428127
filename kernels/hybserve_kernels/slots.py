"""Reading and writing the slots of several rows at once: plain gathers, cheaper where a single slot is meant."""

import torch


def gather(pool_S: torch.Tensor, slots_N: torch.Tensor) -> torch.Tensor:
    """A copy [N, ...] of the named slots."""
    return pool_S.index_select(0, slots_N)


def scatter_(pool_S: torch.Tensor, slots_N: torch.Tensor, values_N: torch.Tensor) -> None:
    """Stores [N, ...] into the named slots, converting to the dtype of the pool. Slots are distinct."""
    pool_S.index_copy_(0, slots_N, values_N.to(pool_S.dtype))
