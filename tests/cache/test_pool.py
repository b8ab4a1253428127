import random

import pytest

from hybserve.cache.integrity import check_pool
from hybserve.cache.pool import Pool, PoolExhausted


def test_peer26_padding_is_never_handed_out() -> None:
    pool = Pool("slots", 5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    with pytest.raises(PoolExhausted, match="asked for 1, 0 of 4 are free"):
        pool.take(1)


def test_a_pool_of_padding_alone_has_nothing_to_give() -> None:
    assert Pool("pages", 1).available == 0
    with pytest.raises(ValueError, match="padding"):
        Pool("pages", 0)


def test_peer29_a_take_that_fails_takes_nothing() -> None:
    pool = Pool("pages", 4)
    pool.take(2)
    with pytest.raises(PoolExhausted):
        pool.take(2)
    assert (pool.available, pool.held) == (1, 2)


def test_F68_freeing_twice_is_a_mistake_that_shows() -> None:
    pool = Pool("pages", 4)
    ids = pool.take(1)
    pool.free(ids, 1)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(ids, 1)


def test_an_id_remembers_the_last_plan_that_named_it() -> None:
    pool = Pool("pages", 4)
    first, second = pool.take(2)
    pool.free([second], 7)
    pool.free([first], 9)
    assert (pool.fence(first), pool.fence(second)) == (9, 7)


def test_the_longest_freed_is_handed_out_first() -> None:
    pool = Pool("pages", 4)
    pool.free(reversed(pool.take(3)), 1)
    assert pool.take(3) == [3, 2, 1]


def test_random_use_keeps_free_and_held_apart_and_complete() -> None:
    rng, pool, held = random.Random(7), Pool("pages", 40), []
    for step in range(2000):
        if held and rng.random() < 0.5:
            back = rng.sample(held, rng.randint(1, len(held)))
            held = [index for index in held if index not in set(back)]
            pool.free(back, step)
        else:
            held += pool.take(rng.randint(0, pool.available))
        check_pool(pool, [("test", held)])
        assert pool.held_ids() == set(held)
