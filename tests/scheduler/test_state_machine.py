"""The whole scheduler under random traffic, against the tattletale runner; and proof that the net holds.

After every rule all books are recounted, no id may be free below its fence, and every token told is the one that the
request would have got alone. At the end nothing arrives any more: everything must finish within a bounded number of
turns, and every page and slot must be free. Then real lines of the scheduler are broken, one at a time: each mutant
must be caught within a bounded number of examples, or its test fails.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hybserve.cache.pool import Pool
from hybserve.core.messages import Cancel, Drain, StepFailed, StepPlan, StopAt
from hybserve.plan.floors import count_floors
from hybserve.plan.result import EngineLimits
from hybserve.scheduler import running as running_module
from hybserve.scheduler import scheduler as scheduler_module
from hybserve.scheduler import settle as settle_module
from hybserve.scheduler import step as step_module
from hybserve.scheduler.request import Sequence, State
from tests.fakes import TattletaleRunner, limits
from tests.scheduler.rig import Rig

PAGE = 4
LONGEST = 24
VOCAB = 40

#: No shrinking: a failure in CI is reported as found, and mutants are only to be caught.
BUDGET = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    report_multiple_bugs=False,
)

#: Most mutants fall within a few examples, the rarest after some hundreds.
MUTANT_BUDGET = settings(BUDGET, max_examples=600)

prompts = st.one_of(
    st.sampled_from([1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE]), st.integers(1, LONGEST - 2)
)


def floor(max_running: int, **changes: Any) -> EngineLimits:
    """The pools that the planner grants at least."""
    floors = count_floors(max_running, LONGEST, changes["step_tokens"], PAGE, prefix=False)
    values = {"max_running": max_running, "state_slots": floors.state_slots, "kv_pages": floors.kv_pages}
    return limits(page_size=PAGE, prefill_chunk=8, max_seq_len=LONGEST, **(values | changes))


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what text, clock and device may do; ``tick`` is a pass of the real loop."""

    @initialize(running=st.integers(2, 5), step_tokens=st.sampled_from([4, 8, 12]), spare=st.sampled_from([0, 0, 9]))
    def begin(self, running: int, step_tokens: int, spare: int) -> None:
        engine = floor(running, step_tokens=step_tokens)
        engine = floor(running, step_tokens=step_tokens, kv_pages=engine.kv_pages + spare)
        self.fail_next = False
        self.rig = Rig(engine, max_queue=12, vocab=VOCAB, evil=self._evil)
        self.uid = 0
        self.cancelled: set[int] = set()
        self.stopped: dict[tuple[int, int], int] = {}
        self.broken: set[int] = set()
        self.timed: set[int] = set()
        self.draining = False
        self.expected: dict[int, list[list[int]]] = {}

    salt = ""
    anchors: tuple[int, ...] = ()

    def ids(self, length: int) -> int | list[int]:
        """The prompt of the next request: its length, or its tokens."""
        return length

    def _evil(self, plan: StepPlan, runner: TattletaleRunner) -> StepFailed | None:
        if not self.fail_next or not plan.seqs:
            return None
        self.fail_next = False
        self.broken.add(runner.seqs[plan.seqs[-1]].start.sampling.seed)
        return StepFailed(plan.step, plan.epoch, [plan.seqs[-1]], "evil")

    @rule(
        prompt=prompts,
        budget=st.integers(1, LONGEST),
        n=st.integers(1, 3),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        stops=st.sampled_from([(), (), (3, 4, 5)]),
        timed=st.sampled_from([False, False, False, True]),
        greedy=st.sampled_from([False, False, True]),
    )
    def arrive(
        self, prompt: int, budget: int, n: int, priority: int, stops: tuple[int, ...], timed: bool, greedy: bool
    ) -> None:
        self.uid += 1
        max_tokens = min(budget, LONGEST - prompt)
        self.rig.ask(
            self.uid, self.ids(prompt), max_tokens, n, priority, 4.0 if timed else 0.0, self.salt, self.anchors,
            stop_ids=stops, temperature=0.0 if greedy else 1.0, presence_penalty=0.1 * (self.uid % 2),
        )  # fmt: skip
        if self.uid in self.rig.failed:
            refused = {"draining"} if self.draining else {"queue_full", "exceeds_capacity"}
            assert self.rig.failed[self.uid].error.code in refused
        elif timed:
            self.timed.add(self.uid)
        self.expected[self.uid] = self.rig.expected(self.uid)

    @rule(turns=st.integers(1, 8))
    def tick(self, turns: int) -> None:
        for _ in range(turns):
            self.rig.turn()
        self.compare()

    @rule(depth=st.integers(1, 3))
    def run_ahead(self, depth: int) -> None:
        """Plans may run further ahead of their results than the loop lets them."""
        while self.rig.scheduler.in_flight < depth:
            if self.rig.planned is not None:
                self.rig.launch()
            if self.rig.plan() is None:
                return

    @precondition(lambda self: self.rig.planned is not None)
    @rule()
    def launch(self) -> None:
        self.rig.launch()

    @precondition(lambda self: self.rig.runner.pending > 0)
    @rule()
    def collect(self) -> None:
        self.rig.collect()

    @precondition(lambda self: bool(self.rig.results))
    @rule()
    def settle(self) -> None:
        self.rig.settle()
        self.compare()

    @precondition(lambda self: self.uid > 0)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        uid = data.draw(st.integers(1, self.uid + 1))
        alive = uid in self.rig.scheduler.requests
        self.rig.tell(Cancel(uid))
        if alive:
            self.cancelled.add(uid)

    @precondition(lambda self: self._parked_in_flight())
    @rule()
    def clear_the_way(self) -> None:
        """Room for a sequence that was parked before its last token came back."""
        for uid in {sequence.uid for sequence in self.rig.scheduler.running.sequences}:
            self.rig.tell(Cancel(uid))
            self.cancelled.add(uid)
        self.run_ahead(depth=self.rig.scheduler.in_flight + 1)

    def _parked_in_flight(self) -> bool:
        scheduler = self.rig.scheduler
        return any(lead.resume_after > scheduler.settled for lead in scheduler.waiting)

    @precondition(lambda self: bool(self.rig.tokens))
    @rule(data=st.data())
    def stop_at(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.rig.tokens)))
        told = len(self.rig.tokens[key])
        alive = key[0] in self.rig.scheduler.requests and key not in self.rig.ended and key not in self.stopped
        self.rig.tell(StopAt(*key, data.draw(st.integers(1, told))))
        if alive:
            self.stopped[key] = told

    @rule(seconds=st.sampled_from([0.1, 1.5]))
    def time_passes(self, seconds: float) -> None:
        self.rig.now += seconds

    @precondition(lambda self: self.uid > 3)
    @rule(what=st.sampled_from(["nothing", "nothing", "nothing", "a step fails", "a step fails", "drain"]))
    def seldom(self, what: str) -> None:
        if what == "a step fails":
            self.fail_next = True
        elif what == "drain":
            self.draining = True
            self.rig.tell(Drain())

    def compare(self) -> None:
        """What was told is the beginning of what is right, and all of it where a request finished."""
        for (uid, choice), tokens in self.rig.tokens.items():
            right = self.expected[uid][choice]
            if (uid, choice) in self.stopped:
                assert tokens == right[: self.stopped[uid, choice]], f"request {uid} choice {choice}: after its stop"
            else:
                assert tokens == right[: len(tokens)], f"request {uid} choice {choice}: wrong tokens"
        for uid in self.rig.finished:
            for choice in range(self.rig.asked[uid].n):
                if (uid, choice) not in self.stopped:
                    told = self.rig.tokens.get((uid, choice), [])
                    assert told == self.expected[uid][choice], f"request {uid} choice {choice} finished early"
        for uid, failed in self.rig.failed.items():
            allowed = {"queue_full", "exceeds_capacity", "draining"}
            allowed |= {"timeout"} if uid in self.timed else set()
            allowed |= {"engine_error", "numerical_error"} if uid in self.broken else set()
            assert failed.error.code in allowed, failed
        assert not self.cancelled & {*self.rig.finished, *self.rig.failed}, "a terminal event after a cancellation"

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        while rig.runner.pending:
            rig.collect()
        while len(rig.results) > 1:
            rig.settle()
        rig.drain(self._bound())
        while rig.runner.pending or rig.results:
            rig.collect() if rig.runner.pending else rig.settle()
        rig.drain(self._bound())
        self.compare()
        ended = {*rig.finished, *rig.failed, *self.cancelled}
        assert ended == set(range(1, self.uid + 1)), "a request has no end"
        assert rig.empty(), "something is still held"
        assert not rig.scheduler.running.parks or self.uid > 0

    def _bound(self) -> int:
        """Turns that suffice if in every stretch of LONGEST chunks and tokens the first in the order ends."""
        sequences = sum(message.n for message in self.rig.asked.values())
        return 20 + 4 * LONGEST * max(sequences, 1)


