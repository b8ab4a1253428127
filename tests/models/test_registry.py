import msgspec
import pytest
import torch

from hybserve.core.errors import ModelError
from hybserve.models.registry import build_model
from hybserve.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from hybserve.spec.split import split_ranks

SPEC = ModelSpec(
    family="qwen3_5",
    vocab_size=11,
    hidden=8,
    ffn=6,
    layers=(LayerSpec("attention", "dense"),),
    attention=AttentionSpec(q_heads=2, kv_heads=1, head_dim=4, rotary_dim=2, rope_theta=1e4),
    gated_delta=None,
    moe=None,
    norm_eps=1e-6,
    tied=False,
    dtype="float32",
    max_seq_len=64,
)


def test_a_known_family_is_built_with_its_parameters() -> None:
    model = build_model(SPEC, split_ranks(SPEC)[0], torch.bfloat16)
    assert model.params["layers.0.attention.qkv.weight"].shape == (24, 8)
    assert model.params["lm_head.weight"].dtype == torch.bfloat16


def test_an_unknown_family_is_refused_by_name() -> None:
    spec = msgspec.structs.replace(SPEC, family="abacus")
    with pytest.raises(ModelError, match="'abacus'; known: qwen3_5, qwen3_5_moe, qwen3_next"):
        build_model(spec, split_ranks(spec)[0], torch.float32)
