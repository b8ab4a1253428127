"""Does every id of a pool have exactly one place? Checked as sets, from scratch, never from counters.

A sum can balance while an id is lost and another owned twice; sets cannot. On a violation the error names the ids and
who claims them, which is what one needs to find the guilty line.
"""

from collections.abc import Iterable, Iterator

from hybserve.cache.node import Node, chain
from hybserve.cache.pool import Pool
from hybserve.cache.tree import PrefixTree


class IntegrityError(AssertionError):
    """The books are wrong: ids lost, or owned twice, or a promise about them broken."""


def check_pool(pool: Pool, owners: Iterable[tuple[str, Iterable[int]]]) -> None:
    """free ⊎ owned = all allocatable ids of ``pool``. ``owners`` yields (name, ids). Raises IntegrityError."""
    free = pool.free_ids()
    owner_of: dict[int, str] = dict.fromkeys(free, "the free list")
    faults = []
    if len(free) != pool.available:
        faults.append("the free list holds an id twice")
    for name, ids in owners:
        for index in ids:
            if not 0 < index < pool.size:
                faults.append(f"{index} is not allocatable but owned by {name}")
            elif index in owner_of:
                faults.append(f"{index} belongs to {owner_of[index]} and to {name}")
            owner_of[index] = name
    lost = set(range(1, pool.size)) - owner_of.keys()
    if lost:
        faults.append(f"{sorted(lost)} belong to nobody")
    if pool.held_ids() & free:
        faults.append(f"{sorted(pool.held_ids() & free)} are free and marked as held")
    if faults:
        raise IntegrityError(f"{pool.name}: " + "; ".join(faults))


def page_owners(tree: PrefixTree) -> Iterator[tuple[str, list[int]]]:
    """The tree's pages by node, for ``check_pool``."""
    for node in tree.all_nodes():
        yield _name(node), node.pages


def slot_owners(tree: PrefixTree) -> Iterator[tuple[str, list[int]]]:
    """The tree's checkpoint slots by node, and those that have no place yet, for ``check_pool``."""
    for node in tree.all_nodes():
        if node.checkpoint is not None:
            yield _name(node), [node.checkpoint.slot]
    for held in tree.held:
        yield f"the state held at {held.position}", [held.slot]


def check_tree(tree: PrefixTree) -> None:
    """Shape, hash chain, checkpoints, lease counts and counters of the tree, recomputed. Raises IntegrityError."""
    held: dict[Node, int] = {}
    for lease in tree.leases:
        current: Node | None = lease.node
        while current is not None:
            held[current] = held.get(current, 0) + 1
            current = current.parent
    nodes, roots = list(tree.all_nodes()), tree.all_roots()
    faults = [
        f"{_name(node)} counts {node.leases} leases, {held.get(node, 0)} hold it"
        for node in [*nodes, *roots]
        if node.leases != held.get(node, 0)
    ]
    alive = {*nodes, *roots}
    faults += [f"a lease holds a dead {_name(node)}" for node in held if node not in alive]
    for node in nodes:
        faults += _node_faults(tree, node)
    for what, counted, real in (
        ("nodes", tree.nodes, len(nodes)),
        ("cached pages", tree.cached_pages, sum(len(node.pages) for node in nodes)),
        ("leased pages", tree.leased_pages, sum(len(node.pages) for node in nodes if node.leases)),
        ("checkpoints", tree.checkpoints, len(tree.held) + sum(node.checkpoint is not None for node in nodes)),
        ("pinned checkpoints", tree.pinned, sum(n.checkpoint is not None and n.checkpoint.pins > 0 for n in nodes)),
    ):
        if counted != real:
            faults.append(f"the tree counts {counted} {what}, there are {real}")
    if faults:
        raise IntegrityError("prefix tree: " + "; ".join(faults))


def _node_faults(tree: PrefixTree, node: Node) -> Iterator[str]:
    name, parent, page, checkpoint = _name(node), node.parent, tree.page_size, node.checkpoint
    if parent is None:
        yield f"{name} has no parent"
        return
    if not node.tokens or len(node.tokens) % page or len(node.pages) * page != len(node.tokens):
        yield f"{name} owns {len(node.pages)} pages for {len(node.tokens)} tokens"
    if node.start != parent.end:
        yield f"{name} does not start at its parent's end {parent.end}"
    if parent.children.get(node.tokens[:page]) is not node:
        yield f"{name} is not its parent's child"
    if node.end_hash != chain(parent.end_hash, node.tokens, page):
        yield f"{name} breaks the hash chain"
    if node.leases > parent.leases:
        yield f"{name} is leased more than its parent"
    if checkpoint is not None and (checkpoint.position, checkpoint.prefix_hash) != (node.end, node.end_hash):
        yield f"{name} has the checkpoint of position {checkpoint.position}"
    if checkpoint is not None and checkpoint.pins < 0:
        yield f"{name} has {checkpoint.pins} pins"


def _name(node: Node) -> str:
    return f"node [{node.start}, {node.end})"
