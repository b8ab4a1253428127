"""The prefix tree as the scheduler uses it: what a newcomer reuses, what a step exports, what its result publishes.

Ledger of one sequence's block table, page by page:

    tree       [0, kv_hit) from admission on, and every page that ``publish`` moved there; kept by ``sequence.lease``
    shared     ``request.shared``: prompt pages of a forked request that the tree did not take (yet, or ever)
    owned      ``sequence.owned``: everything else; freed when the sequence leaves

Slots: one active slot per sequence; slots of exports in flight belong to the plan until its result is settled, then to
the tree, or back to the pool. In decode the tree only *holds* the state at the last boundary passed, and gets KV and
state to match when the sequence leaves, or reaches the grid. Publishing is best effort: no room, a lost sequence, an
equal checkpoint already there mean a slot given back and a count, never an error.
"""

from collections import Counter
from dataclasses import dataclass

from hybserve.cache.node import Node
from hybserve.cache.pool import Pool
from hybserve.cache.tree import Lease, Match, PrefixTree
from hybserve.core.messages import Probe
from hybserve.core.types import CacheTruth
from hybserve.observe.metrics import labelled
from hybserve.plan.result import EngineLimits
from hybserve.scheduler.request import Request, Sequence

#: Reason of the hit of a request that may not read the cache.
ALL_LOGITS = "prompt_logprobs"


@dataclass(slots=True)
class Export:
    """A checkpoint being written by a plan: the state of ``sequence`` at ``position``, into ``slot``."""

    sequence: Sequence
    position: int
    slot: int
    decode: bool  # the boundary that a decoding sequence has just passed


