"""``hybserve demo``: serve the embedded model on a free port, stream a conversation to the terminal, stop."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from hybserve.core.errors import EXIT_FATAL, EXIT_OK
from hybserve.launch.group import child_environment
from hybserve.launch.role import die_with_parent

_SYSTEM = "You are a helpful dictionary of English."
_QUESTIONS = ("What is a dictionary?", "Is there another word for it?")
#: Small pages, so that even so short a conversation has whole ones to reuse.
_SETTINGS = ("server.port=0", "log.level=error", "cache.page_size=16", "engine.backend=cpu")
_READY = re.compile(r"ready at http://([^:/]+):([0-9]+)")


def demo() -> int:
    """Exit code 0 when both answers were streamed and the server ended by itself."""
    server = subprocess.Popen(
        [sys.executable, "-m", "hybserve", "serve", *(part for text in _SETTINGS for part in ("--set", text))],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
        preexec_fn=partial(die_with_parent, os.getpid()),  # killed, the demo could not stop it
    )
    try:
        address = _wait_until_ready(server)
        if address is None:
            print("hybserve: the server did not start; its lines above say why", file=sys.stderr)
            return server.wait() or EXIT_FATAL
        messages = [{"role": "system", "content": _SYSTEM}]
        for question in _QUESTIONS:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": _stream(*address, messages)})
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.send_signal(signal.SIGTERM)
        code = server.wait()
    print(f"the server drained and ended with exit code {code}")
    return EXIT_OK if code == EXIT_OK else EXIT_FATAL


def _wait_until_ready(server: subprocess.Popen[str]) -> tuple[str, int] | None:
    """Show the startup report as it comes; the address from its last line, None if the server ends before."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if found := _READY.match(line):
            return found.group(1), int(found.group(2))
    return None


def _stream(host: str, port: int, messages: list[dict[str, str]]) -> str:
    """Show the answer to the last of ``messages`` as it comes, and what the server says of it; returns the answer."""
    body = {"messages": messages, "max_tokens": 128, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(host, port, timeout=60)
    began = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}: {response.read().decode()}")
    print(f"\n> {messages[-1]['content']}\n")
    first, answer = 0.0, ""
    usage: dict[str, Any] = {}
    for event in _events(response):
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        usage = event if event.get("usage") else usage
        for choice in event["choices"]:
            first = first or time.monotonic() - began
            text = choice["delta"].get("content") or ""
            answer += text
            print(text, end="", flush=True)
    connection.close()
    print(f"\n\n{_summary(usage, first)}")
    return answer


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for raw in response:
        line = raw.decode().strip()
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _summary(last: dict[str, Any], first: float) -> str:
    usage = last.get("usage", {})
    truth = last.get("hybserve", {})
    cache = truth.get("cache", {})
    return (
        f"{usage.get('prompt_tokens', 0)} prompt + {usage.get('completion_tokens', 0)} completion tokens, "
        f"{cache.get('hit', 0)} cached ({cache.get('reason', 'cold')}), first token after {first * 1000:.0f} ms, "
        f"{truth.get('tok_per_s', 0):.0f} tokens/s"
    )
