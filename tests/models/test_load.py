"""Loading against an independent account of the layout: transformers' own tensors, put together by hand."""

import json
import math
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hybserve.core.errors import ModelError
from hybserve.models import load, reading
from hybserve.models.load import dummy_weights, load_weights
from hybserve.models.registry import build_model
from hybserve.spec.from_hf import read_model_spec
from hybserve.spec.inventory import params_of
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.split import RankShare, split_ranks
from tests.checkpoints import SHAPES, load_reference, make_checkpoint

torch.set_num_threads(1)
Tensors = dict[str, torch.Tensor]


def allocate(spec: ModelSpec, share: RankShare, dtype: torch.dtype = torch.float32) -> Tensors:
    return {
        param.name: torch.full(
            param.local_shape(share), math.nan, dtype=torch.float32 if param.dtype == "float32" else dtype
        )
        for param in params_of(spec, share)
    }


def loaded(path: Path, share: RankShare | None = None, dtype: torch.dtype = torch.float32) -> Tensors:
    spec = read_model_spec(path)
    share = share or split_ranks(spec)[0]
    params = allocate(spec, share, dtype)
    load_weights(path, spec, share, params)
    return params


def by_hand(path: Path) -> Tensors:
    """Every parameter in our layout, from the state dict of the transformers model."""
    model = load_reference(path)
    config, state = model.config, model.state_dict()
    ours = {"embed.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    if not config.tie_word_embeddings:
        ours["lm_head.weight"] = state["lm_head.weight"]
    for index in range(config.num_hidden_layers):
        old, new = f"model.layers.{index}", f"layers.{index}"
        layer = {name.removeprefix(f"{old}."): tensor for name, tensor in state.items() if name.startswith(f"{old}.")}
        ours[f"{new}.input_norm.weight"] = layer["input_layernorm.weight"]
        ours[f"{new}.post_norm.weight"] = layer["post_attention_layernorm.weight"]
        if "self_attn.q_proj.weight" in layer:
            for kind in ("weight", "bias") if config.attention_bias else ("weight",):
                qkv = [layer[f"self_attn.{name}_proj.{kind}"] for name in "qkv"]
                ours[f"{new}.attention.qkv.{kind}"] = torch.cat(qkv)
                ours[f"{new}.attention.o.{kind}"] = layer[f"self_attn.o_proj.{kind}"]
            for name in ("q_norm", "k_norm"):
                ours[f"{new}.attention.{name}.weight"] = layer[f"self_attn.{name}.weight"]
        else:
            delta = f"{new}.gated_delta"
            ours[f"{delta}.in_proj.weight"] = delta_projection(layer, config)
            ours[f"{delta}.conv.weight"] = layer["linear_attn.conv1d.weight"].squeeze(1)
            ours[f"{delta}.A_log"] = layer["linear_attn.A_log"]
            ours[f"{delta}.dt_bias"] = layer["linear_attn.dt_bias"]
            ours[f"{delta}.norm.weight"] = layer["linear_attn.norm.weight"]
            ours[f"{delta}.out.weight"] = layer["linear_attn.out_proj.weight"]
        if "mlp.gate_proj.weight" in layer:
            ours |= mlp(layer, "mlp", f"{new}.mlp")
        else:
            ours[f"{new}.moe.router.weight"] = layer["mlp.gate.weight"]
            ours[f"{new}.moe.gate_up.weight"] = layer["mlp.experts.gate_up_proj"]
            ours[f"{new}.moe.down.weight"] = layer["mlp.experts.down_proj"]
            ours |= mlp(layer, "mlp.shared_expert", f"{new}.moe.shared")
            ours[f"{new}.moe.shared_gate.weight"] = layer["mlp.shared_expert_gate.weight"]
    return ours


def mlp(layer: Tensors, old: str, new: str) -> Tensors:
    gate_up = torch.cat([layer[f"{old}.gate_proj.weight"], layer[f"{old}.up_proj.weight"]])
    return {f"{new}.gate_up.weight": gate_up, f"{new}.down.weight": layer[f"{old}.down_proj.weight"]}


def delta_projection(layer: Tensors, config: Any) -> torch.Tensor:
    if "linear_attn.in_proj_qkv.weight" in layer:
        return torch.cat([layer[f"linear_attn.in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")])
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    per_key = config.linear_num_value_heads // heads
    value = per_key * config.linear_value_head_dim
    qkvz = layer["linear_attn.in_proj_qkvz.weight"].unflatten(0, (heads, -1)).split([key, key, value, value], dim=1)
    ba = layer["linear_attn.in_proj_ba.weight"].unflatten(0, (heads, -1)).split(per_key, dim=1)
    return torch.cat([part.flatten(0, 1) for part in (*qkvz, *ba)])


def slice_by_hand(name: str, whole: torch.Tensor, spec: ModelSpec, share: RankShare) -> torch.Tensor:
    """The part of a parameter that a rank must hold, from the meaning of its sections."""
    attention, delta, moe = spec.attention, spec.gated_delta, spec.moe
    leaf = name.split(".", 2)[-1] if name.startswith("layers.") else name

    def rows(*parts: tuple[int, tuple[int, int], int], dim: int = 0) -> torch.Tensor:
        pieces, begin = [], 0
        for units, (low, high), unit in parts:
            pieces.append(whole.narrow(dim, begin + low * unit, (high - low) * unit))
            begin += units * unit
        assert begin == whole.shape[dim]
        return torch.cat(pieces, dim)

    if leaf in ("embed.weight", "lm_head.weight"):
        return rows((spec.vocab_size, share.vocab, 1))
    if attention is not None and leaf.startswith("attention.qkv"):
        head, query = attention.head_dim, attention.head_dim * (2 if attention.output_gate else 1)
        pairs = (attention.kv_heads, share.kv_heads, head)
        return rows((attention.q_heads, share.q_heads, query), pairs, pairs)
    if attention is not None and leaf == "attention.o.weight":
        return rows((attention.q_heads, share.q_heads, attention.head_dim), dim=1)
    if delta is not None and leaf.startswith("gated_delta"):
        keys = (delta.key_heads, share.key_heads, delta.key_dim)
        values = (delta.value_heads, share.value_heads, delta.value_dim)
        scalars = (delta.value_heads, share.value_heads, 1)
        if leaf == "gated_delta.in_proj.weight":
            return rows(keys, keys, values, values, scalars, scalars)
        if leaf == "gated_delta.conv.weight":
            return rows(keys, keys, values)
        if leaf in ("gated_delta.A_log", "gated_delta.dt_bias"):
            return rows(scalars)
        if leaf == "gated_delta.out.weight":
            return rows(values, dim=1)
    if leaf.endswith(("gate_up.weight", "down.weight")):
        ffn = (spec.ffn, share.ffn, 1)
        dim = 0
        if moe is not None and leaf.startswith("moe."):
            shared = leaf.startswith("moe.shared")
            ffn = (moe.shared_ffn, share.shared_ffn, 1) if shared else (moe.expert_ffn, share.expert_ffn, 1)
            dim = 0 if shared else 1
        return rows(ffn, ffn, dim=dim) if leaf.endswith("gate_up.weight") else rows(ffn, dim=dim + 1)
    return whole


def assert_equal(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_loads(shape: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, shape)
    assert_equal(loaded(path), by_hand(path))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("dense", {"shards": 3}),
        ("multimodal_moe", {"shards": 4}),
        ("next_moe", {"shards": 2, "per_expert": True}),
        ("next_mixed", {"per_expert": False}),
        ("moe", {"per_expert": True}),
    ],
)
def test_every_file_layout_loads(shape: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, shape, **options)
    assert_equal(loaded(path), by_hand(path))


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_convert(source: str, target: torch.dtype, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "moe", dtype=source)
    params = loaded(path, dtype=target)
    assert params["layers.0.gated_delta.A_log"].dtype == torch.float32
    assert params["layers.0.moe.down.weight"].dtype == target
    assert_equal(params, by_hand(path))


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [("uneven", 2), ("uneven", 3), ("uneven", 5), ("odd", 3), ("no_recurrent", 4), ("no_recurrent", 3)]
    + [(shape, 2) for shape in ("next_mixed", "next_moe", "moe", "multimodal_moe", "bias", "dims")],
)
def test_peer69_every_rank_gets_its_slice(
    shape: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, shape)
    spec = read_model_spec(path)
    whole = by_hand(path)
    monkeypatch.setattr(load, "_SHORT_RUN", 0 if ranks % 2 else 1 << 30)  # either way of reading short runs
    for share in split_ranks(spec, ranks):
        expected = {name: slice_by_hand(name, tensor, spec, share) for name, tensor in whole.items()}
        assert_equal(loaded(path, share), expected)


