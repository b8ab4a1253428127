"""A node of the prefix tree: a page-aligned run of tokens and what the tree owns for it.

A node's *holdings* are its KV run (one page id per page) and, at most, one checkpoint: the recurrent state frozen at
exactly the node's end. A node whose checkpoint is gone while its KV lives is a *tombstone* (``lost`` says how).
"""

import enum
import hashlib
from array import array
from collections.abc import Sequence
from typing import Optional

#: Tenant and cache salt: trees of different keys never meet.
RootKey = tuple[str, str]


class Tier(enum.IntEnum):
    """Where a holding's bytes lie."""

    DEVICE = 0


class Lost(enum.StrEnum):
    """Why a node has no checkpoint; the words that a client reads as the reason of a short hit."""

    NEVER = "no_checkpoint"
    EVICTED = "evicted_state"


def chain(parent: bytes, tokens: Sequence[int], page_size: int) -> bytes:
    """Chained SHA-256 over whole pages: h(i) = SHA256(h(i-1) + the page's tokens as u32). Names content, everywhere."""
    digest = parent
    for low in range(0, len(tokens), page_size):
        digest = hashlib.sha256(digest + array("I", tokens[low : low + page_size]).tobytes()).digest()
    return digest


class Checkpoint:
    """A state slot owned by the tree. It says what it holds (law 3): ``position`` and the hash of the prefix it
    summarises; it exists only after the kernel that wrote the slot acknowledged it. ``pins``: copies reading it.

    While it is only held for a running sequence (``PrefixTree.hold``) it has no hash yet; gone again, its slot is 0.
    """

    __slots__ = ("pins", "position", "prefix_hash", "slot", "tier", "uses", "version", "worth")

    def __init__(self, slot: int, position: int, prefix_hash: bytes) -> None:
        self.slot = slot
        self.position = position
        self.prefix_hash = prefix_hash
        self.tier = Tier.DEVICE
        self.pins = 0
        self.uses = 0
        self.worth = 0.0
        self.version = 0


class Node:
    """One edge of the radix tree. ``tokens`` is a whole number of pages, except at a root, where it is empty."""

    __slots__ = (
        "checkpoint", "children", "end_hash", "leases", "lost", "pages", "parent", "start", "tier", "tokens", "uses",
        "version", "worth",
    )  # fmt: skip

    def __init__(
        self, parent: Optional["Node"], start: int, tokens: tuple[int, ...], pages: list[int], end_hash: bytes
    ) -> None:
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.start = start
        self.tokens = tokens
        self.pages = pages
        self.tier = Tier.DEVICE
        self.end_hash = end_hash
        self.checkpoint: Checkpoint | None = None
        self.lost = Lost.NEVER
        #: Leases held on this node or anywhere below it.
        self.leases = 0
        self.uses = 0
        self.worth = 0.0
        self.version = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def root(self) -> "Node":
        node = self
        while node.parent is not None:
            node = node.parent
        return node


class Root(Node):
    """The empty prefix of one (tenant, cache salt)."""

    __slots__ = ("key",)

    def __init__(self, key: RootKey, seed: bytes) -> None:
        super().__init__(None, 0, (), [], seed)
        self.key = key
