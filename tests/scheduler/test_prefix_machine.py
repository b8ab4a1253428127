"""The scheduler with its prefix tree under random traffic that shares prefixes, and mutants that must be caught.

The tattletale runner is the oracle: every page and state that a request is given must hold the hash of *its own*
prefix, or its tokens are wrong at once. Compute runs behind the plans, results arrive late, pools are at the planner's
floor or barely above it, and everything is recounted after every rule.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from hybserve.cache.node import Node
from hybserve.cache.tree import PrefixTree
from hybserve.core.messages import StepDone
from hybserve.plan.floors import count_floors
from hybserve.plan.result import EngineLimits
from hybserve.scheduler import prefix as prefix_module
from hybserve.scheduler import request as request_module
from hybserve.scheduler import running as running_module
from hybserve.scheduler import scheduler as scheduler_module
from hybserve.scheduler.prefix import Export, Prefix
from hybserve.scheduler.request import Sequence, State
from hybserve.scheduler.step import StepMaker
from tests.fakes import limits
from tests.scheduler.rig import Rig
from tests.scheduler.test_state_machine import BUDGET, LONGEST, PAGE, VOCAB, SchedulerMachine, caught

#: (seed, position) of states that are not finite.
BROKEN = tuple((seed, position) for seed in (2, 3, 5, 7) for position in (PAGE, 2 * PAGE, 4 * PAGE))


def floor(max_running: int, step_tokens: int, **changes: Any) -> EngineLimits:
    floors = count_floors(max_running, LONGEST, step_tokens, PAGE, prefix=True)
    return limits(
        page_size=PAGE, prefill_chunk=8, max_seq_len=LONGEST, max_running=max_running, step_tokens=step_tokens,
        state_slots=floors.state_slots + changes.pop("slots"), kv_pages=floors.kv_pages + changes.pop("pages"),
        prefix=True, slot_price=3.0, **changes,
    )  # fmt: skip


class PrefixMachine(SchedulerMachine):
    """The rules of the scheduler's machine, on prompts from a small forest, with anchors, salts and flushes."""

    @initialize(
        running=st.integers(2, 5),
        step_tokens=st.sampled_from([4, 8, 12]),
        pages=st.sampled_from([0, 0, 9, 20]),
        slots=st.sampled_from([0, 0, 2, 6]),
        stateful=st.sampled_from([True, True, True, False]),
        every=st.sampled_from([0, PAGE, 2 * PAGE]),
        bad=st.sampled_from([(), BROKEN]),
    )
    def begin(
        self, running: int, step_tokens: int, pages: int, slots: int, stateful: bool, every: int,
        bad: tuple[tuple[int, int], ...],
    ) -> None:  # fmt: skip
        engine = floor(running, step_tokens, pages=pages, slots=slots, stateful=stateful, checkpoint_every=every)
        self.fail_next = False
        self.rig = Rig(engine, max_queue=12, vocab=VOCAB, evil=self._evil, bad_states=bad)
        self.uid = 0
        self.cancelled, self.stopped, self.broken, self.timed = set(), {}, set(), set()
        self.broken = {seed for seed, _ in bad}
        self.draining = False
        self.expected = {}
        self.trunk = 0
        self.fork = LONGEST

    @rule(trunk=st.integers(0, 2), fork=st.integers(1, LONGEST), salt=st.sampled_from(["", "", "", "b"]),
          anchors=st.lists(st.integers(0, LONGEST), max_size=2))  # fmt: skip
    def turn_to(self, trunk: int, fork: int, salt: str, anchors: list[int]) -> None:
        """The prompts that come next: which trunk, where they leave it, for whom."""
        self.trunk, self.fork, self.salt, self.anchors = trunk, fork, salt, tuple(anchors)

    def ids(self, length: int) -> list[int]:
        shared = [(self.trunk * 5 + k * 3) % VOCAB for k in range(min(length, self.fork))]
        return shared + [(self.uid * 11 + k) % VOCAB for k in range(length - len(shared))]

    def compare(self) -> None:
        super().compare()
        for uid, finished in self.rig.finished.items():
            assert finished.cache.hit <= finished.cache.kv_hit <= self.rig.common(uid), f"request {uid} hit too much"

    @rule(really=st.sampled_from([True] + [False] * 7))
    def flush(self, really: bool) -> None:
        if not really:
            return
        tree, running = self.rig.scheduler.running.prefix.tree, self.rig.scheduler.running
        tree.flush(running.step)
        assert not tree.evictable_pages or tree.leases or tree.pinned
        self.rig.hear()