@pytest.mark.parametrize("buffer", [512, 4096])
def test_a_small_buffer_changes_nothing(buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path, "next_mixed", per_expert=False)
    expected = loaded(path)
    spec = read_model_spec(path)
    whole = by_hand(path)
    monkeypatch.setattr(load, "_BUFFER", buffer)
    assert_equal(loaded(path), expected)
    for share in split_ranks(spec, 2):
        expected = {name: slice_by_hand(name, tensor, spec, share) for name, tensor in whole.items()}
        assert_equal(loaded(path, share), expected)


@pytest.mark.parametrize("shape", ["multimodal_tied", "uneven"])
def test_pipeline_stages_hold_their_layers(shape: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, shape)
    spec, whole = read_model_spec(path), by_hand(path)
    stages = split_ranks(spec, 1, 3)
    parts = [loaded(path, share) for share in stages]
    assert ("embed.weight" in parts[2]) == spec.tied
    assert "embed.weight" in parts[0]
    assert "norm.weight" in parts[2]
    assert not {"embed.weight", "norm.weight", "lm_head.weight"} & parts[1].keys()
    for part in parts:
        assert_equal(part, {name: whole[name] for name in part})
    assert set().union(*parts) == whole.keys()


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "moe", dtype="bfloat16")
    spec = read_model_spec(path)
    share = split_ranks(spec)[0]
    calls: list[tuple[int, int]] = []
    params = allocate(spec, share)
    load_weights(path, spec, share, params, lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (calls[0][1], calls[0][1])
    assert calls[0][1] == 2 * sum(tensor.numel() for tensor in params.values())


def test_f86_files_are_not_mapped(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "dense")
    params = loaded(path)
    before = {name: tensor.clone() for name, tensor in params.items()}
    assert str(path) not in Path("/proc/self/maps").read_text()
    (path / "model.safetensors").write_bytes(b"")
    assert_equal(params, before)


# Damaged checkpoints


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pristine"), "dense", num_hidden_layers=2, full_attention_interval=2)


@pytest.fixture
def damaged(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for file in pristine.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def rewrite(path: Path, change: Any) -> None:
    """Apply ``change`` to the tensors of the checkpoint and save them again."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


Q = "model.layers.1.self_attn.q_proj.weight"


def _poison(tensors: Tensors) -> None:
    tensors[Q][3, 5] = math.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), f"the weights lack {Q}"),
        (lambda t: t.update({"model.extra.weight": torch.zeros(2)}), "the weights hold model.extra.weight"),
        (lambda t: t.update({Q: t[Q][1:].clone()}), rf"model.safetensors: tensor {Q} has shape \[127, 64\]"),
        (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), f"{Q} is F8_E4M3; quantised"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), f"{Q} is I8; quantised"),
        (lambda t: t.update({Q: t[Q].double()}), f"{Q} is F64; .*only float32"),
        (_poison, f"model.safetensors: tensor {Q} holds values that are not finite"),
        (lambda t: t["lm_head.weight"].fill_(math.nan), "tensor lm_head.weight holds values that are not finite"),
        (
            lambda t: t.update({"model.language_model.norm.weight": t["model.norm.weight"].clone()}),
            "are the same parameter",
        ),
    ],
)
def test_f80_weights_that_do_not_match(damaged: Path, change: Any, message: str) -> None:
    rewrite(damaged, change)
    with pytest.raises(ModelError, match=message) as error:
        loaded(damaged)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_f80_one_bad_value_anywhere(value: float, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in any dtype and in both ways of reading: a run on its own, and a cut out of a larger block."""
    path = make_checkpoint(tmp_path, "no_recurrent", dtype=dtype)
    spec = read_model_spec(path)
    share = split_ranks(spec, 2)[1]
    rewrite(path, lambda t: t["model.layers.2.mlp.down_proj.weight"].__setitem__((5, 90), value))
    for short_run in (0, 1 << 30):
        monkeypatch.setattr(load, "_SHORT_RUN", short_run)
        with pytest.raises(
            ModelError, match=r"tensor model\.layers\.2\.mlp\.down_proj\.weight holds values that are not"
        ):
            load_weights(path, spec, share, allocate(spec, share, getattr(torch, dtype)))


def test_f80_values_beyond_the_served_dtype(damaged: Path) -> None:
    rewrite(damaged, lambda tensors: tensors[Q].fill_(1e6))
    with pytest.raises(ModelError, match=f"{Q} holds values beyond the range of float16"):
        loaded(damaged, dtype=torch.float16)


def test_f80_many_missing_names_are_counted(damaged: Path) -> None:
    rewrite(damaged, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.0" in name])
    with pytest.raises(ModelError, match=r"lack model.layers.0.input_layernorm.weight, .* and \d+ more$"):
        loaded(damaged)


def test_f80_truncated_between_header_and_read(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = load.read_headers(damaged)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[: headers[Q].end - 8])
    monkeypatch.setattr(load, "read_headers", lambda _: headers)
    with pytest.raises(ModelError, match=r"model.safetensors: tensor .* ends early"):
        loaded(damaged)


def test_f80_truncated_while_others_are_read(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file loses its end after some of it was read; whichever thread meets that, the error says so."""
    monkeypatch.setattr(load, "_BUFFER", 1024)
    file, spec = damaged / "model.safetensors", read_model_spec(damaged)
    share = split_ranks(spec)[0]

    def cut(done: int, total: int) -> None:
        if done > total // 4:
            os.truncate(file, file.stat().st_size // 2)

    with pytest.raises(ModelError, match=r"model.safetensors: tensor .* ends early"):
        load_weights(damaged, spec, share, allocate(spec, share), cut)


def test_f86_a_file_that_is_replaced_meanwhile(damaged: Path) -> None:
    """Threads open files for themselves: all read the version that the first one saw, or the load fails."""
    info = load.read_headers(damaged)[Q]
    content = info.file.read_bytes()
    files, view = reading._Files(), memoryview(bytearray(16))
    files.read(info, info.start, view)
    info.file.unlink()
    info.file.write_bytes(content[: info.start] + bytes(len(content) - info.start))
    files.read(info, info.start, view)
    assert view == content[info.start : info.start + 16]
    with ThreadPoolExecutor(1) as other, pytest.raises(ModelError, match=r"model.safetensors: the file changed while"):
        other.submit(files.read, info, info.start, view).result()
    files.close()


def test_f80_late_checks_name_the_tensor(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the values of many pieces are looked at together."""
    late = load._Checks
    monkeypatch.setattr(load, "_Checks", lambda most: late(7))
    assert_equal(loaded(damaged), by_hand(damaged))
    rewrite(damaged, _poison)
    with pytest.raises(ModelError, match=rf"tensor {Q} holds values that are not finite"):
        loaded(damaged)
    rewrite(damaged, lambda tensors: tensors[Q].fill_(1e6))
    with pytest.raises(ModelError, match=rf"tensor {Q} holds values beyond the range of float16"):
        loaded(damaged, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("short_run", [0, 1 << 30])
def test_a_gpu_gets_the_same(
    target: torch.dtype, short_run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "multimodal_moe", dtype="bfloat16")
    spec = read_model_spec(path)
    monkeypatch.setattr(load, "_SHORT_RUN", short_run)
    monkeypatch.setattr(load, "_BUFFER", 4096)  # many more pieces than buffers
    for share in (*split_ranks(spec), *split_ranks(spec, 2)):
        on_gpu = {name: tensor.cuda() for name, tensor in allocate(spec, share, target).items()}
        load_weights(path, spec, share, on_gpu)
        assert_equal({name: tensor.cpu() for name, tensor in on_gpu.items()}, loaded(path, share, target))
    rewrite(path, lambda tensors: tensors["model.language_model.norm.weight"].fill_(math.nan))
    with pytest.raises(ModelError, match=r"norm\.weight holds values that are not finite"):
        load_weights(path, spec, share, on_gpu)


def test_rotary_tables_are_skipped(damaged: Path, pristine: Path) -> None:
    rewrite(damaged, lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_equal(loaded(damaged), loaded(pristine))


def test_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "tied")
    expected = loaded(path)
    rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_equal(loaded(path), expected)
    rewrite(path, lambda t: t["lm_head.weight"].mul_(1.5))
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight differs from the embedding"):
        loaded(path)
    rewrite(path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].bfloat16()}))
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight differs from the embedding"):
        loaded(path)


def test_untied_without_a_head(damaged: Path) -> None:
    rewrite(damaged, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lack lm_head\.weight"):
        loaded(damaged)


def test_f81_pickled_weights_are_refused(damaged: Path) -> None:
    (damaged / "model.safetensors").unlink()
    (damaged / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"pytorch_model.bin: pickled weights are not read"):
        loaded(damaged)


def test_f81_nothing_unpickles() -> None:
    for file in Path(load.__file__).parents[1].rglob("*.py"):
        text = file.read_text()
        assert "torch.load" not in text, file
        assert "import pickle" not in text, file


def test_targets_must_match_the_inventory(pristine: Path) -> None:
    spec = read_model_spec(pristine)
    share = split_ranks(spec)[0]
    params = allocate(spec, share)
    with pytest.raises(ValueError, match=r"norm\.weight"):
        load_weights(pristine, spec, share, {name: t for name, t in params.items() if name != "norm.weight"})
    params["embed.weight"] = params["embed.weight"].t().contiguous().t()
    with pytest.raises(ValueError, match=r"embed\.weight"):
        load_weights(pristine, spec, share, params)


class TestMutatedBytes:
    """A file with any bytes changed loads to exactly its own content or is refused; nothing else ever happens."""

    @pytest.fixture(autouse=True)
    def _paths(self, pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.directory = tmp_path_factory.mktemp("mutated")
        for file in pristine.iterdir():
            (self.directory / file.name).write_bytes(file.read_bytes())
        self.spec = read_model_spec(self.directory)
        self.share = split_ranks(self.spec)[0]
        self.file = self.directory / "model.safetensors"
        self.content = self.file.read_bytes()
        self.header = struct.unpack("<Q", self.content[:8])[0]

    def check(self, content: bytes) -> None:
        self.file.write_bytes(content)
        params = allocate(self.spec, self.share)
        refusal = self.load(params)
        if refusal is not None:
            assert "\n" not in refusal
            assert len(refusal) < 2000
            return
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        for ours, theirs in self.names.items():
            begin, end = header[theirs]["data_offsets"]
            assert params[ours].numpy().tobytes() == content[8 + length + begin : 8 + length + end]

    names: ClassVar = {
        "embed.weight": "model.embed_tokens.weight",
        "layers.0.gated_delta.A_log": "model.layers.0.linear_attn.A_log",
        "layers.1.mlp.down.weight": "model.layers.1.mlp.down_proj.weight",
    }

    def load(self, params: Tensors) -> str | None:
        try:
            load_weights(self.directory, self.spec, self.share, params)
        except ModelError as error:
            return str(error)
        return None

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_f80_header_bytes(self, data: st.DataObject) -> None:
        content = bytearray(self.content)
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, 8 + self.header - 1))
            content[place] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'"{}[],:0159-eE \\')))
        self.check(bytes(content))

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_f80_cut_grown_or_spliced(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.content)))
        kind = data.draw(st.sampled_from(["cut", "grow", "delete", "insert", "length"]))
        few = data.draw(st.binary(min_size=1, max_size=16))
        content = {
            "cut": self.content[:place],
            "grow": self.content + few,
            "delete": self.content[:place] + self.content[place + len(few) :],
            "insert": self.content[:place] + few + self.content[place:],
            "length": few[:8].ljust(8, b"\0") + self.content[8:],
        }[kind]
        self.check(content)


