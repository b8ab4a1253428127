import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from hybserve.core.errors import ModelError
from hybserve.spec.from_hf import read_bos_id, read_eos_ids, read_generation_defaults, read_model_spec
from hybserve.spec.model_spec import AttentionSpec, GatedDeltaSpec, ModelSpec
from tests.checkpoints import SHAPES, make_checkpoint

TYPES = ["qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"]


def written(directory: Path, **content: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def nest(model_type: str, text: dict[str, Any], **outer: Any) -> dict[str, Any]:
    """A config.json of ``model_type`` with the given text keys, nested if the type nests them."""
    if model_type in ("qwen3_5", "qwen3_5_moe"):
        return {"model_type": model_type, "text_config": {"model_type": f"{model_type}_text", **text}, **outer}
    return {"model_type": model_type, **text, **outer}


def assert_as_transformers(spec: ModelSpec, directory: Path) -> None:
    """Every number of ``spec`` equals what transformers makes of the same config.json."""
    config = transformers.AutoConfig.from_pretrained(directory).get_text_config()
    mixers = {"full_attention": "attention", "linear_attention": "gated_delta"}
    assert [layer.mixer for layer in spec.layers] == [mixers[kind] for kind in config.layer_types]
    assert (spec.vocab_size, spec.hidden) == (config.vocab_size, config.hidden_size)
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.max_seq_len == config.max_position_embeddings
    assert spec.tied == config.tie_word_embeddings
    rope = config.rope_parameters
    if spec.attention_layers:
        assert spec.attention == AttentionSpec(
            q_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_dim=int(config.head_dim * rope["partial_rotary_factor"]),
            rope_theta=rope["rope_theta"],
            bias=config.attention_bias,
        )
    if spec.recurrent_layers:
        assert spec.gated_delta == GatedDeltaSpec(
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim,
        )
    if spec.moe is not None:
        assert (spec.moe.experts, spec.moe.top_k) == (config.num_experts, config.num_experts_per_tok)
        assert spec.moe.expert_ffn == config.moe_intermediate_size
        assert spec.moe.shared_ffn == config.shared_expert_intermediate_size
        assert spec.moe.norm_top_k == getattr(config, "norm_topk_prob", True)
    if any(layer.mlp == "dense" for layer in spec.layers):
        assert spec.ffn == config.intermediate_size


@pytest.mark.parametrize("shape", SHAPES)
def test_checkpoints_are_read_as_transformers_reads_them(shape: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, shape)
    spec = read_model_spec(path)
    assert_as_transformers(spec, path)
    assert read_model_spec(path / "config.json") == spec
    assert spec.dtype == "float32"
    assert spec.family == SHAPES[shape][0].removesuffix("_text")


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(
    "text",
    [
        {},
        {"full_attention_interval": 3, "num_hidden_layers": 7},
        {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
        {
            "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.0},
            "rope_theta": 3.0,
            "tie_word_embeddings": True,
        },
        {"rope_scaling": {"type": "default", "rope_theta": 123.0}, "rope_parameters": {"rope_theta": 7.0}},
        {"rope_scaling": None, "partial_rotary_factor": 1.0},
        {
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
            }
        },
    ],
)
def test_defaults_and_rope_are_those_of_transformers(model_type: str, text: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, **nest(model_type, text))
    spec = read_model_spec(path)
    assert_as_transformers(spec, path)
    assert len(spec.layers) == text.get("num_hidden_layers", len(spec.layers))


@pytest.mark.parametrize(
    ("text", "dense"),
    [
        ({}, []),
        ({"mlp_only_layers": [0, 3]}, [0, 3]),
        ({"decoder_sparse_step": 2}, [0, 2, 4]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 1, 2, 4]),
        ({"num_experts": 0}, [0, 1, 2, 3, 4]),
        ({"mlp_only_layers": None}, []),
    ],
)
def test_dense_layers_of_qwen3_next(text: dict[str, Any], dense: list[int], tmp_path: Path) -> None:
    spec = read_model_spec(written(tmp_path, model_type="qwen3_next", num_hidden_layers=5, **text))
    assert [index for index, layer in enumerate(spec.layers) if layer.mlp == "dense"] == dense
    assert (spec.ffn > 0) == bool(dense)
    assert (spec.moe is None) == (len(dense) == 5)


