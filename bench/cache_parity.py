"""The parity matrix with the prefix tree: real scheduler, tree and runner, against ``transformers`` and our cold runs.

A case runs one prompt through one situation of the cache. Every sampled token and its logits are compared with what
``transformers`` computes for the whole sequence at once; in deterministic mode also bit by bit with our own cold run.
Pages and slots are NaN from the start, and again as soon as they are free.

    cold             nothing is cached
    hit              another prompt left KV and a checkpoint at exactly one page boundary
    evicted_state    KV reaches further than the deepest checkpoint: the gap is read, never written
    evicted_kv       the tree held all of the prompt, and lost the KV beyond the boundary
    evicted_both     KV is lost beyond one boundary, states beyond an earlier one
    parked           thrown off the device on the way, and resumed from its last checkpoint
    publishing       it arrives while the step that publishes its prefix is in flight
    twins            two equal prompts at once
    next_turn        it goes on from what was generated: the boundary was passed in decode

CI runs every pair of values (tests/e2e/test_cache_parity.py);

    python -m bench cache_parity

runs the product of shape, situation, mode, page size and prompt, with a hit at every boundary that can be reached (and
losses at the first, the middle and the last), and writes bench/results/cache_parity.json.
Chunk size and company, which CI pairs too, are drawn by the case.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import record
from bench.parity import LARGE_PAGES, LENGTHS, OUTPUTS, TOLERANCE, Mismatch, Subject, Tally, Truth, compare
from bench.plan_driver import recorded_logits
from hybserve.core.messages import Failed, Finished, FromRunner, Generate, StepDone, StepPlan, Tokens, ToRunner
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import CacheTruth
from hybserve.plan.result import EngineLimits
from hybserve.runner.main import Runner
from hybserve.scheduler.scheduler import Scheduler
from hybserve.spec.split import split_ranks
from hybserve.wire.codec import Codec
from tests.checkpoints import SHAPES
from tests.fakes import PoisoningLink

SITUATIONS = (
    "cold",
    "hit",
    "evicted_state",
    "evicted_kv",
    "evicted_both",
    "parked",
    "publishing",
    "twins",
    "next_turn",
)
#: Prompts by page size, as positions in ``bench.parity.LENGTHS``: of 12, 5, 21, 30 and of 65, 193 tokens.
PROMPTS = {4: (0, 3, 5, 6), 64: (3, 6)}
WHOLE = 0  # chunk: as much of the prompt as there is
ROOT = ("", "")
TARGET = 100  # uid of the request that is compared; donors and company have smaller ones


class CacheCase(NamedTuple):
    """``depth``: the page boundary to resume from, or (parked, publishing) the moment; beyond the last it means the
    last. ``company``: other prompts run beside it."""

    shape: str
    situation: str
    deterministic: bool
    prompt: int
    depth: int
    chunk: int  # in pages
    company: bool
    page: int = 4


FACTORS: dict[str, tuple[Any, ...]] = {
    "shape": tuple(SHAPES),
    "situation": SITUATIONS,
    "deterministic": (False, True),
    "prompt": PROMPTS[4],
    "depth": (1, 2, 3, 9),
    "chunk": (1, 3, WHOLE),
    "company": (False, True),
}


class Start(NamedTuple):
    """A prefill chunk that began at ``start`` in step ``step``."""

    step: int
    uid: int
    start: int


class CacheEngine:
    """The engine loop in pieces: what happens between planning, launching, collecting and settling is the case's."""

    def __init__(self, subject: Subject, case: CacheCase) -> None:
        page = case.page
        self.limits = EngineLimits(
            page_size=page, kv_pages=90 if page == 4 else 40, state_slots=40, max_running=6, max_seq_len=1024,
            step_tokens=2048, prefill_chunk=case.chunk * page or 1024, kv_dtype="float32", state_dtype="float32",
            conv_dtype="float32", deterministic=case.deterministic, prefix=True,
            stateful=subject.spec.recurrent_layers > 0, slot_price=2.0, checkpoint_every=page,
        )  # fmt: skip
        runner = Runner(subject.model, subject.spec, split_ranks(subject.spec)[0], self.limits)
        runner.pools.poison_pages(range(1, self.limits.kv_pages))
        runner.pools.poison_slots(range(1, self.limits.state_slots))
        self.runner, self.scheduler = runner, Scheduler(self.limits, 100, None, clock=lambda: 1.0)
        self._link = PoisoningLink(runner, self.scheduler)
        self._samples: list[list[int]] = []  # per plan in flight: uid of every sample column
        self._columns: list[list[int]] = []  # per plan in flight: output number of every sample column
        self._plans: Codec[ToRunner] = Codec(ToRunner)
        self._results: Codec[FromRunner] = Codec(FromRunner)
        self.planned: bytes | None = None
        self.results: list[StepDone] = []  # collected, not settled
        self.launched = 0  # submitted, not collected
        self.starts: list[Start] = []
        self.restores = 0
        self.logits: dict[tuple[int, int], torch.Tensor] = {}  # (uid, output number)
        self.outputs: dict[int, list[int]] = {}
        self.cache: dict[int, CacheTruth] = {}

    @property
    def tree(self) -> Any:
        return self.scheduler.running.prefix.tree

    @property
    def step(self) -> int:
        return self.scheduler.running.step

    def ask(self, uid: int, prompt: Sequence[int], outputs: int = OUTPUTS, anchors: Sequence[int] = ()) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=outputs)
        message = Generate(uid, list(prompt), sampling, 1, "", "", 0, float(uid), 0.0, list(anchors))
        self.scheduler.receive(message)

    def plan(self) -> None:
        frame = self.scheduler.plan()
        if frame is None:
            return
        flight, plan = self.scheduler._flights[-1], frame[-1]
        assert isinstance(plan, StepPlan)
        self.starts += [Start(plan.step, chunk.sequence.uid, chunk.start) for chunk in flight.chunks]
        self.restores += len(flight.restored)
        self._samples.append([sequence.uid for sequence in flight.samplers])
        self._columns.append(plan.sample_outputs)
        self.planned = self._plans.encode(frame)

    def launch(self) -> None:
        if self.planned is not None:
            self._link.submit(self.planned)
            self.planned = None
            self.launched += 1

    def collect(self) -> None:
        if not self.launched:
            return
        with recorded_logits() as rows:
            (result,) = self._results.decode(self._link.collect())
        assert isinstance(result, StepDone), result
        for uid, output, (number, row) in zip(self._samples.pop(0), self._columns.pop(0), rows, strict=True):
            assert output == number
            self.logits[uid, output] = row
        self.launched -= 1
        self.results.append(result)

    def settle(self) -> None:
        if not self.results:
            return
        self.scheduler.settle(self.results.pop(0))
        for message in self.scheduler.outbox():
            if isinstance(message, Tokens):
                for uid, token in zip(message.uids, message.tokens, strict=True):
                    self.outputs.setdefault(uid, []).append(token)
            elif isinstance(message, Finished):
                self.cache[message.uid] = message.cache
            elif isinstance(message, Failed):
                raise Mismatch(f"request {message.uid} failed: {message.error}")

    def turn(self) -> None:
        """One pass as the loop makes it: launch n, settle n-1, plan n+1, wait for n."""
        self.launch()
        self.settle()
        self.plan()
        self.collect()
        self.scheduler.check()

    def run(self, turns: int = 2000) -> None:
        for _ in range(turns):
            self.turn()
            if self.scheduler.idle and self.planned is None:
                return
        raise Mismatch("the engine did not come to an end")

    def rows(self, uid: int) -> torch.Tensor:
        return torch.stack([self.logits[uid, output] for output in range(len(self.outputs[uid]))])


