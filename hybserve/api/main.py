"""The api role: uvicorn on the inherited sockets, the bridge to text, drain and stop on the parent's word."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvicorn

from hybserve.api.app import build_app
from hybserve.api.bridge import Bridge
from hybserve.api.protocol import limited_protocol
from hybserve.api.settings import ApiSettings, from_deployment
from hybserve.api.status import Status
from hybserve.config.deployment import Deployment
from hybserve.core.errors import ErrorBody, unavailable
from hybserve.core.messages import Drain, FromLaunch, Heartbeat, Ready, Stop, ToApi, ToLaunch, ToText
from hybserve.core.types import ServingFacts
from hybserve.observe.metrics import Metrics
from hybserve.wire.channel import AsyncChannel, ChannelClosed

logger = logging.getLogger(__name__)

ROLE = "api"
BEAT_EVERY = 0.5
#: How long answers that were ended by force may take to leave.
FAREWELL = 2.0


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: only the parent decides when this role ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiRole:
    """One api process: HTTP on one side, text on the other, the parent above."""

    def __init__(
        self,
        settings: ApiSettings,
        facts: ServingFacts,
        text: AsyncChannel[ToApi, ToText],
        control: AsyncChannel[FromLaunch, ToLaunch],
        index: int = 0,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics(ROLE)
        self.status = Status(settings.stall_timeout)
        self.bridge = Bridge(text, index, self.status, settings.sse_ping)
        self._control = control
        app = build_app(facts, settings, self.bridge, self.metrics)
        self.server = Server(server_config(app, settings, self.metrics))

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Until the parent says Stop, or Drain and the drain is over. What fails in the background ends the role."""
        http = asyncio.create_task(self.server.serve(sockets=list(sockets)))
        background = {asyncio.create_task(work) for work in (self.bridge.run(), self.bridge.ping(), self._beat())}
        stopped = asyncio.create_task(self._until_stopped())
        try:
            await self._watch(stopped, background | {http, asyncio.create_task(self._announce())})
        finally:
            self.status.stopping = True
            self.server.should_exit = True
            await self._farewell(http)
            for task in (*background, stopped):
                task.cancel()

    async def _watch(self, stopped: asyncio.Task[None], work: set[asyncio.Task[None]]) -> None:
        """Until ``stopped``; raises what any of ``work`` raises. Work may end (the link to text, when it is lost)."""
        while not stopped.done():
            done, _ = await asyncio.wait({stopped, *work}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            work -= done

    async def _announce(self) -> None:
        """Tell the parent once the socket is served."""
        while not self.server.started:
            await asyncio.sleep(0.005)
        gc.collect()
        gc.freeze()  # what is here stays; full collections must not walk it while streams wait
        self._control.send([Ready(ROLE)])

    async def _until_stopped(self) -> None:
        if await self._next_order() is not Drain:
            self._end_all(unavailable("draining", "The server was stopped before this request was finished.").body)
            return
        logger.info("draining: %d requests in flight", self.bridge.in_flight)
        self.bridge.drain()
        idle, second = asyncio.create_task(self.bridge.idle()), asyncio.create_task(self._next_order())
        await asyncio.wait((idle, second), timeout=self.settings.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, second):
            task.cancel()
        self._end_all(unavailable("draining", "The server shut down before this request was finished.").body)

    async def _next_order(self) -> type[Drain] | type[Stop]:
        """The next word of the parent; a broken link counts as Stop. A second Drain counts as Stop, too."""
        try:
            for message in await self._control.receive():
                if isinstance(message, Stop) or self.status.draining:
                    return Stop
        except ChannelClosed:
            return Stop
        return Drain

    def _end_all(self, error: ErrorBody) -> None:
        self.status.draining = True
        self.bridge.cancel_all(error)

    async def _farewell(self, http: asyncio.Task[None]) -> None:
        """Let the last answers leave, then close what is still open."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.bridge.idle(), FAREWELL)
        await asyncio.wait((http,), timeout=FAREWELL)
        self.server.force_exit = True
        await asyncio.wait((http,), timeout=FAREWELL)
        http.cancel()

    async def _beat(self) -> None:
        progress = 0
        while True:
            progress += 1
            self._control.send([Heartbeat(ROLE, progress, self.bridge.in_flight > 0)])
            await asyncio.sleep(BEAT_EVERY)


def server_config(app: Any, settings: ApiSettings, metrics: Metrics) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited_protocol(settings, metrics),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=1024,
        timeout_keep_alive=settings.keep_alive,
        h11_max_incomplete_event_size=settings.max_header_bytes,
    )


def run(
    deployment: Deployment,
    facts: ServingFacts,
    listen: Sequence[socket.socket],
    text: AsyncChannel[ToApi, ToText],
    control: AsyncChannel[FromLaunch, ToLaunch],
    index: int = 0,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """The whole life of one api process. Raises ConfigError when a named key variable is empty."""
    role = ApiRole(from_deployment(deployment, environ), facts, text, control, index)
    asyncio.run(role.serve(listen))
