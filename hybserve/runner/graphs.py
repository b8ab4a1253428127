"""Captured CUDA graphs by the room that they have, and which rooms are worth one.

Graphs of one kind share a pool of memory: they are replayed one after another on one stream, and nothing of one
replay is read after the next. Kernels find their inputs in buffers that never move (staging.py).
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from hybserve_kernels.rows import TILE

from hybserve.plan.result import EngineLimits
from hybserve.runner.staging import Shape

#: Numbers of decode rows that get a graph of their own, and steps between larger ones.
_ROWS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_ROWS_APART = 64
#: Tokens of steps with prefill rows that get a graph. Most longer ones are launched kernel by kernel: there the device
#: takes longer over a kernel than the host over its launch, and padding would cost more than the launches.
_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024)
#: Decode rows beside the longest chunk that they are made to wait for: such steps are so frequent that they get graphs,
#: used where the padding is at most one part in so many.
_BESIDE, _MOST_PADDING = (64, 128), 16
#: Prefill rows of one of two graphs for each such step: kernels choose other forms for few rows.
_FEW_ROWS = 4

Room = TypeVar("Room")


class Graphs(Generic[Room]):
    """What was captured, by room. On CPU nothing is captured and everything runs at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._captured: dict[Room, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None  # the handle of the shared memory
        self._chosen: dict[Room, Room | None] = {}

    def capture(self, room: Room, call: Callable[[Room], torch.Tensor]) -> None:
        """Run once, to compile what has to be, and capture. Larger rooms first keep the shared memory small."""
        call(room)
        if self._stream is None:
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # torch.cuda.graph would collect garbage before each capture
            graph.capture_begin(pool=self._pool)
            result = call(room)
            graph.capture_end()
        self._pool = graph.pool()
        self._captured[room] = graph, result
        self._chosen.clear()

    def room_for(self, need: Room) -> Room | None:
        """The smallest captured room that holds ``need``; None if there is none."""
        if need not in self._chosen:
            if len(self._chosen) > 4096:
                self._chosen.clear()
            fitting = [room for room in self._captured if _holds(room, need)]
            self._chosen[need] = min(fitting, key=_size) if fitting else None
        return self._chosen[need]

    def run(self, room: Room, call: Callable[[Room], torch.Tensor]) -> torch.Tensor:
        """Replay what was captured for exactly this room, or launch it anew. The result lives until the next run."""
        captured = self._captured.get(room)
        if captured is None:
            return call(room)
        graph, result = captured
        graph.replay()
        return result


def _holds(room: object, need: object) -> bool:
    if isinstance(room, Shape) and isinstance(need, Shape):
        close = room.tokens <= max(_TOKENS[-1], need.tokens + need.tokens // _MOST_PADDING)
        fits = all(have >= wanted for have, wanted in zip(room, need, strict=True))
        return close and fits and _kind(room) == _kind(need)
    assert isinstance(room, int)
    assert isinstance(need, int)
    return room >= need


def _kind(shape: Shape) -> tuple[bool, ...]:
    return bool(shape.decode_rows), bool(shape.prefill_rows), bool(shape.last)


def _size(room: object) -> tuple[int, ...]:
    if isinstance(room, Shape):
        return (room.tokens, room.pages, *room)
    assert isinstance(room, int)
    return (room,)


def buckets_of(max_running: int) -> list[int]:
    """Numbers of rows that get a graph, ascending; the last is ``max_running``."""
    more = range(_ROWS[-1] + _ROWS_APART, max_running, _ROWS_APART)
    return [*(rows for rows in (*_ROWS, *more) if rows < max_running), max_running]


def graph_rooms(limits: EngineLimits, table_width: int, rows: list[int]) -> list[Shape]:
    """The shapes that get a graph, largest first: decode rows alone by their number, and steps with prefill rows by
    tokens, few or many rows, with and without decode rows."""
    running = limits.max_running
    shapes = [Shape(count, count, 0, 0, table_width, 0) for count in rows]
    for tokens in sorted({tokens for tokens in (*_TOKENS, *_beside(limits)) if tokens <= limits.step_tokens}):
        most = min(running, tokens)
        for prefill in {min(_FEW_ROWS, most), most}:
            tiles = tokens // TILE + prefill
            for decode in (0, most) if tokens <= _TOKENS[-1] else (most,):
                shapes.append(Shape(tokens, decode, prefill, tiles, table_width, min(running, decode + prefill)))
    return sorted(shapes, key=_size, reverse=True)


def _beside(limits: EngineLimits) -> list[int]:
    """Tokens of steps with the longest chunk beside decode rows, in whole tiles."""
    if not limits.prefill_beside:
        return []
    rows = {min(rows, limits.max_running) for rows in (*_BESIDE, limits.max_running)}
    return [-(-(limits.prefill_beside + count) // TILE) * TILE for count in rows]


def exact_room(need: Shape, limits: EngineLimits, table_width: int) -> Shape:
    """``need`` with tokens and pages rounded up a little, so that kernels specialised on the divisibility of strides
    are the same for all steps, and rows whose last tokens are read to a number of decode rows that has a graph, whose
    kernels are there. Other rows and tiles stay: kernels choose their form by them."""

    def up(count: int, unit: int) -> int:
        return -(-count // unit) * unit

    tokens = up(need.tokens, TILE) if need.prefill_rows else need.tokens
    last = min((rows for rows in buckets_of(limits.max_running) if rows >= need.last), default=0) if need.last else 0
    return need._replace(tokens=tokens, pages=min(up(need.pages, 16), table_width), last=last)
