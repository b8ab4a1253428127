"""Sampling against straightforward oracles: exact sets, distributions, reproducibility."""

import math

import pytest
import torch
from hybserve_kernels.sampling import (
    Filters,
    add_bias_,
    draw,
    greedy,
    kept,
    mask_,
    penalise_,
    position_key,
    stream_key,
    token_logprobs,
)
from hybserve_kernels.sampling.noise import gumbel
from hybserve_kernels.sampling.reference import ordered

torch.set_num_threads(1)


def logits(rows: int, vocab: int, seed: int = 0, step: float | None = None) -> torch.Tensor:
    """Random logits; ``step`` rounds them to multiples of it, so that ties abound."""
    values = 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return values if step is None else (values / step).round() * step


def filters(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Filters:
    return Filters([temperature] * rows, [top_k] * rows, [top_p] * rows, [min_p] * rows)


def keys(count: int, seed: int = 0) -> list[int]:
    return [position_key(stream_key(seed, 0), position) for position in range(count)]


def oracle_set(row: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, in plain Python: sort, cut to k, renormalise, cut the nucleus, cut below min_p of the best."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if top_k:
        order = order[:top_k]
    weight = [math.exp(row[token] - row[order[0]]) for token in order]
    total, reached, result = sum(weight), 0.0, set()
    for token, share in zip(order, weight, strict=True):
        if (reached < top_p * total or not result) and share >= min_p:
            result.add(token)
        reached += share
    return result


@pytest.mark.parametrize("vocab", [7, 300, 5000])
@pytest.mark.parametrize("step", [None, 0.5], ids=["smooth", "ties"])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.999, 0.0), (40, 0.7, 0.0), (0, 1.0, 0.1), (20, 0.8, 0.05),
     (0, 0.01, 0.0), (10_000, 0.5, 0.0), (3, 0.999, 1.0)],
)  # fmt: skip
def test_kept_sets_are_exact(vocab, step, top_k, top_p, min_p):
    rows = logits(4, vocab, seed=vocab, step=step)
    values, ids = kept(rows.double(), filters(4, top_k=top_k, top_p=top_p, min_p=0.0))
    if min_p:
        scaled = rows.double() - rows.double().amax(-1, keepdim=True)
        values, ids = kept(scaled, filters(4, top_k=top_k, top_p=top_p, min_p=min_p))
    for row in range(4):
        got = {int(token) for token, value in zip(ids[row], values[row], strict=True) if value > float("-inf")}
        assert got == oracle_set(rows[row].double().tolist(), min(top_k, vocab), top_p, min_p)


def test_mixed_filters_equal_each_alone():
    rows = logits(6, 3000)
    mixed = Filters([1.0, 0.5, 2.0, 1.0, 0.7, 1.3], [0, 1, 50, 0, 700, 0], [1.0, 1.0, 0.9, 0.5, 1.0, 0.9999],
                    [0.0, 0.0, 0.0, 0.2, 0.1, 0.0])  # fmt: skip
    together = draw(rows, mixed, keys(6))
    for row in range(6):
        alone = draw(rows[row : row + 1], mixed.take([row]), keys(6)[row : row + 1])
        assert int(alone) == int(together[row])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.7, 8, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.2, 0, 1.0, 0.15)],
)
def test_distribution(temperature, top_k, top_p, min_p):
    """Chi-square against the softmax over the kept set; the bound is generous (p about 1e-6)."""
    count, vocab = 20_000, 24
    row = logits(1, vocab, seed=3)
    tokens = draw(row.expand(count, vocab), filters(count, temperature, top_k, top_p, min_p), keys(count))
    scaled = (row[0].double() / temperature).tolist()
    allowed = oracle_set(scaled, top_k, top_p, min_p)
    weight = {token: math.exp(scaled[token]) for token in allowed}
    expected = {token: count * share / sum(weight.values()) for token, share in weight.items()}
    seen = torch.bincount(tokens, minlength=vocab).tolist()
    assert sum(seen[token] for token in allowed) == count
    bins = [token for token in allowed if expected[token] >= 5]
    chi = sum((seen[token] - expected[token]) ** 2 / expected[token] for token in bins)
    freedom = max(len(bins) - 1, 1)
    assert chi < freedom + 5 * math.sqrt(2 * freedom) + 10


def test_noise_is_uniform_and_uncorrelated():
    noise = gumbel(torch.tensor(keys(400)), torch.arange(500))
    uniform = torch.exp(-torch.exp(-noise))
    assert abs(float(uniform.mean()) - 0.5) < 0.005
    assert abs(float(uniform.var()) - 1 / 12) < 0.002
    for shifted in (uniform.roll(1, 0), uniform.roll(1, 1)):
        assert abs(float(torch.corrcoef(torch.stack((uniform.flatten(), shifted.flatten())))[0, 1])) < 0.01


