"""The embedded model as a newcomer meets it, on this machine's CPUs: ready, first token, tokens a second.

    python -m bench embedded [--starts N]     bars on 2 cores: 10 s, 1 s, 20 tokens/s

A start is ``hybserve serve`` with nothing else said, from the command to the line that says where it is ready. The
first token and the speed are those of one streamed request at a time, over HTTP, after one request that is not counted.
"""

import argparse
import contextlib
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from bench import ROOT, record

QUESTIONS = (
    "What is a dictionary?",
    "What does the verb learn mean?",
    "What is the opposite of big?",
    "What does quickly mean?",
)
ANSWER = 64  # tokens, past the end of the answer, so that there is something to time


@contextlib.contextmanager
def server() -> Iterator[tuple[float, str, int]]:
    """A server; seconds to ready, host and port."""
    began = time.monotonic()
    command = [sys.executable, "-m", "hybserve", "serve", "--set", "server.port=0", "--set", "log.level=error"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.match(r"ready at http://([^:/]+):([0-9]+)", line):
                yield time.monotonic() - began, found.group(1), int(found.group(2))
                return
        raise RuntimeError("the server did not get ready")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def ask(host: str, port: int, question: str) -> tuple[float, float]:
    """Seconds to the first token, and tokens a second from there to the last one."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": ANSWER, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(host, port, timeout=120)
    began = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    first = last = 0.0
    tokens = 0
    for raw in connection.getresponse():
        if not raw.startswith(b"data: {"):
            continue
        event = json.loads(raw.removeprefix(b"data: "))
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            last = time.monotonic()  # of the event that ends it too: tokens without a text of their own are tokens
            if choice["delta"].get("content"):
                first = first or last
    connection.close()
    return first - began, (tokens - 1) / (last - first)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench embedded")
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args(arguments)
    starts, firsts, speeds = [], [], []
    for _ in range(options.starts):
        with server() as (seconds, host, port):
            starts.append(round(seconds, 2))
            ask(host, port, "Hello!")
            for question in QUESTIONS:
                first, speed = ask(host, port, question)
                firsts.append(first)
                speeds.append(speed)
    figures = {
        "ready_s": {"median": statistics.median(starts), "all": starts, "bar": 10},
        "first_token_s": {"median": round(statistics.median(firsts), 3), "worst": round(max(firsts), 3), "bar": 1},
        "tokens_per_s": {"median": round(statistics.median(speeds), 1), "worst": round(min(speeds), 1), "bar": 20},
        "requests": len(firsts),
    }
    path = record("embedded", figures, ["python", "-m", "bench", "embedded", *arguments], ["torch"])
    print(json.dumps(figures, indent=1))
    print(path)
    return 0
