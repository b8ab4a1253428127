"""The text role's process: joins the apis, the engine, the worker and the parent around ``TextCore``."""

import asyncio
import gc
import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from hybserve.config.deployment import Deployment
from hybserve.core.errors import unavailable
from hybserve.core.messages import (
    Drain,
    FromLaunch,
    FromScheduler,
    Heartbeat,
    Loading,
    Ready,
    Stop,
    ToApi,
    ToLaunch,
    ToScheduler,
    ToText,
)
from hybserve.core.types import ServingFacts
from hybserve.observe import log
from hybserve.text.core import TextCore
from hybserve.text.jobs import Outcome, Worker, WorkerSettings
from hybserve.text.tokenize import Tokenizer, load_tokenizer
from hybserve.wire.channel import AsyncChannel, ChannelClosed

_log = logging.getLogger("hybserve.text")

_ROLE = "text"
_TICK = 0.5  # seconds between heartbeats

ApiLink: TypeAlias = AsyncChannel[ToText, ToApi]
EngineLink: TypeAlias = AsyncChannel[FromScheduler, ToScheduler]
ControlLink: TypeAlias = AsyncChannel[FromLaunch, ToLaunch]


def run(
    deployment: Deployment,
    facts: ServingFacts,
    apis: Sequence[ApiLink],
    engine: EngineLink,
    control: ControlLink,
) -> None:
    """Serve until the parent says Stop. Raises ModelError when the tokenizer is refused, HybserveError when the worker
    cannot be started; a lost neighbour ends its requests, not the role."""
    asyncio.run(TextRole(deployment, facts, apis, engine, control).serve())


class TextRole:
    def __init__(
        self,
        deployment: Deployment,
        facts: ServingFacts,
        apis: Sequence[ApiLink],
        engine: EngineLink,
        control: ControlLink,
    ) -> None:
        self._deployment = deployment
        self._facts = facts
        self._apis = dict(enumerate(apis))
        self._engine = engine
        self._control = control
        self._handled = 0

    async def serve(self) -> None:
        self._announce(Loading("tokenizer", 0.0))
        started = time.monotonic()
        facts = self._facts
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(facts.model_dir), facts.vocab_size, facts.eos_ids)
        self._core = TextCore(
            facts, tokenizer, self._deployment.text.allow_request_template, lambda: random.getrandbits(63)
        )
        self._core.apis = set(self._apis)
        self._worker = Worker(_worker_settings(self._deployment, facts), self._from_worker)
        _settle_memory()
        control = asyncio.create_task(self._read_control())
        tasks = [
            control,
            asyncio.create_task(self._worker.run()),
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._read_engine()),
            asyncio.create_task(self._report_ready(tokenizer, started)),
            *[asyncio.create_task(self._read_api(index, channel)) for index, channel in self._apis.items()],
        ]
        try:
            await _until_done(control, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._close()

    async def _read_api(self, index: int, channel: ApiLink) -> None:
        try:
            while True:
                messages = await channel.receive()
                self._core.from_api(index, messages)
                self._flush(len(messages))
        except ChannelClosed as error:
            log.event(
                _log,
                "info" if self._core.draining else "warning",
                "an api is gone; its requests are cancelled",
                reason=str(error),
            )
            self._core.api_lost(index)
            del self._apis[index]
            self._flush(0)

    async def _read_engine(self) -> None:
        try:
            while True:
                messages = await self._engine.receive()
                self._core.from_engine(messages)
                self._flush(len(messages))
        except ChannelClosed as error:
            log.event(_log, "error", "the engine is gone", reason=str(error), requests=self._core.active)
            self._core.engine_lost("The engine stopped while this request was running.")
            self._flush(0)

    async def _read_control(self) -> None:
        """Ends when the parent says Stop or is gone."""
        try:
            while True:
                for message in await self._control.receive():
                    match message:
                        case Stop():
                            return
                        case Drain():
                            self._core.drain(message)
                            self._flush(1)
        except ChannelClosed:
            return

    def _from_worker(self, outcome: Outcome) -> None:
        self._core.from_worker(outcome)
        self._flush(1)

    async def _beat(self) -> None:
        while True:
            beat = Heartbeat(_ROLE, self._handled, not self._core.idle)
            self._control.send([beat])
            self._core.tick()
            self._core.broadcast([beat, self._core.snapshot(self._worker.waiting, self._worker.restarts)])
            self._flush(0)
            await asyncio.sleep(_TICK)

    async def _report_ready(self, tokenizer: Tokenizer, started: float) -> None:
        await self._worker.ready.wait()
        report = [("tokenizer", self._core.describe())]
        report += [("warning", warning) for warning in tokenizer.warnings]
        self._announce(Ready(_ROLE, report, [("tokenizer", time.monotonic() - started)]))

    def _announce(self, message: Loading | Ready) -> None:
        self._control.send([message])
        for channel in self._apis.values():
            channel.send([message])

    def _flush(self, handled: int) -> None:
        """Empty the core's outboxes: one frame per link."""
        self._handled += handled
        core = self._core
        if core.to_engine:
            self._engine.send(core.to_engine)
            core.to_engine = []
        if core.to_apis:
            for index, messages in core.to_apis.items():
                if index in self._apis:
                    self._apis[index].send(messages)
            core.to_apis = {}
        for job in core.jobs:
            self._worker.submit(job)
        core.jobs.clear()
        for job_id in core.withdrawn:
            self._worker.forget(job_id)
        core.withdrawn.clear()

    def _close(self) -> None:
        """End what is open with one error each, hand it over, close the links."""
        self._core.end_all(unavailable("draining", "The server is shutting down.").body)
        self._flush(0)
        for channel in self._apis.values():
            channel.close()
        self._engine.close()
        self._control.close()


async def _until_done(control: asyncio.Task[None], tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for ``control``; an error of any task comes out here."""
    pending = set(tasks)
    while not control.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def _worker_settings(deployment: Deployment, facts: ServingFacts) -> WorkerSettings:
    logs = deployment.log
    return WorkerSettings(facts.model_dir, facts.vocab_size, facts.eos_ids, facts.max_seq_len, logs.level, logs.format)


def _settle_memory() -> None:
    """A vocabulary is a million objects that live for ever: keep the garbage collector from walking over them."""
    gc.collect()
    gc.freeze()
