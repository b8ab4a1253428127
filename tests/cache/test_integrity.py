import pytest

from hybserve.cache.integrity import IntegrityError, check_pool
from hybserve.cache.pool import Pool


@pytest.fixture
def pool() -> Pool:
    pool = Pool("pages", 7)
    pool.take(3)
    return pool


def test_every_id_in_one_place_is_fine(pool: Pool) -> None:
    check_pool(pool, [("a", [1, 3]), ("b", [2])])


def test_peer35_owners_that_only_wait_count_too(pool: Pool) -> None:
    check_pool(pool, [("running", [1]), ("waiting", [2, 3])])


@pytest.mark.parametrize(
    ("owners", "words"),
    [
        ([("a", [1]), ("b", [2])], r"\[3\] belong to nobody"),
        ([("a", [1, 2, 3]), ("b", [2])], "2 belongs to a and to b"),
        ([("a", [1, 2, 3, 3])], "3 belongs to a and to a"),
        ([("a", [1, 2, 3]), ("b", [5])], "5 belongs to the free list and to b"),
        ([("a", [1, 2, 3, 0])], "0 is not allocatable but owned by a"),
        ([("a", [1, 2, 3, 9])], "9 is not allocatable but owned by a"),
    ],
)
def test_a_violation_names_ids_and_owners(pool: Pool, owners: list, words: str) -> None:
    with pytest.raises(IntegrityError, match=words):
        check_pool(pool, owners)


def test_equal_counts_do_not_hide_a_swap(pool: Pool) -> None:
    """One id lost and one owned twice: the sums are right, the sets are not."""
    with pytest.raises(IntegrityError) as caught:
        check_pool(pool, [("a", [1, 2]), ("b", [2])])
    assert "nobody" in str(caught.value)
    assert "to a and to b" in str(caught.value)


def test_a_free_list_that_holds_an_id_twice_shows(pool: Pool) -> None:
    pool._free.append(5)
    with pytest.raises(IntegrityError, match="twice"):
        check_pool(pool, [("a", [1, 2, 3])])
