import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hybserve.core.errors import ModelError, RequestError
from hybserve.text.tokenize import Tokenizer, load_tokenizer

KINDS = ("byte-level", "llama", "gemma", "metaspace", "words")
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces  ",
    "line\n\nbreaks\r\n\tand tabs",
    "<|im_start|>user\nhi<|im_end|>\n<think>\nx</think>",
    "<s>a</s> <extra><unk>",
    "你好 สวัสดี 👩‍👩‍👧‍👦 🙂 e\u0301 \u0000 \ufffe \ufffd \u202e",
    "w1 w2 w59 w60",
    "a" * 300,
    " " * 300,
    "e" + "\u0301" * 2000,
]


@pytest.fixture(scope="module")
def references(model_dirs: dict[str, Path]) -> dict[str, Any]:
    return {kind: AutoTokenizer.from_pretrained(model_dirs[kind]) for kind in KINDS}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_transformers(
    kind: str, special: bool, references: dict[str, Any], tokenizers: dict[str, Tokenizer]
) -> None:
    for text in TEXTS:
        expected = references[kind].encode(text, add_special_tokens=special)
        assert tokenizers[kind].encode(text, special) == expected, text
    assert tokenizers[kind].names == references[kind].special_tokens_map
    ours, theirs = tokenizers[kind].special_ids, references[kind].added_tokens_decoder
    assert ours == {index for index, token in theirs.items() if token.special}


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_F26_any_text_equals_transformers(
    text: str, references: dict[str, Any], tokenizers: dict[str, Tokenizer]
) -> None:
    for kind in ("byte-level", "llama"):
        assert tokenizers[kind].encode(text, True) == references[kind].encode(text, add_special_tokens=True)


def test_the_tokenizer_class_of_the_family_gives_the_same_ids(tmp_path: Path, model_dirs: dict[str, Path]) -> None:
    shutil.copytree(model_dirs["byte-level"], tmp_path / "m")
    config = _edit(tmp_path / "m" / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    assert config["tokenizer_class"] == "Qwen2Tokenizer"
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    reference = AutoTokenizer.from_pretrained(tmp_path / "m")
    ours = load_tokenizer(tmp_path / "m", 1024)
    for text in TEXTS:
        assert ours.encode(text, True) == reference.encode(text), text


def test_tokens_declared_only_in_the_configuration(tmp_path: Path, model_dirs: dict[str, Path]) -> None:
    shutil.copytree(model_dirs["byte-level"], tmp_path / "m")
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    _edit(
        tmp_path / "m" / "tokenizer_config.json",
        added_tokens_decoder={
            "426": {"content": "<|new|>", "special": True, **flags},
            "427": {"content": "<plain>", "special": False, **flags},
        },
        extra_special_tokens=["<|extra|>"],
        sep_token="<|sep|>",
    )
    reference, ours = AutoTokenizer.from_pretrained(tmp_path / "m"), load_tokenizer(tmp_path / "m", 1024)
    for text in ("a<|new|>b<plain>c<|extra|>d<|sep|>", *TEXTS):
        assert ours.encode(text, True) == reference.encode(text), text
    assert ours.special_ids == {i for i, token in reference.added_tokens_decoder.items() if token.special}


def test_special_tokens_map_counts_when_the_configuration_lists_no_tokens(
    tmp_path: Path, model_dirs: dict[str, Path]
) -> None:
    shutil.copytree(model_dirs["byte-level"], tmp_path / "m")
    (tmp_path / "m" / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|endoftext|>"}}))
    reference, ours = AutoTokenizer.from_pretrained(tmp_path / "m"), load_tokenizer(tmp_path / "m", 1024)
    assert ours.names == reference.special_tokens_map
    assert ours.bos_id == reference.bos_token_id


def _edit(path: Path, **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))
    return content


def test_F26_half_a_surrogate_pair_is_refused_with_its_place(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="character 3") as caught:
        tokenizers["byte-level"].encode("abc\ud800d", True)
    assert caught.value.body.status == 400


def test_F31_the_byte_limit_leaves_room_for_every_text_that_fits(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    for text in TEXTS:
        assert len(text.encode()) <= tokenizer.byte_limit(max(len(tokenizer.encode(text, True)), 1))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "z"]]}}'),
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"3": "a"}}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", '{"chat_template": 7}'),
        ("tokenizer_config.json", '{"extra_special_tokens": 3}'),
    ],
)
def test_F84_broken_files_are_refused(name: str, content: str, tmp_path: Path, model_dirs: dict[str, Path]) -> None:
    shutil.copytree(model_dirs["byte-level"], tmp_path / "m")
    (tmp_path / "m" / name).write_text(content)
    with pytest.raises(ModelError):
        load_tokenizer(tmp_path / "m", 1024)


def test_F84_not_utf8_and_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="missing"):
        load_tokenizer(tmp_path, 1024)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match="UTF-8"):
        load_tokenizer(tmp_path, 1024)


def test_F84_ids_beyond_the_embedding(model_dirs: dict[str, Path]) -> None:
    directory = model_dirs["byte-level"]
    with pytest.raises(ModelError, match="vocabulary reaches"):
        load_tokenizer(model_dirs["words"], 60, (1,))
    with pytest.raises(ModelError, match="eos_token_id 5000"):
        load_tokenizer(directory, 1024, (5000,))
    size = load_tokenizer(directory, 1024).vocab
    with pytest.raises(ModelError, match="eos_token"):
        load_tokenizer(directory, size["<|im_end|>"])
    roomy = load_tokenizer(directory, size["<think>"], (size["<|im_end|>"],))
    assert "added tokens have no embedding" in roomy.warnings[0]


def test_F84_no_end_of_sequence_is_a_warning(model_dirs: dict[str, Path]) -> None:
    assert "no end-of-sequence" in load_tokenizer(model_dirs["byte-level"], 1024).warnings[0]


def test_templates_from_files_win(tmp_path: Path, model_dirs: dict[str, Path]) -> None:
    shutil.copytree(model_dirs["byte-level"], tmp_path / "m")
    _edit(
        tmp_path / "m" / "tokenizer_config.json",
        chat_template=[{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}],
    )
    assert load_tokenizer(tmp_path / "m", 1024).chat_templates == {"default": "a", "rag": "b"}
    (tmp_path / "m" / "chat_template.jinja").write_text("c")
    assert load_tokenizer(tmp_path / "m", 1024).chat_templates == {"default": "c"}
    (tmp_path / "m" / "additional_chat_templates").mkdir()
    (tmp_path / "m" / "additional_chat_templates" / "rag.jinja").write_text("d")
    assert load_tokenizer(tmp_path / "m", 1024).chat_templates == {"default": "c", "rag": "d"}


def test_F26_a_text_that_the_library_cannot_encode(tmp_path: Path) -> None:
    """A vocabulary without an unknown token: the library raises, the request is refused."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    tokenizer = load_tokenizer(tmp_path, 8)
    assert tokenizer.encode("a", True) == [0]
    with pytest.raises(RequestError) as caught:
        tokenizer.encode("zzz", True)
    assert (caught.value.body.status, caught.value.body.param) == (400, "prompt")
