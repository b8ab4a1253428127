"""The engine on a GPU without HTTP: scheduler, loop and runner in one process, random weights, random token ids.

    python -m bench gpu [--model m1|m2] [--only decode,prefill,…] [--set engine.max_running=…]

Every scenario of the table is a list of requests; times are taken where a client would see them: from the request to
its tokens. Greedy, no stop ids, prefix cache on. ``peer`` and ``limit`` are vLLM 0.26's figure and the physical limit
on an H200 for the same scenario; ``bar`` is what has to be beaten.
"""

import argparse
import gc
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import RESULTS, circumstances
from bench.dummy import MODELS
from bench.gpu_profile import breakdown, kernels_of, steps_before
from hybserve.config.deployment import Deployment
from hybserve.core.messages import Failed, Finished, FromScheduler, Generate, Tokens, ToScheduler
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import CacheTruth
from hybserve.plan.facts import MemoryFacts
from hybserve.plan.planner import make_plan
from hybserve.runner.main import build_runner
from hybserve.runner.memory import drift
from hybserve.scheduler.loop import Loop
from hybserve.scheduler.scheduler import Scheduler
from hybserve.spec.from_hf import read_model_spec


class Figure(NamedTuple):
    what: str
    ours: float
    unit: str
    bar: float | None = None
    peer: float | None = None
    limit: float | None = None
    more: str = ""


class Asked(NamedTuple):
    prompt: list[int]
    new: int


class Answer:
    """What a client saw of one request: times in seconds."""

    def __init__(self, asked: Asked, begun: float) -> None:
        self.asked, self.begun = asked, begun
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.cache = CacheTruth()
        self.done = False

    @property
    def first(self) -> float:
        return self.times[0] - self.begun


class Client:
    """The text role's end of the engine loop: holds what it is asked to send, notes what comes back and when."""

    def __init__(self) -> None:
        self.inbox: list[ToScheduler] = []
        self.answers: dict[int, Answer] = {}
        self.open = 0
        self.widths: list[tuple[float, int]] = []  # of every message with tokens: when, and how many

    def send(self, messages: list[FromScheduler]) -> None:
        now = time.perf_counter()
        for message in messages:
            if isinstance(message, Tokens):
                self.widths.append((now, len(message.uids)))
                for uid, token in zip(message.uids, message.tokens, strict=True):
                    answer = self.answers[uid]
                    answer.tokens.append(token)
                    answer.times.append(now)
            elif isinstance(message, Finished):
                self.answers[message.uid].cache = message.cache
                self._end(message.uid)
            elif isinstance(message, Failed):
                raise RuntimeError(f"request {message.uid} failed: {message.error}")

    def _end(self, uid: int) -> None:
        self.answers[uid].done = True
        self.open -= 1

    def receive(self, timeout: float | None = None) -> list[ToScheduler]:
        messages, self.inbox = self.inbox, []
        return messages