class Seen(NamedTuple):
    """What a case saw: comparisons, and the hit of the compared request."""

    tally: Tally
    hit: int


def reachable(length: int, page: int) -> int:
    """Page boundaries from which a prompt can resume: one token is always left to compute."""
    return (length - 1) // page


def check_case(subject: Subject, case: CacheCase) -> Seen:
    """Raises Mismatch where the case departs from the truth, or did not happen as it should."""
    truth = subject.truths(case.page)[case.prompt]
    if case.situation == "next_turn":
        truth = next_turn(subject, truth, case)
    engine = CacheEngine(subject, case)
    last = reachable(len(truth.prompt), case.page)
    boundary = min(case.depth, last) * case.page
    arrange = _ARRANGE[case.situation]
    expected = arrange(engine, truth, case, boundary)
    others = _company(engine, subject, case)
    if case.situation not in ("parked", "publishing", "twins"):
        engine.ask(TARGET, truth.prompt)
    engine.run()
    tally = Tally()
    for uid in [TARGET, TARGET + 1] if case.situation == "twins" else [TARGET]:
        tally.add(compare(truth, engine.outputs[uid], engine.rows(uid), case))
    for uid, other in others.items():
        tally.add(compare(other, engine.outputs[uid], engine.rows(uid), case))
    hit = engine.cache[TARGET].hit
    if expected is not None and hit != expected:
        raise Mismatch(f"{case}: hit {hit}, expected {expected}: {engine.cache[TARGET]}")
    if case.situation == "twins" and engine.cache[TARGET + 1].hit != last * case.page:
        raise Mismatch(f"{case}: the twin hit {engine.cache[TARGET + 1]}")
    if case.situation == "parked":
        _check_parked(engine, case)
    if not engine.runner.pools.padding_intact():
        raise Mismatch(f"{case}: the padding page or slot was written")
    return Seen(tally, hit)


