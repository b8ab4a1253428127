"""A tiny random model, made on the spot: the checkpoint of tests that need a server but no sense.

It is a genuine checkpoint directory (config.json, model.safetensors, tokenizer.json, tokenizer_config.json,
generation_config.json) that any loader of such directories reads unchanged. Its vocabulary is the 256 bytes and three
special tokens, so every text round-trips; its weights are seeded random numbers, so its answers are noise, kept
printable by giving all other tokens a small output row.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from hybserve.core.errors import ModelError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_VOCAB = 256 + len(SPECIAL_TOKENS)
END_OF_TEXT, IM_START, IM_END = range(256, BYTE_VOCAB)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

#: Part of the directory's name: a release that changes the content below must not meet an older one's files.
_REVISION = 1
_SEED = 20260
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")

_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "float32",
    "vocab_size": BYTE_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "eos_token_id": IM_END,
    "bos_token_id": None,
    "pad_token_id": END_OF_TEXT,
}


def default_random_dir() -> Path:
    """Where the random checkpoint lives when nobody says: the user's cache directory (``XDG_CACHE_HOME``)."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hybserve" / f"random-{_REVISION}"


def ensure_random_model(directory: Path | None = None) -> Path:
    """The directory of the random checkpoint, made if it is not there yet. Raises ModelError if it cannot be made.

    It appears whole or not at all (a rename), so processes that start together do not meet a half-written one.
    """
    target = directory or default_random_dir()
    if _complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
            content = Path(work) / target.name
            content.mkdir()
            _write(content)
            _publish(content, target)
    except OSError as error:
        raise ModelError(
            f"the random model cannot be written to {str(target)!r} ({error.strerror}); "
            "set XDG_CACHE_HOME to a writable directory"
        ) from None
    return target


def _complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _FILES)


def _publish(content: Path, target: Path) -> None:
    """Rename ``content`` to ``target``; a directory that another process put there first is as good as ours."""
    try:
        content.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        for name in _FILES:  # there already; if it is a damaged one, its files are put in place one by one
            os.replace(content / name, target / name)


def _write(directory: Path) -> None:
    write_tokenizer_files(directory)
    _dump(directory / "config.json", _CONFIG)
    _dump(
        directory / "generation_config.json",
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": [IM_END, END_OF_TEXT]},
    )
    (directory / "model.safetensors").write_bytes(save(_weights(), metadata={"format": "pt"}))


def write_tokenizer_files(directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json of the byte vocabulary: byte b is token b, special tokens follow."""
    _dump(directory / "tokenizer.json", _tokenizer())
    _dump(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 32768,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _dump(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _byte_characters() -> list[str]:
    """The printable character by which byte-level BPE writes each byte."""
    keep = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(spare)) for byte in range(256)]


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + n, "content": token, **flags} for n, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _weights() -> dict[str, torch.Tensor]:
    """Seeded random tensors under the public names; activations stay near one, memories last 1 to 1000 tokens."""
    random = torch.Generator().manual_seed(_SEED)
    hidden, ffn, vocab = _CONFIG["hidden_size"], _CONFIG["intermediate_size"], _CONFIG["vocab_size"]
    queries, pairs = _CONFIG["num_attention_heads"], _CONFIG["num_key_value_heads"]
    head = _CONFIG["head_dim"]
    keys = _CONFIG["linear_num_key_heads"] * _CONFIG["linear_key_head_dim"]
    value_heads, value_dim = _CONFIG["linear_num_value_heads"], _CONFIG["linear_value_head_dim"]
    values = value_heads * value_dim
    width = _CONFIG["linear_conv_kernel_dim"]
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, *shape: int) -> None:
        tensors[name] = torch.randn(shape, generator=random) * 1.2 / shape[-1] ** 0.5

    def norm(name: str, size: int, centre: float) -> None:
        tensors[name] = centre + 0.1 * torch.randn(size, generator=random)

    matrix("model.embed_tokens.weight", vocab, hidden)
    for index, kind in enumerate(_CONFIG["layer_types"]):
        layer = f"model.layers.{index}"
        norm(f"{layer}.input_layernorm.weight", hidden, 0.0)
        norm(f"{layer}.post_attention_layernorm.weight", hidden, 0.0)
        matrix(f"{layer}.mlp.gate_proj.weight", ffn, hidden)
        matrix(f"{layer}.mlp.up_proj.weight", ffn, hidden)
        matrix(f"{layer}.mlp.down_proj.weight", hidden, ffn)
        if kind == "full_attention":
            matrix(f"{layer}.self_attn.q_proj.weight", queries * head * 2, hidden)
            matrix(f"{layer}.self_attn.k_proj.weight", pairs * head, hidden)
            matrix(f"{layer}.self_attn.v_proj.weight", pairs * head, hidden)
            matrix(f"{layer}.self_attn.o_proj.weight", hidden, queries * head)
            norm(f"{layer}.self_attn.q_norm.weight", head, 0.0)
            norm(f"{layer}.self_attn.k_norm.weight", head, 0.0)
            continue
        matrix(f"{layer}.linear_attn.in_proj_qkv.weight", 2 * keys + values, hidden)
        matrix(f"{layer}.linear_attn.in_proj_z.weight", values, hidden)
        matrix(f"{layer}.linear_attn.in_proj_b.weight", value_heads, hidden)
        matrix(f"{layer}.linear_attn.in_proj_a.weight", value_heads, hidden)
        matrix(f"{layer}.linear_attn.conv1d.weight", 2 * keys + values, 1, width)
        matrix(f"{layer}.linear_attn.out_proj.weight", hidden, values)
        norm(f"{layer}.linear_attn.norm.weight", value_dim, 1.0)
        tensors[f"{layer}.linear_attn.A_log"] = torch.empty(value_heads).uniform_(1, 16, generator=random).log()
        steps = torch.empty(value_heads).uniform_(-6.9, -2.3, generator=random).exp()
        tensors[f"{layer}.linear_attn.dt_bias"] = steps + torch.log(-torch.expm1(-steps))  # inverse softplus
    norm("model.norm.weight", hidden, 0.0)
    matrix("lm_head.weight", vocab, hidden)
    loud = torch.zeros(vocab, dtype=torch.bool)
    loud[[ord("\n"), *range(ord(" "), ord("~") + 1), IM_END]] = True
    tensors["lm_head.weight"][~loud] *= 0.02
    tensors["lm_head.weight"][loud] *= 3.0
    return tensors