@pytest.mark.parametrize(
    ("content", "tied"),
    [
        (nest("qwen3_5", {"tie_word_embeddings": True}), True),
        (nest("qwen3_5", {"tie_word_embeddings": False}, tie_word_embeddings=True), False),
        (nest("qwen3_5", {}, tie_word_embeddings=True), True),
        (nest("qwen3_5", {}), False),
        (nest("qwen3_next", {"tie_word_embeddings": True}), True),
    ],
)
def test_tied_embeddings(content: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    assert read_model_spec(written(tmp_path, **content)).tied is tied


@pytest.mark.parametrize(
    ("content", "dtype"),
    [
        (nest("qwen3_5", {"dtype": "float16"}, dtype="float32"), "float16"),
        (nest("qwen3_5", {}, torch_dtype="bfloat16"), "bfloat16"),
        (nest("qwen3_next", {"torch_dtype": "torch.bfloat16"}), "bfloat16"),
        (nest("qwen3_next", {"dtype": None}), "float32"),
    ],
)
def test_dtype(content: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    assert read_model_spec(written(tmp_path, **content)).dtype == dtype


def test_unstated_dtype_is_that_of_the_weights(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "multimodal", dtype="bfloat16")
    config = json.loads((path / "config.json").read_text())
    del config["dtype"], config["text_config"]["dtype"]
    (path / "config.json").write_text(json.dumps(config))
    assert read_model_spec(path).dtype == "bfloat16"


def test_output_gate_can_be_off(tmp_path: Path) -> None:
    spec = read_model_spec(written(tmp_path, model_type="qwen3_5_text", attn_output_gate=False))
    assert spec.attention is not None
    assert not spec.attention.output_gate


DEEP = "[" * 100_000 + "]" * 100_000
HUGE_NUMBER = "9" * 10_000


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("", "config.json: not valid JSON"),
        ("{", "config.json: not valid JSON"),
        ("[1]", "expected a JSON object, got a list of 1"),
        ("null", "expected a JSON object, got None"),
        ('{"model_type": ' + DEEP + "}", "config.json: nested too deeply"),
        ('{"model_type": "qwen3_next", "vocab_size": ' + HUGE_NUMBER + "}", "config.json: not valid JSON"),
        ('{"model_type": "qwen3_next", "rms_norm_eps": NaN}', "NaN is no JSON number"),
        ("{" + " " * (5 << 20) + "}", "config.json: 5.00 MiB, the limit is 4 MiB"),
        (b"\xff\xfe{}", "config.json: not valid JSON"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_f83_config_that_is_no_object(raw: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    refused(tmp_path, message)


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelError) as error:
        read_model_spec(path)
    text = str(error.value)
    assert message in text
    assert "\n" not in text
    assert len(text) < 400
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__ or error.value.__context__ is None


def test_f83_config_missing(tmp_path: Path) -> None:
    refused(tmp_path, "config.json: not found in")
    refused(tmp_path / "nowhere", "no model directory")
    refused(tmp_path / "Qwen" / "Qwen3.5-27B", "nothing is downloaded")
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, "config.json: not a regular file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "llama"},
            "model_type 'llama' is not supported; supported are qwen3_5, qwen3_5_text, qwen3_5_moe,",
        ),
        ({"model_type": None}, "model_type None is not supported"),
        ({"model_type": ["qwen3_5"]}, "model_type a list of 1 is not supported"),
        ({"model_type": "qwen3_5"}, "text_config must be an object, got None"),
        (
            {"model_type": "qwen3_5", "text_config": {"model_type": "llama"}},
            "text_config.model_type must be 'qwen3_5_text'",
        ),
        (
            {"model_type": "qwen3_5", "text_config": {"hidden_size": -1}},
            "text_config.hidden_size must be a whole number",
        ),
        ({"hidden_size": 0}, "hidden_size must be a whole number from 1 to 1048576, got 0"),
        ({"hidden_size": -64}, "hidden_size must be a whole number from 1 to 1048576, got -64"),
        ({"hidden_size": 64.0}, "hidden_size must be a whole number"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number from 1 to 1048576, got '64'"),
        ({"hidden_size": True}, "got True"),
        ({"hidden_size": None}, "got None"),
        ({"hidden_size": 10**300}, "got a number of more than 70 digits"),
        ({"hidden_size": {"a": 1}}, "got an object"),
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"vocab_size": 10**9}, "vocab_size must be a whole number from 1 to 16777216"),
        ({"intermediate_size": 0}, "intermediate_size must be"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 4096, got 1000000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
        ({"layer_types": ["full_attention"]}, "layer_types must list num_hidden_layers = 4 layers, got a list of 1"),
        ({"layer_types": "full_attention"}, "layer_types must list num_hidden_layers = 4 layers"),
        (
            {"layer_types": ["full_attention"] * 3 + ["mamba"]},
            "layer_types[3] must be one of full_attention, linear_attention",
        ),
        ({"layer_types": [1, 2, 3, 4]}, "layer_types[0] must be one of"),
        ({"full_attention_interval": 0}, "full_attention_interval must be"),
        ({"num_attention_heads": 0}, "num_attention_heads must be"),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 2},
            "num_attention_heads = 5 must be a multiple of num_key_value_heads = 2",
        ),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be"),
        ({"head_dim": 0}, "head_dim must be"),
        ({"head_dim": 20, "partial_rotary_factor": 0.25}, "gives 5 rotary dimensions; it must be even"),
        ({"head_dim": 4, "partial_rotary_factor": 0.25}, "gives 1 rotary dimensions"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor must be a number above 0 and at most 1, got 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be"),
        ({"rope_theta": -1}, "rope_theta must be a number above 1"),
        ({"rope_theta": "1e6"}, "rope_theta must be a number"),
        ({"rope_theta": 10**400}, "rope_theta must be a number"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object, got a list of 1"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters.rope_type 'yarn' is not supported, only 'default'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.rope_type 'linear' is not supported"),
        ({"rope_scaling": {"type": ["x"]}}, "rope_scaling.rope_type a list of 1 is not supported"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta must be"),
        ({"rope_parameters": {"factor": 4.0}}, "rope_parameters.factor is not a known key"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters.full_attention is not a known key",
        ),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads must be"),
        (
            {"linear_num_key_heads": 3, "linear_num_value_heads": 4},
            "linear_num_value_heads = 4 must be a multiple of linear_num_key_heads = 3",
        ),
        ({"linear_key_head_dim": -1}, "linear_key_head_dim must be"),
        ({"linear_value_head_dim": 0}, "linear_value_head_dim must be"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be a whole number from 2 to 64, got 1"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"hidden_act": None}, "hidden_act must be 'silu'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be"),
        ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"dtype": "float8_e4m3fn"}, "dtype must be one of float32, bfloat16, float16, got 'float8_e4m3fn'"),
        ({"torch_dtype": 16}, "torch_dtype must be one of"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is set ('fp8'): quantised checkpoints are not supported",
        ),
        ({"quantization_config": {}}, "quantization_config is set: quantised"),
        ({"compression_config": "x"}, "compression_config is set: quantised"),
        ({"model_type": "qwen3_5_moe_text", "num_experts": 0}, "num_experts must be"),
        (
            {"model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok = 5 exceeds num_experts = 4",
        ),
        ({"model_type": "qwen3_next", "decoder_sparse_step": 0}, "decoder_sparse_step must be"),
        ({"model_type": "qwen3_next", "mlp_only_layers": 3}, "mlp_only_layers must be a list of layer numbers"),
        ({"model_type": "qwen3_next", "mlp_only_layers": ["0"]}, "mlp_only_layers must be a list of layer numbers"),
        ({"model_type": "qwen3_next", "norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"model_type": "qwen3_next", "shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be"),
        ({"hidden_size": "6\n4\x1b[31m" * 50}, "hidden_size must be"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_f83_mutations(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(written(tmp_path, **({"model_type": "qwen3_5_text", "num_hidden_layers": 4} | change)), message)


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
KEYS = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types", "full_attention_interval",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters", "rope_scaling", "rope_theta",
    "partial_rotary_factor", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "mlp_only_layers",
    "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok", "decoder_sparse_step",
    "norm_topk_prob", "hidden_act", "rms_norm_eps", "dtype", "tie_word_embeddings", "quantization_config", "auto_map",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(model_type=st.sampled_from(TYPES), content=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_f83_any_value_is_read_or_refused(model_type: str, content: dict[str, Any], tmp_path_factory: Any) -> None:
    path = written(tmp_path_factory.mktemp("any"), **nest(model_type, content))
    try:
        spec = read_model_spec(path)
    except ModelError:
        return
    assert 1 <= len(spec.layers) <= 4096


def test_f82_code_of_a_checkpoint_is_never_imported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path, "multimodal")
    canary = tmp_path / "canary"
    (path / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    config = json.loads((path / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}, "trust_remote_code": True}
    (path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        read_model_spec(path)
    assert "auto_map is ignored" in caplog.text
    assert "trust_remote_code is ignored" in caplog.text
    assert not canary.exists()


# Sampling defaults and special tokens


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, {}),
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"min_p": 0, "repetition_penalty": 1.05, "eos_token_id": 3}, {"min_p": 0.0, "repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 20}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"do_sample": True, "top_k": -1, "temperature": None}, {"top_k": 0}),
    ],
)
def test_generation_defaults(content: dict[str, Any] | None, found: dict[str, float], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    defaults, source = read_generation_defaults(tmp_path)
    assert defaults == found
    assert source == ("generation_config.json" if found else "built in")


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"top_p": 0},
        {"top_p": 2},
        {"top_k": 1.5},
        {"top_k": -2},
        {"min_p": True},
        {"repetition_penalty": 0},
    ],
)
def test_generation_defaults_out_of_range(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=f"generation_config.json: {next(iter(content))} must be"):
        read_generation_defaults(tmp_path)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "multimodal")


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "remove"}))


