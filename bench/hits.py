"""How much is reused: traces whose right answer is known, through the real scheduler, with the answers checked too.

The runner is the tattletale: it computes nothing worth waiting for, and turns a wrong page or state into a wrong token.
Every trace states what must be reused and what was; a run with one figure below its expectation fails.

    python -m bench hits
"""

import argparse
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from bench import record
from hybserve.core.types import CacheTruth
from tests.fakes import limits
from tests.scheduler.rig import Rig

PAGE = 16


class Figure(NamedTuple):
    """``got`` and ``expected`` in tokens reused; ``exact``: more would be as wrong as less."""

    what: str
    prompt: int
    got: int
    expected: int
    exact: bool = False

    @property
    def good(self) -> bool:
        return self.got == self.expected if self.exact else self.got >= self.expected


def make_rig(**changes: object) -> Rig:
    values: dict[str, object] = {
        "page_size": PAGE, "kv_pages": 1200, "state_slots": 200, "max_running": 8, "max_seq_len": 4096,
        "step_tokens": 512, "prefill_chunk": 256, "prefix": True, "slot_price": 30.0,
    }  # fmt: skip
    return Rig(limits(**(values | changes)))


def run(rig: Rig, uid: int, prompt: list[int], **asked: Any) -> CacheTruth:
    """One request alone, its answer checked; what it reused."""
    rig.ask(uid, prompt, **asked)
    rig.drain()
    rig.right([uid])
    return rig.finished[uid].cache


def words(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(64) for _ in range(length)]


def chat(turns: int = 6) -> list[Figure]:
    """Every turn from the second on reuses all that was there at the end of the turn before, but two pages."""
    rig, conversation, figures, before = make_rig(), words(0, 150), list[Figure](), 0
    for turn in range(1, turns + 1):
        hit = run(rig, turn, conversation, max_tokens=70, anchors=[max(len(conversation) - 40, 0)]).hit
        if turn > 1:
            figures.append(Figure(f"turn {turn}", len(conversation), hit, before - 2 * PAGE))
        conversation = conversation + rig.tokens[turn, 0]
        before = len(conversation)
        conversation = conversation + words(turn, 45)
    return figures


def system_prompt(users: int = 8) -> list[Figure]:
    """The system prompt is reused from the second request on, whatever follows it."""
    rig, system = make_rig(), words(1, 500)
    figures = []
    for user in range(1, users + 1):
        prompt = [*system, user, *words(100 + user, 20 + 9 * user)]
        hit = run(rig, user, prompt, max_tokens=8, anchors=[len(system)]).hit
        figures.append(Figure(f"user {user}", len(prompt), hit, len(system) // PAGE * PAGE if user > 1 else 0, True))
    return figures


def identical(times: int = 3) -> list[Figure]:
    """The same prompt again leaves one token, or what does not fill its page, to compute."""
    rig, figures = make_rig(), []
    for length in (PAGE + 1, 10 * PAGE, 10 * PAGE + 1, 777):
        for time in range(times):
            hit = run(rig, 10 * length + time, [length % 64, *words(length, length - 1)], max_tokens=3).hit
            expected = (length - 1) // PAGE * PAGE if time else 0
            figures.append(Figure(f"{length} tokens, time {time + 1}", length, hit, expected, True))
    return figures


def fluctuating(requests: int = 40) -> list[Figure]:
    """One long text, asked up to a point that jumps to and fro: what any earlier request had before the point and its
    last page is reused. Requests longer than any before reuse the longest; shorter ones a checkpoint of their own or of
    a junction, chunk or grid, so they are allowed to be short by one step of the grid."""
    every = 8 * PAGE
    rig, text, rng = make_rig(checkpoint_every=every), words(2, 3000), random.Random(3)
    longest, figures = 0, []
    for uid in range(1, requests + 1):
        length = rng.randrange(40, 3000)
        hit = run(rig, uid, text[:length], max_tokens=2).hit
        known = min(longest, length - 1) // PAGE * PAGE
        figures.append(Figure(f"request {uid}", length, hit, known if length > longest else max(known - every, 0)))
        longest = max(longest, length)
    return figures


def long_path(turns: int = 100, slots: int = 24) -> list[Figure]:
    """A path of a hundred turns with few slots beside other traffic still hits near its end."""
    rig, conversation = make_rig(state_slots=slots, kv_pages=1500), words(4, 30)
    figures, before = [], 0
    for turn in range(1, turns + 1):
        hit = run(rig, 2 * turn, conversation, max_tokens=17).hit
        figures.append(Figure(f"turn {turn}", len(conversation), hit, max(before - 2 * PAGE, 0)))
        run(rig, 2 * turn + 1, words(1000 + turn, 60), max_tokens=4)
        conversation = conversation + rig.tokens[2 * turn, 0]
        before = len(conversation)
        conversation = conversation + words(turn, 13)
    return figures


def concurrency(lanes: int = 8, turns: int = 4) -> list[Figure]:
    """The same trace one request at a time and ``lanes`` at a time restores the same tokens."""
    alone, together = _trace(1, lanes, turns), _trace(lanes, lanes, turns)
    return [
        Figure(f"conversation {key[0]}, turn {key[1]}", prompt, together[key][1], hit, True)
        for key, (prompt, hit) in alone.items()
    ]


def _trace(width: int, lanes: int, turns: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(prompt, tokens reused) by (conversation, turn); all conversations share a system prompt that is known before,
    ``width`` of them are under way at a time."""
    rig, system = make_rig(), words(5, 200)
    run(rig, 9999, [*system, 1], max_tokens=2, anchors=[len(system)])
    conversations = {lane: [*system, lane, *words(50 + lane, 30 + lane)] for lane in range(lanes)}
    seen = {}
    for turn in range(turns):
        for low in range(0, lanes, width):
            some = range(low, low + width)
            for lane in some:
                rig.ask(turn * 100 + lane, conversations[lane], max_tokens=20 + lane, anchors=[len(system)])
            rig.drain()
            for lane in some:
                uid = turn * 100 + lane
                rig.right([uid])
                seen[lane, turn] = len(conversations[lane]), rig.finished[uid].cache.hit
                conversations[lane] = conversations[lane] + rig.tokens[uid, 0] + words(uid, 25)
    return seen


TRACES: dict[str, Callable[[], list[Figure]]] = {
    "chat": chat,
    "system prompt": system_prompt,
    "identical": identical,
    "fluctuating lengths": fluctuating,
    "long path, few slots": long_path,
    "one and eight at a time": concurrency,
}


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="python -m bench hits", description="what is reused of known traces").parse_args(
        arguments
    )
    report: dict[str, Any] = {}
    failed = 0
    for name, trace in TRACES.items():
        figures = trace()
        bad = [figure for figure in figures if not figure.good]
        failed += len(bad)
        report[name] = {
            "what": (trace.__doc__ or "").replace("\n    ", " "),
            "requests": len(figures),
            "prompt_tokens": sum(figure.prompt for figure in figures),
            "reused_tokens": sum(figure.got for figure in figures),
            "expected_tokens": sum(figure.expected for figure in figures),
            "below_expectation": [figure._asdict() for figure in bad],
        }
        print(
            f"{name:<24} {report[name]['reused_tokens']} tokens reused, {report[name]['expected_tokens']} expected, "
            f"{len(bad)} requests below"
        )
    path = record("hits", {"page_size": PAGE, "traces": report}, sys.orig_argv)
    print(f"written to {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
