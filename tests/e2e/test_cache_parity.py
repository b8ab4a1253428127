"""Parity through the prefix tree (DESIGN 5 and 9.1): in every situation of the cache a request gets the tokens and
logits that it gets cold; in deterministic mode to the bit."""

import itertools
from functools import cache

import pytest
import torch

from bench.cache_parity import FACTORS, CacheCase, check_case, pairs, product
from bench.parity import LARGE_PAGES, Mismatch, Subject
from hybserve.cache.tree import PrefixTree
from hybserve.runner import execute
from hybserve.runner.copies import copy_runs
from hybserve.scheduler.prefix import Prefix
from tests.poison import poison_empty

torch.set_num_threads(1)

PAIRS = pairs()


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory):
    """Subjects by shape, each made once."""

    @cache
    def make(shape: str) -> Subject:
        return Subject(shape, tmp_path_factory.mktemp("cache-parity"))

    return make


@pytest.mark.parametrize("shape", FACTORS["shape"])
def test_every_pair_of_values_peer11_peer13_peer16_peer17_peer18_peer23(subject, shape):
    for case in PAIRS:
        if case.shape == shape:
            assert check_case(subject(shape), case).tally.rows


@pytest.mark.parametrize("situation", ["hit", "evicted_both", "parked", "publishing"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "deterministic"])
def test_page_64_peer41(subject, situation, deterministic):
    shape = LARGE_PAGES[len(situation) % 3]
    check_case(subject(shape), CacheCase(shape, situation, deterministic, 6, 2, 1, False, page=64))


@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "deterministic"])
def test_scratch_that_nobody_wrote_is_not_read_peer20(subject, monkeypatch, deterministic):
    one = subject("next_mixed")
    one.truths(4)
    poison_empty(monkeypatch)
    check_case(one, CacheCase("next_mixed", "evicted_both", deterministic, 6, 3, 3, True))


@pytest.mark.full
@pytest.mark.parametrize("shape", FACTORS["shape"])
def test_whole_product(subject, shape):
    for case in product([shape]):
        check_case(subject(shape), case)


def test_pairs_are_all_there():
    for (a, first), (b, second) in itertools.combinations(enumerate(FACTORS.values()), 2):
        assert {(row[a], row[b]) for row in PAIRS} == set(itertools.product(first, second))
    assert len(PAIRS) < 180


# the instrument itself: what it must notice


def _case(situation: str, **changes) -> CacheCase:
    return CacheCase("dense", situation, True, 6, 3, 3, False)._replace(**changes)


def test_a_state_that_is_not_restored_is_noticed(subject, monkeypatch):
    monkeypatch.setattr(execute, "copy_runs", lambda runs, pairs: copy_runs(runs, [] if runs.shape[0] == 40 else pairs))
    with pytest.raises(Mismatch):
        check_case(subject("dense"), _case("hit"))


def test_a_checkpoint_of_another_position_is_noticed(subject, monkeypatch):
    real = PrefixTree.match

    def match(self, key, tokens):
        found = real(self, key, tokens)
        above = found.source.parent if found.source is not None else None
        if above is None or above.checkpoint is None:
            return found
        return found.__class__(found.kv_hit, found.state_hit, found.hit, found.reason, found.at, found.node, above)

    monkeypatch.setattr(PrefixTree, "match", match)
    with pytest.raises(Mismatch):
        check_case(subject("dense"), _case("hit", depth=9))


def test_a_hit_shorter_than_it_should_be_is_noticed(subject, monkeypatch):
    monkeypatch.setattr(Prefix, "exports", lambda self, *args: [])
    with pytest.raises(Mismatch, match="expected"):
        check_case(subject("dense"), _case("hit"))
