"""Both sides of the comparison say the same, and the figures are what they claim to be."""

import random
from pathlib import Path

import pytest
import torch

from bench import vs_transformers as bench

torch.set_num_threads(1)
LENGTHS = [(9, 3), (70, 5), (2, 4)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[bench.Ours, bench.Theirs]:
    changes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    monkeypatch.setattr(bench, "CONFIG", bench.CONFIG | changes)
    bench.make_model(tmp_path)
    return bench.Ours(tmp_path), bench.Theirs(tmp_path)


def test_every_way_generates_the_asked_lengths_and_both_sides_agree(small: tuple[bench.Ours, bench.Theirs]) -> None:
    turns = bench.measure(bench.ways(*small), LENGTHS, 2, random.Random(0))
    for turn in turns:
        for sample in turn.values():
            assert [len(prompt) for prompt in sample.prompts] == [prompt for prompt, _ in LENGTHS]
            assert [len(output) for output in sample.outputs] == [output for _, output in LENGTHS]
    agreement = bench.agreement(turns, *small, LENGTHS)
    assert not any(entry["wrong"] for entry in agreement.values())
    assert set(bench.figures(turns, LENGTHS)["bars"]) == {
        "ours alone over theirs alone",
        "ours at once over theirs alone",
        "ours at once over theirs padded",
    }


def test_a_bar_is_missed_by_the_median_of_the_rounds() -> None:
    def turn(ours: float) -> dict[tuple[str, str], bench.Sample]:
        seconds = {("ours", "alone"): ours, ("theirs", "alone"): 4.0, ("ours", "at once"): 1.0, ("theirs", "padded"): 1}
        return {way: bench.Sample(value, [], []) for way, value in seconds.items()}

    bars = bench.figures([turn(2.0), turn(5.0), turn(6.0)], LENGTHS)["bars"]
    assert bars["ours alone over theirs alone"]["rounds"] == [2.0, 0.8, 0.667]
    assert [entry["met"] for entry in bars.values()] == [False, True, True]
