import json
import stat
from pathlib import Path

import pytest
import torch
import transformers

from hybserve.models import embedded
from hybserve.models.embedded import ensure_embedded_model

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_embedded_model(tmp_path_factory.mktemp("cache") / "deep" / "embedded")


def test_made_once_and_whole(model_dir: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()}
    assert ensure_embedded_model(model_dir) == model_dir
    assert {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()} == before
    assert sorted(before) == sorted(embedded._FILES)
    assert [path.name for path in model_dir.parent.iterdir()] == ["embedded"]  # no scratch directory stays
    assert stat.S_IMODE(model_dir.stat().st_mode) == 0o755


def test_same_bytes_every_time(model_dir: Path, tmp_path: Path) -> None:
    again = ensure_embedded_model(tmp_path / "again")
    for path in model_dir.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_damaged_directory_is_completed(model_dir: Path, tmp_path: Path) -> None:
    damaged = ensure_embedded_model(tmp_path / "damaged")
    (damaged / "model.safetensors").unlink()
    ensure_embedded_model(damaged)
    assert (damaged / "model.safetensors").read_bytes() == (model_dir / "model.safetensors").read_bytes()


def test_a_rename_lost_to_another_process_is_no_error(tmp_path: Path) -> None:
    first, work = ensure_embedded_model(tmp_path / "first"), tmp_path / "work"
    work.mkdir()
    embedded._write(work)
    embedded._publish(work, first)
    assert all((first / name).is_file() for name in embedded._FILES)


def test_default_directory_is_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ensure_embedded_model().is_relative_to(tmp_path)


def test_transformers_loads_it_unchanged(model_dir: Path) -> None:
    transformers.logging.disable_progress_bar()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(model_dir, output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi ü"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nhi ü<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert len(set(answer.tolist())) > 4
    assert tokenizer.decode(answer, skip_special_tokens=True).isascii()


def test_every_byte_is_one_token(model_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    text = "".join(chr(code) for code in (*range(0x250), 0x4E2D, 0x1F600, 0xFFFD))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    for token, expected in zip(embedded.SPECIAL_TOKENS, range(256, 259), strict=True):
        assert tokenizer(token).input_ids == [expected]
    config = json.loads((model_dir / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.eos_token_id == config["eos_token_id"]
