"""HTTP load against any OpenAI-compatible server: TTFT, ITL, TPOT, whole latency and throughput, as JSON.

    python -m bench serve --url http://127.0.0.1:8000 --concurrency 64 --requests 512 --input 512 --output 128
    python -m bench serve --url ... --rate 20          open loop: Poisson arrivals, latencies from the intended start
    python -m bench serve                              starts `hybserve serve` with its default model first

Output lengths are fixed with ``ignore_eos``. Prompts are random token ids (completions) or random words (chat, or a
server whose vocabulary is not known), so no two share a prefix. A run whose client took more than 80 % of a core is
marked invalid: it measured the client.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import RESULTS, ROOT, circumstances, percentile
from bench.http_client import Client, Reply

PACKAGES = ("uvicorn", "starlette", "h11", "msgspec", "torch")
MAX_CLIENT_CPU = 0.8
PERCENTILES = (50, 90, 95, 99)
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvwxz" for vowel in "aeiou"]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench serve", description="HTTP load generator.")
    parser.add_argument("--url", help="server to load; without it one is started with its default model")
    parser.add_argument("--model", help="name to send (default: the first of /v1/models)")
    parser.add_argument("--api", choices=("completions", "chat"), default="completions")
    parser.add_argument(
        "--prompts", choices=("tokens", "words"), help="default: tokens for completions, words for chat"
    )
    parser.add_argument("--vocab", type=int, help="token ids are drawn below this (default: what the server says)")
    parser.add_argument("--input", type=int, default=64, help="tokens (or words) of a prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens to generate")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[8], help="closed loop: requests in flight; one run for each"
    )
    parser.add_argument("--rate", type=float, help="open loop: mean arrivals per second; concurrency is unbounded")
    parser.add_argument("--warmup", type=int, default=4, help="requests before the measured ones")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key-env", help="environment variable that holds the API key")
    parser.add_argument("--out", type=Path, default=RESULTS / "serve.json")
    options = parser.parse_args(argv)
    for name in ("input", "output", "requests"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if min(options.concurrency) < 1:
        parser.error("--concurrency must be at least 1")
    if options.rate is not None and options.rate <= 0:
        parser.error("--rate must be above 0")
    if options.api == "chat" and options.prompts == "tokens":
        parser.error("chat prompts are words")
    return options


# what is sent


class Prompts:
    """Bodies of requests, random and distinct, equal for equal seeds."""

    def __init__(self, options: argparse.Namespace, model: str, vocab: int | None, seed: int) -> None:
        self._options, self._model, self._vocab = options, model, vocab
        self._random = random.Random(seed)
        self.kind = options.prompts or ("tokens" if options.api == "completions" and vocab else "words")
        if self.kind == "tokens" and not vocab:
            raise SystemExit("the server does not say its vocabulary: give --vocab, or --prompts words")

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self._options.api == "chat" else "/v1/completions"

    def body(self) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.api == "chat":
            message = {"role": "user", "content": self._words()}
            return body | {"messages": [message], "max_completion_tokens": options.output}
        prompt = self._tokens() if self.kind == "tokens" else self._words()
        return body | {"prompt": prompt, "max_tokens": options.output}

    def _tokens(self) -> list[int]:
        assert self._vocab is not None
        return [self._random.randrange(self._vocab) for _ in range(self._options.input)]

    def _words(self) -> str:
        pick = self._random.choice
        return " ".join(pick(_SYLLABLES) + pick(_SYLLABLES) for _ in range(self._options.input))


async def closed_loop(client: Client, path: str, bodies: list[dict[str, Any]], concurrency: int) -> list[Reply]:
    """``concurrency`` workers, each sends its next request when the last is answered."""
    replies: list[Reply] = []
    waiting = iter(bodies)

    async def work() -> None:
        for body in waiting:
            replies.append(await client.post(path, body))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return replies


async def open_loop(
    client: Client, path: str, bodies: list[dict[str, Any]], rate: float, seed: int
) -> tuple[list[Reply], float]:
    """Poisson arrivals; also the largest delay of a send against its plan."""
    arrivals = random.Random(seed + 1)
    at, worst, tasks = time.monotonic(), 0.0, []
    for body in bodies:
        at += arrivals.expovariate(rate)
        await asyncio.sleep(max(at - time.monotonic(), 0))
        worst = max(worst, time.monotonic() - at)
        tasks.append(asyncio.create_task(client.post(path, body, started=at)))
    return await asyncio.gather(*tasks), worst


# what came back


def spread(seconds: list[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds."""
    if not seconds:
        return None
    values = sorted(value * 1000 for value in seconds)
    table = {"mean": sum(values) / len(values), "max": values[-1]}
    table |= {f"p{percent}": percentile(values, percent / 100) for percent in PERCENTILES}
    return {key: round(value, 3) for key, value in table.items()}


