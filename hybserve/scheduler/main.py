"""The engine role: the loop with its heart beating, until the parent says stop."""

import gc
import logging
import time
from collections.abc import Callable
from typing import Protocol

from hybserve.cache.integrity import IntegrityError
from hybserve.core.errors import HybserveError
from hybserve.core.messages import Fatal, FromLaunch, Heartbeat, Ready, Stop, ToLaunch
from hybserve.observe import log
from hybserve.plan.result import EngineLimits
from hybserve.scheduler.loop import Loop, RunnerLink, TextLink
from hybserve.scheduler.scheduler import EngineLost, Scheduler
from hybserve.wire.channel import ChannelClosed

_log = logging.getLogger(__name__)
_BEAT = 0.5  # seconds between heartbeats; one a second is owed
_SNAPSHOT_EVERY = 2  # beats
_WAIT = 0.25  # longest wait for a message, so that the parent is heard


class ControlLink(Protocol):
    """The link to the parent; ``hybserve.wire.channel.Channel`` is one."""

    def send(self, messages: list[ToLaunch], /) -> None: ...

    def receive(self, timeout: float | None = None, /) -> list[FromLaunch]: ...


def run(
    limits: EngineLimits,
    max_queue: int,
    max_queue_tokens: int | None,
    runner: RunnerLink,
    text: TextLink,
    control: ControlLink | None,
    ready: Ready,
    *,
    debug: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Serve until the parent sends Stop or its link breaks; without a parent, until the text role is gone.

    ``ready`` is announced on both links first: the runner must be warm. ``debug`` recounts all books after every step
    and raises on a violation. Raises HybserveError, after every request was told, when the engine cannot go on.
    """
    scheduler = Scheduler(limits, max_queue, max_queue_tokens, clock)
    engine = Engine(scheduler, Loop(scheduler, runner, text), control, clock, debug)
    text.send([ready])
    engine.report(ready)
    gc.collect()
    gc.freeze()  # what was loaded stays: walking over it again and again would stall steps
    try:
        engine.serve()
    except ChannelClosed:
        _log.info("the text role is gone; waiting for the parent to stop the engine")
        engine.wait_for_stop()
    finally:
        gc.unfreeze()


class Engine:
    """The loop, the heartbeat and the ear for the parent."""

    def __init__(
        self,
        scheduler: Scheduler,
        loop: Loop,
        control: ControlLink | None,
        clock: Callable[[], float],
        debug: bool,
    ) -> None:
        self._scheduler = scheduler
        self._loop = loop
        self._control = control
        self._clock = clock
        self._debug = debug
        self._next_beat = clock()
        self._beats = 0
        self._checked = 0  # the last step after which everything was recounted

    def report(self, message: ToLaunch) -> None:
        if self._control is not None:
            self._control.send([message])

    def serve(self) -> None:
        """Turn until stopped. Raises ChannelClosed when text is gone, HybserveError when the engine is lost."""
        scheduler, loop = self._scheduler, self._loop
        while not self._stopped():
            now = self._clock()
            if now >= self._next_beat:
                self._beat(now)
            until = min(self._next_beat, scheduler.next_deadline) - now
            try:
                loop.turn(min(max(until, 0.0), _WAIT))
            except EngineLost as lost:
                loop.tell(Fatal("engine", str(lost)))
                raise HybserveError(f"the engine failed: {lost}") from lost
            if self._debug:
                scheduler.check()
        loop.stop()

    def wait_for_stop(self) -> None:
        """Nobody is left to serve: keep beating until told to stop."""
        while self._control is not None and not self._stopped(_BEAT):
            self.report(self._heartbeat())

    def _stopped(self, wait: float = 0.0) -> bool:
        if self._control is None:
            return False
        try:
            return any(isinstance(message, Stop) for message in self._control.receive(wait))
        except ChannelClosed:
            return True

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat("engine", self._loop.turns, not self._scheduler.idle)

    def _beat(self, now: float) -> None:
        self._next_beat = now + _BEAT
        self._beats += 1
        self.report(self._heartbeat())
        self._loop.tell(self._heartbeat())
        if self._beats % _SNAPSHOT_EVERY == 0:
            self._loop.tell(self._scheduler.snapshot())
        if self._scheduler.idle:
            self._check_idle()

    def _check_idle(self) -> None:
        """Recount everything once after something has happened."""
        if self._scheduler.settled == self._checked:
            return
        self._checked = self._scheduler.settled
        try:
            self._scheduler.check()
        except IntegrityError as error:
            if self._debug:
                raise
            log.event(
                _log, "error", "the books of the scheduler are wrong; all pools are rebuilt", violation=str(error)
            )
            self._scheduler.rebuild()
