"""config.json and its neighbours, read into a ModelSpec, sampling defaults and special token ids.

Keys, defaults and precedence are those of the transformers configuration classes of each family. Everything is
checked against explicit limits before it is used; what is wrong or unsupported is one line that names file, key and
limit. Code that a checkpoint brings along (``auto_map``) is never imported, only mentioned in the log.

Multi-axis rotary embedding (``mrope_section``, ``mrope_interleaved``) needs no support here: it rotates by three
positions (time, height, width) that differ only inside images and videos. For text all three are the token's index,
so whichever axis a frequency is assigned to, the angle is that of plain rotary embedding.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybserve.core.errors import ModelError
from hybserve.spec.json_file import TOKENIZER_LIMIT, one_line, read_object, read_optional, shown
from hybserve.spec.model_spec import AttentionSpec, GatedDeltaSpec, LayerSpec, Mixer, ModelSpec, MoeSpec
from hybserve.spec.safetensors import read_headers, weight_files

log = logging.getLogger(__name__)


class _Family(NamedTuple):
    """Where a model type keeps its text configuration, and the defaults that its configuration class has."""

    name: str
    nested: bool  # under "text_config", because the checkpoint also holds a vision model
    defaults: Mapping[str, int]


_COMMON = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_QWEN3_5 = _COMMON | {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
_QWEN3_5_MOE = _COMMON | {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
_QWEN3_NEXT = _COMMON | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
_FAMILIES = {
    "qwen3_5": _Family("qwen3_5", True, _QWEN3_5),
    "qwen3_5_text": _Family("qwen3_5", False, _QWEN3_5),
    "qwen3_5_moe": _Family("qwen3_5_moe", True, _QWEN3_5_MOE),
    "qwen3_5_moe_text": _Family("qwen3_5_moe", False, _QWEN3_5_MOE),
    "qwen3_next": _Family("qwen3_next", False, _QWEN3_NEXT),
}
_MIXERS: dict[str, Mixer] = {"full_attention": "attention", "linear_attention": "gated_delta"}
_DTYPES = ("float32", "bfloat16", "float16")
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

#: Generous upper limits: above them a number is a mistake or an attack, not a model.
_MOST_LAYERS = 4096
_MOST_WIDTH = 1 << 20
_MOST_HEADS = 1 << 14
_MOST_VOCAB = 1 << 24
_MOST_TOKENS = 1 << 30

#: Keys of rope parameters that leave plain rotary embedding as it is (see above for those of the multi-axis form).
_ROPE_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
)

#: Accepted range of each sampling default, both ends included.
_SAMPLING: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 100.0),
}


class _Keys:
    """Typed, bounded access to one object of config.json; ``where`` prefixes the key in messages."""

    def __init__(self, content: Mapping[str, Any], defaults: Mapping[str, int], where: str) -> None:
        self.content, self.defaults, self.where = content, defaults, where

    def fail(self, key: str, problem: str) -> ModelError:
        return ModelError(f"config.json: {self.where}{key} {problem}")

    def has(self, key: str) -> bool:
        return self.content.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.content.get(key, self.defaults.get(key, default))
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"must be a whole number from {low} to {high}, got {shown(value)}")
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """A number in (low, high]."""
        value = self.content.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
            raise self.fail(key, f"must be a number above {low:g} and at most {high:g}, got {shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.content.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, got {shown(value)}")
        return value

    def section(self, key: str) -> "_Keys":
        value = self.content.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, f"must be an object, got {shown(value)}")
        return _Keys(value, {}, f"{self.where}{key}.")


def read_model_spec(path: Path) -> ModelSpec:
    """The model in a checkpoint directory, or of a config.json alone. Raises ModelError."""
    config, directory = _read_config(path)
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            f"config.json: model_type {shown(model_type)} is not supported; supported are {', '.join(_FAMILIES)}"
        )
    top = _Keys(config, family.defaults, "")
    text = _text_section(top, family) if family.nested else top
    for keys in (top, text):
        _refuse_quantised(keys)
        _warn_about_code(keys)
    layers = _layers(text, family)
    activation = text.content.get("hidden_act", "silu")
    if activation != "silu":
        raise text.fail("hidden_act", f"must be 'silu', got {shown(activation)}")
    dense = any(layer.mlp == "dense" for layer in layers)
    return ModelSpec(
        family=family.name,
        vocab_size=text.integer("vocab_size", 1, _MOST_VOCAB),
        hidden=text.integer("hidden_size", 1, _MOST_WIDTH),
        ffn=text.integer("intermediate_size", 1, _MOST_WIDTH) if dense else 0,
        layers=layers,
        attention=_attention(text) if any(layer.mixer == "attention" for layer in layers) else None,
        gated_delta=_gated_delta(text) if any(layer.mixer == "gated_delta" for layer in layers) else None,
        moe=_moe(text, family) if any(layer.mlp == "moe" for layer in layers) else None,
        norm_eps=text.number("rms_norm_eps", 1e-6, 0.0, 1.0),
        tied=_tied(top, text),
        dtype=_dtype(top, text, directory),
        max_seq_len=text.integer("max_position_embeddings", 1, _MOST_TOKENS),
    )


def read_generation_defaults(model_dir: Path) -> tuple[dict[str, float | int], str]:
    """Sampling defaults that generation_config.json states, and where they came from.

    Only stated keys are returned; without any the source is ``built in``. ``do_sample: false`` is temperature 0, and
    then the keys that only shape a random choice are left out, as they would not have been used.
    """
    config = read_optional(model_dir / "generation_config.json") or {}
    found: dict[str, float | int] = {}
    for key, (low, high) in _SAMPLING.items():
        value = config.get(key)
        if value is None:
            continue
        whole = key == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
            kind = "whole number" if whole else "number"
            raise ModelError(
                f"generation_config.json: {key} must be a {kind} from {low:g} to {high:g}, got {shown(value)}"
            )
        found[key] = value if whole else float(value)
    if found.get("top_k") == -1:
        found["top_k"] = 0
    if config.get("do_sample") is False:
        found = {key: value for key, value in found.items() if key == "repetition_penalty"} | {"temperature": 0.0}
    return found, "generation_config.json" if found else "built in"


def read_eos_ids(model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a sequence, in the order stated, without repeats; empty if the checkpoint names none.

    generation_config.json decides, else config.json, else the ``eos_token`` of tokenizer_config.json. Raises
    ModelError if one lies outside the vocabulary.
    """
    generation = read_optional(model_dir / "generation_config.json") or {}
    if generation.get("eos_token_id") is not None:
        return _token_ids(generation["eos_token_id"], "generation_config.json: eos_token_id", vocab_size)
    stated = _config_value(model_dir, "eos_token_id")
    if stated is not None:
        return _token_ids(stated, "config.json: eos_token_id", vocab_size)
    return _token_ids(_special_token(model_dir, "eos_token"), "tokenizer.json: the id of eos_token", vocab_size)


