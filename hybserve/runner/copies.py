"""Copies inside the pools: whole runs of bytes, before the forward of the plan that names them."""

import torch


def copy_runs(runs: torch.Tensor, pairs: list[int]) -> None:
    """Copy pages or slots, given as flat pairs source, target, source, target …

    No id may be the target of one pair and part of another: a device copies all pairs at once, in no order.
    """
    sources, targets = pairs[0::2], pairs[1::2]
    assert len(sources) == len(targets), "copies come in pairs"
    assert len(set(targets)) == len(targets), "two copies of one plan have the same target"
    assert not set(targets) & set(sources), "a copy of one plan takes from another's target"
    assert 0 not in targets, "the padding run is nobody's"
    for source, target in zip(sources, targets, strict=True):
        runs[target].copy_(runs[source])
