from typing import Any, cast

import torch

from hybserve.layers.embedding import Embedding
from hybserve.layers.params import Params
from hybserve.layers.step_context import StepContext
from hybserve.parallel.mesh import Mesh
from hybserve.spec.split import RankShare


class Tile:
    deterministic = True
    tile = (1, 3)


def one_rank() -> RankShare:
    spans: dict[str, Any] = dict.fromkeys(
        ("layers", "q_heads", "kv_heads", "key_heads", "value_heads", "ffn", "expert_ffn", "shared_ffn"), (0, 0)
    )
    return RankShare(stage=0, rank=0, stages=1, ranks=1, vocab=(0, 7), **spans)


def test_rows_outside_a_tile_are_zero() -> None:
    params = Params(torch.float32, torch.device("cpu"))
    embedding = Embedding(params, "embed", 3, Mesh(one_rank()))
    params.tensors["embed.weight"].copy_(torch.arange(21.0).view(7, 3) + 1)
    embedding.bind()
    hidden = embedding(torch.tensor([0, 5, 6, 0]), cast(StepContext, Tile()))
    assert hidden.tolist() == [[0, 0, 0], [16, 17, 18], [19, 20, 21], [0, 0, 0]]