def read_bos_id(model_dir: Path, vocab_size: int) -> int | None:
    """The id that begins a sequence, None if the model has none.

    The tokenizer decides: a ``bos_token`` of null in tokenizer_config.json means none, whatever config.json says
    (public checkpoints state an id there that the model was never trained to begin with).
    """
    tokenizer = read_optional(model_dir / "tokenizer_config.json")
    if tokenizer is not None and "bos_token" in tokenizer:
        stated: object = _special_token(model_dir, "bos_token")
    else:
        stated = _config_value(model_dir, "bos_token_id")
    ids = _token_ids(stated, "bos_token_id", vocab_size)
    return ids[0] if ids else None


def _read_config(path: Path) -> tuple[dict[str, Any], Path | None]:
    """config.json, and the directory of weights beside it (None if only a configuration was named)."""
    if path.is_dir():
        return read_object(path / "config.json"), path
    if not path.exists():
        raise ModelError(f"no model directory {str(path)!r}; only local directories are read, nothing is downloaded")
    return read_object(path), None


def _text_section(top: _Keys, family: _Family) -> _Keys:
    section = top.section("text_config")
    expected = f"{family.name}_text"
    model_type = section.content.get("model_type", expected)
    if model_type != expected:
        raise section.fail("model_type", f"must be {expected!r}, got {shown(model_type)}")
    return _Keys(section.content, family.defaults, section.where)


