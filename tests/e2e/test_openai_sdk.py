"""openai-python, in a process of its own, against a live server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLIENT = Path(__file__).with_name("openai_client.py")
CHECKS = [
    "models", "chat", "chat_stream", "no_usage_chunk_unless_asked", "completion", "completion_of_a_batch",
    "two_choices", "seeds", "chat_logprobs", "completion_logprobs_with_echo", "stop_strings_end_the_text",
    "bad_requests", "a_bad_streaming_request_raises_too", "not_found",
]  # fmt: skip


def run_client(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CLIENT, *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def results(live_server) -> dict[str, str]:
    done = run_client(live_server.url)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CHECKS)
def test_openai_python(results, name):
    assert results[name] == "ok", results[name]


def test_every_check_is_listed(results):
    assert sorted(results) == sorted(CHECKS)
