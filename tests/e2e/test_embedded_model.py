"""The trained model that comes with the package: its files, and that it answers as transformers says it does."""

import hashlib
import re

import pytest
import torch
import transformers

from hybserve.launch.prepare import EMBEDDED_DIR
from hybserve.models.load import load_weights
from hybserve.spec.from_hf import read_eos_ids, read_generation_defaults, read_model_spec
from hybserve.spec.inventory import params_of
from hybserve.spec.split import split_ranks

torch.set_num_threads(1)

PROMPTS = ("What is a dictionary?", "Define the verb to learn.", "What is the opposite of big?")


def test_the_checksums_of_the_card_hold():
    card = (EMBEDDED_DIR / "README.md").read_text()
    listed = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", card, re.MULTILINE)}
    assert set(listed) == {path.name for path in EMBEDDED_DIR.iterdir()} - {"README.md"}
    for name, digest in listed.items():
        assert hashlib.sha256((EMBEDDED_DIR / name).read_bytes()).hexdigest() == digest, name


def test_it_is_small():
    assert sum(path.stat().st_size for path in EMBEDDED_DIR.iterdir()) <= 20_000_000


def test_our_loader_loads_it():
    spec = read_model_spec(EMBEDDED_DIR)
    assert (spec.recurrent_layers, spec.attention_layers, spec.vocab_size) == (6, 2, 8192)
    assert read_eos_ids(EMBEDDED_DIR, spec.vocab_size) == (2, 0)
    assert read_generation_defaults(EMBEDDED_DIR)[0] == {"temperature": 0.0}
    share = split_ranks(spec)[0]
    params = {param.name: torch.zeros(param.shape, dtype=torch.bfloat16) for param in params_of(spec, share)}
    load_weights(EMBEDDED_DIR, spec, share, params)
    assert all(tensor.any() and tensor.isfinite().all() for tensor in params.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_greedy_answers_equal_those_of_transformers(start_server, dtype):
    """In fp32 also the second turn, behind a reused prefix; bf16 rounds too much to promise more than the first."""
    transformers.logging.disable_progress_bar()
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_DIR, dtype=kind, output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED_DIR)
    server = start_server(f"model.path={EMBEDDED_DIR}", f"model.dtype={dtype}", "cache.page_size=16")
    server.wait_until_ready()
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        for turn in range(2 if dtype == "fp32" else 1):
            if turn:
                messages.append({"role": "user", "content": "What else does it mean?"})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
            expected = model.generate(ids, max_new_tokens=100, do_sample=False)[0, ids.shape[1] :]
            assert expected[-1] == tokenizer.eos_token_id  # it ends by itself
            status, _, body = server.request("POST", "/v1/chat/completions", {"messages": messages})
            assert status == 200, body
            answer = body["choices"][0]
            assert answer["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True)
            assert answer["finish_reason"] == "stop"
            assert body["usage"]["prompt_tokens"] == ids.shape[1]
            assert body["usage"]["completion_tokens"] == len(expected)
            messages.append({"role": "assistant", "content": answer["message"]["content"]})


def test_the_template_only_appends():
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED_DIR)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
    longer = tokenizer.apply_chat_template([*turns, turns[0]], add_generation_prompt=True, tokenize=False)
    assert longer.startswith(prompt + "Hello!<|im_end|>\n")
