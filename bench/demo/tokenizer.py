"""The model's own byte-level BPE tokenizer, and the files that make up a checkpoint beside the weights."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.demo.corpus import Turn
from bench.demo.model import CONFIG

END_OF_TEXT, IM_START, IM_END = range(3)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

#: Only appends: what was rendered for a first turn is the start of what is rendered for the second.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def render(turns: Sequence[Turn], answer: bool = False) -> str:
    """What CHAT_TEMPLATE makes of a conversation. ``answer``: followed by the start of the model's turn."""
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return text + "<|im_start|>assistant\n" if answer else text


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of CONFIG's vocabulary; ``texts`` are plain, without special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_files(directory: Path, tokenizer: Tokenizer) -> None:
    """config.json, generation_config.json and the tokenizer's files."""
    ends = {"eos_token_id": IM_END, "pad_token_id": END_OF_TEXT, "bos_token_id": None}
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    _dump(directory / "config.json", CONFIG | ends)
    _dump(directory / "generation_config.json", {"do_sample": False, "eos_token_id": [IM_END, END_OF_TEXT]})
    _dump(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG["max_position_embeddings"],
            "bos_token": None,
            "eos_token": SPECIAL_TOKENS[IM_END],
            "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
            "unk_token": None,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
