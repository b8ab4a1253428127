"""The prefix tree: a radix tree over page-aligned token runs whose nodes own KV pages and checkpoints.

Who owns what, across the asynchronous window:

* A page or slot belongs to the pool, to one live sequence, or to one tree node. ``publish`` moves pages from a
  sequence to the tree; ``attach`` moves a slot; both happen only after the runner acknowledged the step that wrote
  them, so a match never sees pending content.
* ``hold`` moves the slot of a running sequence's last boundary to the tree before its KV is there: nobody can match
  it, and it is the first to give way. ``let_go`` gives it back, to be attached when the sequence leaves.
* A *lease* keeps every node on the path to its node from being evicted; a *pin* keeps one checkpoint while a copy
  reads it. Leases count at every ancestor: child leases <= parent leases.
* A held node may be split, nothing else: a new parent takes the upper run and inherits the lease count; the lower
  part keeps identity, checkpoint and pins.
* Where a newcomer's run is already in the tree, the tree keeps its page and the newcomer keeps its own copy.

The tree names ids, never bytes. The root key mixes tenant and cache salt, so trees of different tenants never meet.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybserve.cache.node import Checkpoint, Lost, Node, Root, RootKey, chain
from hybserve.cache.pool import Pool
from hybserve.cache.worth import Clock, WorthHeap

#: Remembered places of evicted leaves, to tell "evicted" from "never seen".
GHOSTS = 65536


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree knows of a prompt, read-only. Positions in tokens, all page multiples but ``at``.

    ``hit`` is where computing resumes; ``reason`` says why it is not deeper (``full``: it is as deep as can be), ``at``
    the position the reason speaks of: the first differing token for ``divergent``.
    """

    kv_hit: int
    state_hit: int
    hit: int
    reason: str
    at: int
    node: Node | None  # deepest node that the KV match reaches (its run may be matched in part); None at 0
    source: Node | None  # node whose checkpoint stands at ``hit``