def test_F53_F56_F68_peer29_peer37_random_traffic_gets_its_tokens_and_ends() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=BUDGET)


# mutants: what they break stands in their name


def _page_leak_on_park(patch: pytest.MonkeyPatch) -> None:
    real = running_module.Running.leave

    def leave(self: running_module.Running, sequence: Sequence, state: State, **how: bool) -> None:
        if state is State.PARKED and sequence.owned:
            sequence.owned.pop()
        real(self, sequence, state, **how)

    patch.setattr(running_module.Running, "leave", leave)


def _slot_freed_but_still_used(patch: pytest.MonkeyPatch) -> None:
    """A choice of n > 1 gives its slot back when its siblings are forked."""
    real = running_module.Running.join

    def join(self: running_module.Running, sequence: Sequence) -> None:
        real(self, sequence)
        self.slots.free([sequence.slot], self.step)
        sequence.slot = self.slots.take(1)[0] if self.slots.available > 1 else sequence.slot

    patch.setattr(running_module.Running, "join", join)


def _fence_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = Pool.free
    patch.setattr(Pool, "free", lambda self, ids, fence: real(self, ids, 0))


def _resume_at_the_wrong_start(patch: pytest.MonkeyPatch) -> None:
    """A resumed sequence believes that its first page is still there."""
    real = running_module.Running.admit

    def admit(self: running_module.Running, lead: Sequence, pages: int, match: Any) -> bool:
        resumed = lead.state is State.PARKED
        admitted = real(self, lead, pages, match)
        if admitted and resumed and lead.fill > PAGE:
            lead.planned = PAGE
        return admitted

    patch.setattr(running_module.Running, "admit", admit)


