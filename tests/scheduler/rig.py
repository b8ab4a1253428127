"""A scheduler with a runner and a clock that the test turns by hand."""

from collections.abc import Iterable

from hybserve.core.messages import (
    Accepted,
    Failed,
    Finished,
    FromRunner,
    FromScheduler,
    Generate,
    PromptLogprobs,
    StepPlan,
    Tokens,
    ToRunner,
)
from hybserve.core.sampling import SamplingParams
from hybserve.plan.result import EngineLimits
from hybserve.scheduler.scheduler import Scheduler
from hybserve.wire.codec import Codec
from tests.fakes import TattletaleRunner, expected_tokens, limits

_PLANS: Codec[ToRunner] = Codec(ToRunner)
_RESULTS: Codec[FromRunner] = Codec(FromRunner)


class Rig:
    """Drives plan, submit, collect and settle apart, so that a test may delay any of them.

    Everything told is collected: ``tokens[uid, choice]``, ``ended[uid, choice]``, ``finished``, ``failed``. After every
    move the books are recounted and no id may be free below its fence.
    """

    def __init__(self, engine: EngineLimits | None = None, max_queue: int = 100, **changes: object) -> None:
        queue_tokens = changes.pop("max_queue_tokens", None)
        runner = {key: changes.pop(key) for key in ("bad", "bad_states", "evil", "vocab") if key in changes}
        self.limits = engine or limits(**changes)
        self.now = 1000.0
        self.scheduler = Scheduler(self.limits, max_queue, queue_tokens, lambda: self.now)  # type: ignore[arg-type]
        self.runner = TattletaleRunner(self.limits, **runner)  # type: ignore[arg-type]
        self.planned: bytes | None = None
        self.poisoned: tuple[set[int], set[int]] = (set(), set())  # ids free when the last plan was made
        self.results: list[FromRunner] = []
        self.events: list[FromScheduler] = []
        self.accepted: set[int] = set()
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ended: dict[tuple[int, int], int] = {}
        self.scored: dict[int, list[object]] = {}
        self.finished: dict[int, Finished] = {}
        self.failed: dict[int, Failed] = {}
        self.asked: dict[int, Generate] = {}

    # requests

    def ask(
        self,
        uid: int,
        prompt: int | list[int] = 5,
        max_tokens: int = 4,
        n: int = 1,
        priority: int = 0,
        timeout: float = 0.0,
        salt: str = "",
        anchors: Iterable[int] = (),
        **sampling: object,
    ) -> Generate:
        ids = [(uid * 7 + k * 3) % 64 for k in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(seed=uid, max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        message = Generate(uid, ids, params, n, "", salt, priority, self.now, timeout, list(anchors))
        self.asked[uid] = message
        self.tell(message)
        return message

    def tell(self, message: object) -> None:
        self.scheduler.receive(message)  # type: ignore[arg-type]
        self.hear()

    def expected(self, uid: int) -> list[list[int]]:
        message = self.asked[uid]
        page_size, stateful = self.limits.page_size, self.limits.stateful
        return expected_tokens(message.prompt, message.sampling, message.n, page_size, self.runner.vocab, stateful)

    def right(self, uids: Iterable[int]) -> None:
        """These finished, with the tokens that they had alone."""
        for uid in uids:
            assert uid in self.finished, f"request {uid} did not finish"
            assert [self.tokens[uid, choice] for choice in range(self.asked[uid].n)] == self.expected(uid)

    # moves

    def plan(self) -> StepPlan | None:
        assert self.planned is None
        frame = self.scheduler.plan()
        self.hear()
        if frame is None:
            return None
        self.planned = _PLANS.encode(frame)
        plan = frame[-1]
        assert isinstance(plan, StepPlan)
        self._check_writes(plan)
        running = self.scheduler.running
        free = running.pages.free_ids(), running.slots.free_ids()
        self.runner.condemn(plan, free[0] - self.poisoned[0], free[1] - self.poisoned[1])
        self.poisoned = free
        return plan

    def _check_writes(self, plan: StepPlan) -> None:
        """No row writes into a page that the tree owns."""
        page, gaps = self.limits.page_size, dict(zip(plan.gap_rows, plan.gap_ends, strict=True))
        running = self.scheduler.running
        cached = {index for node in running.prefix.tree.all_nodes() for index in node.pages}
        by_index = {sequence.index: sequence for sequence in running.sequences if sequence.started}
        for row, (seq, start, count) in enumerate(zip(plan.seqs, plan.starts, plan.counts, strict=True)):
            table, first = by_index[seq].table, max(start, gaps.get(row, 0))
            written = {table[position // page] for position in range(first, start + count)}
            assert not written & cached, f"row {row} writes into pages {written & cached} of the tree"

    def common(self, uid: int) -> int:
        """The longest prefix that the prompt shares with anything computed before under its salt."""
        mine, most = self.asked[uid], 0
        for other, asked in self.asked.items():
            if asked.cache_salt != mine.cache_salt:
                continue
            for choice in range(asked.n):
                known = asked.prompt + (self.tokens.get((other, choice), []) if other != uid else [])
                if other != uid:
                    same = [a == b for a, b in zip(known, mine.prompt, strict=False)]
                    most = max(most, same.index(False) if False in same else len(same))
        return most

    def launch(self) -> None:
        assert self.planned is not None
        self.runner.submit(self.planned)
        self.planned = None
        self.check_fences()

    def collect(self) -> None:
        self.results += _RESULTS.decode(self.runner.collect())

    def settle(self) -> None:
        self.scheduler.settle(self.results.pop(0))  # type: ignore[arg-type]
        self.hear()

    def turn(self) -> bool:
        """One pass of the engine loop; false if there was nothing to do."""
        launched = self.planned is not None
        if launched:
            self.launch()
        settled = bool(self.results)
        if settled:
            self.settle()
        planned = self.plan() is not None
        if launched:
            self.collect()
        return launched or settled or planned

    def step(self) -> StepPlan | None:
        """Plan, run and settle one step with nothing ahead."""
        plan = self.plan()
        if plan is not None:
            self.launch()
            self.collect()
            self.settle()
        return plan

    def drain(self, most: int = 2000) -> int:
        """Turn until nothing is left; the number of turns."""
        for turn in range(most):
            if not self.turn():
                return turn
        raise AssertionError(f"still busy after {most} turns")

    # what was told

    def hear(self) -> None:
        self.scheduler.check()
        for message in self.scheduler.outbox():
            self.events.append(message)
            match message:
                case Tokens():
                    self._tokens(message)
                case Accepted():
                    assert message.uid not in self.accepted
                    self.accepted.add(message.uid)
                case PromptLogprobs():
                    entries = self.scored.setdefault(message.uid, [])
                    assert message.first == len(entries) + 1, "prompt log-probabilities with a gap"
                    entries += message.entries
                case Finished():
                    assert message.uid not in {**self.finished, **self.failed}, "two terminal events"
                    self.finished[message.uid] = message
                case Failed():
                    assert message.uid not in {**self.finished, **self.failed}, "two terminal events"
                    self.failed[message.uid] = message

    def _tokens(self, message: Tokens) -> None:
        columns = (message.uids, message.choices, message.tokens, message.ended)
        assert not message.logprobs or len(message.logprobs) == len(message.tokens)
        for uid, choice, token, ended in zip(*columns, strict=True):
            assert uid not in {**self.finished, **self.failed}, "a token after the terminal event"
            assert (uid, choice) not in self.ended, "a token after the end of the choice"
            self.tokens.setdefault((uid, choice), []).append(token)
            if ended:
                self.ended[uid, choice] = ended

    def check_fences(self) -> None:
        """No id is free with a fence before the last plan sent that names it."""
        running = self.scheduler.running
        for pool, named in ((running.pages, self.runner.page_named), (running.slots, self.runner.slot_named)):
            for index in pool.free_ids():
                if pool.fence(index) < named[index]:
                    raise AssertionError(f"{pool.name} {index} is free since {pool.fence(index)}, named {named[index]}")

    def empty(self) -> bool:
        """Everything given back, once the tree has been told to forget."""
        running = self.scheduler.running
        running.prefix.tree.flush(running.step)
        return self.scheduler.idle and not running.pages.held and not running.slots.held
