"""Ids of pages and slots, and who may use them again: the one pool type. No bytes here, only integers.

Id 0 is padding: never allocatable. A freed id carries the last plan sent that names it (its *fence*). The compute
stream executes plans in order, so ``take`` may hand a freed id out at once; whoever works beside that stream (copies,
files) may touch it only when ``fence(id) <= `` the last plan that every rank has reported done.
"""

from collections import deque
from collections.abc import Iterable


class PoolExhausted(RuntimeError):
    """More ids were asked for than are free: a programmer's mistake, callers check ``available`` first."""


class Pool:
    """Allocatable ids 1 .. size-1. All operations are O(ids touched)."""

    def __init__(self, name: str, size: int) -> None:
        if size < 1:
            raise ValueError(f"{name}: a pool needs at least its padding id, got size {size}")
        self.name = name
        self.size = size
        self._free: deque[int] = deque(range(1, size))
        self._fence = [0] * size
        self._held = [False] * size

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self.size - 1 - len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` ids, oldest freed first."""
        if count > len(self._free):
            raise PoolExhausted(f"{self.name}: asked for {count}, {len(self._free)} of {self.size - 1} are free")
        ids = [self._free.popleft() for _ in range(count)]
        for index in ids:
            self._held[index] = True
        return ids

    def free(self, ids: Iterable[int], fence: int) -> None:
        """Give ids back. ``fence``: number of the last plan sent that names them."""
        for index in ids:
            assert self._held[index], f"{self.name}: id {index} freed twice"
            self._held[index] = False
            self._fence[index] = fence
            self._free.append(index)

    def fence(self, index: int) -> int:
        """The last plan that named the id before it was last freed."""
        return self._fence[index]

    def held_ids(self) -> set[int]:
        return {index for index, held in enumerate(self._held) if held}

    def free_ids(self) -> set[int]:
        return set(self._free)
