"""The engine bench runs the real loop and accounts for every part of a step."""

import pytest

from bench.engine import PARTS, measure


@pytest.mark.parametrize("prefix", [False, True])
def test_every_part_of_a_step_is_timed(prefix: bool) -> None:
    figures = measure(rows=4, steps=20, prefix=prefix)
    assert (figures["rows"], figures["steps"]) == (4, 20)
    assert tuple(figures["median_ms_by_part"]) == PARTS
    assert figures["p99_ms"] >= figures["median_ms"] > 0
