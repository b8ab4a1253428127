"""Tokenizers of several kinds, built on the spot as model directories."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from hybserve.core.types import ServingFacts
from hybserve.text.detokenize import Detokenizer
from hybserve.text.tokenize import Tokenizer as OurTokenizer
from hybserve.text.tokenize import load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox runs; 1234567890!",
    "def main(args):\n    for item in args:\n        print(item)\n\n\treturn None",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "你好，世界。今天的天气很好。 สวัสดีชาวโลก ภาษาไทย こんにちは 🙂🙂 👩‍👩‍👧‍👦 héllo naïve",
] * 4

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

TEMPLATE = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""


def byte_level() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>")])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    }
    return tokenizer, config


def sentencepiece_like(strip: bool, prefix: bool) -> tuple[Tokenizer, dict[str, Any]]:
    """Llama's shape: spaces as U+2581, byte tokens for what the vocabulary lacks, BOS by the post-processor."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if prefix else steps)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator([line.replace("\n", "  ") for line in CORPUS[:3]], trainer)
    raw = json.loads(tokenizer.to_str())
    for text in bytes_:
        raw["model"]["vocab"][text] = len(raw["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_tokens(["<extra>"])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "unk_token": "<unk>",
        "chat_template": "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}",
    }
    return tokenizer, config


def metaspace() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}


def words() -> tuple[Tokenizer, dict[str, Any]]:
    """No concatenation at all: words joined by spaces."""
    names = ["[UNK]", "[EOS]", *(f"w{i}" for i in range(60))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[EOS]", "unk_token": "[UNK]"}


BUILDERS: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    "byte-level": byte_level,
    "llama": lambda: sentencepiece_like(strip=True, prefix=True),
    "gemma": lambda: sentencepiece_like(strip=False, prefix=False),
    "metaspace": metaspace,
    "words": words,
}
KINDS = tuple(BUILDERS)


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory (tokenizer files only) for each kind."""
    made = {}
    for kind, build in BUILDERS.items():
        directory = tmp_path_factory.mktemp(kind)
        tokenizer, config = build()
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        made[kind] = directory
    return made


@pytest.fixture(scope="session")
def tokenizers(model_dirs: dict[str, Path]) -> dict[str, OurTokenizer]:
    return {kind: load_tokenizer(directory, 1024, (1,)) for kind, directory in model_dirs.items()}


@pytest.fixture(scope="session")
def detokenizers(tokenizers: dict[str, OurTokenizer]) -> dict[str, Detokenizer]:
    return {kind: Detokenizer(tokenizer) for kind, tokenizer in tokenizers.items()}


@pytest.fixture(scope="session")
def make_facts(model_dirs: dict[str, Path], tokenizers: dict[str, OurTokenizer]) -> Callable[..., ServingFacts]:
    def make(kind: str = "byte-level", max_seq_len: int = 512, eos: tuple[str, ...] = ("<|im_end|>",)) -> ServingFacts:
        tokenizer = tokenizers[kind]
        return ServingFacts(
            served_names=("test",),
            model_dir=str(model_dirs[kind]),
            family="qwen3_5",
            vocab_size=tokenizer.vocab_size,
            max_seq_len=max_seq_len,
            max_running=8,
            page_size=4,
            capacity_tokens=max_seq_len,
            eos_ids=tuple(tokenizer.vocab[text] for text in eos),
            bos_id=tokenizer.bos_id,
            sampling_defaults={},
            sampling_source="built in",
            created=0,
            version="0",
        )

    return make
