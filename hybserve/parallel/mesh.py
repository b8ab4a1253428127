"""How a layer learns its part of the model and joins its result with the other ranks': handed in, never looked up."""

import torch

from hybserve.spec.split import RankShare


class Mesh:
    """The place of one rank: its share of the model, and the sum over the tensor ranks of its stage."""

    def __init__(self, share: RankShare) -> None:
        self.share = share

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The total of every rank's ``partial``. One rank: its own tensor."""
        self.require_single()
        return partial

    def require_single(self) -> None:
        """Raises NotImplementedError on more than one tensor rank: their sums need a transport that is not there."""
        if self.share.ranks != 1:
            raise NotImplementedError(f"tensor_parallel {self.share.ranks}: this version computes on one tensor rank")
