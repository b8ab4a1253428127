"""A sample of the soak: pools at the planner's floor and just above it, with cancellations."""

from collections import Counter

from bench.soak import run_workload, soak_machine, workload


def test_random_workloads_at_the_floor_get_their_answers_peer5_peer29_peer30_peer31_peer55() -> None:
    """Nothing asserts, nothing hangs, every answer is right, and what found no slot is counted. The grid of checkpoints
    is none, a page or two; checkpoints stay within their pool, which is recounted after every move."""
    seen, exact = Counter[str](), 0
    for number in range(24):
        load = workload(number)
        exact += load.factor == 1.0
        seen.update(run_workload(load))
    assert exact == 6
    assert seen["requests"] == 24 * 24
    assert seen["checkpoints skipped"] > 0
    for what in ("checkpoints published", "parks", "hits", "cancelled", "evicted_pages", "evicted_states"):
        assert seen[what] > 0, what


def test_the_machine_s_part_counts_what_ran() -> None:
    figures = soak_machine(5, minutes=1)
    assert figures["failure"] is None
    assert figures["examples"] >= 5
