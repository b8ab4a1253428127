"""Model directories without weights, for ``model.load: dummy``: a configuration and a tokenizer of the same width."""

import json
from itertools import islice, product
from pathlib import Path
from typing import Any

#: Shapes of public checkpoints (m1: Qwen3.5-9B, m2: Qwen3.5-35B-A3B, text only) and one that a CPU computes at once.
MODELS: dict[str, dict[str, Any]] = {
    "m1": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False, "dtype": "bfloat16",
    },
    "m2": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False, "dtype": "bfloat16",
    },
    "tiny": {
        "model_type": "qwen3_5_text", "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "max_position_embeddings": 65536,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False, "dtype": "float32",
    },
}  # fmt: skip

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
_CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def write_model_directory(directory: Path, config: dict[str, Any]) -> Path:
    """Fill ``directory`` with all that a server reads of a model but weights; returns it.

    Tokens are the 256 bytes, words, and last three special tokens, together ``config["vocab_size"]``: every id has a
    text of its own. Nothing merges: a text is encoded to its bytes. Raises ValueError when the vocabulary has less room
    than the bytes and special tokens need.
    """
    directory.mkdir(parents=True, exist_ok=True)
    first = config["vocab_size"] - len(SPECIAL_TOKENS)
    ends = [first + SPECIAL_TOKENS.index(token) for token in ("<|im_end|>", "<|endoftext|>")]
    files = {
        "config.json": {**config, "eos_token_id": ends[0]},
        "tokenizer.json": _tokenizer(config["vocab_size"]),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "chat_template": _CHAT_TEMPLATE,
        },
        "generation_config.json": {"do_sample": False, "temperature": 0.0, "eos_token_id": ends},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return directory


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    words = vocab_size - 256 - len(SPECIAL_TOKENS)
    if words < 0:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for 256 bytes and {len(SPECIAL_TOKENS)} tokens")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    texts = ["\u0120" + "".join(word) for word in islice(product(_SYLLABLES, repeat=3), words)]
    assert len(texts) == words, f"only {len(texts)} words for {words} ids"
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    vocab |= {text: index for index, text in enumerate(texts, 256)}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 256 + words + n, "content": token, **flags} for n, token in enumerate(SPECIAL_TOKENS)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def _byte_characters() -> list[str]:
    """The printable character by which byte-level BPE writes each byte."""
    keep = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in keep else chr(next(spare)) for byte in range(256)]
