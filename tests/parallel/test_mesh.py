from dataclasses import dataclass
from typing import cast

import pytest
import torch

from hybserve.parallel.mesh import Mesh
from hybserve.spec.split import RankShare


@dataclass
class Share:
    ranks: int


def test_the_sum_over_one_rank_is_its_own_tensor() -> None:
    partial = torch.ones(2)
    assert Mesh(cast(RankShare, Share(1))).sum(partial) is partial


def test_more_ranks_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="tensor_parallel 3"):
        Mesh(cast(RankShare, Share(3))).sum(torch.ones(2))
