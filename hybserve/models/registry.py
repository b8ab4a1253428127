"""Which class computes which family."""

import torch

from hybserve.core.errors import ModelError
from hybserve.models.base import Model
from hybserve.models.qwen_hybrid import QwenHybrid
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.split import RankShare

FAMILIES: dict[str, type[Model]] = {
    "qwen3_5": QwenHybrid,
    "qwen3_5_moe": QwenHybrid,
    "qwen3_next": QwenHybrid,
}


def build_model(
    spec: ModelSpec,
    share: RankShare,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    triton: bool | None = None,
) -> Model:
    """One rank's part of the model with unfilled parameters. ``triton``: computes through the Triton forms of the ops,
    as it does on a GPU by default. Raises ModelError for an unknown family."""
    family = FAMILIES.get(spec.family)
    if family is None:
        raise ModelError(f"no model family {spec.family!r}; known: {', '.join(sorted(FAMILIES))}")
    place = torch.device(device)
    return family(spec, share, dtype, place, place.type == "cuda" if triton is None else triton)
