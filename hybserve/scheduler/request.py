"""A request and its choices, as the scheduler sees them.

One choice of a request is one sequence. All lengths are in tokens. Because plans run ahead of their results,
``planned`` and ``sampled`` count what plans have asked for (upper bounds), ``output`` what has come back.
"""

import enum
from collections.abc import Sequence as Columns
from typing import TypeAlias

from hybserve.cache.node import Checkpoint, RootKey
from hybserve.cache.tree import Lease
from hybserve.core.messages import Generate
from hybserve.core.types import CacheTruth

#: (priority, arrival, uid, choice): the one total order. The first is never parked, the last is parked first.
Key: TypeAlias = tuple[int, float, int, int]

#: ``Sequence.live_from`` of a sequence that has ended: no plan speaks for it any more.
NEVER = 1 << 62


class State(enum.Enum):
    """Where a sequence is. On the device (slot held): PREFILL, FORK, DECODE."""

    QUEUED = "queued"
    PREFILL = "prefill"  # computing tokens that the host knows
    FORK = "fork"  # n > 1: waits for the one prefill of its request, or to be forked from it
    DECODE = "decode"  # computing tokens that it sampled
    PARKED = "parked"  # off the device, will recompute
    GONE = "gone"


class Sequence:
    """One choice. ``group``: the sequences admitted together with this one as their lead (empty if it leads none)."""

    __slots__ = (
        "awaits",
        "boundary",
        "capacity",
        "choice",
        "edge",
        "ended",
        "exported",
        "exporting",
        "fill",
        "goals",
        "group",
        "hit",
        "index",
        "key",
        "lease",
        "live_from",
        "max_tokens",
        "output",
        "owned",
        "planned",
        "request",
        "resume_after",
        "sampled",
        "settled",
        "shares",
        "slot",
        "started",
        "state",
        "stop_ids",
        "table",
        "uid",
        "write_from",
    )

    def __init__(self, request: "Request", choice: int) -> None:
        self.request = request
        self.uid = request.uid
        self.choice = choice
        self.key: Key = (request.priority, request.arrival, request.uid, choice)
        self.group: Columns[Sequence] = ()
        self.state = State.QUEUED
        self.stop_ids = request.sampling.stop_ids
        self.max_tokens = request.sampling.max_tokens
        self.output: list[int] = []
        #: Ended, but still the source of a fork that no plan has made yet, or ``parting``.
        self.ended = False
        #: Results of plans before this one are not about this sequence's present state.
        self.live_from = 0
        #: Parked: the plan after whose result all its tokens are known.
        self.resume_after = 0
        # what it holds on the device
        self.index = -1
        self.started = False  # the runner has heard of ``index``
        self.slot = 0
        self.table: list[int] = []  # block table; who owns which page: see prefix.py
        self.owned: set[int] = set()
        self.lease: Lease | None = None  # on what the tree owns of the table
        self.shares = False
        self.capacity = 0  # tokens its block table has room for
        #: Waiting for a promise: whose, and at which position.
        self.awaits: tuple[Sequence, int] | None = None
        # where it is
        self.fill = 0  # tokens to compute from ids that the host knows: prompt, and output when resumed
        self.planned = 0
        self.edge = 0  # in decode, nothing happens to pages or checkpoints before this position
        self.sampled = 0
        self.settled = 0  # tokens of this prefill whose result has come back
        self.write_from = 0  # positions before it lie in pages that the tree owned at admission
        # its checkpoints, as positions
        self.goals: set[int] = set()  # promised by this prefill
        self.hit = 0  # where its prefill began
        self.exported = 0  # the last one taken in its prefill, or the hit
        self.exporting = 0  # the last page boundary in decode that a plan was asked to export
        self.boundary: Checkpoint | None = None  # at the last boundary passed in decode, held by the tree

    @property
    def lease_held(self) -> Lease:
        """The lease of a sequence that runs with a prefix tree."""
        assert self.lease is not None
        return self.lease

    @property
    def parting(self) -> bool:
        """It ended at a page boundary whose export is still on its way, and leaves when that has come back."""
        return self.ended and self.state is State.DECODE

    @property
    def length(self) -> int:
        """Tokens known to the host."""
        return len(self.request.prompt) + len(self.output)

    def ids(self, start: int, end: int) -> list[int]:
        """Token ids of positions [start, end), all known to the host."""
        prompt = self.request.prompt
        known = len(prompt)
        if end <= known:
            return prompt[start:end]
        return prompt[start:] + self.output[max(start - known, 0) : end - known]

    def retire(self) -> None:
        """It has ended: whatever comes back of it from plans in flight is nobody's."""
        self.state = State.GONE
        self.live_from = NEVER

    @property
    def on_device(self) -> bool:
        return self.state in (State.PREFILL, State.FORK, State.DECODE)


class Request:
    """What a client asked for, and the pages that its choices share after a fork."""

    __slots__ = (
        "admitted_at",
        "alive",
        "anchors",
        "arrival",
        "cache",
        "deadline",
        "first_token_at",
        "n",
        "priority",
        "prompt",
        "root",
        "sampling",
        "scored",
        "sequences",
        "shared",
        "sharers",
        "uid",
    )

    def __init__(self, message: Generate) -> None:
        self.uid = message.uid
        self.prompt = message.prompt
        self.sampling = message.sampling
        self.n = message.n
        self.priority = message.priority
        self.arrival = message.arrival
        self.deadline = message.arrival + message.timeout if message.timeout > 0 else float("inf")
        self.sequences = [Sequence(self, choice) for choice in range(message.n)]
        self.sequences[0].group = tuple(self.sequences)
        self.alive = message.n  # choices that have not ended
        self.root: RootKey = (message.tenant, message.cache_salt)
        self.anchors = message.anchors
        self.cache = CacheTruth()
        self.shared: set[int] = set()
        self.sharers = 0
        self.scored = 1  # the next prompt position whose log-probability the client has not got
        self.admitted_at = 0.0
        self.first_token_at = 0.0

    @property
    def longest(self) -> int:
        """Tokens whose KV one choice can ever hold: the last token sampled is never computed."""
        return len(self.prompt) + self.sampling.max_tokens - 1
