"""The engine bench runs the real loop and accounts for every part of a step."""

from bench.engine import PARTS, measure


def test_every_part_of_a_step_is_timed() -> None:
    figures = measure(rows=4, steps=20)
    assert (figures["rows"], figures["steps"]) == (4, 20)
    assert tuple(figures["median_ms_by_part"]) == PARTS
    assert figures["p99_ms"] >= figures["median_ms"] > 0