def _resume_forgets_the_last_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "length", property(lambda self: len(self.request.prompt) + max(len(self.output) - 1, 0)))


def _fork_without_page_copy(patch: pytest.MonkeyPatch) -> None:
    real = step_module.StepMaker._fork

    def fork(self: step_module.StepMaker, draft: Any, choice: Sequence) -> None:
        real(self, draft, choice)
        draft.page_copies.clear()

    patch.setattr(step_module.StepMaker, "_fork", fork)


def _fork_copies_the_wrong_way(patch: pytest.MonkeyPatch) -> None:
    real = step_module.StepMaker._fork

    def fork(self: step_module.StepMaker, draft: Any, choice: Sequence) -> None:
        real(self, draft, choice)
        if draft.state_copies:
            draft.state_copies[-2:] = draft.state_copies[:-3:-1]

    patch.setattr(step_module.StepMaker, "_fork", fork)


def _overshoot_told(patch: pytest.MonkeyPatch) -> None:
    def retire(self: Sequence) -> None:
        self.state = State.GONE

    patch.setattr(Sequence, "retire", retire)


def _cancel_leaks(patch: pytest.MonkeyPatch) -> None:
    """Only the first choice of a cancelled request is released."""

    def drop(self: scheduler_module.Scheduler, request: Any) -> None:
        self._release(request.sequences[0])
        del self.requests[request.uid]

    patch.setattr(scheduler_module.Scheduler, "_drop", drop)


def _first_is_parked(patch: pytest.MonkeyPatch) -> None:
    real = running_module.Running.park

    def room(self: running_module.Running, sequence: Sequence) -> bool:
        while not self.pages.available:
            real(self, self.sequences[0])
            if not sequence.on_device:
                return False
        return True

    patch.setattr(running_module.Running, "room_to_grow", room)


def _freed_index_not_announced(patch: pytest.MonkeyPatch) -> None:
    real = running_module.Running.leave

    def leave(self: running_module.Running, sequence: Sequence, state: State, **how: bool) -> None:
        real(self, sequence, state, **how)
        self.freed.clear()

    patch.setattr(running_module.Running, "leave", leave)


def _failed_step_believed(patch: pytest.MonkeyPatch) -> None:
    """After a failed step the plan that was already on its way still counts."""
    real = settle_module.settle

    def settle(flight: Any, done: Any) -> Any:
        for sequence in flight.samplers:
            if sequence.state is State.PARKED:
                sequence.live_from = 0
        return real(flight, done)

    patch.setattr(scheduler_module, "settle", settle)


def _prompt_chunk_skipped(patch: pytest.MonkeyPatch) -> None:
    real = step_module.chunk_end

    def chunk_end(start: int, fill: int, page_size: int, most: int) -> int:
        return real(start, fill, page_size, most + 1)

    patch.setattr(step_module, "chunk_end", chunk_end)


def _shared_pages_kept(patch: pytest.MonkeyPatch) -> None:
    def unshare(self: running_module.Running, sequence: Sequence) -> None:
        sequence.shares = False
        sequence.request.sharers -= 1

    patch.setattr(running_module.Running, "_unshare", unshare)


def _admission_with_too_few_pages(patch: pytest.MonkeyPatch) -> None:
    """A page too few is found good enough."""
    patch.setattr(step_module, "pages_at_admission", lambda lead, chunk, page_size: -(-chunk // page_size) - 1 or 1)


def caught(machine: type[SchedulerMachine]) -> None:
    """The machine fails, and not because the mutant does not fit the code that it breaks."""
    with pytest.raises(Exception) as failure:  # noqa: PT011
        run_state_machine_as_test(machine, settings=MUTANT_BUDGET)
    assert not isinstance(failure.value, TypeError | AttributeError), failure.value


MUTANTS = [
    _page_leak_on_park,
    _slot_freed_but_still_used,
    _fence_forgotten,
    _resume_at_the_wrong_start,
    _resume_forgets_the_last_token,
    _fork_without_page_copy,
    _fork_copies_the_wrong_way,
    _overshoot_told,
    _cancel_leaks,
    _first_is_parked,
    _freed_index_not_announced,
    _failed_step_believed,
    _prompt_chunk_skipped,
    _shared_pages_kept,
    _admission_with_too_few_pages,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_the_net_catches(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    caught(SchedulerMachine)