def next_turn(subject: Subject, truth: Truth, case: CacheCase) -> Truth:
    """The conversation goes on: what was asked, what was answered and three tokens more."""
    made = subject.__dict__.setdefault("next_turns", {})
    key = (case.page, case.prompt)
    if key not in made:
        made[key] = subject.truth(truth.prompt + truth.output + truth.prompt[:3], case.page)
    return made[key]


# situations: each leaves the engine so that the compared request meets it; returns the hit to expect, None = any


def _cold(engine: CacheEngine, truth: Truth, case: CacheCase, boundary: int) -> int | None:
    return 0


def _hit(engine: CacheEngine, truth: Truth, case: CacheCase, boundary: int) -> int | None:
    if boundary:
        engine.ask(1, other_tail(truth.prompt, boundary, case.page), 1, anchors=[boundary])
        engine.run()
    return boundary


def other_tail(prompt: list[int], boundary: int, page: int) -> list[int]:
    """A prompt that leaves ``prompt`` at ``boundary`` for half a page."""
    return prompt[:boundary] + [(prompt[boundary] + 1) % 200] * (page // 2)


def _evicted_state(engine: CacheEngine, truth: Truth, case: CacheCase, boundary: int) -> int | None:
    return _lose(engine, truth, case, boundary, len(truth.prompt))


def _evicted_kv(engine: CacheEngine, truth: Truth, case: CacheCase, boundary: int) -> int | None:
    return _lose(engine, truth, case, boundary, boundary)


def _evicted_both(engine: CacheEngine, truth: Truth, case: CacheCase, boundary: int) -> int | None:
    last = reachable(len(truth.prompt), case.page) * case.page
    return _lose(engine, truth, case, boundary, (boundary + last) // 2 // case.page * case.page)


def _lose(engine: CacheEngine, truth: Truth, case: CacheCase, state: int, kv: int) -> int | None:
    """The same prompt ran before; then all KV beyond ``kv`` and all states beyond ``state`` are evicted, which leases
    and pins keep from going further."""
    prompt, tree = truth.prompt, engine.tree
    engine.ask(1, prompt, 1)
    engine.run()
    kept = tree.lease(ROOT, tree.match(ROOT, prompt[:kv]))
    tree.evict_pages(engine.limits.kv_pages, engine.step)
    if engine.limits.stateful:
        source = tree.match(ROOT, prompt[: state + 1]).source if state else None
        if source is not None:
            tree.pin(source)
        tree.evict_states(engine.limits.state_slots, engine.step)
        if source is not None:
            tree.unpin(source, engine.step)
    tree.release(kept, engine.step)
    engine.scheduler.check()
    match = tree.match(ROOT, prompt)
    if match.kv_hit != kv // case.page * case.page:
        raise Mismatch(f"{case}: {match.kv_hit} tokens of KV are left of {kv}")
    most = reachable(len(prompt), case.page) * case.page
    return state if engine.limits.stateful else min(match.kv_hit, most)


def _parked(engine: CacheEngine, truth: Truth, case: CacheCase, boundary: int) -> int | None:
    """Parked some turns after the one whose plan admits it: its first chunk has been published, its last token not
    been asked for."""
    engine.ask(TARGET, truth.prompt)
    for _ in range(1 + 2 * min(case.depth, 3)):
        engine.turn()
    running = engine.scheduler.running
    for sequence in list(running.sequences):
        if sequence.uid == TARGET:
            running.park(sequence)
            engine.starts.append(Start(engine.step, -1, 0))
    return 0


def _check_parked(engine: CacheEngine, case: CacheCase) -> None:
    marks = [index for index, start in enumerate(engine.starts) if start.uid < 0]
    if not marks:
        raise Mismatch(f"{case}: it was gone before it could be parked")
    resumed = [start for start in engine.starts[marks[0] :] if start.uid == TARGET]
    if not resumed or resumed[0].start == 0:
        raise Mismatch(f"{case}: it did not resume from a checkpoint")


def _publishing(engine: CacheEngine, truth: Truth, case: CacheCase, boundary: int) -> int | None:
    """It arrives, and is planned, before that step is launched, while it runs, or when its result is not settled."""
    engine.ask(1, other_tail(truth.prompt, boundary, case.page), 1, anchors=[boundary])
    engine.plan()
    while _unfinished(engine, 1):
        engine.turn()
    for moment in (engine.launch, engine.collect)[: case.depth % 3]:
        moment()
    engine.ask(TARGET, truth.prompt)
    if engine.planned is None:
        engine.plan()
    return None


def _unfinished(engine: CacheEngine, uid: int) -> bool:
    return any(
        sequence.uid == uid and sequence.planned < sequence.fill for sequence in engine.scheduler.running.sequences
    )


def _twins(engine: CacheEngine, truth: Truth, case: CacheCase, boundary: int) -> int | None:
    engine.ask(TARGET, truth.prompt)
    engine.ask(TARGET + 1, truth.prompt)
    return 0


def _next_turn(engine: CacheEngine, truth: Truth, case: CacheCase, boundary: int) -> int | None:
    """All that was asked and answered before is reused, but for the last token and what does not fill a page."""
    before = len(truth.prompt) - 3
    engine.ask(1, truth.prompt[: before - OUTPUTS])
    engine.run()
    return (before - 1) // case.page * case.page


_ARRANGE = {
    "cold": _cold, "hit": _hit, "evicted_state": _evicted_state, "evicted_kv": _evicted_kv,
    "evicted_both": _evicted_both, "parked": _parked, "publishing": _publishing, "twins": _twins,
    "next_turn": _next_turn,
}  # fmt: skip


def _company(engine: CacheEngine, subject: Subject, case: CacheCase) -> dict[int, Truth]:
    """Other prompts beside it, compared too."""
    if not case.company:
        return {}
    truths = subject.truths(case.page)
    others = {50 + place: truths[index] for place, index in enumerate((1, 2, 4)) if index != case.prompt}
    for uid, other in others.items():
        engine.ask(uid, other.prompt)
    return others


# which cases


def pairs() -> list[CacheCase]:
    """Cases in which every two values of different factors meet: the product of the two largest factors, whose rows
    take in turn, of every other factor, the value that meets most of what it has not met yet."""
    names = sorted(FACTORS, key=lambda name: -len(FACTORS[name]))
    open_pairs = {
        frozenset(((a, x), (b, y))) for a, b in itertools.combinations(names, 2) for x in FACTORS[a] for y in FACTORS[b]
    }
    rows: list[dict[str, Any]] = []
    seeds: Iterator[dict[str, Any]] = (
        dict(zip(names[:2], both, strict=True)) for both in itertools.product(*(FACTORS[name] for name in names[:2]))
    )
    while open_pairs:
        row = next(seeds, None) or dict(min(open_pairs, key=sorted_pair))
        for name in names:
            if name not in row:
                met = row.items()
                row[name] = max(
                    FACTORS[name], key=lambda value: sum(frozenset(((name, value), pair)) in open_pairs for pair in met)
                )
        open_pairs -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return [CacheCase(**row) for row in rows]


def sorted_pair(pair: frozenset[tuple[str, Any]]) -> list[str]:
    return sorted(map(str, pair))


def product(shapes: Sequence[str] = tuple(SHAPES)) -> Iterator[CacheCase]:
    """Every shape, situation, mode, page size (64 for a sample of shapes), prompt and boundary."""
    for shape in shapes:
        pages = (4, 64) if shape in LARGE_PAGES else (4,)
        for page, situation, deterministic in itertools.product(pages, SITUATIONS, (False, True)):
            for prompt in PROMPTS[page]:
                for depth in _depths(situation, page, prompt):
                    rng = random.Random(f"{shape} {page} {situation} {prompt} {depth}")
                    chunk, company = rng.choice((1, 3, WHOLE)), rng.random() < 0.5
                    yield CacheCase(shape, situation, deterministic, prompt, depth, chunk, company, page)


def _depths(situation: str, page: int, prompt: int) -> Sequence[int]:
    last = reachable(LENGTHS[page][prompt], page)
    if situation in ("cold", "twins", "next_turn"):
        return (1,)
    if situation == "parked":
        return range(1, 4)
    if situation == "publishing":
        return range(max(last, 3))
    if situation == "hit":
        return range(1, last + 1)
    return sorted({0, last // 2, last})


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench cache_parity", description="the parity product with cache")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, figures = time.monotonic(), Figures()
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as directory:
            figures.run(shape, Subject(shape, Path(directory)))
        seconds = round(time.monotonic() - began, 1)
        path = record("cache_parity", figures.report() | {"seconds": seconds}, sys.orig_argv, ("torch", "transformers"))
        print(f"{shape}: {figures.tally.rows} rows, {len(figures.mismatches)} mismatches", file=sys.stderr, flush=True)
    print(f"{figures.cases.total()} cases: {path}", file=sys.stderr)
    return 1 if figures.mismatches else 0


class Figures:
    """What has been compared so far; written after every shape, so that a run cut short says how far it came."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.cases = Counter[str]()
        self.hits = Counter[str]()
        self.tally = Tally()
        self.mismatches: list[str] = []

    def run(self, shape: str, subject: Subject) -> None:
        for case in product([shape]):
            self.cases[case.situation] += 1
            try:
                seen = check_case(subject, case)
            except Exception as error:
                self.mismatches.append(f"{case}: {type(error).__name__}: {error}")
                continue
            self.tally.add(seen.tally)
            self.hits[case.situation] += seen.hit > 0
        self.shapes.append(shape)

    def report(self) -> dict[str, Any]:
        return {
            "what": "greedy tokens and logits against transformers through the prefix tree, freed pages and slots NaN; "
            "deterministic mode bit-equal to the cold run",
            "shapes_done": self.shapes,
            "shapes_in_all": len(SHAPES),
            "modes": ["batched", "deterministic"],
            "page_4_prompts": [LENGTHS[4][prompt] for prompt in PROMPTS[4]],
            "page_64_prompts": [LENGTHS[64][prompt] for prompt in PROMPTS[64]],
            "page_64_shapes": LARGE_PAGES,
            "threads": torch.get_num_threads(),
            "tolerance": TOLERANCE,
            "cases": self.cases.total(),
            "cases_by_situation": self.cases,
            "cases_with_a_hit": self.hits,
            "rows": self.tally.rows,
            "near_ties": self.tally.near_ties,
            "shaky": self.tally.shaky,
            "largest_difference": self.tally.largest,
            "mismatches": self.mismatches,
        }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
