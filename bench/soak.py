"""Soak: the prefix tree in the scheduler under far more random traffic than CI has time for.

Two parts, both on the tattletale runner, which turns every aliased page and every wrong state into a wrong token:

    machine     the state machine of tests/scheduler/test_prefix_machine.py, example after example
    workloads   random traffic with cancellations on pools of 1.0 to 1.3 times the planner's floor

    python -m bench soak [--examples N] [--workloads N] [--minutes M]

``--minutes`` bounds the machine; the true number of examples is recorded, with the first failure if there is one.
"""

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from bench import record
from hybserve.core.messages import Cancel
from hybserve.plan.floors import count_floors
from tests.fakes import limits
from tests.scheduler.rig import Rig
from tests.scheduler.test_prefix_machine import PrefixMachine
from tests.scheduler.test_state_machine import BUDGET

EXAMPLES = 20_000
WORKLOADS = 1_000
#: Examples between two looks at the clock.
PORTION = 100
PAGE = 4
LONGEST = 40
#: Refusals at the door, which are answers too.
REFUSED = ("queue_full", "exceeds_capacity")


# the machine


def soak_machine(
    examples: int, minutes: float, tell: Callable[[dict[str, Any]], None] = lambda figures: None
) -> dict[str, Any]:
    """Up to ``examples`` examples in ``minutes``, each portion from a seed of its own; stops at the first failure.
    ``tell`` hears the figures after every portion."""
    began, done = time.monotonic(), Counter[str]()
    figures: dict[str, Any] = {"asked": examples, "examples": 0, "portions": 0, "failure": None}
    while done["examples"] < examples and time.monotonic() - began < 60 * minutes and figures["failure"] is None:
        budget = settings(BUDGET, max_examples=min(PORTION, examples - done["examples"]), derandomize=False)
        try:
            run_state_machine_as_test(_counted(figures["portions"], done), settings=budget)
        except Exception:
            figures["failure"] = {"seed": figures["portions"], "error": traceback.format_exc()[-4000:]}
        figures |= {**done, "portions": figures["portions"] + 1, "seconds": round(time.monotonic() - began, 1)}
        tell(figures)
    return figures


def _counted(number: int, done: Counter[str]) -> type[PrefixMachine]:
    class Counted(PrefixMachine):
        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "rig"):
                done["examples"] += 1
                done["steps"] += len(self.rig.runner.plans)
                done["requests"] += self.uid
                done["parks"] += self.rig.scheduler.running.parks
                done["hits"] += sum(finished.cache.hit > 0 for finished in self.rig.finished.values())
                done.update({f"checkpoints {k}": v for k, v in self.rig.scheduler.running.prefix.checkpoints.items()})

    return seed(number)(Counted)


# workloads


class Workload(NamedTuple):
    """``factor``: pools in units of the floor."""

    number: int
    factor: float
    running: int
    step_tokens: int
    stateful: bool
    every: int


def workload(number: int) -> Workload:
    """The ``number``-th; every fourth stands exactly at the floor."""
    rng = random.Random(number)
    factor = 1.0 if number % 4 == 0 else rng.uniform(1.0, 1.3)
    return Workload(
        number, factor, rng.randint(2, 6), rng.choice((4, 8, 16)), rng.random() < 0.85, rng.choice((0, PAGE, 2 * PAGE))
    )


def run_workload(load: Workload) -> Counter[str]:
    """Arrivals in bursts, shared prefixes, choices, priorities, cancellations; raises if anything is wrong."""
    rng, uids = random.Random(load.number), 24
    floors = count_floors(load.running, LONGEST, load.step_tokens, PAGE, prefix=True)
    engine = limits(
        page_size=PAGE, prefill_chunk=8, max_seq_len=LONGEST, max_running=load.running, step_tokens=load.step_tokens,
        state_slots=int(floors.state_slots * load.factor), kv_pages=int(floors.kv_pages * load.factor),
        prefix=True, slot_price=rng.choice((0.5, 3.0, 20.0)), stateful=load.stateful, checkpoint_every=load.every,
    )  # fmt: skip
    rig = Rig(engine, max_queue=uids)
    trunks = [[rng.randrange(64) for _ in range(LONGEST)] for _ in range(3)]
    cancelled: set[int] = set()
    for uid in range(1, uids + 1):
        prompt = _prompt(rng, trunks)
        rig.ask(
            uid, prompt, rng.randint(1, LONGEST - len(prompt)), n=rng.choice((1, 1, 1, 2, min(3, load.running))),
            priority=rng.choice((0, 0, 0, 1, -1)), anchors=[rng.randrange(len(prompt) + 1)],
            temperature=rng.choice((0.0, 1.0)),
        )  # fmt: skip
        for _ in range(rng.choice((0, 0, 1, 3, 9))):
            rig.turn()
        if rng.random() < 0.25:
            victim = rng.randint(1, uid)
            if victim in rig.scheduler.requests:
                cancelled.add(victim)
            rig.tell(Cancel(victim))
    rig.drain(20 + 4 * LONGEST * 3 * uids)
    refused = {uid for uid, failed in rig.failed.items() if failed.error.code in REFUSED}
    assert refused == set(rig.failed), f"failed: {rig.failed}"
    rig.right(set(range(1, uids + 1)) - cancelled - refused)
    prefix, parks = rig.scheduler.running.prefix, rig.scheduler.running.parks
    assert rig.empty(), "something is still held"
    hits = sum(finished.cache.hit > 0 for finished in rig.finished.values())
    seen = Counter({f"checkpoints {outcome}": count for outcome, count in prefix.checkpoints.items()})
    seen.update(requests=uids, cancelled=len(cancelled), refused=len(refused), parks=parks, hits=hits)
    seen.update(steps=len(rig.runner.plans), evicted_pages=prefix.tree.evicted_pages)
    seen.update(evicted_states=prefix.tree.evicted_states)
    return seen


def _prompt(rng: random.Random, trunks: list[list[int]]) -> list[int]:
    length = rng.randint(1, LONGEST - 2)
    fork = rng.randint(0, length)
    return rng.choice(trunks)[:fork] + [rng.randrange(64) for _ in range(length - fork)]


def soak_workloads(count: int) -> dict[str, Any]:
    """All of them; failures by number."""
    began, seen, at_floor, failures = time.monotonic(), Counter[str](), Counter[str](), {}
    for number in range(count):
        load = workload(number)
        try:
            one = run_workload(load)
        except Exception:
            failures[number] = {"load": load._asdict(), "error": traceback.format_exc()[-2000:]}
            continue
        seen.update(one)
        if load.factor == 1.0:
            at_floor.update(one)
    return {
        "workloads": count,
        **seen,
        "exactly_at_the_floor": dict(at_floor),
        "seconds": round(time.monotonic() - began, 1),
        "failures": failures,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench soak", description="random traffic through the prefix tree")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--workloads", type=int, default=WORKLOADS)
    parser.add_argument("--minutes", type=float, default=60.0, help="bound of the state machine's part")
    options = parser.parse_args(arguments)
    workloads = soak_workloads(options.workloads)
    print(f"{workloads['workloads']} workloads, {len(workloads['failures'])} failures", file=sys.stderr, flush=True)

    def tell(machine: dict[str, Any]) -> None:
        """Written after every portion, so that a run cut short says how far it came."""
        record("soak", {"workloads": workloads, "machine": machine}, sys.orig_argv, ("hypothesis",))

    machine = soak_machine(options.examples, options.minutes, tell)
    print(f"{machine['examples']} examples, failure: {machine['failure'] is not None}", file=sys.stderr)
    return 1 if machine["failure"] or workloads["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
