import random

import pytest

from hybserve.core.messages import Generate
from hybserve.core.sampling import SamplingParams
from hybserve.scheduler.queues import Waiting, insert, remove
from hybserve.scheduler.request import Request, State


def request(uid: int, priority: int = 0, arrival: float = 0.0, n: int = 1, prompt: int = 3) -> Request:
    return Request(Generate(uid, [1] * prompt, SamplingParams(), n, "", "", priority, arrival, 0.0))


def test_the_order_is_priority_then_arrival_then_uid_then_choice() -> None:
    rows = [(3, 0, 5.0), (1, 1, 0.0), (2, 0, 5.0), (4, -1, 9.0), (5, 0, 4.0)]
    sequences = [sequence for row in rows for sequence in request(*row, n=2).sequences]
    random.Random(1).shuffle(sequences)
    ordered: list = []
    for sequence in sequences:
        insert(ordered, sequence)
    assert [(sequence.uid, sequence.choice) for sequence in ordered] == [
        (uid, choice) for uid in (4, 5, 2, 3, 1) for choice in (0, 1)
    ]
    for sequence in sequences[::2]:
        remove(ordered, sequence)
    assert [sequence.key for sequence in ordered] == sorted(sequence.key for sequence in sequences[1::2])


def test_removing_what_is_not_there_is_a_mistake_that_shows() -> None:
    ordered = [request(1).sequences[0]]
    with pytest.raises(AssertionError, match="not where the order puts it"):
        remove(ordered, request(1).sequences[0])


def test_only_new_requests_count_against_the_bounds() -> None:
    waiting = Waiting()
    new, parked = request(1, n=3, prompt=7).sequences[0], request(2, n=2, prompt=5).sequences[0]
    parked.state = State.PARKED
    waiting.add(new)
    waiting.add(parked)
    assert (len(waiting), waiting.requests, waiting.tokens, waiting.parked) == (2, 1, 7, 2)
    waiting.remove(new)
    waiting.remove(parked)
    assert (len(waiting), waiting.requests, waiting.tokens, waiting.parked) == (0, 0, 0, 0)


def test_peer38_the_head_of_a_long_queue_costs_no_walk_through_it() -> None:
    waiting = Waiting()
    leads = [request(uid, arrival=float(uid)).sequences[0] for uid in range(5_000)]
    for lead in leads:
        waiting.add(lead)
    for lead in leads:
        assert waiting.at(0) is lead
        waiting.remove(lead)