def _refuse_quantised(keys: _Keys) -> None:
    for key in ("quantization_config", "compression_config"):
        value = keys.content.get(key)
        if value is not None:
            method = value.get("quant_method") if isinstance(value, dict) else None
            name = f" ({shown(method)})" if method is not None else ""
            raise keys.fail(key, f"is set{name}: quantised checkpoints are not supported, use the unquantised one")


def _warn_about_code(keys: _Keys) -> None:
    for key in ("auto_map", "trust_remote_code"):
        if keys.content.get(key):
            log.warning("config.json: %s%s is ignored; code of a checkpoint is never run", keys.where, key)


def _layers(text: _Keys, family: _Family) -> tuple[LayerSpec, ...]:
    count = text.integer("num_hidden_layers", 1, _MOST_LAYERS)
    sparse = _sparse_layers(text, family, count)
    return tuple(
        LayerSpec(mixer=mixer, mlp="moe" if moe else "dense")
        for mixer, moe in zip(_mixers(text, count), sparse, strict=True)
    )


def _mixers(text: _Keys, count: int) -> list[Mixer]:
    types = text.content.get("layer_types")
    if types is None:
        interval = text.integer("full_attention_interval", 1, _MOST_TOKENS, default=4)
        return ["gated_delta" if (index + 1) % interval else "attention" for index in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise text.fail("layer_types", f"must list num_hidden_layers = {count} layers, got {shown(types)}")
    for index, kind in enumerate(types):
        if not isinstance(kind, str) or kind not in _MIXERS:
            raise text.fail(f"layer_types[{index}]", f"must be one of {', '.join(_MIXERS)}, got {shown(kind)}")
    return [_MIXERS[kind] for kind in types]


def _sparse_layers(text: _Keys, family: _Family, count: int) -> list[bool]:
    """Which layers have experts instead of one dense MLP."""
    if family.name != "qwen3_next":
        return [family.name == "qwen3_5_moe"] * count
    if text.integer("num_experts", 0, _MOST_HEADS) == 0:
        return [False] * count
    step = text.integer("decoder_sparse_step", 1, _MOST_TOKENS, default=1)
    dense = text.content.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise text.fail("mlp_only_layers", f"must be a list of layer numbers, got {shown(dense)}")
    return [index not in set(dense) and (index + 1) % step == 0 for index in range(count)]


def _attention(text: _Keys) -> AttentionSpec:
    q_heads = text.integer("num_attention_heads", 1, _MOST_HEADS)
    kv_heads = text.integer("num_key_value_heads", 1, _MOST_HEADS)
    if q_heads % kv_heads:
        raise text.fail("num_attention_heads", f"= {q_heads} must be a multiple of num_key_value_heads = {kv_heads}")
    head_dim = text.integer("head_dim", 1, _MOST_WIDTH)
    theta, partial = _rope(text)
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise text.fail(
            "partial_rotary_factor",
            f"= {partial:g} of head_dim = {head_dim} gives {rotary_dim} rotary dimensions; it must be even and above 0",
        )
    return AttentionSpec(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        output_gate=text.flag("attn_output_gate", True),
        bias=text.flag("attention_bias", False),
    )


def _rope(text: _Keys) -> tuple[float, float]:
    """(theta, partial factor). The rope object wins over keys beside it; ``rope_scaling`` is its older name."""
    name = "rope_scaling" if text.content.get("rope_scaling") else "rope_parameters"
    rope = text.section(name) if text.has(name) else _Keys({}, {}, text.where)
    kind = rope.content.get("rope_type", rope.content.get("type", "default"))
    if kind != "default":
        raise rope.fail("rope_type", f"{shown(kind)} is not supported, only 'default'")
    unknown = sorted(set(rope.content) - _ROPE_KEYS)
    if unknown:
        raise rope.fail(one_line(unknown[0], 40), "is not a known key of rope type 'default'")
    theta_keys = rope if "rope_theta" in rope.content else text
    partial_keys = rope if "partial_rotary_factor" in rope.content else text
    return theta_keys.number("rope_theta", 10000.0, 1.0, 1e30), partial_keys.number(
        "partial_rotary_factor", 0.25, 0.0, 1.0
    )


def _gated_delta(text: _Keys) -> GatedDeltaSpec:
    key_heads = text.integer("linear_num_key_heads", 1, _MOST_HEADS)
    value_heads = text.integer("linear_num_value_heads", 1, _MOST_HEADS)
    if value_heads % key_heads:
        raise text.fail(
            "linear_num_value_heads", f"= {value_heads} must be a multiple of linear_num_key_heads = {key_heads}"
        )
    return GatedDeltaSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=text.integer("linear_key_head_dim", 1, _MOST_WIDTH),
        value_dim=text.integer("linear_value_head_dim", 1, _MOST_WIDTH),
        conv_width=text.integer("linear_conv_kernel_dim", 2, 64),
    )


