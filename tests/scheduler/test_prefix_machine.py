"""The scheduler with its prefix tree under random traffic that shares prefixes, and mutants that must be caught.

The tattletale runner is the oracle: every page and state that a request is given must hold the hash of *its own*
prefix, or its tokens are wrong at once. Compute runs behind the plans, results arrive late, pools are at the planner's
floor or barely above it, and everything is recounted after every rule.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from hybserve.plan.floors import count_floors
from hybserve.plan.result import EngineLimits
from tests.fakes import limits
from tests.scheduler.rig import Rig
from tests.scheduler.test_state_machine import BUDGET, LONGEST, PAGE, VOCAB, SchedulerMachine


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
        bad=st.sampled_from([(), (), ((2, PAGE), (3, 2 * PAGE))]),
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
        self.fork = 0

    @rule(trunk=st.integers(0, 2), fork=st.integers(1, LONGEST), salt=st.sampled_from(["", "", "", "b"]),
          anchors=st.lists(st.integers(0, LONGEST), max_size=2))  # fmt: skip
    def turn_to(self, trunk: int, fork: int, salt: str, anchors: list[int]) -> None:
        """The prompts that come next: which trunk, where they leave it, for whom."""
        self.trunk, self.fork, self.salt, self.anchors = trunk, fork, salt, tuple(anchors)

    def ids(self, length: int) -> list[int]:
        shared = [(self.trunk * 5 + k * 3) % VOCAB for k in range(min(length, self.fork))]
        return shared + [(self.uid * 11 + k) % VOCAB for k in range(length - len(shared))]

    @rule()
    def flush(self) -> None:
        tree, running = self.rig.scheduler.running.prefix.tree, self.rig.scheduler.running
        tree.flush(running.step)
        assert not tree.evictable_pages or tree.leases or tree.pinned
        self.rig.hear()


def test_F57_F61_F62_random_traffic_with_shared_prefixes_gets_its_tokens_and_ends() -> None:
    run_state_machine_as_test(PrefixMachine, settings=BUDGET)
