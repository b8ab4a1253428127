"""HTTP load against any OpenAI-compatible server: TTFT, ITL, TPOT, whole latency and throughput, as JSON.

    python -m bench serve --url http://127.0.0.1:8000 --concurrency 64 --requests 512 --input 512 --output 128
    python -m bench serve --url ... --rate 20          open loop: Poisson arrivals, latencies from the intended start
    python -m bench serve                              starts `hybserve serve` with its default model first
    python -m bench serve --model m1 [--scenario c64]  the model's server with random weights, and the load that a peer
                                                       was measured with on an H200: ours, the bar, the peer

Output lengths are fixed with ``ignore_eos``. Prompts are random token ids (completions) or random words (chat, or a
server whose vocabulary is not known), so no two share a prefix. A run whose client took more than 80 % of a core is
marked invalid: it measured the client.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import RESULTS, circumstances, percentile
from bench.dummy import MODELS
from bench.http_client import Client, Reply
from bench.server import EMBEDDED, ON_GPU, Server, own_server

PACKAGES = ("uvicorn", "starlette", "h11", "msgspec", "torch")
MAX_CLIENT_CPU = 0.8
PERCENTILES = (50, 90, 95, 99)
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvwxz" for vowel in "aeiou"]


class Load(NamedTuple):
    """``rate`` (arrivals a second) None = a closed loop of ``concurrency``; the warm-up has that concurrency too."""

    input: int
    output: int
    requests: int
    concurrency: int
    warmup: int
    rate: float | None = None


class Bar(NamedTuple):
    """One figure of a scenario, on an H200 with m1: ``peer`` is vLLM 0.26's, ``bar`` what has to be reached."""

    what: str
    of: Callable[[dict[str, Any]], float]
    bar: float | None
    peer: float | None
    more_is_better: bool = False


def _rate(results: dict[str, Any]) -> float:
    return float(results["requests_per_s"])


def _at(name: str, percent: int) -> Callable[[dict[str, Any]], float]:
    return lambda results: float((results[name] or {}).get(f"p{percent}", float("nan")))


_ALONE = (
    Bar("TTFT p50, ms", _at("ttft_ms", 50), 20, 68),
    Bar("TPOT p50, ms", _at("tpot_ms", 50), 4.4, 5.3),
)
#: The loads of the comparison, by name, and what is read off them.
SCENARIOS: dict[str, tuple[Load, tuple[Bar, ...]]] = {
    "c64": (
        Load(input=512, output=128, requests=512, concurrency=64, warmup=64),
        (
            Bar("requests/s", _rate, 42, 34.5, more_is_better=True),
            Bar("TTFT p50, ms", _at("ttft_ms", 50), 400, 563),
            Bar("TTFT p99, ms", _at("ttft_ms", 99), None, 926),
            Bar("ITL p50, ms", _at("itl_ms", 50), None, 7.7),
            Bar("ITL p99, ms", _at("itl_ms", 99), 40, 181),
        ),
    ),
    "c1": (Load(input=128, output=128, requests=8, concurrency=1, warmup=2), _ALONE),
    "c1_512": (Load(input=512, output=128, requests=8, concurrency=1, warmup=2), _ALONE),
}
READY_BAR = 30.0  # seconds to ready; the peer took 122 s


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench serve", description="HTTP load generator.")
    parser.add_argument("--url", help="server to load; without it one is started")
    parser.add_argument("--model", choices=(EMBEDDED, *MODELS), default=EMBEDDED, help="what the started server serves")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="settings of the server that is started"
    )
    parser.add_argument(
        "--scenario",
        action="append",
        choices=tuple(SCENARIOS),
        help="loads with a peer's figures, instead of the options below (default for m1 and m2: all)",
    )
    parser.add_argument("--name", help="model name to send (default: the first of /v1/models)")
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
    parser.add_argument("--out", type=Path, help="file of the figures (default: in BENCH_RESULTS or bench/results)")
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
    if options.scenario is None and options.url is None and options.model in ON_GPU:
        options.scenario = list(SCENARIOS)
    return options


