"""The parity matrix (DESIGN 9.1, law 7): tokens and logits equal those of transformers under every schedule."""

import itertools
from functools import cache

import pytest
import torch

from bench.parity import (
    FACTORS,
    LARGE_PAGES,
    WHOLE,
    Case,
    Mismatch,
    Subject,
    Truth,
    check_case,
    compare,
    pairwise,
    product,
)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory):
    """Subjects by shape, each made once."""

    @cache
    def make(shape: str) -> Subject:
        return Subject(shape, tmp_path_factory.mktemp("parity"))

    return make


PAIRS = [Case(*row) for row in pairwise(FACTORS)]


@pytest.mark.parametrize("shape", FACTORS["shape"])
def test_every_pair_of_values_peer11_peer18_peer23(subject, shape):
    cases = [case for case in PAIRS if case.shape == shape]
    assert cases
    for case in cases:
        assert check_case(subject(shape), case).rows


@pytest.mark.parametrize("shape", LARGE_PAGES)
@pytest.mark.parametrize(
    ("chunk", "parked", "deterministic"),
    [(1, True, False), (3, False, True), (WHOLE, True, True), (WHOLE, False, False)],
)
def test_page_64_peer41(subject, shape, chunk, parked, deterministic):
    check_case(subject(shape), Case(shape, 7, chunk, parked, deterministic, page=64))


@pytest.mark.parametrize("shape", ["odd", "next_mixed"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "deterministic"])
def test_every_length_F63(subject, shape, deterministic):
    """Prompts of 1 … 3 chunks + 1 tokens, chunks of one page and of three, all lengths riding in mixed steps."""
    page, outputs = 4, 3
    for chunk in (1, 3):
        lengths = list(range(1, 3 * chunk * page + 2))
        prompts = subject(shape).prompts(lengths)
        truths = [subject(shape).truth(prompt, page, outputs) for prompt in prompts]
        for low in range(0, len(lengths), 7):
            case = Case(shape, 7, chunk, False, deterministic, page, seed=low)
            some = truths[low : low + 7]
            lives, logits = subject(shape).run([truth.prompt for truth in some], case, outputs)
            for truth, live, rows in zip(some, lives, logits, strict=True):
                compare(truth, live.output, rows, case)


@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_deterministic_bits_do_not_depend_on_threads(subject, shape):
    truths = subject(shape).truths(4)[:1]
    torch.set_num_threads(2)
    try:
        case = Case(shape, 1, 3, True, True, seed=1)
        lives, logits = subject(shape).run([truth.prompt for truth in truths], case, 9)
    finally:
        torch.set_num_threads(1)
    compare(truths[0], lives[0].output, logits[0], case)


@pytest.mark.full
@pytest.mark.parametrize("shape", FACTORS["shape"])
def test_whole_product(subject, shape):
    for case in product(seeds=1):
        if case.shape == shape:
            check_case(subject(shape), case)


def test_pairs_are_all_there():
    rows = pairwise(FACTORS)
    for (a, first), (b, second) in itertools.combinations(enumerate(FACTORS.values()), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(first, second))
    assert len(rows) < 70


def test_comparison_notices_what_it_must_peer12():
    """The instrument itself: a wrong token, a drifted logit and a changed bit are each a mismatch."""
    oracle = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 2.0 - 1e-4]])
    truth = Truth([0], [0, 1], oracle, oracle.clone(), lambda: torch.tensor([1e-6, 1e-6]))
    batched, exact = Case("", 1, WHOLE, False, False), Case("", 1, WHOLE, False, True)
    assert compare(truth, [0, 1], oracle, exact).near_ties == 1
    assert compare(truth, [0, 2], oracle, batched).rows == 2
    with pytest.raises(Mismatch, match="token 1"):
        compare(truth, [1, 1], oracle, batched)
    with pytest.raises(Mismatch, match="row's largest"):
        compare(truth, [0, 1], oracle + 1e-3, batched)
    with pytest.raises(Mismatch, match="row's largest"):
        compare(truth, [0, 1], oracle * float("nan"), batched)
    assert compare(truth._replace(noise=lambda: torch.tensor([1.0, 1.0])), [0, 1], oracle + 1e-3, batched).shaky == 2
    shaken = oracle.clone()
    shaken[1, 0] = 1e-7
    compare(truth, [0, 1], shaken, batched)
    with pytest.raises(Mismatch, match="bit-equal"):
        compare(truth, [0, 1], shaken, exact)
