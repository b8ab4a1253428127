"""What a row samples depends on nothing but itself: a batch of every kind of row equals each row alone."""

import itertools
import math

import pytest
import torch

from hybserve.core.messages import SequenceStart
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import LOGPROB_FLOOR, TokenLogprobs
from hybserve.runner.sampler import SAFE_TOKEN, sample, score
from hybserve.runner.sequences import Sequence

VOCAB = 500
HISTORY = [3, 3, 4, 5, 9, 9, 9]

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy with logprobs": SamplingParams(temperature=0.0, logprobs=4),
    "greedy with penalties": SamplingParams(temperature=0.0, repetition_penalty=1.8, presence_penalty=1.0),
    "greedy with bias": SamplingParams(temperature=0.0, logit_bias=((17, 100.0), (18, -100.0))),
    "greedy without stops": SamplingParams(temperature=0.0, min_tokens=9, stop_ids=tuple(range(0, VOCAB, 2))),
    "plain": SamplingParams(seed=1),
    "hot": SamplingParams(seed=2, temperature=5.0, logprobs=0),
    "top_k": SamplingParams(seed=3, top_k=7),
    "top_p": SamplingParams(seed=4, top_p=0.8, temperature=0.7),
    "min_p": SamplingParams(seed=5, min_p=0.1),
    "all": SamplingParams(
        seed=6, temperature=1.3, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.3, logit_bias=((7, 2.0),), min_tokens=5, stop_ids=(1, 2), logprobs=3,
    ),
}  # fmt: skip


def sequence(kind: str, choice: int = 0) -> Sequence:
    sampling = KINDS[kind]
    return Sequence(SequenceStart(0, 1, choice, sampling, HISTORY if sampling.needs_history else [], 4, 3))


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_independent(dtype):
    kinds = list(KINDS) * 3
    rows = logits(len(kinds)).to(dtype)
    outputs = [index % 7 for index in range(len(kinds))]
    together = sample(rows.clone(), [sequence(kind) for kind in kinds], outputs)
    order = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(2)).tolist()
    shuffled = sample(rows[order], [sequence(kinds[at]) for at in order], [outputs[at] for at in order])
    for place, at in enumerate(order):
        alone = sample(rows[at : at + 1].clone(), [sequence(kinds[at])], [outputs[at]])
        assert int(alone.tokens[0]) == int(together.tokens[at]) == int(shuffled.tokens[place]), kinds[at]
        if alone.logprobs:
            assert alone.logprobs[0] == together.logprobs[at] == shuffled.logprobs[place]
    assert together.bad == []


def test_bad_rows_change_no_other_row_F50():
    kinds = list(KINDS)
    rows = logits(2 * len(kinds))
    broken = rows.clone()
    for index, value in zip(
        range(1, 2 * len(kinds), 2), itertools.cycle((math.nan, math.inf, -math.inf)), strict=False
    ):
        broken[index, 11 * index] = value
    sequences = [kind for kind in kinds for _ in range(2)]
    healthy = sample(rows.clone(), [sequence(kind) for kind in sequences], [0] * len(rows))
    hurt = sample(broken.clone(), [sequence(kind) for kind in sequences], [0] * len(rows))
    assert hurt.bad == list(range(1, 2 * len(kinds), 2))
    assert hurt.tokens[0::2].tolist() == healthy.tokens[0::2].tolist()
    assert set(hurt.tokens[1::2].tolist()) == {SAFE_TOKEN}
    assert hurt.logprobs[0::2] == healthy.logprobs[0::2]
    for entry in hurt.logprobs[1::2]:
        assert entry is None or all(math.isfinite(value) for value in (entry.logprob, *entry.top_logprobs))


def test_penalties_follow_the_output():
    """Each token is banned in effect once it was generated; a prompt token is not touched by presence or frequency."""
    row = torch.zeros(1, VOCAB)
    row[0, :6] = torch.tensor([5.0, 4.9, 4.8, 4.7, 4.6, 4.5])
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    one = Sequence(SequenceStart(0, 1, 0, params, [0, 1], 2, 0))
    assert [int(sample(row.clone(), [one], [at]).tokens[0]) for at in range(4)] == [0, 1, 2, 3]
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    one = Sequence(SequenceStart(0, 1, 0, params, [0, 1], 2, 0))
    assert [int(sample(row.clone(), [one], [at]).tokens[0]) for at in range(3)] == [2, 3, 4]


def test_min_tokens_ends():
    row = torch.zeros(1, VOCAB)
    row[0, 7] = 9.0
    one = Sequence(SequenceStart(0, 1, 0, SamplingParams(temperature=0.0, min_tokens=2, stop_ids=(7,)), [], 2, 0))
    assert [int(sample(row.clone(), [one], [at]).tokens[0]) == 7 for at in range(4)] == [False, False, True, True]


def test_sampled_token_has_its_logprob_outside_the_top():
    row = torch.zeros(1, VOCAB)
    row[0, 0] = 50.0
    banned = SamplingParams(temperature=0.0, logit_bias=((0, -100.0),), logprobs=1)
    entry = sample(row, [Sequence(SequenceStart(0, 1, 0, banned, [], 2, 0))], [0]).logprobs[0]
    assert entry.top_ids == (0,)
    assert entry.top_logprobs[0] == pytest.approx(0.0, abs=1e-6)
    assert entry.logprob == pytest.approx(-50.0, abs=1e-3)


def test_logprobs_have_a_floor():
    row = torch.tensor([[0.0, -3e38, 1.0]])
    (entry,) = score(row, torch.tensor([1]), [3])
    assert isinstance(entry, TokenLogprobs)
    assert entry.logprob == entry.top_logprobs[2] == LOGPROB_FLOOR


def test_seed_choice_and_position_make_the_draw():
    row = torch.zeros(1, VOCAB)

    def token(seed: int, choice: int, output: int) -> int:
        one = Sequence(SequenceStart(0, 1, choice, SamplingParams(seed=seed), [], 4, 0))
        return int(sample(row.clone(), [one], [output]).tokens[0])

    assert token(1, 0, 0) == token(1, 0, 0)
    for changed in ([token(seed, 0, 0) for seed in range(9)], [token(1, choice, 0) for choice in range(9)],
                    [token(1, 0, output) for output in range(9)]):  # fmt: skip
        assert len(set(changed)) > 6