def _moe(text: _Keys, family: _Family) -> MoeSpec:
    experts = text.integer("num_experts", 1, _MOST_HEADS)
    top_k = text.integer("num_experts_per_tok", 1, _MOST_HEADS)
    if top_k > experts:
        raise text.fail("num_experts_per_tok", f"= {top_k} exceeds num_experts = {experts}")
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        expert_ffn=text.integer("moe_intermediate_size", 1, _MOST_WIDTH),
        shared_ffn=text.integer("shared_expert_intermediate_size", 1, _MOST_WIDTH),
        # Qwen3.5 always normalises, whatever its config says; only Qwen3-Next has the switch.
        norm_top_k=text.flag("norm_topk_prob", True) if family.name == "qwen3_next" else True,
    )


def _tied(top: _Keys, text: _Keys) -> bool:
    """A causal model is built from the text configuration alone, so its own key decides and the outer one stands in."""
    keys = text if "tie_word_embeddings" in text.content else top
    return keys.flag("tie_word_embeddings", False)


def _dtype(top: _Keys, text: _Keys, directory: Path | None) -> str:
    """The stated dtype, else that of the embedding in the weights, else float32 (as transformers decides)."""
    for keys in (text, top):
        for key in ("dtype", "torch_dtype"):
            if keys.has(key):
                value = keys.content[key]
                name = value.removeprefix("torch.") if isinstance(value, str) else value
                if name not in _DTYPES:
                    raise keys.fail(key, f"must be one of {', '.join(_DTYPES)}, got {shown(value)}")
                return str(name)
    if directory is not None and weight_files(directory):
        for tensor in read_headers(directory).values():
            if tensor.name.endswith("embed_tokens.weight") and tensor.dtype in _SAFETENSORS_DTYPES:
                return _SAFETENSORS_DTYPES[tensor.dtype]
    return "float32"


def _config_value(model_dir: Path, key: str) -> object:
    """``key`` of config.json, from its text section if that has it."""
    config = read_object(model_dir / "config.json")
    text = config.get("text_config")
    nested = text.get(key) if isinstance(text, dict) else None
    return config.get(key) if nested is None else nested


def _special_token(model_dir: Path, key: str) -> int | None:
    """The id of the special token that tokenizer_config.json names under ``key``, by the list in tokenizer.json."""
    config = read_optional(model_dir / "tokenizer_config.json") or {}
    token = config.get(key)
    if isinstance(token, dict):  # the older form, an object with the text under "content"
        token = token.get("content")
    if token is None:
        return None
    if not isinstance(token, str):
        raise ModelError(f"tokenizer_config.json: {key} must be a string, got {shown(token)}")
    added = (read_optional(model_dir / "tokenizer.json", TOKENIZER_LIMIT) or {}).get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == token and type(entry.get("id")) is int:
            return int(entry["id"])
    raise ModelError(f"tokenizer_config.json: {key} {shown(token)} is not among the added tokens of tokenizer.json")


def _token_ids(value: object, what: str, vocab_size: int) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for entry in ids:
        if type(entry) is not int or not 0 <= entry < vocab_size:
            raise ModelError(f"{what} must be a token id from 0 to {vocab_size - 1}, got {shown(entry)}")
    return tuple(dict.fromkeys(ids))