def loads(options: argparse.Namespace) -> list[tuple[str | None, Load]]:
    """The runs that were asked for; those of the comparison with their names."""
    if options.scenario:
        return [(name, SCENARIOS[name][0]) for name in options.scenario]
    counts = options.concurrency if options.rate is None else options.concurrency[:1]
    return [
        (None, Load(options.input, options.output, options.requests, count, options.warmup, options.rate))
        for count in counts
    ]


# what is sent


class Prompts:
    """Bodies of requests as JSON, random and distinct, equal for equal seeds."""

    def __init__(self, options: argparse.Namespace, load: Load, model: str, vocab: int | None, seed: int) -> None:
        self._chat, self._load, self._model, self._vocab = options.api == "chat", load, model, vocab
        self._random = random.Random(seed)
        self.kind = options.prompts or ("tokens" if not self._chat and vocab else "words")
        if self.kind == "tokens" and not vocab:
            raise SystemExit("the server does not say its vocabulary: give --vocab, or --prompts words")

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self._chat else "/v1/completions"

    def bodies(self, count: int) -> list[bytes]:
        return [json.dumps(self._body()).encode() for _ in range(count)]

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._chat:
            message = {"role": "user", "content": self._words()}
            return body | {"messages": [message], "max_completion_tokens": self._load.output}
        prompt = self._tokens() if self.kind == "tokens" else self._words()
        return body | {"prompt": prompt, "max_tokens": self._load.output}

    def _tokens(self) -> list[int]:
        assert self._vocab is not None
        return [self._random.randrange(self._vocab) for _ in range(self._load.input)]

    def _words(self) -> str:
        pick = self._random.choice
        return " ".join(pick(_SYLLABLES) + pick(_SYLLABLES) for _ in range(self._load.input))


async def closed_loop(client: Client, path: str, bodies: list[bytes], concurrency: int) -> list[Reply]:
    """``concurrency`` workers, each sends its next request when the last is answered."""
    replies: list[Reply] = []
    waiting = iter(bodies)

    async def work() -> None:
        for body in waiting:
            replies.append(await client.post(path, body))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return replies


