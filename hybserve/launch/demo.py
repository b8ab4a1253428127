"""``hybserve demo``: serve the embedded model on a free port, stream one answer to the terminal, stop."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from hybserve.core.errors import EXIT_FATAL, EXIT_OK
from hybserve.launch.group import child_environment

_QUESTION = "Say something."
_BODY = {
    "messages": [{"role": "user", "content": _QUESTION}],
    "max_tokens": 64,
    "temperature": 0.7,
    "seed": 7,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_READY = re.compile(r"ready at http://([^:/]+):([0-9]+)")


def demo() -> int:
    """Exit code 0 when an answer was streamed and the server ended by itself."""
    server = subprocess.Popen(
        [sys.executable, "-m", "hybserve", "serve", "--set", "server.port=0", "--set", "log.level=error"],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    try:
        address = _wait_until_ready(server)
        if address is None:
            print("hybserve: the server did not start; its lines above say why", file=sys.stderr)
            return server.wait() or EXIT_FATAL
        _stream(*address)
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


def _stream(host: str, port: int) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=60)
    began = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(_BODY), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}: {response.read().decode()}")
    print(f"\n> {_QUESTION}\n")
    first = 0.0
    usage: dict[str, Any] = {}
    for event in _events(response):
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        usage = event if event.get("usage") else usage
        for choice in event["choices"]:
            first = first or time.monotonic() - began
            print(choice["delta"].get("content") or "", end="", flush=True)
    connection.close()
    print(f"\n\n{_summary(usage, first)}")


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
        f"{truth.get('tok_per_s', 0):.0f} tokens/s; random weights, so the words are noise"
    )