def summarise(replies: list[Reply], wall: float) -> dict[str, Any]:
    """The figures of a run. TTFT ends and ITL counts at events with choices, as OpenAI clients measure them."""
    good = [reply for reply in replies if reply.error is None and reply.times]
    errors: dict[str, int] = {}
    for reply in replies:
        if reply.error is not None:
            errors[f"{reply.status}: {reply.error}"[:200]] = errors.get(f"{reply.status}: {reply.error}"[:200], 0) + 1
    gaps = [b - a for reply in good for a, b in zip(reply.times, reply.times[1:], strict=False)]
    outputs = [_tokens(reply, "completion_tokens", len(reply.times)) for reply in good]
    inputs = [_tokens(reply, "prompt_tokens", 0) for reply in good]
    tpot = [
        (reply.times[-1] - reply.times[0]) / (count - 1)
        for reply, count in zip(good, outputs, strict=True)
        if count > 1
    ]
    return {
        "requests": len(replies),
        "failed": len(replies) - len(good),
        "errors": errors,
        "wall_s": round(wall, 3),
        "input_tokens": sum(inputs),
        "output_tokens": sum(outputs),
        "requests_per_s": round(len(good) / wall, 3),
        "output_tokens_per_s": round(sum(outputs) / wall, 2),
        "total_tokens_per_s": round((sum(inputs) + sum(outputs)) / wall, 2),
        "ttft_ms": spread([reply.times[0] - reply.started for reply in good]),
        "itl_ms": spread(gaps),
        "tpot_ms": spread(tpot),
        "e2e_ms": spread([reply.ended - reply.started for reply in good]),
    }


def _tokens(reply: Reply, key: str, otherwise: int) -> int:
    return int(reply.usage[key]) if reply.usage else otherwise


# the run


def get_json(url: str, key: str | None) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


async def run_load(options: argparse.Namespace, url: str, concurrency: int, seed: int) -> dict[str, Any]:
    """One run. With a rate the concurrency is that of the warm-up only."""
    key = os.environ[options.api_key_env] if options.api_key_env else None
    entry = (await asyncio.to_thread(get_json, f"{url}/v1/models", key))["data"][0]
    facts = entry.get("hybserve") or {}
    prompts = Prompts(options, options.model or entry["id"], options.vocab or facts.get("vocab_size"), seed)
    client = Client(url, key, options.timeout)
    await closed_loop(client, prompts.path, [prompts.body() for _ in range(options.warmup)], concurrency)
    bodies = [prompts.body() for _ in range(options.requests)]
    cpu, began, late = time.process_time(), time.monotonic(), 0.0
    if options.rate is None:
        replies = await closed_loop(client, prompts.path, bodies, concurrency)
    else:
        replies, late = await open_loop(client, prompts.path, bodies, options.rate, seed)
    wall = time.monotonic() - began
    share = (time.process_time() - cpu) / wall
    client.close()
    loop = {"concurrency": concurrency} if options.rate is None else {"rate": options.rate}
    return {
        "server": {"model": entry["id"], "max_model_len": entry.get("max_model_len"), "version": facts.get("version")},
        "load": {
            "api": options.api,
            "prompts": prompts.kind,
            "input": options.input,
            "output": options.output,
            "seed": seed,
            **loop,
        },
        "results": summarise(replies, wall),
        "client": {"cpu_share": round(share, 3), "latest_send_ms": round(late * 1000, 3)},
        "valid": share <= MAX_CLIENT_CPU,
    }


def _gpu() -> str | None:
    command = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """`hybserve serve` with its default model on a free port; its URL, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "hybserve", "serve", "--set", f"server.port={port}", "--set", "log.level=warning"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not get ready")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return bool(get_json(f"{url}/health/ready", None)["status"] == "ready")
    except OSError:
        return False


def show(report: dict[str, Any]) -> None:
    results, load = report["results"], report["load"]
    kind = "rate" if "rate" in load else "concurrency"
    print(
        f"{kind} {load[kind]}: {results['requests']} requests ({results['failed']} failed) in {results['wall_s']} s: "
        f"{results['requests_per_s']} req/s, {results['output_tokens_per_s']} output tok/s"
    )
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        if results[name]:
            print(f"  {name:8}", "  ".join(f"{key} {value:.1f}" for key, value in results[name].items()))
    for error, count in results["errors"].items():
        print(f"  {count} x {error}")
    if not report["valid"]:
        print(f"INVALID: the client took {report['client']['cpu_share']:.0%} of a core; it measured itself")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 for a valid run without failures."""
    options = arguments(argv)
    with contextlib.ExitStack() as stack:
        url = (options.url or stack.enter_context(own_server())).rstrip("/").removesuffix("/v1")
        runs = []
        for index, concurrency in enumerate(options.concurrency if options.rate is None else options.concurrency[:1]):
            # a seed of its own: prompts of the run before may lie in the server's prefix cache
            runs.append(asyncio.run(run_load(options, url, concurrency, options.seed + index)))
            show(runs[-1])
    command = ["python", "-m", "bench", "serve", *(sys.argv[1:] if argv is None else argv)]
    report = {"bench": "serve", **circumstances(command, PACKAGES), "gpu": _gpu(), "runs": runs}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {options.out}")
    return 0 if all(run["valid"] and not run["results"]["failed"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