async def open_loop(
    client: Client, path: str, bodies: list[bytes], rate: float, seed: int
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
    cached = [((reply.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens", 0) for reply in good]
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
        "cached_share": round(sum(cached) / max(sum(inputs), 1), 4),
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


async def run_load(
    options: argparse.Namespace, load: Load, url: str, seed: int, server: Server | None = None
) -> dict[str, Any]:
    """One run. ``server``: the one behind ``url`` if it is ours, to see what its processes cost."""
    key = os.environ[options.api_key_env] if options.api_key_env else None
    entry = (await asyncio.to_thread(get_json, f"{url}/v1/models", key))["data"][0]
    facts = entry.get("hybserve") or {}
    prompts = Prompts(options, load, options.name or entry["id"], options.vocab or facts.get("vocab_size"), seed)
    client = Client(url, key, options.timeout)
    await closed_loop(client, prompts.path, prompts.bodies(load.warmup), load.concurrency)
    bodies = prompts.bodies(load.requests)
    costs = server.cpu_seconds() if server else {}
    with _no_collector():
        cpu, began, late = time.process_time(), time.monotonic(), 0.0
        if load.rate is None:
            replies = await closed_loop(client, prompts.path, bodies, load.concurrency)
        else:
            replies, late = await open_loop(client, prompts.path, bodies, load.rate, seed)
        wall = time.monotonic() - began
        share = (time.process_time() - cpu) / wall
    after = server.cpu_seconds() if server else {}
    client.close()
    loop = {"concurrency": load.concurrency} if load.rate is None else {"rate": load.rate}
    return {
        "server": {"model": entry["id"], "max_model_len": entry.get("max_model_len"), "version": facts.get("version")},
        "load": {
            "api": options.api,
            "prompts": prompts.kind,
            "input": load.input,
            "output": load.output,
            "seed": seed,
            **loop,
        },
        "results": summarise(replies, wall),
        "cpu_share": {name: round((after[name] - seconds) / wall, 3) for name, seconds in costs.items()},
        "client": {"cpu_share": round(share, 3), "latest_send_ms": round(late * 1000, 3)},
        "valid": share <= MAX_CLIENT_CPU,
    }


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """A pause of the client's garbage collector would be measured as one of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _gpu() -> str | None:
    command = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def show(report: dict[str, Any]) -> None:
    results, load = report["results"], report["load"]
    kind = "rate" if "rate" in load else "concurrency"
    print(
        f"{kind} {load[kind]}: {results['requests']} requests ({results['failed']} failed) in {results['wall_s']} s: "
        f"{results['requests_per_s']} req/s, {results['output_tokens_per_s']} output tok/s, "
        f"{results['cached_share']:.1%} of the prompts reused"
    )
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        if results[name]:
            print(f"  {name:8}", "  ".join(f"{key} {value:.1f}" for key, value in results[name].items()))
    if report["cpu_share"]:
        print("  cores    ", "  ".join(f"{name} {share:.2f}" for name, share in report["cpu_share"].items()))
    for error, count in results["errors"].items():
        print(f"  {count} x {error}")
    if not report["valid"]:
        print(f"INVALID: the client took {report['client']['cpu_share']:.0%} of a core; it measured itself")


def compare(runs: list[dict[str, Any]], ready_s: float | None, same_model: bool = True) -> list[str]:
    """The table of ours, the bar and the peer; what misses its bar is marked. Bars are known for m1 alone."""
    lines = [f"{'scenario':<10}{'':<16}{'ours':>10}{'bar':>10}{'peer':>10}"]
    rows = []
    if ready_s is not None:
        rows.append(("start", Bar("ready, s", lambda _: 0.0, READY_BAR, 122), ready_s))
    for run in runs:
        for bar in SCENARIOS[run["scenario"]][1]:
            rows.append((run["scenario"], bar, bar.of(run["results"])))
    for name, bar, ours in rows:
        bar = bar if same_model else bar._replace(bar=None, peer=None)
        met = bar.bar is None or (ours >= bar.bar if bar.more_is_better else ours <= bar.bar)
        lines.append(
            f"{name:<10}{bar.what:<16}{ours:>10.1f}{_number(bar.bar)}{_number(bar.peer)}{'' if met else '  !'}"
        )
    return lines


def _number(value: float | None) -> str:
    return f"{'–' if value is None else f'{value:g}':>10}"


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 for valid runs without failures."""
    options = arguments(argv)
    with contextlib.ExitStack() as stack:
        server, url = None, options.url
        if url is None:
            server = stack.enter_context(own_server(options.model, options.set))
            print(*server.report, f"ready after {server.ready_s:.1f} s", sep="\n", flush=True)
            url = server.url
        url = url.rstrip("/").removesuffix("/v1")
        runs = []
        for index, (name, load) in enumerate(loads(options)):
            # a seed of its own: prompts of the run before may lie in the server's prefix cache
            run = asyncio.run(run_load(options, load, url, options.seed + index, server))
            runs.append({"scenario": name} | run)
            show(runs[-1])
    if options.scenario:
        print(*compare(runs, server.ready_s if server else None, options.model == "m1"), sep="\n")
    path = _record(options, argv, server, runs)
    print(f"written to {path}")
    return 0 if all(run["valid"] and not run["results"]["failed"] for run in runs) else 1


def _record(
    options: argparse.Namespace, argv: list[str] | None, server: Server | None, runs: list[dict[str, Any]]
) -> Path:
    command = ["python", "-m", "bench", "serve", *(sys.argv[1:] if argv is None else argv)]
    report = {"bench": "serve", **circumstances(command, PACKAGES), "gpu": _gpu()}
    if server is not None:
        report |= {"ready_s": round(server.ready_s, 2), "stages_s": server.stages}
    name = f"serve_gpu_{options.model}.json" if options.model in ON_GPU else "serve.json"
    path: Path = options.out or Path(os.environ.get("BENCH_RESULTS", RESULTS)) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report | {"runs": runs}, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
