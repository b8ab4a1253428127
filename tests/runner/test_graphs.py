"""Which captured graph serves a step."""

from contextlib import nullcontext

import pytest
import torch

from hybserve.plan.result import EngineLimits
from hybserve.runner.graphs import Graphs, buckets_of, exact_room, graph_rooms
from hybserve.runner.staging import Shape


class Recorded:
    """A graph that records nothing."""

    def capture_begin(self, pool: object) -> None: ...

    def capture_end(self) -> None: ...

    def pool(self) -> None: ...


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    made: Graphs = Graphs(torch.device("cpu"))
    made._stream = object()
    return made


def test_what_was_asked_for_before_the_capture_is_looked_for_again(graphs: Graphs) -> None:
    assert graphs.room_for(3) is None
    for rows in (8, 4, 2):
        graphs.capture(rows, lambda _: torch.zeros(1))
    assert graphs.room_for(3) == 4
    assert graphs.room_for(9) is None


def test_a_step_takes_the_smallest_room_of_its_own_kind(graphs: Graphs) -> None:
    limits = EngineLimits(64, 40, 12, 24, 512, 512, 256, "float32", "float32", "float32")
    for shape in graph_rooms(limits, 16, buckets_of(limits.max_running)):
        graphs.capture(shape, lambda _: torch.zeros(1))
    assert graphs.room_for(exact_room(Shape(5, 5, 0, 0, 3, 0), limits, 16)) == Shape(8, 8, 0, 0, 16, 0)
    assert graphs.room_for(exact_room(Shape(100, 0, 1, 2, 3, 1), limits, 16)) == Shape(128, 0, 4, 6, 16, 4)
    assert graphs.room_for(exact_room(Shape(103, 3, 9, 11, 3, 12), limits, 16)) == Shape(128, 24, 24, 26, 16, 24)
    assert graphs.room_for(exact_room(Shape(513, 1, 1, 8, 3, 2), limits, 16)) is None
    assert graphs.room_for(exact_room(Shape(100, 0, 1, 2, 3, 0), limits, 16)) is None  # all tokens are read: no graph


def test_an_exact_room_reads_the_last_tokens_of_as_many_rows_as_a_graph_decodes() -> None:
    limits = EngineLimits(64, 40, 12, 24, 2048, 2048, 256, "float32", "float32", "float32")
    assert exact_room(Shape(1290, 7, 3, 21, 3, 10), limits, 16) == Shape(1344, 7, 3, 21, 16, 16)
    assert exact_room(Shape(1290, 7, 3, 21, 3, 0), limits, 16).last == 0  # all tokens are read


def test_the_longest_chunk_beside_decode_rows_has_a_room_without_much_padding(graphs: Graphs) -> None:
    limits = EngineLimits(64, 400, 12, 96, 4096, 4096, 4096, "float32", "float32", "float32", prefill_beside=1216)
    rooms = graph_rooms(limits, 16, buckets_of(limits.max_running))
    assert {room.tokens for room in rooms if room.tokens > 1024} == {1280, 1344}
    for shape in rooms:
        graphs.capture(shape, lambda _: torch.zeros(1))
    assert graphs.room_for(exact_room(Shape(1216 + 60, 60, 3, 21, 3, 63), limits, 16)) == Shape(1280, 96, 4, 24, 16, 96)
    assert graphs.room_for(exact_room(Shape(1216 + 90, 90, 5, 23, 3, 95), limits, 16)) == Shape(
        1344, 96, 96, 117, 16, 96
    )
    assert graphs.room_for(exact_room(Shape(1100, 60, 3, 21, 3, 63), limits, 16)) is None  # padding costs more
    assert graphs.room_for(exact_room(Shape(1216, 0, 3, 21, 3, 3), limits, 16)) is None