class Lease:
    """A request's right to a path: everything from the root to ``node`` stays while the lease lives."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def end(self) -> int:
        """Tokens that the lease covers."""
        return self.node.end


class PrefixTree:
    """``stateful``: the model has recurrent layers, so a hit needs a checkpoint exactly at its end.

    ``slot_price``: bytes of a slot in units of one page's bytes (both whole model), for the eviction policy.
    """

    def __init__(self, page_size: int, pages: Pool, slots: Pool, *, stateful: bool, slot_price: float) -> None:
        self.page_size = page_size
        self.stateful = stateful
        self.leases: set[Lease] = set()
        self.held: dict[Checkpoint, None] = {}  # oldest first
        self.visited = 0  # nodes looked at by eviction since start: the cost that tests bound
        self.evicted_pages = 0
        self.evicted_states = 0
        self._pages = pages
        self._slots = slots
        self._slot_price = slot_price
        self._roots: dict[RootKey, Node] = {}
        self._detached: list[Node] = []
        self._clock = Clock()
        self._leaves: WorthHeap[Node] = WorthHeap()
        self._states: WorthHeap[Node] = WorthHeap()
        self._nodes = 0
        self._checkpoints = 0
        self._cached_pages = 0
        self._leased_pages = 0
        self._pinned = 0
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()  # hashes of evicted leaves' first pages

    # looking

    def match(self, key: RootKey, tokens: Sequence[int]) -> Match:
        """The deepest reusable prefix of ``tokens``; KV may match them all, the hit leaves at least one to compute.
        Changes nothing."""
        page = self.page_size
        whole = len(tokens) // page * page
        node = self._roots.get(key)
        if node is None:
            return Match(0, 0, 0, "cold", 0, None, None)
        tokens = tuple(tokens)  # slices of a tuple are the children's keys
        depth, source = 0, None
        while depth < whole:
            child = node.children.get(tokens[depth : depth + page])
            if child is None:
                break
            length = len(child.tokens)  # the key has already compared the first page
            if length > page and (
                length > whole - depth or tokens[depth + page : depth + length] != child.tokens[page:]
            ):
                depth += _common_pages(child.tokens, tokens, depth, min(length, whole - depth), page) * page
                node = child
                break
            node, depth = child, depth + length
            if child.checkpoint is not None and depth < len(tokens):
                source = child
        return self._result(tokens, node, depth, source)

    def _result(self, tokens: tuple[int, ...], node: Node, depth: int, source: Node | None) -> Match:
        """``depth``: tokens whose KV matches; it ends in ``node``."""
        most = min(depth, (len(tokens) - 1) // self.page_size * self.page_size)
        state_hit = source.end if source is not None else 0
        hit = state_hit if self.stateful else most
        if not self.stateful:
            source = None
        if hit < most:
            lost = node.lost if node.end == depth else Lost.NEVER
            return Match(depth, state_hit, hit, str(lost), hit, node, source)
        if len(tokens) - depth <= self.page_size:
            return Match(depth, state_hit, hit, "full" if depth else "short", hit, node, source)
        reason, at = self._divergence(tokens, node, depth)
        return Match(depth, state_hit, hit, reason, at, node, source)

    def _divergence(self, tokens: tuple[int, ...], node: Node, depth: int) -> tuple[str, int]:
        """Why the KV match ends at ``depth`` although the prompt goes on."""
        page = self.page_size
        if depth < node.end:
            known: Sequence[int] = node.tokens[depth - node.start : depth - node.start + page]
        elif chain(node.end_hash, tokens[depth : depth + page], page) in self._ghosts:
            return "evicted_kv", depth
        elif node.children:
            known = next(reversed(node.children))
        else:
            return ("new" if depth else "cold"), depth
        same = 0
        while same < page and tokens[depth + same] == known[same]:
            same += 1
        return "divergent", depth + same

    # holding

    def lease(self, key: RootKey, match: Match) -> Lease:
        """Hold the path of ``match.kv_hit`` tokens; splits the last node if it matched in part. ``match`` must be
        fresh: nothing evicted since."""
        node = match.node
        if node is None or match.kv_hit == 0:
            node = self._root(key)
        elif match.kv_hit < node.end:
            node = self._split(node, match.kv_hit)
        lease = Lease(node)
        self.leases.add(lease)
        self._count(node, None, +1)
        return lease

    def touch(self, lease: Lease, source: Node | None) -> None:
        """A leased hit was used: the KV run at its end and the one checkpoint it consumes rise, nothing else."""
        if lease.node.parent is not None:
            lease.node.uses += 1
            self._revalue_run(lease.node)
        if source is not None and source.checkpoint is not None:
            source.checkpoint.uses += 1
            self._revalue_state(source)

    def pages_of(self, lease: Lease) -> list[int]:
        """Page ids of [0, lease end), in order."""
        runs = []
        node: Node | None = lease.node
        while node is not None:
            runs.append(node.pages)
            node = node.parent
        return [page for run in reversed(runs) for page in run]

    def release(self, lease: Lease, fence: int) -> None:
        """Give the path back; nodes of a flushed tree are freed at once."""
        self.leases.remove(lease)
        self._count(lease.node, None, -1)
        self._settle_released(lease.node, fence)

    def _settle_released(self, node: Node, fence: int) -> None:
        root = node.root
        if root in self._detached:
            self._drop_detached(node, fence)
        else:
            self._offer_leaf(node)
        self._prune_root(root)

    def pin(self, node: Node) -> Checkpoint:
        """Keep the node's checkpoint while a copy reads it."""
        checkpoint = node.checkpoint
        assert checkpoint is not None, "pin needs a checkpoint"
        assert checkpoint.position == node.end, "a checkpoint stands at the end of its node"
        assert checkpoint.prefix_hash == node.end_hash, "a checkpoint summarises its node's prefix"
        self._pinned += not checkpoint.pins
        checkpoint.pins += 1
        return checkpoint

    def unpin(self, node: Node, fence: int) -> None:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        assert checkpoint.pins > 0, "unpin without pin"
        checkpoint.pins -= 1
        if checkpoint.pins == 0:
            self._pinned -= 1
            self._push_state(node)
            self._settle_released(node, fence)

    # publishing

    def publish(self, lease: Lease, tokens: Sequence[int], pages: Sequence[int], *, last: bool = False) -> list[int]:
        """Make the KV of ``tokens`` (whole pages, they follow the lease's end) in ``pages`` matchable, and move the
        lease to their end. Returns the page ids that changed owner.

        Ledger, counted from the lease's end: [0, known) is in the tree already: the tree keeps its pages and the
        sequence its own copies; [known, end) becomes the tree's. While the sequence runs it must not hold both, or it
        would need twice the pages that were planned for it: if anything is known, nothing happens but on its ``last``
        call, after which it lets go of its copies and of the lease.
        """
        page = self.page_size
        assert len(tokens) == len(pages) * page, "only whole pages are published"
        node, at, run = lease.node, 0, tuple(tokens)
        moved: list[int] = []
        while at < len(run):
            child = node.children.get(run[at : at + page])
            if child is None:
                moved = list(pages[at // page :])
                rest = run[at:]
                child = Node(node, node.end, rest, moved, chain(node.end_hash, rest, page))
                node.children[rest[:page]] = child
                self._nodes += 1
                self._cached_pages += len(moved)
                node, at = child, len(run)
                continue
            if not last:
                return []
            same = _common_pages(child.tokens, run, at, min(len(child.tokens), len(run) - at), page) * page
            node = child if same == len(child.tokens) else self._split(child, child.start + same)
            at += same
        self._count(node, lease.node, +1)
        lease.node = node
        if moved:
            self._revalue_run(node)
        return list(moved)

    def follow(self, lease: Lease, other: Lease, position: int) -> None:
        """Move ``lease`` down the path of ``other`` to ``position``; it must stand on that path, above it."""
        node = self.node_at(other, position)
        if position < node.end:
            node = self._split(node, position)
        self._count(node, lease.node, +1)
        lease.node = node

    def clone(self, lease: Lease) -> Lease:
        """One more lease on the same path."""
        copy = Lease(lease.node)
        self.leases.add(copy)
        self._count(copy.node, None, +1)
        return copy

    def attach(self, lease: Lease, position: int, slot: int) -> bool:
        """Publish an acknowledged state at ``position`` on the lease's path. False (slot not taken) if there is one."""
        node = self.node_at(lease, position)
        if node.start < position < node.end:
            node = self._split(node, position)
        assert node.end == position, "a checkpoint stands at the end of its node"
        if node.checkpoint is not None:
            return False
        node.checkpoint = Checkpoint(slot, position, node.end_hash)
        self._checkpoints += 1
        self._revalue_state(node)
        self._revalue_run(node)
        return True

    def node_at(self, lease: Lease, position: int) -> Node:
        """The node on the lease's path that covers the token before ``position``."""
        node = lease.node
        assert position <= node.end, "beyond what is published"
        while node.start >= position and node.parent is not None:
            node = node.parent
        return node

    def has_checkpoint(self, lease: Lease, position: int) -> bool:
        """Whether a checkpoint stands at exactly ``position`` on the path (positions beyond it: False)."""
        if position > lease.node.end:
            return False
        node = self.node_at(lease, position)
        return node.end == position and node.checkpoint is not None

    def hold(self, slot: int, position: int) -> Checkpoint:
        """Take an acknowledged state at ``position`` that has no place yet."""
        held = Checkpoint(slot, position, b"")
        self.held[held] = None
        self._checkpoints += 1
        return held

    def let_go(self, held: Checkpoint) -> int:
        """The slot of what ``hold`` took, the caller's again; 0 if it has been evicted."""
        slot, held.slot = held.slot, 0
        if slot:
            del self.held[held]
            self._checkpoints -= 1
        return slot

    # evicting

    def evict_pages(self, count: int, fence: int) -> int:
        """Free at least ``count`` pages if unleased leaves hold that many; returns how many were freed."""
        freed = 0
        while freed < count:
            node = self._next_leaf()
            if node is None:
                break
            freed += len(node.pages)
            self._evict_leaf(node, fence)
        return freed

    def evict_states(self, count: int, fence: int, below: float | None = None) -> int:
        """Free at least ``count`` slots; with ``below`` only those worth less (publishing never evicts its betters)."""
        freed = 0
        while freed < count:
            node = self._next_state(below)
            if node is None:
                break
            freed += 1
            self.evicted_states += 1
            if not node.children and node.leases == 0:
                self._evict_leaf(node, fence)
                continue
            self._drop_state(node, fence)
            node.lost = Lost.EVICTED
            if not node.children:
                self._revalue_run(node)
        return freed

    def evict_held(self, fence: int) -> bool:
        """Free the slot held longest, if there is one: its sequence brings a newer state the soonest."""
        if not self.held:
            return False
        self.evicted_states += 1
        self._slots.free([self.let_go(next(iter(self.held)))], fence)
        return True

    def worth_of_new(self, loss: int) -> float:
        """The worth that a new checkpoint would have whose loss costs ``loss`` tokens."""
        return self._clock.now + loss / self._slot_price

    def age(self, worth: float) -> None:
        """A newcomer of that worth found no place: what holds the places grows older by as much as it would have by
        one eviction of many, or what was once useful would stay for ever."""
        self._clock.now += (worth - self._clock.now) / max(self._checkpoints, 1)

    def flush(self, fence: int) -> None:
        """Forget everything: nothing cached matches any more. What running requests hold is freed when they let go."""
        for root in list(self._roots.values()):
            self._detached.append(root)
            for leaf in [node for node in _walk(root) if not node.children]:
                self._drop_detached(leaf, fence)
        self._roots.clear()
        for root in list(self._detached):
            self._prune_root(root)
        self._ghosts.clear()

    # facts

    @property
    def nodes(self) -> int:
        return self._nodes

    @property
    def cached_pages(self) -> int:
        return self._cached_pages

    @property
    def leased_pages(self) -> int:
        return self._leased_pages

    @property
    def pinned(self) -> int:
        """Checkpoints that a copy reads."""
        return self._pinned

    @property
    def evictable_pages(self) -> int:
        """Pages that eviction could free (all but those under lease)."""
        return self._cached_pages - self._leased_pages

    @property
    def evictable_states(self) -> int:
        """Slots that eviction could free."""
        return self._checkpoints - self._pinned

    @property
    def checkpoints(self) -> int:
        return self._checkpoints

    def all_nodes(self) -> Iterator[Node]:
        """Every node but the roots, flushed ones that are still held included."""
        for root in [*self._roots.values(), *self._detached]:
            for node in _walk(root):
                if node.parent is not None:
                    yield node

    def all_roots(self) -> list[Node]:
        return [*self._roots.values(), *self._detached]

    # inside

    def _root(self, key: RootKey) -> Node:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Root(key, hashlib.sha256(repr(key).encode()).digest())
        return root

    def _prune_root(self, root: Node) -> None:
        """Forget a root that holds nothing and that nobody holds."""
        if root.children or root.leases:
            return
        if root in self._detached:
            self._detached.remove(root)
        elif isinstance(root, Root) and self._roots.get(root.key) is root:
            del self._roots[root.key]

    def _count(self, node: Node, stop: Node | None, step: int) -> None:
        """Add ``step`` to the lease count from ``node`` up to, not including, ``stop``."""
        current: Node | None = node
        while current is not None and current is not stop:
            current.leases += step
            if current.leases == (step > 0):  # it became leased, or unleased
                self._leased_pages += step * len(current.pages)
            current = current.parent

    def _split(self, node: Node, position: int) -> Node:
        """Ledger: [start, position) and its pages move to a new parent, which inherits the lease count;
        [position, end), the checkpoint, its pins and the children stay with ``node``."""
        page = self.page_size
        parent = node.parent
        assert parent is not None
        assert node.start < position < node.end
        cut = position - node.start
        upper = Node(
            parent,
            node.start,
            node.tokens[:cut],
            node.pages[: cut // page],
            chain(parent.end_hash, node.tokens[:cut], page),
        )
        upper.leases = node.leases
        upper.uses = node.uses
        upper.children[node.tokens[cut : cut + page]] = node
        parent.children[upper.tokens[:page]] = upper
        node.parent, node.start = upper, position
        node.tokens, node.pages = node.tokens[cut:], node.pages[cut // page :]
        self._nodes += 1
        if not node.children:
            self._revalue_run(node)
        if node.checkpoint is not None:
            self._push_state(node)
        return upper

    def _loss(self, node: Node) -> int:
        """Tokens computed again if the state at the node's end is lost: back to the nearest checkpoint above."""
        above = node.parent
        while above is not None and above.parent is not None and above.checkpoint is None:
            above = above.parent
        return node.end - (above.end if above is not None else 0)

    def _revalue_run(self, node: Node) -> None:
        price = len(node.pages) + (self._slot_price if node.checkpoint is not None else 0.0)
        loss = len(node.tokens)
        if self.stateful:  # a leaf's KV without a state at its end saves nobody a token
            loss = self._loss(node) if node.checkpoint is not None else 0
        node.worth = self._clock.now + (1 + node.uses) * loss / price
        node.version += 1
        self._offer_leaf(node)

    def _offer_leaf(self, node: Node) -> None:
        if not node.children and node.leases == 0 and node.parent is not None:
            self._leaves.push(node, node.worth, node.version)
            if len(self._leaves) > 64 + 8 * self._nodes:
                live = {n: n.version for n in self.all_nodes() if not n.children and n.leases == 0}
                self._leaves.compact([(n, n.worth, version) for n, version in live.items()])

    def _revalue_state(self, node: Node) -> None:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        checkpoint.worth = self._clock.now + (1 + checkpoint.uses) * self._loss(node) / self._slot_price
        checkpoint.version += 1
        self._push_state(node)

    def _push_state(self, node: Node) -> None:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        self._states.push(node, checkpoint.worth, checkpoint.version)
        if len(self._states) > 64 + 8 * self._checkpoints:
            live = [(n, n.checkpoint) for n in self.all_nodes() if n.checkpoint is not None]
            self._states.compact([(n, c.worth, c.version) for n, c in live if c is not None])

    def _next_leaf(self) -> Node | None:
        while (entry := self._leaves.pop()) is not None:
            worth, version, node = entry
            self.visited += 1
            pinned = node.checkpoint is not None and node.checkpoint.pins > 0
            if node.version != version or node.children or node.leases or pinned:
                continue
            self._clock.now = max(self._clock.now, worth)
            return node
        return None

    def _next_state(self, below: float | None) -> Node | None:
        while (entry := self._states.pop()) is not None:
            worth, version, node = entry
            self.visited += 1
            checkpoint = node.checkpoint
            if checkpoint is None or checkpoint.version != version or checkpoint.pins:
                continue
            if below is not None and worth >= below:
                self._states.push(node, worth, version)
                return None
            self._clock.now = max(self._clock.now, worth)
            return node
        return None

    def _drop_state(self, node: Node, fence: int) -> None:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        assert checkpoint.pins == 0, "a pinned checkpoint is not evicted"
        node.checkpoint = None
        self._checkpoints -= 1
        self._slots.free([checkpoint.slot], fence)

    def _drop_leaf(self, node: Node, fence: int) -> None:
        """A leaf goes whole: its KV run, its checkpoint and its place."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        assert node.leases == 0
        first = node.tokens[: self.page_size]
        del parent.children[first]
        if node.checkpoint is not None:
            self._drop_state(node, fence)
        self._pages.free(node.pages, fence)
        self._nodes -= 1
        self._cached_pages -= len(node.pages)
        node.version += 1
        node.parent = None
        node.pages, node.tokens = [], ()
        if parent.parent is None:
            self._prune_root(parent)
        elif not parent.children:
            self._revalue_run(parent)

    def _evict_leaf(self, node: Node, fence: int) -> None:
        """``_drop_leaf`` to make room: counted, and remembered as the reason of a later miss."""
        assert node.parent is not None
        self.evicted_pages += len(node.pages)
        self._ghosts[chain(node.parent.end_hash, node.tokens[: self.page_size], self.page_size)] = None
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)
        self._drop_leaf(node, fence)

    def _drop_detached(self, node: Node, fence: int) -> None:
        """Free a flushed branch upward as far as nothing holds it."""
        while node.parent is not None and not node.children and node.leases == 0:
            if node.checkpoint is not None and node.checkpoint.pins:
                return
            parent = node.parent
            self._drop_leaf(node, fence)
            node = parent


def _common_pages(run: tuple[int, ...], tokens: tuple[int, ...], start: int, length: int, page: int) -> int:
    """Whole pages that ``run`` and ``tokens[start:]`` share, at most ``length`` tokens; bisection over list slices."""
    low, high = 0, length // page
    while low < high:
        middle = (low + high + 1) // 2
        if run[low * page : middle * page] == tokens[start + low * page : start + middle * page]:
            low = middle
        else:
            high = middle - 1
    return low


def _walk(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