def test_keys_are_pinned():
    """The numbers are part of what a seed means: a release that changes them changes everybody's seeded texts."""
    assert [position_key(stream_key(seed, choice), at) for seed, choice, at in ((0, 0, 0), (1, 0, 0), (-1, 2, 3))] == [
        2558736989570252433,
        -5653703133376969021,
        5193809491884537434,
    ]


def test_seed_choice_and_position_all_matter():
    row = torch.zeros(1, 1000)
    drawn = {
        int(draw(row, filters(1), [position_key(stream_key(seed, choice), position)]))
        for seed in range(3)
        for choice in range(3)
        for position in range(3)
    }
    assert len(drawn) > 20


def test_perturbed_logits_rarely_change_the_token():
    """Rounding noise moves a token only where two perturbed logits nearly tie (cold equals warm)."""
    rows = logits(500, 300)
    shaken = rows + 1e-5 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    same = draw(rows, filters(500), keys(500)) == draw(shaken, filters(500), keys(500))
    assert float(same.float().mean()) > 0.99


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-6, 1e6])
def test_extreme_temperatures_F29(temperature):
    rows = logits(3, 50)
    tokens = draw(rows, filters(3, temperature, top_p=0.9), keys(3))
    assert tokens.min() >= 0
    if temperature < 1e-3:
        assert torch.equal(tokens, rows.argmax(-1))


def test_greedy_takes_the_lowest_of_equals():
    tokens, finite = greedy(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0], [float("nan"), 1.0, 2.0]]))
    assert tokens[:2].tolist() == [1, 0]
    assert finite.tolist() == [True, True, False]
    for value in (float("inf"), float("-inf")):
        assert not greedy(torch.tensor([[0.0, value]]))[1].item()


@pytest.mark.parametrize("count", [0, 1, 5, 64, 999, 1000])
@pytest.mark.parametrize("step", [None, 1.0])
def test_ordered_breaks_ties_by_id(count, step):
    rows = logits(5, 1000, step=step)
    rows[0] = 0.0
    rows[1, 3:] = float("-inf")
    values, ids = ordered(rows, count)
    for row in range(5):
        expected = sorted(range(1000), key=lambda token: (-float(rows[row, token]), token))[:count]
        assert ids[row].tolist() == expected
        assert torch.equal(values[row], rows[row, expected])


def test_penalties():
    row = torch.tensor([[2.0, -2.0, 1.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    penalise_(
        row,
        torch.tensor([0, 0, 0, 1]),
        torch.tensor([0, 1, 2, 3]),
        torch.tensor([0, 2, 1, 5]),
        torch.tensor([2.0, 1.0]),
        torch.tensor([0.5, 0.0]),
        torch.tensor([0.25, 0.1]),
    )
    assert row[0].tolist() == [1.0, -4.0 - 0.5 - 0.5, 0.5 - 0.25 - 0.5, 3.0]
    assert row[1].tolist() == pytest.approx([1.0, 1.0, 1.0, 0.5])


def test_bias_and_mask():
    row = torch.zeros(2, 3)
    add_bias_(row, torch.tensor([0, 1]), torch.tensor([2, 0]), torch.tensor([5.0, -1.0]))
    mask_(row, torch.tensor([1]), torch.tensor([1]))
    assert row.tolist() == [[0.0, 0.0, 5.0], [-1.0, float("-inf"), 0.0]]


def test_everything_masked_still_draws_a_token():
    row = torch.full((1, 9), float("-inf"))
    for shape in (filters(1), filters(1, top_k=2), filters(1, top_p=0.5, min_p=0.1)):
        assert 0 <= int(draw(row, shape, keys(1))) < 9


def test_token_logprobs():
    rows = logits(3, 700)
    tokens = torch.tensor([0, 699, 5])
    own, values, ids = token_logprobs(rows, tokens, 4)
    expected = torch.log_softmax(rows.double(), -1)
    torch.testing.assert_close(own.double(), expected[torch.arange(3), tokens], atol=1e-5, rtol=0)
    torch.testing.assert_close(values.double(), expected.sort(-1, descending=True).values[:, :4], atol=1e-5, rtol=0)
    assert torch.equal(ids, expected.sort(-1, descending=True).indices[:, :4])
    assert token_logprobs(rows, tokens, 0)[2].shape == (3, 0)
