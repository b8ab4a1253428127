import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybserve.core.errors import ModelError
from hybserve.spec.from_hf import read_model_spec
from hybserve.spec.inventory import ParamSpec, bind, inventory, params_of, weight_bytes
from hybserve.spec.model_spec import (
    DTYPE_BYTES,
    AttentionSpec,
    GatedDeltaSpec,
    LayerSpec,
    Mixer,
    Mlp,
    ModelSpec,
    MoeSpec,
)
from hybserve.spec.safetensors import TensorInfo
from hybserve.spec.split import split_ranks
from tests.checkpoints import SHAPES, make_checkpoint

MIXERS: tuple[Mixer, ...] = ("attention", "gated_delta")
MLPS: tuple[Mlp, ...] = ("dense", "moe")


@pytest.fixture(scope="module", params=SHAPES)
def shape_spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_model_spec(make_checkpoint(tmp_path_factory.mktemp("shape"), request.param))


def default_spec(directory: Path, model_type: str, **text: Any) -> ModelSpec:
    (directory / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    return read_model_spec(directory)


def headers_of(spec: ModelSpec, layout: int = 0) -> dict[str, TensorInfo]:
    """Headers of a checkpoint that holds exactly what one layout of the inventory asks for."""
    file = Path("model.safetensors")
    return {
        name: TensorInfo(name, file, "BF16", shape, 0, 2 * math.prod(shape))
        for param in inventory(spec)
        for name, shape in param.tensors(min(layout, param.layouts - 1))
    }


def test_names_and_sections_are_consistent(shape_spec: ModelSpec) -> None:
    params = inventory(shape_spec)
    assert len({param.name for param in params}) == len(params)
    for param in params:
        assert sum(section.units * section.rows for section in param.sections) == param.shape[param.axis]
        assert len({len(section.sources) for section in param.sections}) == 1
        for section in param.sections:
            for source in section.sources:
                axis = param.axis - ("{e}" in source.tensor)
                last = source.offset + (section.units - 1) * source.stride + section.rows
                assert last <= source.shape[axis]


def test_sources_of_every_layout_are_read_exactly_once(shape_spec: ModelSpec) -> None:
    """Over all parameters, the sections of one layout tile each checkpoint tensor's rows."""
    for layout in (0, 1):
        covered: dict[str, list[int]] = {}
        rows: dict[str, int] = {}
        for param in inventory(shape_spec):
            for section in param.sections:
                source = section.sources[min(layout, param.layouts - 1)]
                rows[source.tensor] = source.shape[param.axis - ("{e}" in source.tensor)]
                covered.setdefault(source.tensor, []).extend(
                    source.offset + unit * source.stride + row
                    for unit in range(section.units)
                    for row in range(section.rows)
                )
        for tensor, found in covered.items():
            assert sorted(found) == list(range(rows[tensor])), tensor


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_local_shapes_add_up(ranks: int, tmp_path: Path) -> None:
    spec = read_model_spec(make_checkpoint(tmp_path, "uneven"))
    shares = split_ranks(spec, ranks)
    for param in inventory(spec):
        local = [param.local_shape(share) for share in shares]
        whole = param.sections[0].split == "whole"
        assert sum(shape[param.axis] for shape in local) == param.shape[param.axis] * (ranks if whole else 1)
        assert all(_without(shape, param) == _without(param.shape, param) for shape in local)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_peer69_shares_of_any_model_tile_it(data: st.DataObject) -> None:
    """Ranges of one section over all ranks follow one another from 0 to its end; only kv heads may repeat."""
    size = st.integers(1, 9)
    kv_heads, key_heads = data.draw(size), data.draw(size)
    kinds = st.sampled_from([LayerSpec(mixer, mlp) for mixer in MIXERS for mlp in MLPS])
    spec = ModelSpec(
        family="qwen3_next",
        vocab_size=data.draw(st.integers(1, 50)),
        hidden=data.draw(size),
        ffn=data.draw(size),
        layers=tuple(data.draw(st.lists(kinds, min_size=1, max_size=7))),
        attention=AttentionSpec(
            kv_heads * data.draw(size), kv_heads, 4, 2, 1e4, output_gate=data.draw(st.booleans()), bias=True
        ),
        gated_delta=GatedDeltaSpec(key_heads, key_heads * data.draw(size), data.draw(size), data.draw(size), 3),
        moe=MoeSpec(experts=3, top_k=1, expert_ffn=data.draw(size), shared_ffn=data.draw(st.integers(0, 4))),
        norm_eps=1e-6,
        tied=data.draw(st.booleans()),
        dtype="bfloat16",
        max_seq_len=64,
    )
    ranks, stages = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    try:
        shares = split_ranks(spec, ranks, stages)
    except ValueError:
        assume(False)
    for param in inventory(spec):
        for section in param.sections:
            ranges = [section.range(share) for share in shares[:ranks]]
            if section.split == "whole":
                assert set(ranges) == {(0, section.units)}
            else:
                distinct = list(dict.fromkeys(ranges)) if section.split == "kv_heads" else ranges
                assert [low for low, _ in distinct] == [0, *(high for _, high in distinct[:-1])]
                assert distinct[-1][1] == section.units
    held = [param.name for share in shares[::ranks] for param in params_of(spec, share)]
    twice = {"embed.weight"} if spec.tied and stages > 1 else set()
    assert sorted(held) == sorted([param.name for param in inventory(spec)] + list(twice))


def _without(shape: tuple[int, ...], param: ParamSpec) -> tuple[int, ...]:
    return *shape[: param.axis], *shape[param.axis + 1 :]


def test_kv_heads_are_replicated_beyond_their_number(tmp_path: Path) -> None:
    spec = read_model_spec(make_checkpoint(tmp_path, "no_recurrent"))  # 4 query heads, 2 kv heads
    qkv = next(param for param in inventory(spec) if param.name.endswith("qkv.weight"))
    assert [qkv.local_shape(share)[0] for share in split_ranks(spec, 4)] == [2 * 16 + 16 + 16] * 4


def test_stages_hold_what_they_need(tmp_path: Path) -> None:
    spec = read_model_spec(make_checkpoint(tmp_path, "tied"))
    stages = [{param.name for param in params_of(spec, share)} for share in split_ranks(spec, 1, 3)]
    everything = {param.name for param in inventory(spec)}
    assert set().union(*stages) == everything
    assert [("embed.weight" in names, "norm.weight" in names) for names in stages] == [
        (True, False),
        (False, False),
        (True, True),
    ]
    assert not any("lm_head" in name for name in everything)
    assert {name.split(".")[1] for name in stages[1] if name.startswith("layers.")} == {"2", "3"}


@pytest.mark.parametrize(
    ("model_type", "config", "model"),
    [
        ("qwen3_5_text", transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
        ("qwen3_5_moe_text", transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
        ("qwen3_next", transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    ],
)
def test_full_size_models_have_every_parameter(model_type: str, config: Any, model: Any, tmp_path: Path) -> None:
    spec = default_spec(tmp_path, model_type)
    with torch.device("meta"):
        expected = model(config())
    assert sum(math.prod(param.shape) for param in inventory(spec)) == sum(p.numel() for p in expected.parameters())
    share = split_ranks(spec)[0]
    halves = [param for param in inventory(spec) if param.dtype == "float32"]
    extra = sum(2 * math.prod(param.shape) for param in halves)
    assert weight_bytes(spec, share, "bfloat16") == 2 * sum(p.numel() for p in expected.parameters()) + extra
    state = {name: tuple(tensor.shape) for name, tensor in expected.state_dict().items()}
    named = {name: shape for param in inventory(spec) for name, shape in param.tensors(0) if "in_proj" not in name}
    assert named.items() <= state.items()


def test_weight_bytes_are_those_of_the_shapes(shape_spec: ModelSpec) -> None:
    for share in split_ranks(shape_spec, 2, 2):
        expected = sum(
            math.prod(param.local_shape(share)) * DTYPE_BYTES["float16" if param.dtype == "model" else "float32"]
            for param in params_of(shape_spec, share)
        )
        assert weight_bytes(shape_spec, share, "float16") == expected


def test_largest_layouts_bind_quickly(tmp_path: Path) -> None:
    spec = default_spec(tmp_path, "qwen3_next")
    headers = headers_of(spec, layout=1)
    assert len(headers) > 48 * 512 * 3
    start = time.monotonic()
    binding = bind(spec, headers)
    assert time.monotonic() - start < 20
    assert set(binding.layouts.values()) == {0, 1}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_binding_knows_both_prefixes_and_skips_by_name(prefix: str, tmp_path: Path) -> None:
    spec = read_model_spec(make_checkpoint(tmp_path, "multimodal"))
    headers = {name.replace("model.", prefix, 1): info for name, info in headers_of(spec).items()}
    for name in ("model.visual.x", "visual.y", "mtp.layers.0.z", "model.layers.0.self_attn.rotary_emb.inv_freq"):
        headers[name] = TensorInfo(name, Path("f"), "I8", (1,), 0, 1)
    assert set(bind(spec, headers).tensors) == set(headers_of(spec))


def test_vision_tensors_are_unknown_to_a_text_only_family(tmp_path: Path) -> None:
    spec = read_model_spec(make_checkpoint(tmp_path, "next_dense"))
    headers = headers_of(spec)
    headers["model.visual.x"] = TensorInfo("model.visual.x", Path("f"), "BF16", (1,), 0, 2)
    with pytest.raises(ModelError, match=r"the weights hold model\.visual\.x"):
        bind(spec, headers)


def test_mixed_layouts_are_refused(tmp_path: Path) -> None:
    spec = read_model_spec(make_checkpoint(tmp_path, "moe"))
    headers = headers_of(spec)
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    headers[name] = TensorInfo(name, Path("f"), "BF16", (64, 24), 0, 2)
    with pytest.raises(ModelError, match=f"the weights hold {name}"):
        bind(spec, headers)
