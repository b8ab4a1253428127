"""Recompute from scratch what the tree believes, and name every disagreement. Read-only; O(everything cached).

Pools balance as *sets*: free ⊎ tree ⊎ given owners = all ids, each id once. The caller passes the owners it knows
(live sequences, pending exports); their names appear in the findings.
"""

from collections.abc import Iterable, Mapping

from hybserve.cache.node import Node, chain
from hybserve.cache.pool import Pool
from hybserve.cache.tree import PrefixTree


def check_pool(pool: Pool, owners: Mapping[str, Iterable[int]]) -> list[str]:
    """Findings for one pool: ids in two owners, free and owned at once, or owned by nobody."""
    findings = []
    owner_of: dict[int, str] = {}
    for owner, ids in owners.items():
        for index in ids:
            if index in owner_of:
                findings.append(f"{pool.name} {index} is owned by {owner_of[index]} and by {owner}")
            owner_of[index] = owner
    free = pool.free_ids()
    findings += [
        f"{pool.name} {index} is free and owned by {owner_of[index]}" for index in sorted(free & set(owner_of))
    ]
    lost = set(range(1, pool.size)) - free - set(owner_of)
    findings += [f"{pool.name} {index} is neither free nor owned" for index in sorted(lost)]
    findings += [f"{pool.name} 0 is padding and owned by {owner_of[0]}"] if 0 in owner_of else []
    return findings


def tree_owners(tree: PrefixTree) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Page ids and slot ids by owning node, for ``check_pool``."""
    pages, slots = {}, {}
    for number, node in enumerate(tree.all_nodes()):
        name = f"node {number} [{node.start}, {node.end})"
        pages[name] = node.pages
        if node.checkpoint is not None:
            slots[name] = [node.checkpoint.slot]
    return pages, slots


def check_tree(tree: PrefixTree) -> list[str]:
    """Findings for the tree itself: shape, hash chain, checkpoints, lease counts, counters."""
    findings = []
    held: dict[Node, int] = {}
    for lease in tree.leases:
        current: Node | None = lease.node
        while current is not None:
            held[current] = held.get(current, 0) + 1
            current = current.parent
    nodes = list(tree.all_nodes())
    for node in [*nodes, *tree.all_roots()]:
        if node.leases != held.get(node, 0):
            findings.append(f"node [{node.start}, {node.end}) counts {node.leases} leases, {held.get(node, 0)} hold it")
    alive = set(nodes) | set(tree.all_roots())
    findings += [f"a lease holds a dead node [{n.start}, {n.end})" for n in held if n not in alive]
    for node in nodes:
        findings += _check_node(tree, node)
    for what, counted, real in (
        ("nodes", tree.nodes, len(nodes)),
        ("cached pages", tree.cached_pages, sum(len(node.pages) for node in nodes)),
        ("checkpoints", tree.checkpoints, sum(node.checkpoint is not None for node in nodes)),
    ):
        if counted != real:
            findings.append(f"the tree counts {counted} {what}, there are {real}")
    return findings


def _check_node(tree: PrefixTree, node: Node) -> list[str]:
    where = f"node [{node.start}, {node.end})"
    parent, page = node.parent, tree.page_size
    if parent is None:
        return [f"{where} has no parent"]
    findings = []
    if not node.tokens or len(node.tokens) % page or len(node.pages) * page != len(node.tokens):
        findings.append(f"{where} owns {len(node.pages)} pages for {len(node.tokens)} tokens")
    if node.start != parent.end:
        findings.append(f"{where} does not start at its parent's end {parent.end}")
    if parent.children.get(node.tokens[:page]) is not node:
        findings.append(f"{where} is not its parent's child")
    if node.end_hash != chain(parent.end_hash, node.tokens, page):
        findings.append(f"{where} breaks the hash chain")
    if node.leases > parent.leases:
        findings.append(f"{where} is leased more than its parent")
    checkpoint = node.checkpoint
    if checkpoint is not None:
        if checkpoint.position != node.end or checkpoint.prefix_hash != node.end_hash:
            findings.append(f"{where} has the checkpoint of position {checkpoint.position}")
        if checkpoint.pins < 0:
            findings.append(f"{where} has {checkpoint.pins} pins")
    return findings
