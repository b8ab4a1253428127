"""What to evict first: the one policy for KV pages and for checkpoints, with both prices in view.

GreedyDual-Size-Frequency (Cherkasova, HPL-98-69): a holding's worth is ``clock + uses · loss / bytes``, where loss is
the tokens that would have to be computed again. Evicting the least worthy raises the clock to its worth, so what has
not been used for a while sinks below what is new: recency, use and price in one number. Heaps hold stale entries; an
entry counts only if its version is still the holding's.
"""

import heapq
import itertools
from typing import Generic, TypeVar

H = TypeVar("H")


class Clock:
    """The inflation value that all heaps of one tree share."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0


class WorthHeap(Generic[H]):
    """Least worthy first. Entries are (worth, order, version, holding); ``pop`` hands them out with their version."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, H]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, holding: H, worth: float, version: int) -> None:
        heapq.heappush(self._heap, (worth, next(self._order), version, holding))

    def pop(self) -> tuple[float, int, H] | None:
        if not self._heap:
            return None
        worth, _, version, holding = heapq.heappop(self._heap)
        return worth, version, holding

    def compact(self, live: list[tuple[H, float, int]]) -> None:
        """Rebuild from the live entries, dropping the stale ones."""
        self._heap = [(worth, next(self._order), version, holding) for holding, worth, version in live]
        heapq.heapify(self._heap)
