"""The engine bench runs the real loop and accounts for every part of a step."""

from bench.engine import PARTS, TURN, measure


def test_every_part_of_a_step_is_timed_with_and_without_the_tree() -> None:
    both = measure(rows=4, steps=2 * TURN + 1)
    for figures in (both, both["with_prefix_tree"]):
        assert (figures["rows"], figures["steps"]) == (4, 2 * TURN)
        assert tuple(figures["median_ms_by_part"]) == PARTS
        assert figures["p99_ms"] >= figures["median_ms"] > 0
    assert both["tree_cost"] > -1
    checkpoints = both["with_prefix_tree"]["checkpoints"]
    assert checkpoints["superseded"] > 0
    assert "skipped" not in checkpoints