class Prefix:
    """One per scheduler. With ``limits.prefix`` off nothing is matched, exported or published."""

    def __init__(self, limits: EngineLimits, pages: Pool, slots: Pool) -> None:
        self.on = limits.prefix
        self.exports_states = limits.prefix and limits.stateful
        self.tree = PrefixTree(
            limits.page_size, pages, slots, stateful=limits.stateful, slot_price=max(limits.slot_price, 1e-9)
        )
        #: Checkpoints by what became of them: published, duplicate, skipped, lost, superseded.
        self.checkpoints: Counter[str] = Counter()
        self.short_hits: Counter[str] = Counter()
        self.asked_tokens = 0
        self.hit_tokens = 0
        self._limits = limits
        self._pages = pages
        self._slots = slots
        self._promising: dict[Sequence, None] = {}

    # admission

    def look(self, sequence: Sequence) -> Match | None:
        """What the tree has for all tokens that the host knows of the sequence; None without a prefix cache.

        Prompt log-probabilities need every logit of the prompt: such a request reads nothing.
        """
        if not self.on:
            return None
        if sequence.request.sampling.prompt_logprobs >= 0:
            return Match(0, 0, 0, ALL_LOGITS, 0, None, None)
        return self.tree.match(sequence.request.root, sequence.ids(0, sequence.length))

    def awaited(self, sequence: Sequence, match: Match) -> bool:
        """Whether a running prefill has promised a checkpoint that would serve this sequence deeper than the hit."""
        if match.reason == ALL_LOGITS:
            return False
        root, hit, last = sequence.request.root, match.hit, sequence.length - 1
        page = sequence.ids(hit, hit + self._limits.page_size)
        for other in self._promising:
            if other.request.root != root or other.ids(hit, hit + len(page)) != page:
                continue
            for goal in sorted(other.goals, reverse=True):
                if hit < goal <= last and other.ids(hit, goal) == sequence.ids(hit, goal):
                    sequence.awaits = (other, goal)
                    return True
        return False

    def still_awaits(self, sequence: Sequence) -> bool:
        """Whether the promise that the sequence waits for is still open; if not, it has to look again."""
        if sequence.awaits is not None:
            other, goal = sequence.awaits
            if goal in other.goals:
                return True
            sequence.awaits = None
        return False

    def take(self, sequence: Sequence, match: Match | None) -> None:
        """Admit with this hit: block table, write border, first position; the checkpoint, if any, is pinned."""
        page = self._limits.page_size
        hit = kv_hit = 0
        if match is not None:
            hit, kv_hit = match.hit, match.kv_hit
            self.tree.touch(sequence.lease_held, match.source)
            sequence.table = self.tree.pages_of(sequence.lease_held)
        sequence.planned = sequence.exported = sequence.hit = hit
        sequence.settled = kv_hit
        sequence.write_from = kv_hit
        sequence.capacity = kv_hit
        if self.on:
            self._promise(sequence, page)

    def _promise(self, sequence: Sequence, page: int) -> None:
        """The checkpoints worth taking of this prefill, beyond chunk ends and the grid; where no states are exported,
        the places up to which others may wait for its KV."""
        spots = [sequence.fill - 1, sequence.fill, sequence.write_from, *sequence.request.anchors]
        spots = [spot // page * page for spot in spots if spot <= sequence.fill]
        sequence.goals = {spot for spot in spots if spot > sequence.planned}
        if sequence.goals:
            self._promising[sequence] = None

    def probe(self, message: Probe) -> CacheTruth:
        """What a request with this prompt would hit now; changes nothing."""
        root = (message.tenant, message.cache_salt)
        return self.truth(self.tree.match(root, message.prompt) if self.on else None)

    def flush(self, fence: int) -> tuple[int, int]:
        """Nothing cached matches any more; the pages and slots that came free at once."""
        pages, states = self._pages.available, self._slots.available
        self.tree.flush(fence)
        return self._pages.available - pages, self._slots.available - states

    def truth(self, match: Match | None) -> CacheTruth:
        """The hit in the client's words."""
        if match is None:
            return CacheTruth(reason="off")
        return CacheTruth(match.kv_hit, match.state_hit, match.hit, match.reason, match.at, device=match.hit)

    def count(self, request: Request) -> None:
        """Book a first admission."""
        self.asked_tokens += len(request.prompt)
        self.hit_tokens += request.cache.hit
        if request.cache.reason not in ("full", "short", "off", ALL_LOGITS):
            self.short_hits[request.cache.reason] += 1

    def totals(self) -> dict[str, int]:
        """Counts since the tree was made, by metric name."""
        tree = self.tree
        totals = {
            "hybserve_prompt_tokens_total": self.asked_tokens,
            labelled("hybserve_cached_tokens_total", tier="device"): self.hit_tokens,
            labelled("hybserve_evictions_total", what="page"): tree.evicted_pages,
            labelled("hybserve_evictions_total", what="state"): tree.evicted_states,
        }
        for outcome, count in self.checkpoints.items():
            totals[labelled("hybserve_checkpoints_total", outcome=outcome)] = count
        for reason, count in self.short_hits.items():
            totals[labelled("hybserve_short_hits_total", reason=reason)] = count
        return totals

    # exports

    def exports(self, sequence: Sequence, start: int, end: int, fence: int) -> list[Export]:
        """Checkpoints to take while tokens [start, end) are computed: promises first, then the chunk's end and the
        grid, as far as there are slots, or published ones worth less."""
        page, every = self._limits.page_size, self._limits.checkpoint_every
        promised = sorted((goal for goal in sequence.goals if start < goal <= end), reverse=True)
        others = [] if end % page else [end]
        if every:
            others += range((start // every + 1) * every // page * page, end + 1, every)
        spots = dict.fromkeys([*promised, *(spot for spot in others if start < spot <= end)])
        made = []
        for spot in spots:
            loss = spot - (sequence.hit if spot in sequence.goals else start)
            slot = 0
            if not self._known(sequence, spot):
                if not self._slots.available:
                    self.tree.evict_held(fence)
                slot = self._slot(loss, fence)
            if slot:
                made.append(Export(sequence, spot, slot, decode=False))
            else:
                self._forgo(sequence, spot)
        sequence.exported = max([sequence.exported, *(export.position for export in made)])
        return sorted(made, key=lambda export: export.position)

    def boundary(self, sequence: Sequence, position: int, fence: int) -> Export | None:
        """The checkpoint of a page boundary that a decoding sequence reaches with this step. Where no slot is free it
        gives up the one before."""
        slot = 0 if self._slots.available else self._supersede(sequence)
        slot = slot or self._slot(position - sequence.exported, fence)
        if not slot:
            self.checkpoints["skipped"] += 1
            return None
        sequence.exporting = position
        return Export(sequence, position, slot, decode=True)

    def _known(self, sequence: Sequence, position: int) -> bool:
        return sequence.lease is not None and self.tree.has_checkpoint(sequence.lease, position)

    def _slot(self, loss: int, fence: int) -> int:
        """A slot for a new checkpoint whose loss would cost ``loss`` tokens, at the expense of one worth less; or 0."""
        if not self._slots.available:
            worth = self.tree.worth_of_new(loss)
            if not self.tree.evict_states(1, fence, below=worth):
                self.tree.age(worth)
        return self._slots.take(1)[0] if self._slots.available else 0

    def _forgo(self, sequence: Sequence, position: int) -> None:
        if not self._known(sequence, position):
            self.checkpoints["skipped"] += 1
        self._kept(sequence, position)

    def _kept(self, sequence: Sequence, position: int) -> None:
        """A promise was kept or given up: whoever waits for it looks again."""
        sequence.goals.discard(position)
        if not sequence.goals:
            self._promising.pop(sequence, None)

    # results

    def publish(self, sequence: Sequence, computed: int, *, last: bool = False) -> None:
        """Make the KV of the whole pages before ``computed`` (acknowledged) matchable. ``last``: it leaves now."""
        page, lease, request = self._limits.page_size, sequence.lease_held, sequence.request
        if not self.exports_states:
            for goal in [goal for goal in sequence.goals if goal <= computed]:
                self._kept(sequence, goal)
        start, end = lease.end, computed // page * page
        if end <= start:
            return
        pages = sequence.table[start // page : end // page]
        moved = self.tree.publish(lease, sequence.ids(start, end), pages, last=last)
        sequence.owned.difference_update(moved)
        if not sequence.shares or not moved:
            return
        request.shared.difference_update(moved)
        prompt_end = min(len(request.prompt) // page * page, end)
        for sibling in request.sequences:
            if sibling.shares and sibling.lease is not None and sibling.lease.end < prompt_end:
                self.tree.follow(sibling.lease, lease, prompt_end)

    def settle(self, export: Export, live: bool, position: int, fence: int) -> None:
        """An export came back: ``live`` if its sequence still is what it was. It becomes the tree's, or free."""
        assert position == export.position, f"asked for the state at {export.position}, got the one at {position}"
        sequence, every = export.sequence, self._limits.checkpoint_every
        if not live or sequence.lease is None:
            self._slots.free([export.slot], fence)
            self.checkpoints["lost"] += 1
        elif not export.decode:
            self.publish(sequence, position)
            self._place(sequence.lease, position, export.slot, fence)
            self._kept(sequence, position)
        else:
            before = self._supersede(sequence)
            if before:
                self._slots.free([before], fence)
            if every and position % every == 0:
                self.publish(sequence, position)
            if sequence.lease.end == position:
                self._place(sequence.lease, position, export.slot, fence)
            else:
                sequence.boundary = self.tree.hold(export.slot, position)

    def _place(self, lease: Lease, position: int, slot: int, fence: int) -> None:
        """Let a state become matchable, if its KV is the sequence's own there and has none yet."""
        if position <= lease.end and self.tree.attach(lease, position, slot):
            self.checkpoints["published"] += 1
        else:
            self._slots.free([slot], fence)
            self.checkpoints["duplicate"] += 1

    def _supersede(self, sequence: Sequence) -> int:
        """Of the boundaries passed in decode the last is enough, beside those on the grid: the slot of the one before,
        or 0."""
        boundary, sequence.boundary = sequence.boundary, None
        slot = self.tree.let_go(boundary) if boundary is not None else 0
        self.checkpoints["superseded"] += slot > 0
        return slot

    def unpin(self, node: Node, fence: int) -> None:
        self.tree.unpin(node, fence)

    # leaving

    def release(self, sequence: Sequence, fence: int) -> None:
        """The sequence leaves the device; nobody waits for it any more. The state of its last boundary goes to its
        place, if KV was published up to there."""
        self._promising.pop(sequence, None)
        sequence.goals = set()
        lease, boundary = sequence.lease, sequence.boundary
        if lease is None:
            return
        if boundary is not None:
            slot, sequence.boundary = self.tree.let_go(boundary), None
            if slot and boundary.position <= lease.end:
                self._place(lease, boundary.position, slot, fence)
            elif slot:
                self._slots.free([slot], fence)
                self.checkpoints["lost"] += 1
        self.tree.release(lease, fence)
        sequence.lease = None

    # room

    def reclaim_pages(self, count: int, fence: int) -> bool:
        """Evict until ``count`` pages are free, if that is possible."""
        missing = count - self._pages.available
        if missing > 0:
            self.tree.evict_pages(missing, fence)
        return self._pages.available >= count

    def reclaim_slots(self, count: int, fence: int) -> bool:
        """Evict until ``count`` slots are free, if that is possible."""
        while self._slots.available < count and self.tree.evict_held(fence):
            pass
        missing = count - self._slots.available
        if missing > 0:
            self.tree.evict_states(missing, fence)
        return self._slots.available >= count

    @property
    def reachable_pages(self) -> int:
        """Pages free or evictable."""
        return self._pages.available + self.tree.evictable_pages

    @property
    def reachable_slots(self) -> int:
        """Slots free or evictable."""
        return self._slots.available + self.tree.evictable_states