# Parameters that the model has joined before (what compiles ahead binds a model without weights)


@pytest.mark.parametrize("dummy", [False, True])
def test_weights_reach_what_was_joined_before(dummy: bool, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "moe")
    spec = read_model_spec(path)
    share = split_ranks(spec)[0]
    model = build_model(spec, share, torch.float32, triton=True)
    with torch.inference_mode():
        model.bind()
    if dummy:
        expected = allocate(spec, share)
        dummy_weights(expected, 1)
        dummy_weights(model.params, 1)
    else:
        expected = loaded(path)
        load_weights(path, spec, share, model.params)
    with torch.inference_mode():
        model.bind()
    assert_equal(model.params, expected)


# Dummy weights


def test_dummy_weights_are_seeded_and_sensible(pristine: Path) -> None:
    spec = read_model_spec(pristine)
    share = split_ranks(spec)[0]
    first, again, other = (allocate(spec, share) for _ in range(3))
    dummy_weights(first, 1)
    dummy_weights(again, 1)
    dummy_weights(other, 2)
    assert_equal(first, again)
    assert all(torch.isfinite(tensor).all() for tensor in first.values())
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert not torch.equal(first["layers.0.input_norm.weight"], first["layers.0.post_norm.weight"])
    decay = -first["layers.0.gated_delta.A_log"].exp() * torch.nn.functional.softplus(
        first["layers.0.gated_delta.dt_bias"]
    )
    assert (decay < 0).all()
    assert (decay > -2).all()
