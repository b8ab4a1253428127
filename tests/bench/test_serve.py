"""The comparison with a peer: which loads are run, and what counts as missed."""

from typing import Any

from bench.serve import SCENARIOS, Load, arguments, compare, loads


def _run(scenario: str, **results: Any) -> dict[str, Any]:
    return {"scenario": scenario, "results": results}


def test_models_for_a_gpu_are_loaded_as_the_peer_was() -> None:
    assert [name for name, _ in loads(arguments(["--model", "m1"]))] == list(SCENARIOS)
    assert loads(arguments(["--model", "m2", "--scenario", "c1"])) == [("c1", SCENARIOS["c1"][0])]
    one, other = loads(arguments(["--concurrency", "2", "4", "--input", "7", "--output", "3", "--requests", "5"]))
    assert one == (None, Load(7, 3, 5, 2, 4))
    assert other == (None, Load(7, 3, 5, 4, 4))


def test_what_misses_its_bar_is_marked() -> None:
    good = _run("c64", requests_per_s=50.0, ttft_ms={"p50": 399, "p99": 900}, itl_ms={"p50": 7, "p99": 41})
    alone = _run("c1", ttft_ms={"p50": 19}, tpot_ms={"p50": 4.5})
    lines = compare([good, alone], ready_s=31.0)[1:]
    marked = [line for line in lines if line.endswith("!")]
    assert [line[:26].split() for line in marked] == [
        ["start", "ready,", "s"],
        ["c64", "ITL", "p99,", "ms"],
        ["c1", "TPOT", "p50,", "ms"],
    ]
    assert len(lines) == 8
    slow = compare([_run("c64", requests_per_s=41.0, ttft_ms=None, itl_ms=None)], None)
    assert slow[1].endswith("!")
    assert not any(line.endswith("!") for line in compare([good], 31.0, same_model=False))
