"""The prefix cache as clients meet it: hits, renders, flushes, salts and explain-miss on a running server."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.random_model import ensure_random_model

PAGE = 64
CHAT, RENDER = "/v1/chat/completions", "/v1/chat/completions/render"
SYSTEM = {"role": "system", "content": "You answer in one short sentence. " * 10}
QUESTION = {"role": "user", "content": "What is the difference between a page and a checkpoint? " * 5}


#: Opens a thought of more than a page behind the messages, and drops it when the turn is over.
THINKING = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>' + 'Let me see. ' * 12 }}{%- endif %}"
)


def body(salt, *messages, **fields):
    return {"messages": list(messages), "cache_salt": salt, "max_tokens": 8, "temperature": 0, **fields}


def post(server, path, content):
    status, _, answer = server.request("POST", path, content)
    assert status == 200, answer
    return answer


def test_the_second_turn_hits_nearly_all_of_the_first_prompt_and_render_says_so_before(live_server):
    first = post(live_server, CHAT, body("turns", SYSTEM, QUESTION))
    assert first["hybserve"]["cache"]["reason"] == "cold"
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    second = body("turns", SYSTEM, QUESTION, answer, {"role": "user", "content": "And a slot?"})
    rendered = post(live_server, RENDER, second)
    hit = rendered["hybserve"]["cache"]["hit"]
    prompt = first["usage"]["prompt_tokens"]
    assert prompt - 2 * PAGE <= hit < rendered["tokens"] == len(rendered["token_ids"])
    assert hit % PAGE == 0
    assert rendered["text"].endswith("And a slot?<|im_end|>\n<|im_start|>assistant\n")
    assert post(live_server, RENDER, second)["hybserve"] == rendered["hybserve"]  # asking changes nothing
    served = post(live_server, CHAT, second)
    assert served["hybserve"]["cache"] == rendered["hybserve"]["cache"]
    assert served["usage"]["prompt_tokens_details"]["cached_tokens"] == hit
    assert served["usage"]["prompt_tokens"] == rendered["tokens"]


def test_another_question_behind_the_same_system_message_hits_it(live_server):
    post(live_server, CHAT, body("system", SYSTEM, QUESTION))
    other = post(live_server, CHAT, body("system", SYSTEM, {"role": "user", "content": "Something else?"}))
    cache = other["hybserve"]["cache"]
    assert len(SYSTEM["content"]) - PAGE <= cache["hit"]


def test_a_template_that_drops_thoughts_hits_up_to_the_generation_prompt(start_server, tmp_path):
    shutil.copytree(ensure_random_model(), tmp_path / "thinking")
    config = tmp_path / "thinking" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": THINKING}))
    server = start_server(f"model.path={tmp_path / 'thinking'}", "cache.checkpoint_every=16K").wait_until_ready()
    end = post(server, RENDER, body("x", SYSTEM, QUESTION, add_generation_prompt=False))["tokens"]
    first = post(server, CHAT, body("x", SYSTEM, QUESTION))
    assert first["usage"]["prompt_tokens"] - end > 2 * PAGE
    answer = {"role": "assistant", "content": "A page holds keys, a checkpoint holds a state."}
    second = post(server, CHAT, body("x", SYSTEM, QUESTION, answer, {"role": "user", "content": "Thanks."}))
    assert second["hybserve"]["cache"]["hit"] == end // PAGE * PAGE


def test_salts_never_share(live_server):
    post(live_server, CHAT, body("one", SYSTEM, QUESTION))
    assert post(live_server, RENDER, body("one", SYSTEM, QUESTION))["hybserve"]["cache"]["hit"] > 0
    for stranger in (body("two", SYSTEM, QUESTION), {"messages": [SYSTEM, QUESTION]}):
        for path in (RENDER, CHAT):
            cache = post(live_server, path, stranger | {"max_tokens": 1})["hybserve"]["cache"]
            assert (cache["hit"], cache["kv_hit"]) == (0, 0), (path, cache)


def test_flush_makes_it_cold(live_server):
    content = body("flush", SYSTEM, QUESTION)
    post(live_server, CHAT, content)
    assert post(live_server, RENDER, content)["hybserve"]["cache"]["hit"] > 0
    flushed = post(live_server, "/flush_cache", None)
    assert set(flushed) == {"pages", "states"}
    assert min(flushed.values()) > 0
    cache = post(live_server, RENDER, content)["hybserve"]["cache"]
    assert (cache["hit"], cache["kv_hit"], cache["reason"]) == (0, 0, "cold")
    again = post(live_server, CHAT, content)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def explain(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hybserve", "explain-miss", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def test_explain_miss_names_the_token(live_server, tmp_path):
    one, other = body("explain", SYSTEM, QUESTION), body("explain", SYSTEM, {"role": "user", "content": "Why?"})
    post(live_server, CHAT, one)
    for name, content in (("one.json", one), ("other.json", other)):
        (tmp_path / name).write_text(json.dumps(content))
    result = explain(tmp_path / "one.json", tmp_path / "other.json", "--url", live_server.url)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) <= 12
    ids, others = (post(live_server, RENDER, content)["token_ids"] for content in (one, other))
    at = next(index for index, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    assert f"First difference: token {at}, in page {at // PAGE}" in result.stdout
    assert f"A has   'a' (id {ord('a')}), then 't is the" in result.stdout
    assert f"B has   'y' (id {ord('y')}), then '?<|im_end|>" in result.stdout
    hit = post(live_server, RENDER, other)["hybserve"]["cache"]["hit"]
    assert f"B would reuse {hit} of its {len(others)} tokens now" in result.stdout


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nowhere"])
def test_explain_miss_without_a_server(url, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    result = explain(tmp_path / "a.txt", tmp_path / "a.txt", "--url", url)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("hybserve: ")
    assert "Traceback" not in result.stderr