class Engine:
    """A whole engine on the GPU with dummy weights."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(MODELS[model]))
            self.spec = read_model_spec(Path(directory))
            values: dict[str, Any] = {
                "model": {"load": "dummy", "path": directory},
                "engine": {"backend": "cuda", "max_running": 256, "max_seq_len": 40960},
            }
            for key, value in settings.items():
                section, name = key.split(".")
                values.setdefault(section, {})[name] = value
            self.deployment = Deployment.build(values)
            free, _ = torch.cuda.mem_get_info()
            self.plan = make_plan(self.spec, self.deployment, MemoryFacts("cuda", int(free * 0.93)))
            limits = self.plan.engine
            assert limits is not None, f"{model} does not fit: {self.plan.shortfalls}"
            self.limits = limits
            self.runner = build_runner(self.deployment, self.spec, limits, Path(directory))
        torch.cuda.synchronize()
        self.start_seconds = time.perf_counter() - began
        self.client = Client()
        self.scheduler = Scheduler(limits, 1 << 16, None, time.monotonic)
        self.loop = Loop(self.scheduler, self.runner, self.client)
        self._uid = 0
        self._random = random.Random(1)
        gc.collect()
        gc.freeze()

    def ids(self, count: int) -> list[int]:
        return [self._random.randrange(self.spec.vocab_size) for _ in range(count)]

    def ask(self, asked: Asked) -> Answer:
        self._uid += 1
        answer = self.client.answers[self._uid] = Answer(asked, time.perf_counter())
        sampling = SamplingParams(temperature=0.0, max_tokens=asked.new)
        anchors = [len(asked.prompt)]
        self.client.inbox.append(
            Generate(self._uid, asked.prompt, sampling, 1, "", "", 0, time.monotonic(), 0.0, anchors)
        )
        self.client.open += 1
        return answer

    def run(self, requests: Iterable[Asked | Callable[[], Asked]], concurrency: int = 1 << 30) -> list[Answer]:
        """Answers in the order of the requests; a callable is asked for its request when its turn comes."""
        waiting, answers = deque(requests), []
        self.client.widths.clear()
        while waiting or self.client.open or self.loop.busy:
            while waiting and self.client.open < concurrency:
                asked = waiting.popleft()
                answers.append(self.ask(asked() if callable(asked) else asked))
            self.loop.turn(0.0)
        return answers

    def step_gap(self, rows: int) -> float:
        """Median milliseconds between steps in which ``rows`` sequences all decoded."""
        whole = [when for when, width in self.client.widths if width == rows]
        gaps = [after - before for before, after in pairwise(whole)]
        return 1e3 * statistics.median(gaps[len(gaps) // 8 :])


def decode(engine: Engine, figures: dict[int, tuple[float, float, float]]) -> Iterator[Figure]:
    for rows, (bar, peer, limit) in figures.items():
        engine.run([Asked(engine.ids(128), 256 if rows <= 64 else 160) for _ in range(rows)])
        yield Figure(f"decode ms/step, B = {rows}", engine.step_gap(rows), "ms", bar, peer, limit)


def prefill(engine: Engine, figures: dict[int, tuple[float, float, float]]) -> Iterator[Figure]:
    for tokens, (bar, peer, limit) in figures.items():
        times = [1e3 * engine.run([Asked(engine.ids(tokens), 1)])[0].first for _ in range(4)]
        yield Figure(f"prefill {tokens}, batch 1", statistics.median(times[1:]), "ms", bar, peer, limit)


def lone(engine: Engine, bar: float, peer: float, limit: float | None) -> Iterator[Figure]:
    times = [1e3 * engine.run([Asked(engine.ids(128), 1)])[0].first for _ in range(8)]
    yield Figure("TTFT of a lone 128-token prompt", statistics.median(times[1:]), "ms", bar, peer, limit)


def _seconds(engine: Engine, requests: list[Asked], concurrency: int = 1 << 30) -> tuple[float, list[Answer]]:
    began = time.perf_counter()
    answers = engine.run(requests, concurrency)
    return time.perf_counter() - began, answers


def long_batch(engine: Engine) -> Iterator[Figure]:
    seconds, _ = _seconds(engine, [Asked(engine.ids(32_000), 64) for _ in range(8)])
    yield Figure("8 x 32k in, 64 out", seconds, "s", 6.7, 7.58, 5.9)


def mixed(engine: Engine, bar: float, peer: float, limit: float | None) -> Iterator[Figure]:
    rng = random.Random(2)
    requests = [Asked(engine.ids(rng.randint(256, 2048)), rng.randint(64, 512)) for _ in range(256)]
    seconds, answers = _seconds(engine, requests)
    gaps = sorted(1e3 * (after - before) for answer in answers for before, after in pairwise(answer.times))
    more = (
        f"{sum(len(asked.prompt) for asked in requests)} in, {sum(asked.new for asked in requests)} out; ITL p50 "
        f"{gaps[len(gaps) // 2]:.1f}, p99 {gaps[len(gaps) * 99 // 100]:.1f} ms"
    )
    yield Figure("mixed, 256 requests", seconds, "s", bar, peer, limit, more)


def _hit(answers: list[Answer]) -> float:
    return 100 * sum(answer.cache.hit for answer in answers) / sum(len(answer.asked.prompt) for answer in answers)


def reuse(engine: Engine) -> Iterator[Figure]:
    prefixes = [engine.ids(16_384) for _ in range(6)]
    visits = [Asked(prefix + engine.ids(1024), 32) for _ in range(8) for prefix in prefixes]
    seconds, answers = _seconds(engine, visits, 4)
    yield Figure("prefix reuse: 6 x 8, 16,384 + 1k", seconds, "s", 7.0, 9.27, None, f"hit {_hit(answers):.1f} %")
    rng = random.Random(3)
    prefixes = [engine.ids(15_000 + rng.randint(-500, 500)) for _ in range(6)]
    visits = [Asked(prefix + engine.ids(1024), 32) for _ in range(8) for prefix in prefixes]
    seconds, answers = _seconds(engine, visits, 4)
    later = [answer.cache.hit / len(answer.asked.prompt) for answer in answers[6:]]
    more = f"{seconds:.2f} s; from the second visit on {100 * statistics.mean(later):.1f} %"
    yield Figure("same, prefixes of 15,000 +- random: hit", _hit(answers), "%", 80.0, None, None, more)


def chats(engine: Engine) -> Iterator[Figure]:
    history = [engine.ids(2560) for _ in range(8)]
    began, hits = time.perf_counter(), []
    for turn in range(5):
        answers = engine.run([Asked(list(words), 128) for words in history])
        hits.append(_hit(answers))
        for words, answer in zip(history, answers, strict=True):
            words += answer.tokens + engine.ids(512)
            assert turn < 0 or len(answer.tokens) == 128
    more = "hit by turn " + "/".join(f"{hit:.1f}" for hit in hits) + " %; exact 0/80.8/83.9/86.1/87.8"
    yield Figure("8 chats x 5 turns", time.perf_counter() - began, "s", 4.7, 5.69, None, more)


def scenarios(model: str, engine: Engine) -> dict[str, Callable[[], Iterator[Figure]]]:
    if model == "m2":
        rows = {
            1: (2.6, 4.15, 1.42), 8: (6.0, 7.72, 4.56), 32: (13.4, 14.6, 11.6), 64: (18, 19.3, 16.1),
            128: (22, 23.9, 19.8), 256: (27, 29.7, 24.1),
        }  # fmt: skip
        tokens = {2048: (50, 121, 13), 8192: (115, 152, 59), 32768: (520, 624, 325)}
        return {
            "decode": lambda: decode(engine, rows),
            "prefill": lambda: prefill(engine, tokens),
            "lone": lambda: lone(engine, 15, 87, None),
            "mixed": lambda: mixed(engine, 13.7, 16.5, None),
        }
    rows = {
        1: (4.3, 5.35, 3.76), 8: (4.7, 5.81, 3.94), 32: (5.5, 6.62, 4.57), 64: (6.3, 7.47, 5.41),
        128: (8.3, 10.0, 7.09), 256: (12.5, 15.9, 10.4),
    }  # fmt: skip
    tokens = {2048: (52, 78, 37), 8192: (180, 218, 152), 32768: (790, 907, 677)}
    return {
        "decode": lambda: decode(engine, rows),
        "prefill": lambda: prefill(engine, tokens),
        "lone": lambda: lone(engine, 12, 48, 4),
        "long": lambda: long_batch(engine),
        "mixed": lambda: mixed(engine, 11.3, 13.6, 9.7),
        "reuse": lambda: reuse(engine),
        "chats": lambda: chats(engine),
    }


def show(figure: Figure) -> str:
    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    good = figure.bar is None or (figure.ours >= figure.bar if figure.unit == "%" else figure.ours <= figure.bar)
    share = "" if figure.limit is None else f"{100 * figure.limit / figure.ours:.0f}"
    return (
        f"{figure.what:<42}{figure.ours:>9.2f} {figure.unit:<3}{number(figure.bar):>8}{'' if good else ' !':<2}"
        f"{number(figure.peer):>8}{number(figure.limit):>8}{share:>5}  {figure.more}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="m1")
    parser.add_argument("--only", default="", help="names of scenarios, separated by commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--trace", type=Path, metavar="FOLDER", help="tell where the time goes; Chrome traces of it into this folder"
    )
    options = parser.parse_args(arguments)
    engine = Engine(options.model, dict(setting.split("=", 1) for setting in options.set))
    print(f"{options.model}: ready after {engine.start_seconds:.1f} s; {engine.limits}", flush=True)
    for name, line in drift(engine.plan.stages[0], engine.runner.measured()):
        print(f"  {name}: {line}")
    print(f"{'scenario':<42}{'ours':>9}    {'bar':>8}  {'peer':>8}{'limit':>8}{'%':>5}", flush=True)
    chosen = [name for name in options.only.split(",") if name]
    figures = []
    for name, scenario in scenarios(options.model, engine).items():
        if chosen and name not in chosen:
            continue
        for figure in scenario():
            figures.append(figure)
            print(show(figure), flush=True)
    parts = {}
    if options.trace:
        options.trace.mkdir(parents=True, exist_ok=True)
        parts = profile(engine, options.trace)
    _record(options.model, engine, figures, parts, arguments)
    return 0


#: Steps at the end of a trace in which not all sequences decode: they did not all begin in one step either.
_ENDING = 12


def profile(engine: Engine, path: Path) -> dict[str, dict[str, float]]:
    """A timeline of decode steps at three widths and of two prefills into ``path``; µs of each part of a step, or of
    the prefill."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record_profile

    found = {}
    for name, requests, steps in (
        ("decode, B = 1", [Asked(engine.ids(128), 40)], 15),
        ("decode, B = 64", [Asked(engine.ids(128), 40) for _ in range(64)], 15),
        ("decode, B = 256", [Asked(engine.ids(128), 40) for _ in range(256)], 15),
        ("prefill of 2,048 tokens", [Asked(engine.ids(2048), 1)], 0),
        ("prefill of 8,192 tokens", [Asked(engine.ids(8192), 1)], 0),
    ):
        engine.run(requests)
        with record_profile(activities=[ProfilerActivity.CUDA]) as recorded:
            engine.run([Asked(engine.ids(len(asked.prompt)), asked.new) for asked in requests])
            torch.cuda.synchronize()
        file = path / f"{re.sub('[^a-z0-9]+', '_', name)}.json"
        recorded.export_chrome_trace(str(file))
        kernels = kernels_of(json.loads(file.read_text()))
        found[name] = breakdown(steps_before(kernels, steps, _ENDING), steps) if steps else breakdown(kernels)
        print(f"--- {name}: {sum(found[name].values()):.0f} µs")
        for part, us in found[name].items():
            print(f"{us:>10.0f}  {part}")
    return found


def _record(
    model: str, engine: Engine, figures: list[Figure], parts: dict[str, dict[str, float]], arguments: list[str]
) -> None:
    command = ["python", "-m", "bench", "gpu", *arguments]
    text = {
        "bench": "gpu",
        **circumstances(command, ("torch", "triton")),
        "gpu": torch.cuda.get_device_name(),
        "model": model,
        "start_seconds": round(engine.start_seconds, 2),
        "figures": [figure._asdict() for figure in figures],
        "parts_us": {name: {part: round(us, 1) for part, us in shares.items()} for name, shares in parts.items()},
    }
    target = Path(os.environ.get("BENCH_RESULTS", RESULTS)) / f"gpu_{model}.json"
    target.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