def test_F57_F61_F62_random_traffic_with_shared_prefixes_gets_its_tokens_and_ends() -> None:
    run_state_machine_as_test(PrefixMachine, settings=BUDGET)


# mutants: what they break stands in their name


def _page_published_and_kept(patch: pytest.MonkeyPatch) -> None:
    real = PrefixTree.publish
    patch.setattr(PrefixTree, "publish", lambda self, *args, **how: real(self, *args, **how)[:-1])


def _salt_left_out(patch: pytest.MonkeyPatch) -> None:
    real = request_module.Request.__init__

    def init(self: Any, message: Any) -> None:
        real(self, message)
        self.root = (message.tenant, "")

    patch.setattr(request_module.Request, "__init__", init)


def _failed_step_published(patch: pytest.MonkeyPatch) -> None:
    real = scheduler_module.Scheduler._publish

    def publish(self: Any, flight: Any, done: Any) -> None:
        positions = [export.position for export in flight.exports]
        done = done or StepDone(flight.plan.step, 1, [], [], [], [], 0.0, positions, [True] * len(positions))
        real(self, flight, done)

    patch.setattr(scheduler_module.Scheduler, "_publish", publish)


def _state_at_another_position(patch: pytest.MonkeyPatch) -> None:
    """The export of a chunk's end is booked one page too early."""
    real = PrefixTree.attach

    def attach(self: PrefixTree, lease: Any, position: int, slot: int) -> bool:
        return real(self, lease, position - PAGE if position > PAGE else position, slot)

    patch.setattr(PrefixTree, "attach", attach)


def _gap_written(patch: pytest.MonkeyPatch) -> None:
    real = Prefix.take

    def take(self: Prefix, sequence: Sequence, match: Any) -> None:
        real(self, sequence, match)
        sequence.write_from = 0

    patch.setattr(Prefix, "take", take)


def _lease_kept(patch: pytest.MonkeyPatch) -> None:
    def release(self: Prefix, sequence: Sequence, fence: int) -> None:
        self._promising.pop(sequence, None)
        sequence.goals, sequence.lease = set(), None

    patch.setattr(Prefix, "release", release)


def _leases_ignored(patch: pytest.MonkeyPatch) -> None:
    """Eviction takes the newest leaf, held or not."""

    def next_leaf(self: PrefixTree) -> Node | None:
        leaves = [
            node for node in self.all_nodes() if not node.children and not (node.checkpoint and node.checkpoint.pins)
        ]
        for node in leaves[:1]:
            self._count(node, None, -node.leases)
        return leaves[0] if leaves else None

    patch.setattr(PrefixTree, "_next_leaf", next_leaf)


def _broken_state_published(patch: pytest.MonkeyPatch) -> None:
    real_publish = scheduler_module.Scheduler._publish

    def publish(self: Any, flight: Any, done: Any) -> None:
        if done is not None:
            for index in range(len(done.export_finite)):
                done.export_finite[index] = True
        real_publish(self, flight, done)

    patch.setattr(scheduler_module.Scheduler, "_publish", publish)


def _state_not_restored(patch: pytest.MonkeyPatch) -> None:
    real = StepMaker._let_in

    def let_in(self: StepMaker, draft: Any, *args: Any) -> bool:
        copies = len(draft.state_copies)
        let = real(self, draft, *args)
        del draft.state_copies[copies:]
        return let

    patch.setattr(StepMaker, "_let_in", let_in)


def _lost_export_leaks(patch: pytest.MonkeyPatch) -> None:
    real = Prefix.settle

    def settle(self: Prefix, export: Export, live: bool, position: int, fence: int) -> None:
        if live:
            real(self, export, live, position, fence)

    patch.setattr(Prefix, "settle", settle)


