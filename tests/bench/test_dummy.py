"""Model directories without weights are ones that the text role takes, and every id in them says something."""

from pathlib import Path

import pytest

from bench.dummy import MODELS, SPECIAL_TOKENS, write_model_directory
from hybserve.spec.from_hf import read_eos_ids, read_generation_defaults, read_model_spec
from hybserve.text.detokenize import Detokenizer
from hybserve.text.tokenize import load_tokenizer


@pytest.mark.parametrize("vocab_size", [259, 1024])
def test_every_id_has_a_text_of_its_own_and_the_tokenizer_is_as_wide_as_the_model(
    tmp_path: Path, vocab_size: int
) -> None:
    write_model_directory(tmp_path, MODELS["tiny"] | {"vocab_size": vocab_size})
    assert read_model_spec(tmp_path).vocab_size == vocab_size
    assert read_eos_ids(tmp_path, vocab_size) == (vocab_size - 1, vocab_size - 3)
    assert read_generation_defaults(tmp_path) == ({"temperature": 0.0}, "generation_config.json")
    tokenizer = load_tokenizer(tmp_path, vocab_size, (vocab_size - 1,))
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.token_bytes(index) for index in range(vocab_size)]
    assert len(set(texts)) == len(tokenizer.vocab) == vocab_size
    assert b"" not in texts
    assert tuple(text.decode() for text in texts[-3:]) == SPECIAL_TOKENS
    assert tokenizer.encode("hé<|im_end|>", False) == [104, 0xC3, 0xA9, vocab_size - 1]
    assert (tokenizer.warnings, list(tokenizer.chat_templates)) == ((), ["default"])


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no room"):
        write_model_directory(tmp_path, MODELS["tiny"] | {"vocab_size": 258})
