"""The bench of chats says what is wrong, and finds nothing wrong with a server that is not."""

import json
from pathlib import Path

import pytest

from bench.multi_turn import MAX_ERRORS, Answer, Comparison, Distance, Hits, growth, main, margin, verdict

NEAR = {"a": -1.0, "b": -1.0005, "c": -3.0}
CLEAR = {"a": -1.0, "b": -1.2, "c": -3.0}


def _answer(tokens: list[int], tops: list[dict[str, float]]) -> Answer:
    return Answer(tokens, tops, 100, 64, 0.1)


def test_another_token_is_right_only_where_the_two_likeliest_are_near() -> None:
    comparison = Comparison(tie=1e-3, noise=Distance(0.0, 0.0))
    cold = _answer([1, 2, 3], [CLEAR, NEAR, CLEAR])
    comparison.add(_answer([1, 2, 3], [CLEAR, NEAR, CLEAR]), cold)
    comparison.add(_answer([1, 5, 9], [CLEAR, NEAR, {"x": -0.5}]), cold)
    assert comparison.figures()["far"] == 0, "what follows the first difference is another text"
    comparison.add(_answer([1, 2, 4], [CLEAR, NEAR, {"a": -1.0, "b": -1.4}]), cold)
    figures = comparison.figures()
    assert [figures[kind] for kind in ("compared", "equal", "near_tie", "wrong", "far")] == [3, 1, 1, 1, 1]
    assert figures["wrong_answers"][0] == {
        "prompt_tokens": 100, "cached": 64, "at": 2, "margin": pytest.approx(0.2), "warm": 4, "cold": 3,
    }  # fmt: skip
    assert figures["warm_to_cold"]["largest"] == pytest.approx(0.2)
    assert margin({"a": -1.0}) == float("inf")


def test_hits_may_lack_a_page_and_memory_may_grow_at_first_only() -> None:
    hits = Hits()
    for cached, prompt in ((0, 100), (160, 200), (125, 200)):
        hits.add(
            int(cached > 0), _answer([], [])._replace(cached_tokens=cached, prompt_tokens=prompt), 160 * (cached > 0)
        )
    assert [row["good"] for row in hits.figures(first=100, page=9)] == [True, True]
    assert [row["good"] for row in hits.figures(first=100, page=8)] == [True, False]
    mib = 1 << 20
    grown = growth([{"a": 0, "b": 0}, {"a": 500 * mib, "b": 0}, {"a": 560 * mib, "b": 70 * mib}])
    assert [row["good"] for row in grown.values()] == [True, False]


def test_a_verdict_names_every_fault() -> None:
    good = {"hits": [{"turn": 1, "good": True}], "memory_mib": {}, "errors": {}, "log_errors": []}
    tokens = {"compared": 3, "wrong": 0, "far": 0}
    assert verdict(good | {"tokens": tokens}) == []
    bad = {
        "hits": [{"turn": 2, "good": False, "hit": 0.1, "expected": 0.8}],
        "memory_mib": {"engine": {"good": False, "middle": 1, "end": 99}},
        "errors": {"timeout": 2},
        "log_errors": ["the books are wrong"],
        "tokens": {"compared": 0, "wrong": 1, "far": 1},
    }
    assert len(verdict(bad)) == 7


def test_chats_on_a_small_model_reuse_what_they_sent_and_answer_as_cold(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    small = ["cache.page_size=8", "memory.device=48MiB", "engine.max_seq_len=512", "engine.max_running=8"]
    sets = [part for text in small for part in ("--set", text)]
    run = ["--minutes", "0.06", "--scale", "32", "--chats", "4", "--turns", "3", "--pauses", "1", "--check", "step"]
    assert main(["--model", "tiny", *run, *sets, "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["faults"] == []
    assert figures["errors"] == {}
    assert figures["tokens"]["compared"] >= 2
    assert [row["turn"] for row in figures["hits"]] == [1, 2, 3]
    assert figures["hits"][-1]["hit"] > 0.7
    assert set(figures["memory_mib"]) >= {"launch", "api", "text", "worker", "engine"}
    assert figures["requests"] <= 2 * figures["answers"] + 2 * 8 + MAX_ERRORS