def _split_forgets_leases(patch: pytest.MonkeyPatch) -> None:
    real = PrefixTree._split

    def split(self: PrefixTree, node: Node, position: int) -> Node:
        upper = real(self, node, position)
        upper.leases = 0
        return upper

    patch.setattr(PrefixTree, "_split", split)


def _hit_at_the_longest_kv(patch: pytest.MonkeyPatch) -> None:
    """Resume at the deepest KV, with the state of the deepest checkpoint."""
    real = PrefixTree._result

    def result(self: PrefixTree, *args: Any) -> Any:
        match = real(self, *args)
        return prefix_module.Match(
            match.kv_hit, match.state_hit, match.kv_hit if match.hit else 0, match.reason, match.at, match.node,
            match.source,
        )  # fmt: skip

    patch.setattr(PrefixTree, "_result", result)


def _whole_prompt_reused(patch: pytest.MonkeyPatch) -> None:
    """Not one token is left to compute."""
    real = PrefixTree.match
    patch.setattr(PrefixTree, "match", lambda self, key, tokens: real(self, key, [*tokens, 0]))


def _waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A promise that is kept is not taken back."""
    patch.setattr(Prefix, "_kept", lambda self, sequence, position: None)
    real = Prefix.release

    def release(self: Prefix, sequence: Sequence, fence: int) -> None:
        promising = dict(self._promising)
        goals = sequence.goals
        real(self, sequence, fence)
        self._promising.update(promising)
        sequence.goals = goals

    patch.setattr(Prefix, "release", release)


def _source_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """The checkpoint that a plan restores from may be evicted, and overwritten, before the plan has run."""
    patch.setattr(PrefixTree, "pin", lambda self, node: node.checkpoint)
    patch.setattr(PrefixTree, "unpin", lambda self, node, fence: None)


def _siblings_left_behind(patch: pytest.MonkeyPatch) -> None:
    """The tree takes the prompt's pages from a forked request, and only the lead holds them there."""
    patch.setattr(PrefixTree, "follow", lambda self, lease, other, position: None)


def _held_slot_owned_twice(patch: pytest.MonkeyPatch) -> None:
    """A sequence writes its next boundary over the state it held, and the tree keeps the slot too."""
    patch.setattr(PrefixTree, "let_go", lambda self, held: held.slot)


def _held_state_a_page_too_early(patch: pytest.MonkeyPatch) -> None:
    """The state of the last boundary is booked at the one before; who was parked resumes from it."""
    real = PrefixTree.hold
    patch.setattr(PrefixTree, "hold", lambda self, slot, position: real(self, slot, position - PAGE or PAGE))


def _held_state_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A sequence that leaves does not let go of what the tree holds for it."""
    real = Prefix.release

    def release(self: Prefix, sequence: Sequence, fence: int) -> None:
        sequence.boundary = None
        real(self, sequence, fence)

    patch.setattr(Prefix, "release", release)


def _parting_never_leaves(patch: pytest.MonkeyPatch) -> None:
    """The last boundary of an ended sequence has come back, and it stays."""
    real = running_module.Running.leave

    def leave(self: running_module.Running, sequence: Sequence, state: State, **how: bool) -> None:
        if not (sequence.parting and sequence.settled == sequence.length):
            real(self, sequence, state, **how)

    patch.setattr(running_module.Running, "leave", leave)


MUTANTS = [
    _page_published_and_kept,
    _salt_left_out,
    _failed_step_published,
    _state_at_another_position,
    _gap_written,
    _lease_kept,
    _leases_ignored,
    _broken_state_published,
    _state_not_restored,
    _lost_export_leaks,
    _split_forgets_leases,
    _hit_at_the_longest_kv,
    _whole_prompt_reused,
    _waits_for_ever,
    _source_not_pinned,
    _siblings_left_behind,
    _held_slot_owned_twice,
    _held_state_a_page_too_early,
    _held_state_forgotten,
    _parting_never_leaves,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_the_net_catches(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    caught(PrefixMachine)
