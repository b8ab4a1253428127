import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

from hybserve.core.errors import ModelError
from hybserve.models.load import load_weights
from hybserve.spec.from_hf import read_bos_id, read_eos_ids, read_generation_defaults, read_model_spec
from hybserve.spec.inventory import params_of
from hybserve.spec.split import split_ranks
from tests import random_model
from tests.random_model import ensure_random_model

torch.set_num_threads(1)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_random_model(tmp_path_factory.mktemp("cache") / "deep" / "random")


def test_made_once_and_whole(model_dir: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()}
    assert ensure_random_model(model_dir) == model_dir
    assert {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()} == before
    assert sorted(before) == sorted(random_model._FILES)
    assert [path.name for path in model_dir.parent.iterdir()] == ["random"]  # no scratch directory stays
    assert stat.S_IMODE(model_dir.stat().st_mode) & 0o055 == 0o055 & ~current_umask()


def test_same_bytes_every_time(model_dir: Path, tmp_path: Path) -> None:
    again = ensure_random_model(tmp_path / "again")
    for path in model_dir.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_damaged_directory_is_completed(model_dir: Path, tmp_path: Path) -> None:
    damaged = ensure_random_model(tmp_path / "damaged")
    (damaged / "model.safetensors").unlink()
    ensure_random_model(damaged)
    assert (damaged / "model.safetensors").read_bytes() == (model_dir / "model.safetensors").read_bytes()


def test_a_rename_lost_to_another_process_is_no_error(tmp_path: Path) -> None:
    first, work = ensure_random_model(tmp_path / "first"), tmp_path / "work"
    work.mkdir()
    random_model._write(work)
    random_model._publish(work, first)
    assert all((first / name).is_file() for name in random_model._FILES)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"the random model cannot be written to .*; set XDG_CACHE_HOME"):
        ensure_random_model(tmp_path / "file" / "random")
    with pytest.raises(ModelError, match="cannot be written"):
        ensure_random_model(tmp_path / "file")


def test_made_by_several_at_once(tmp_path: Path) -> None:
    target = tmp_path / "shared"
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ensure_random_model, [target] * 4)) == [target] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]
    assert sorted(path.name for path in target.iterdir()) == sorted(random_model._FILES)


def test_our_loader_loads_it(model_dir: Path) -> None:
    spec = read_model_spec(model_dir)
    assert (spec.recurrent_layers, spec.attention_layers, spec.vocab_size) == (6, 2, 259)
    assert read_eos_ids(model_dir, spec.vocab_size) == (random_model.IM_END, random_model.END_OF_TEXT)
    assert read_bos_id(model_dir, spec.vocab_size) is None
    assert read_generation_defaults(model_dir) == ({"temperature": 0.7, "top_p": 0.9}, "generation_config.json")
    share = split_ranks(spec)[0]
    params = {param.name: torch.zeros(param.shape) for param in params_of(spec, share)}
    load_weights(model_dir, spec, share, params)
    assert all(tensor.any() for tensor in params.values())


def test_default_directory_is_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ensure_random_model().is_relative_to(tmp_path)


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
    for token, expected in zip(random_model.SPECIAL_TOKENS, range(256, 259), strict=True):
        assert tokenizer(token).input_ids == [expected]
    config = json.loads((model_dir / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.eos_token_id == config["eos_token_id"]
