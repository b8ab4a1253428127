"""Chats of several turns over HTTP for minutes, every k-th answer compared with a cold run, hits and memory watched.

    python -m bench multi_turn --model m1 --minutes 6          on a GPU
    python -m bench multi_turn --model tiny --scale 16 --minutes 0.2 --set cache.page_size=16

Eight chats at a time, new ones when old ones end. A turn sends the whole history as token ids: the first prompt has
about 2560 tokens, each turn adds about 512 of the user's and 128 of the answer; greedy, ``ignore_eos``.

*Tokens.* A compared answer is asked again, cold (a ``cache_salt`` of its own): the tokens must be equal, or their first
difference begin at a near tie: the two likeliest tokens of the cold run closer than 1e-3 in fp32, in other dtypes than
twice the largest difference of a log-probability between cold runs alone and in a batch, which is measured first. Nor
may the log-probabilities of an answer be farther from the cold run's, in the mean, than a few times those of cold runs.

*Books.* With ``--check idle`` the server runs at full speed and recounts its books in the pauses that this bench makes,
in which it also reads memory; a violation is an error in the server's log, which is a fault here. With ``--check step``
(log.level debug) they are recounted after every step, which takes longer than the step where pools are large, and the
server ends on a violation.

*Hits* are told by turn, beside the share of the prompt that the turn before had sent.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from bench import RESULTS, circumstances
from bench.dummy import MODELS
from bench.http_client import Client, Reply
from bench.serve import get_json
from bench.server import EMBEDDED, Server, own_server

PAUSE = 1.5  # seconds of silence in which an idle server recounts its books; it looks twice a second
TOP = 5  # alternatives whose log-probabilities are compared
FP32_TIE = 1e-3
#: An answer is far from its cold run when its log-probabilities differ in the mean by this many times what those of
#: cold runs do: weights of random numbers forget too well for every wrong state to change a token.
FAR, FP32_NOISE = 4.0, 1e-5
HIT_TOLERANCE = 0.02  # of the prompt; never less than a page
GROWTH = 64 << 20  # bytes that a process, or the GPU, may grow by from the middle to the end
MAX_ERRORS = 20  # more end the run


class Lengths(NamedTuple):
    """Tokens; what the user writes varies by ``jitter`` either way, so that nothing is aligned to pages."""

    first: int
    more: int
    output: int
    jitter: int

    @classmethod
    def scaled(cls, scale: int) -> "Lengths":
        return cls(2560 // scale, 512 // scale, 128 // scale, 32 // scale)


class Answer(NamedTuple):
    tokens: list[int]
    tops: list[dict[str, float]]  # log-probabilities of the likeliest tokens by position, if they were asked for
    prompt_tokens: int
    cached_tokens: int
    ttft: float  # seconds


class AnswerError(Exception):
    """The request failed, or its answer is not whole."""


class Asker:
    """Greedy requests by token ids; counts those under way."""

    def __init__(self, client: Client, model: str, vocab: int, seed: int) -> None:
        self._client, self._model, self._vocab = client, model, vocab
        self._random = random.Random(seed)
        self._salts = itertools.count(1)
        self.count = 0

    def ids(self, count: int, jitter: int = 0) -> list[int]:
        count += self._random.randint(-jitter, jitter)
        return [self._random.randrange(self._vocab) for _ in range(count)]

    async def ask(self, prompt: list[int], new: int, cold: bool = False, logprobs: bool = False) -> Answer:
        """``cold``: nothing is reused. Raises AnswerError."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if cold:
            body["cache_salt"] = f"cold-{next(self._salts)}"
        if logprobs:
            body["logprobs"] = TOP
        self.count += 1
        reply = await self._client.post("/v1/completions", json.dumps(body).encode(), keep=True)
        if reply.error is not None:
            raise AnswerError(reply.error)
        answer = _answer(reply)
        if len(answer.tokens) != new:
            raise AnswerError(f"{len(answer.tokens)} tokens came, {new} were asked for")
        return answer


