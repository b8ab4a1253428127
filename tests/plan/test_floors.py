import pytest

from hybserve.plan.floors import copies_in_flight, count_floors, pages_of
from hybserve.plan.result import Floors


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (4096, 64)])
def test_pages(tokens, pages):
    assert pages_of(tokens, 64) == pages


def test_one_slot_per_running_sequence_the_padding_and_one_copy_peer28_peer40():
    assert count_floors(24, 4096, 512, 64, prefix=True) == Floors(state_slots=26, kv_pages=64 + 8 + 1)
    assert count_floors(24, 4096, 512, 64, prefix=False).state_slots == 25


def test_pages_of_one_sequence_of_one_step_and_the_padding():
    assert count_floors(1, 10, 5, 4, prefix=False).kv_pages == 3 + 2 + 1


def test_copies_in_flight():
    assert (copies_in_flight(True), copies_in_flight(False)) == (1, 0)
