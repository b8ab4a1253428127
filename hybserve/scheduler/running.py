"""Sequences on the device, in the one total order, and everything they hold there.

Ledger of a request with prompt P, page G, full = P // G, once it has been forked (n > 1):

    [0, full·G)       the tree's under each choice's lease, or ``request.shared``, freed when the last sharer leaves
    [full·G, P)       choice 0: the page it prefilled; choice i: its own copy (nothing if P is a page multiple)
    [P, …)            each choice: its own pages, one by one as it grows, until they are published

Before the fork, and for n = 1, all that is not the tree's is ``owned`` by the one sequence that prefills. A parked
choice gives up all it holds and resumes alone.

Every id is freed with ``step``, the last plan made, as its fence: no later plan names it until it is taken anew.
"""

import heapq

from hybserve.cache.pool import Pool
from hybserve.cache.tree import Match
from hybserve.plan.floors import pages_of
from hybserve.plan.result import EngineLimits
from hybserve.scheduler import queues
from hybserve.scheduler.prefix import Prefix
from hybserve.scheduler.queues import Waiting
from hybserve.scheduler.request import Sequence, State


class Running:
    """Takes and gives back pages, slots and sequence indices; parks from the end of the order when pages run out."""

    def __init__(self, limits: EngineLimits, waiting: Waiting) -> None:
        self.limits = limits
        self.step = 0  # number of the last plan made
        self.parks = 0
        self.freed: list[int] = []  # indices that the next plan tells the runner to forget
        self._waiting = waiting
        self.rebuild()

    def rebuild(self) -> None:
        """Everything free, nothing running."""
        self.pages = Pool("kv pages", self.limits.kv_pages)
        self.slots = Pool("state slots", self.limits.state_slots)
        self.prefix = Prefix(self.limits, self.pages, self.slots)
        self.sequences: list[Sequence] = []  # in the total order
        self._indices = list(range(self.limits.max_running))  # a heap: indices stay dense

    @property
    def free_indices(self) -> list[int]:
        return self._indices

    def has_seats(self, group: int) -> bool:
        """Whether ``group`` more sequences may run, as far as slots go; touches nothing."""
        return len(self.sequences) + group <= self.limits.max_running and self.prefix.reachable_slots >= group

    def _owed(self) -> int:
        """Pages that running sequences will ask for soon."""
        page_size, owed = self.limits.page_size, len(self.sequences)
        for sequence in self.sequences:
            if sequence.state is State.PREFILL and sequence.fill > sequence.capacity:
                owed += pages_of(sequence.fill - sequence.capacity, page_size)
        return owed

    def admit(self, lead: Sequence, pages: int, match: Match | None) -> bool:
        """Let a group in: a slot for each, and for the lead, which prefills for all, the hit and ``pages`` pages more.

        All or nothing: false, and nothing but evictable content is touched, if eviction cannot make the room. What was
        parked must also find, beside others, the pages that they still need to prefill and one for each of them to
        grow: let back in with less, it would soon be parked again and its recomputed tokens lost.
        """
        prefix, group = self.prefix, len(lead.group)
        source = match.source if match is not None else None
        if match is not None:
            lead.lease = prefix.tree.lease(lead.request.root, match)
            if source is not None:
                prefix.tree.pin(source)
        owed = 0
        if lead.state is State.PARKED and self.sequences:
            kv_hit = match.kv_hit if match is not None else 0
            owed = max(pages_of(lead.fill - kv_hit, self.limits.page_size) - pages, 0) + self._owed()
        if not self._make_room(group, pages, owed):
            if source is not None:
                prefix.tree.unpin(source, self.step)
            prefix.release(lead, self.step)
            return False
        for member, slot in zip(lead.group, self.slots.take(group), strict=True):
            member.slot = slot
            member.state = State.FORK
            member.planned = member.sampled = 0
            queues.insert(self.sequences, member)
        lead.state = State.PREFILL
        prefix.take(lead, match)
        self.grow(lead, pages)
        return True

    def _make_room(self, group: int, pages: int, owed: int) -> bool:
        """Evict for ``group`` slots and ``pages`` pages, if ``owed`` pages more could be had later."""
        prefix = self.prefix
        if prefix.reachable_slots < group or prefix.reachable_pages < pages + owed:
            return False
        return prefix.reclaim_slots(group, self.step) and prefix.reclaim_pages(pages, self.step)

    def grow(self, sequence: Sequence, count: int) -> list[int]:
        """``count`` more pages at the end of the block table; the caller has made sure that they are free."""
        ids = self.pages.take(count)
        sequence.table += ids
        sequence.owned.update(ids)
        sequence.capacity += count * self.limits.page_size
        return ids

    def name(self, sequence: Sequence) -> None:
        """Give it the index by which the plan being made names it first."""
        sequence.index = heapq.heappop(self._indices)
        sequence.started = True

    def share(self, lead: Sequence) -> None:
        """The request is forked: the lead's full prompt pages become the request's (see the ledger)."""
        request = lead.request
        full = len(request.prompt) // self.limits.page_size
        request.shared = lead.owned.intersection(lead.table[:full])
        lead.owned -= request.shared
        lead.shares = True
        request.sharers = 1

    def join(self, sequence: Sequence) -> None:
        """A choice forked from its lead shares the prompt's full pages."""
        request, page_size = sequence.request, self.limits.page_size
        lead, full = request.sequences[0], len(request.prompt) // page_size
        sequence.shares = True
        request.sharers += 1
        sequence.table = lead.table[:full]
        sequence.capacity = full * page_size
        sequence.planned = sequence.fill = sequence.settled = sequence.exported = len(request.prompt)
        if lead.lease is not None:
            sequence.lease = self.prefix.tree.clone(lead.lease)

    def room_to_grow(self, sequence: Sequence) -> bool:
        """Make at least one page free: evict first, then park from the end of the order; false if ``sequence`` itself
        was parked."""
        while not self.prefix.reclaim_pages(1, self.step):
            self.park(self.sequences[-1])
            if not sequence.on_device:
                assert self.sequences, "the first in the order was parked"
                return False
        return True

    def park(self, sequence: Sequence) -> None:
        """Take it off the device to recompute later; a group that has not been prefilled yet goes and returns whole."""
        lead = sequence.request.sequences[0]
        group = lead.group if lead.state is State.PREFILL and sequence in lead.group else (sequence,)
        for member in group:
            if member.ended:
                self.leave(member, State.GONE)
                continue
            self.leave(member, State.PARKED)
            member.resume_after = self.step
            self.parks += 1
        if sequence.state is State.PARKED:
            group[0].group = group
            self._waiting.add(group[0])

    def leave(self, sequence: Sequence, state: State, *, publish: bool = True) -> None:
        """Give back all that it holds. ``state``: PARKED or GONE. ``publish``: first let the tree have whole pages."""
        queues.remove(self.sequences, sequence)
        self.slots.free([sequence.slot], self.step)
        if publish and sequence.lease is not None and sequence.output:
            behind = sequence.settled < sequence.fill  # a resumed prefill has not come back to where it was
            computed = sequence.settled if behind else max(sequence.settled, sequence.length - 1)
            self.prefix.publish(sequence, computed, last=True)
        self.pages.free(sequence.owned, self.step)
        if sequence.shares:
            self._unshare(sequence)
        self.prefix.release(sequence, self.step)
        if sequence.started:
            self.freed.append(sequence.index)
            heapq.heappush(self._indices, sequence.index)
        sequence.slot, sequence.table, sequence.capacity = 0, [], 0
        sequence.owned, sequence.write_from, sequence.edge, sequence.exporting = set(), 0, 0, 0
        sequence.index, sequence.started = -1, False
        sequence.state = state
        if state is State.GONE:
            sequence.retire()

    def _unshare(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.shares = False
        request.sharers -= 1
        if not request.sharers:
            self.pages.free(request.shared, self.step)
            request.shared = set()

    def covers(self, sequence: Sequence) -> int:
        """Tokens its block table has room for, counted from the pages themselves."""
        return len(sequence.table) * self.limits.page_size

    def pages_needed(self, sequence: Sequence, end: int) -> int:
        """Pages still missing to hold the tokens before ``end``."""
        return pages_of(end - sequence.capacity, self.limits.page_size)