def _answer(reply: Reply) -> Answer:
    tokens: list[int] = []
    tops: list[dict[str, float]] = []
    for event in reply.kept or []:
        choice = json.loads(event)["choices"][0]
        tokens += choice["token_ids"]
        tops += (choice["logprobs"] or {}).get("top_logprobs", [])
    usage = reply.usage or {"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(tokens, tops, usage["prompt_tokens"], cached, reply.times[0] - reply.started)


# what is compared


def common(one: list[int], other: list[int]) -> int:
    """Tokens before the first difference."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


class Distance(NamedTuple):
    """Between the log-probabilities of two runs, over the likeliest tokens of every position they have in common."""

    largest: float
    mean: float


def distance(one: Answer, other: Answer) -> Distance:
    at = common(one.tokens, other.tokens) + 1  # where they first differ they still follow the same tokens
    pairs = zip(one.tops[:at], other.tops[:at], strict=True)
    gaps = [abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys()]
    return Distance(max(gaps, default=0.0), statistics.fmean(gaps) if gaps else 0.0)


def farthest(distances: list[Distance]) -> Distance:
    return (
        Distance(*(max(values, default=0.0) for values in zip(*distances, strict=True)))
        if distances
        else Distance(0, 0)
    )


def margin(top: dict[str, float]) -> float:
    """Between the two likeliest; infinite if there is but one (two tokens of one text)."""
    best, second = sorted([*top.values(), -float("inf")], reverse=True)[:2]
    return best - second


class Comparison:
    """Answers against cold runs. ``tie``: margins below it are near ties; ``noise``: between cold runs."""

    def __init__(self, tie: float, noise: Distance) -> None:
        self.tie, self.noise = tie, noise
        self.seen: Counter[str] = Counter()
        self.distances: list[Distance] = []
        self.wrong: list[dict[str, Any]] = []

    def add(self, warm: Answer, cold: Answer) -> None:
        at = common(warm.tokens, cold.tokens)
        self.distances.append(distance(warm, cold))
        if at == len(warm.tokens):
            self.seen["equal"] += 1
        elif margin(cold.tops[at]) < self.tie:
            self.seen["near_tie"] += 1
        else:
            self.seen["wrong"] += 1
            self.wrong.append({
                "prompt_tokens": warm.prompt_tokens, "cached": warm.cached_tokens, "at": at,
                "margin": margin(cold.tops[at]), "warm": warm.tokens[at], "cold": cold.tokens[at],
            })  # fmt: skip

    def figures(self) -> dict[str, Any]:
        kinds = {kind: self.seen[kind] for kind in ("equal", "near_tie", "wrong")}
        far = sum(one.mean > FAR * self.noise.mean + FP32_NOISE for one in self.distances)
        return {
            "compared": self.seen.total(), **kinds, "far": far, "near_tie_bound": self.tie,
            "cold_to_cold": self.noise._asdict(), "warm_to_cold": farthest(self.distances)._asdict(),
            "wrong_answers": self.wrong[:10],
        }  # fmt: skip


async def cold_noise(asker: Asker, lengths: Lengths, turns: int, prompts: int) -> Distance:
    """How far log-probabilities of cold runs move with the batch: each prompt alone, then all at once."""
    grown = [lengths.first + turn % turns * (lengths.more + lengths.output) for turn in range(prompts)]
    asked = [asker.ids(length, lengths.jitter) for length in grown]
    alone = [await asker.ask(prompt, lengths.output, cold=True, logprobs=True) for prompt in asked]
    together = await asyncio.gather(*(asker.ask(prompt, lengths.output, cold=True, logprobs=True) for prompt in asked))
    return farthest([distance(one, other) for one, other in zip(alone, together, strict=True)])


# the chats


class Hits:
    """Reused tokens by turn, and what the turn before had sent of the same prompt."""

    def __init__(self) -> None:
        self.cached: dict[int, list[float]] = defaultdict(list)
        self.expected: dict[int, list[float]] = defaultdict(list)
        self.ttft: dict[int, list[float]] = defaultdict(list)

    def add(self, turn: int, answer: Answer, before: int) -> None:
        self.cached[turn].append(answer.cached_tokens / answer.prompt_tokens)
        self.expected[turn].append(before / answer.prompt_tokens)
        self.ttft[turn].append(answer.ttft)

    def figures(self, first: int, page: int) -> list[dict[str, Any]]:
        """One row a turn. A prefix ends at a page: up to one may be missing."""
        rows = []
        for turn in sorted(self.cached):
            hit, expected = statistics.fmean(self.cached[turn]), statistics.fmean(self.expected[turn])
            rows.append({
                "turn": turn + 1, "answers": len(self.cached[turn]), "hit": round(hit, 4),
                "expected": round(expected, 4), "good": hit >= expected - max(HIT_TOLERANCE, page / first),
                "ttft_p50_ms": round(1e3 * statistics.median(self.ttft[turn]), 2),
            })  # fmt: skip
        return rows


class Talk:
    """All chats of a run: ``until`` runs them for a while, then nothing is under way."""

    def __init__(
        self, asker: Asker, lengths: Lengths, turns: int, sample: int, comparison: Comparison, chats: int
    ) -> None:
        self.hits = Hits()
        self.comparison = comparison
        self.errors: Counter[str] = Counter()
        self.chats = self.answers = 0
        self._asker, self._lengths, self._turns, self._sample = asker, lengths, turns, sample
        self._open: list[tuple[list[int], int, int]] = [([], 0, 0)] * chats  # history, turn, tokens sent before

    async def until(self, deadline: float) -> None:
        await asyncio.gather(*(self._work(index, deadline) for index in range(len(self._open))))

    async def _work(self, index: int, deadline: float) -> None:
        while time.monotonic() < deadline and self.errors.total() <= MAX_ERRORS:
            try:
                self._open[index] = await self._turn(*self._open[index])
            except AnswerError as error:
                self.errors[str(error)[:200]] += 1
                self._open[index] = ([], 0, 0)

    async def _turn(self, history: list[int], turn: int, before: int) -> tuple[list[int], int, int]:
        """One question of a chat and its answer; the chat after it, or a new one."""
        asker, lengths = self._asker, self._lengths
        prompt = history + asker.ids(lengths.more if turn else lengths.first, lengths.jitter)
        self.answers += 1
        compared = self.answers % self._sample == 0
        answer = await asker.ask(prompt, lengths.output, logprobs=compared)
        self.hits.add(turn, answer, before)
        if compared:
            self.comparison.add(answer, await asker.ask(prompt, lengths.output, cold=True, logprobs=True))
        if turn + 1 < self._turns:
            return prompt + answer.tokens, turn + 1, len(prompt)
        self.chats += 1
        return [], 0, 0


# memory


def memory(server: Server) -> dict[str, int]:
    """Bytes resident of every process, and bytes in use on the GPUs if there are any."""
    return server.resident() | ({"gpu": used} if (used := _gpu_bytes()) else {})


def _gpu_bytes() -> int:
    command = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(int(line) << 20 for line in text.split())


def growth(samples: list[dict[str, int]]) -> dict[str, dict[str, Any]]:
    """MiB at the start, in the middle and at the end. Caches fill at first: what may not grow is the second half."""
    start, middle, end = samples[0], samples[len(samples) // 2], samples[-1]
    return {
        name: {
            "start": start[name] >> 20, "middle": middle[name] >> 20, "end": end[name] >> 20,
            "good": end[name] - middle[name] <= GROWTH,
        }
        for name in start
    }  # fmt: skip


# the run


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench multi_turn", description="Chats over HTTP, checked against cold runs.")
    parser.add_argument("--model", choices=(EMBEDDED, *MODELS), default="tiny")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of the server")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--chats", type=int, default=8, help="at one time")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths by this")
    parser.add_argument("--sample", type=int, default=4, help="compare every so-many-th answer with a cold run")
    parser.add_argument("--pauses", type=int, default=6, help="of one or two seconds, equally spaced")
    parser.add_argument("--check", choices=("step", "idle"), default="idle", help="when the server recounts its books")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file of the figures (default: in BENCH_RESULTS or bench/results)")
    return parser.parse_args(argv)


async def measure(options: argparse.Namespace, server: Server) -> dict[str, Any]:
    entry = (await asyncio.to_thread(get_json, f"{server.url}/v1/models", None))["data"][0]
    facts, lengths = entry["hybserve"], Lengths.scaled(options.scale)
    client = Client(server.url, None, 600.0)
    asker = Asker(client, entry["id"], facts["vocab_size"], options.seed)
    noise = await cold_noise(asker, lengths, options.turns, 2 * options.chats)
    tie = FP32_TIE if server.dtype == "fp32" else 2 * noise.largest
    print(
        f"log-probabilities of cold runs alone and in a batch differ by up to {noise.largest:.2e}, of one answer by "
        f"{noise.mean:.2e} in the mean; near ties: below {tie:.2e}",
        flush=True,
    )
    talk = Talk(asker, lengths, options.turns, options.sample, Comparison(tie, noise), options.chats)
    samples, began = [memory(server)], time.monotonic()
    for part in range(1, options.pauses + 1):
        await talk.until(began + 60 * options.minutes * part / options.pauses)
        await asyncio.sleep(PAUSE)
        samples.append(memory(server))
        print(_progress(time.monotonic() - began, talk, samples[-1]), flush=True)
    client.close()
    return {
        "load": lengths._asdict() | {"chats": options.chats, "turns": options.turns, "check": options.check},
        "seconds": round(time.monotonic() - began, 1),
        "chats": talk.chats,
        "answers": talk.answers,
        "requests": asker.count,
        "errors": dict(talk.errors),
        "hits": talk.hits.figures(lengths.first, facts["page_size"]),
        "tokens": talk.comparison.figures(),
        "memory_mib": growth(samples),
        "log_errors": server.log_errors(),
    }


def _progress(seconds: float, talk: Talk, used: dict[str, int]) -> str:
    sizes = ", ".join(f"{name} {size >> 20}" for name, size in used.items())
    seen = ", ".join(f"{count} {kind}" for kind, count in talk.comparison.seen.items())
    answers = f"{talk.chats} chats, {talk.answers} answers ({seen}), {talk.errors.total()} errors"
    return f"{seconds:5.0f} s: {answers}; MiB: {sizes}"


def verdict(figures: dict[str, Any]) -> list[str]:
    """What is not as it has to be."""
    faults = [f"{count} x {error}" for error, count in figures["errors"].items()]
    faults += [f"in the server's log: {line}" for line in figures["log_errors"][:5]]
    if figures["tokens"]["wrong"]:
        faults.append(f"{figures['tokens']['wrong']} answers differ from cold runs, and not from a near tie on")
    if figures["tokens"]["far"]:
        faults.append(f"{figures['tokens']['far']} answers have other log-probabilities than cold runs")
    if not figures["tokens"]["compared"]:
        faults.append("nothing was compared")
    faults += [f"turn {row['turn']} reuses {row['hit']:.1%} instead of {row['expected']:.1%}"
               for row in figures["hits"] if not row["good"]]  # fmt: skip
    faults += [f"{name} grew from {row['middle']} to {row['end']} MiB"
               for name, row in figures["memory_mib"].items() if not row["good"]]  # fmt: skip
    return faults


def show(figures: dict[str, Any]) -> None:
    print("{seconds} s, {chats} whole chats, {answers} answers, {requests} requests".format_map(figures))
    for row in figures["hits"]:
        print(
            f"  turn {row['turn']}: hit {row['hit']:6.1%}, expected {row['expected']:6.1%}, "
            f"TTFT p50 {row['ttft_p50_ms']:.1f} ms, {row['answers']} answers"
        )
    print(
        "  {compared} compared with cold runs: {equal} equal, {near_tie} from a near tie on, {wrong} wrong; "
        "{far} far in log-probabilities, which differ by up to {warm_to_cold[largest]:.2e}, of one answer by "
        "{warm_to_cold[mean]:.2e} in the mean".format_map(figures["tokens"])
    )
    for name, row in figures["memory_mib"].items():
        print(f"  {name:<8} {row['start']} -> {row['middle']} -> {row['end']} MiB")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when nothing is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    level = ["log.level=debug"] if options.check == "step" else []
    with own_server(options.model, [*level, *options.set]) as server:
        print(f"ready after {server.ready_s:.1f} s", flush=True)
        figures = asyncio.run(measure(options, server))
    show(figures)
    faults = verdict(figures)
    for fault in faults:
        print(f"  ! {fault}")
    command = ["python", "-m", "bench", "multi_turn", *argv]
    path: Path = options.out or Path(os.environ.get("BENCH_RESULTS", RESULTS)) / f"multi_turn_{options.model}.json"
    report = {"bench": "multi_turn", **circumstances(command, ("torch",)), **figures, "faults": faults}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
