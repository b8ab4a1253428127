"""The bench of state dtypes against independent accounts of the same: fp64, and the embedded model in plain torch."""

import pytest
import torch
import torch.nn.functional as F

from bench.demo.evaluate import load
from bench.demo.model import Packing
from bench.state_quality import model
from bench.state_quality.recurrence import WINDOW, WRITES, measure
from hybserve.launch.prepare import EMBEDDED_DIR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_only_the_rounded_states_leave_the_truth():
    errors, forgets = measure((1, 2, 16, 16), 1, (WINDOW,), DEVICE)
    for writes in WRITES:
        worst = {
            error.state: (float(error.outputs.max()), float(error.matrices.max()))
            for error in errors
            if error.writes == writes
        }
        assert max(worst["fp32"]) < 1e-5
        for state in ("bf16, stochastic", "bf16, nearest"):
            assert 1e-4 < worst[state][0] < 0.1
            assert 1e-4 < worst[state][1] < 0.1
    assert forgets.tolist() == pytest.approx([0.1, 1e-4])


def test_the_truth_is_that_of_the_plain_model(monkeypatch):
    monkeypatch.setattr(model, "KINDS", model.KINDS[:2])
    plain, tokenizer = load(EMBEDDED_DIR, "cpu")
    texts = [[0, *tokenizer.encode(text).ids] for text in ("a cat", "dog")]
    nats = 0.0
    for text in texts:
        whole = torch.tensor([[*text, *[0] * (-len(text) % 64)]])
        with torch.no_grad():
            logits = plain(whole, Packing(torch.arange(whole.shape[1])[None]))[0]
        nats += F.cross_entropy(logits[: len(text) - 1], torch.tensor(text[1:]), reduction="sum").item()
    reader = model.Reader(EMBEDDED_DIR, 2, 8, DEVICE)
    truth, rounded = reader.decoded(texts)
    assert truth.tokens == rounded.tokens == sum(map(len, texts)) - len(texts)
    assert truth.nats == pytest.approx(nats, rel=1e-3)
    assert truth.divergence == 0.0
    assert 0.0 < rounded.divergence < 0.01
    assert truth.same == 1.0


def test_answers_end_with_the_turn():
    assert model._until_end([5, 6, 2, 7, 0]) == [5, 6, 2]
    assert model._until_end([5, 6]) == [5, 6]
