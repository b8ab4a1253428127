"""The api's end of the link to text: uids, the queue of every HTTP request, and what is known of the roles behind it.

A ``Call`` is one HTTP request with one uid per prompt. Its messages arrive in order in one queue, tagged with the
prompt's index. A call ends by terminal messages for all its uids or by ``close``, which cancels the rest.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from hybserve.api.status import Status
from hybserve.core.errors import ErrorBody, engine_error
from hybserve.core.messages import (
    Accepted,
    Cancel,
    Delta,
    Detokenized,
    Done,
    Drain,
    Failed,
    Fatal,
    Flushed,
    Heartbeat,
    Loading,
    MetricsSnapshot,
    Ready,
    Rendered,
    ToApi,
    Tokenized,
)
from hybserve.wire.channel import ChannelClosed

logger = logging.getLogger(__name__)

#: The api's index stands above this bit of a uid, so that several apis never share one.
INDEX_SHIFT = 48


class TextLink(Protocol):
    """What the bridge uses of an AsyncChannel."""

    async def receive(self) -> list[Any]: ...

    def send(self, messages: Sequence[Any]) -> None: ...


class Ping:
    """In a call's queue: nothing has happened for a while, a comment keeps the stream open."""


class Gone:
    """In a call's queue: the client has hung up."""


Reply: TypeAlias = Accepted | Delta | Done | Failed | Tokenized | Detokenized | Rendered | Flushed
Event: TypeAlias = tuple[int, Reply | Ping | Gone]

PING: Event = (-1, Ping())
GONE: Event = (-1, Gone())


class Call:
    """The messages of one HTTP request; one task reads it with ``events``."""

    __slots__ = ("_pending", "_waiter", "closed", "quiet", "uids", "wants_pings")

    def __init__(self, uids: list[int]) -> None:
        self.uids = uids
        self.wants_pings = False
        self.quiet = False
        self.closed = False
        self._pending: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: Event) -> None:
        self._pending.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def hang_up(self) -> None:
        self.push(GONE)

    async def events(self) -> list[Event]:
        """Everything that has arrived since the last call; waits for the first."""
        while not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, []
        return pending


class Bridge:
    """Owns the link to text. ``run`` must be running for calls to progress."""

    def __init__(self, link: TextLink, index: int, status: Status, ping_every: float) -> None:
        self.status = status
        self.snapshots: dict[str, MetricsSnapshot] = {}
        self._link = link
        self._ping_every = ping_every
        self._uids = itertools.count((index << INDEX_SHIFT) + 1)
        self._routes: dict[int, tuple[Call, int]] = {}
        self._calls: set[Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    def open(self, prompts: int) -> Call:
        """A call with one uid per prompt. Raises RequestError (503) when the server takes no request now."""
        self.status.admit()
        call = Call([next(self._uids) for _ in range(prompts)])
        self._routes.update((uid, (call, index)) for index, uid in enumerate(call.uids))
        self._calls.add(call)
        self._idle.clear()
        return call

    def send(self, messages: Sequence[Any]) -> None:
        self._link.send(messages)

    def close(self, call: Call) -> None:
        """The HTTP request is over; whatever still runs for it is cancelled. Closing twice is fine."""
        if call.closed:
            return
        call.closed = True
        running = [uid for uid in call.uids if self._routes.pop(uid, None) is not None]
        self._calls.discard(call)
        if not self._calls:
            self._idle.set()
        if running and self.status.lost is None:
            self._link.send([Cancel(uid) for uid in running])

    async def run(self) -> None:
        """Deliver what text sends until the link is lost; then every call gets one typed error."""
        try:
            while True:
                for message in await self._link.receive():
                    self._deliver(message)
        except ChannelClosed as error:
            if not self.status.stopping:
                logger.error("the link to the text role is lost: %s", error)
            self.lose("The engine behind this server is gone.")

    def lose(self, message: str) -> None:
        """Nothing more will come from behind: refuse new requests, end the running ones with one error each."""
        self.fail_all(self.status.lose(message))

    def fail_all(self, error: ErrorBody) -> None:
        for uid, (call, index) in list(self._routes.items()):
            call.push((index, Failed(uid, error)))
        self._routes.clear()

    def cancel_all(self, error: ErrorBody) -> None:
        """End every running request with ``error`` on both sides of the link."""
        if self._routes and self.status.lost is None:
            self._link.send([Cancel(uid) for uid in self._routes])
        self.fail_all(error)

    def drain(self) -> None:
        self.status.draining = True
        if self.status.lost is None:
            self._link.send([Drain()])

    async def idle(self) -> None:
        """Returns when no HTTP request is being answered."""
        while self._calls:
            self._idle.clear()
            await self._idle.wait()

    async def ping(self) -> None:
        """Runs for ever: streams that were silent for half to one ``ping_every`` get a Ping."""
        while True:
            await asyncio.sleep(self._ping_every / 2)
            for call in self._calls:
                due = call.wants_pings and call.quiet
                if due:
                    call.push(PING)
                call.quiet = not due

    def _deliver(self, message: ToApi) -> None:
        match message:
            case Delta() | Accepted():
                route = self._routes.get(message.uid)
                if route is not None:
                    route[0].quiet = False
                    route[0].push((route[1], message))
            case Done() | Failed() | Tokenized() | Detokenized() | Rendered() | Flushed():
                route = self._routes.pop(message.uid, None)
                if route is not None:
                    route[0].push((route[1], message))
            case MetricsSnapshot():
                self.snapshots[message.role] = message
            case Heartbeat():
                self.status.beat(message.role, time.monotonic())
            case Loading():
                self.status.load(message.stage, message.done)
            case Ready():
                self.status.ready(message.role, time.monotonic())
            case Fatal():
                logger.error("the %s role cannot go on: %s", message.role, message.reason)
                self.lose("The engine behind this server has failed.")


def unexpected(reply: object) -> ErrorBody:
    """A reply that does not belong to the request: our fault."""
    logger.error("unexpected reply %s from the text role", type(reply).__name__)
    return engine_error("The server failed on this request; the cause is in its log.").body