def test_eos_from_each_file_in_turn(model_dir: Path) -> None:
    assert read_eos_ids(model_dir, 300) == (258, 256)
    edit(model_dir / "generation_config.json", eos_token_id=256)
    assert read_eos_ids(model_dir, 300) == (256,)
    (model_dir / "generation_config.json").unlink()
    assert read_eos_ids(model_dir, 300) == (258,)  # config.json, its text section
    edit(model_dir / "config.json", text_config="remove", eos_token_id=[7, 8, 7])
    assert read_eos_ids(model_dir, 300) == (7, 8)
    edit(model_dir / "config.json", eos_token_id="remove")
    assert read_eos_ids(model_dir, 300) == (258,)  # tokenizer_config.json
    edit(model_dir / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert read_eos_ids(model_dir, 300) == (256,)
    edit(model_dir / "tokenizer_config.json", eos_token=None)
    assert read_eos_ids(model_dir, 300) == ()
    (model_dir / "tokenizer_config.json").unlink()
    assert read_eos_ids(model_dir, 300) == ()


@pytest.mark.parametrize("value", [300, -1, "258", True, 1.0, [258, 10**30]])
def test_f84_eos_outside_the_vocabulary(value: Any, model_dir: Path) -> None:
    edit(model_dir / "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id must be a token id from 0 to 299"):
        read_eos_ids(model_dir, 300)


def test_f84_eos_token_that_the_tokenizer_lacks(model_dir: Path) -> None:
    (model_dir / "generation_config.json").unlink()
    edit(model_dir / "config.json", text_config={})
    edit(model_dir / "tokenizer_config.json", eos_token="<nope>")
    with pytest.raises(ModelError, match="eos_token '<nope>' is not among the added tokens"):
        read_eos_ids(model_dir, 300)
    edit(model_dir / "tokenizer_config.json", eos_token=3)
    with pytest.raises(ModelError, match="eos_token must be a string, got 3"):
        read_eos_ids(model_dir, 300)


def test_bos_is_the_tokenizers(model_dir: Path) -> None:
    edit(model_dir / "config.json", bos_token_id=256)
    assert read_bos_id(model_dir, 300) is None
    edit(model_dir / "tokenizer_config.json", bos_token="<|endoftext|>")
    assert read_bos_id(model_dir, 300) == 256
    edit(model_dir / "tokenizer_config.json", bos_token="remove")
    edit(model_dir / "config.json", bos_token_id=258)
    assert read_bos_id(model_dir, 300) == 258
    with pytest.raises(ModelError, match="bos_token_id must be a token id from 0 to 99"):
        read_bos_id(model_dir, 100)


def test_no_torch_is_imported() -> None:
    code = "import sys, hybserve.spec.from_hf, hybserve.spec.inventory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
