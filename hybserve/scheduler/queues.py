"""Waiting sequences in the one total order: what stands first is admitted first, and nothing passes it."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from hybserve.scheduler.request import Key, Sequence, State


def _key(sequence: Sequence) -> Key:
    return sequence.key


def insert(ordered: list[Sequence], sequence: Sequence) -> None:
    insort(ordered, sequence, key=_key)


def remove(ordered: list[Sequence], sequence: Sequence) -> None:
    """The sequence must be there."""
    position = bisect_left(ordered, sequence.key, key=_key)
    assert ordered[position] is sequence, f"sequence {sequence.key} is not where the order puts it"
    del ordered[position]


class Waiting:
    """Leads of groups that wait for admission: new requests whole, parked ones as they were parked.

    Only new requests count against the bounds of the queue: a parked one was already let in.
    """

    def __init__(self) -> None:
        self._ordered: list[Sequence] = []
        self.requests = 0
        self.tokens = 0  # prompt tokens of ``requests``

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ordered)

    def at(self, place: int) -> Sequence:
        return self._ordered[place]

    @property
    def parked(self) -> int:
        """Sequences off the device that had been on it."""
        return sum(len(lead.group) for lead in self._ordered if lead.state is State.PARKED)

    def add(self, lead: Sequence) -> None:
        insert(self._ordered, lead)
        self._count(lead, 1)

    def remove(self, lead: Sequence) -> None:
        remove(self._ordered, lead)
        self._count(lead, -1)

    def _count(self, lead: Sequence, sign: int) -> None:
        if lead.state is State.QUEUED:
            self.requests += sign
            self.tokens += sign * len(lead.request.prompt)
