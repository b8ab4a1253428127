"""The engine loop: settle n-1; plan n+1; launch n+1; wait for n. One thread, speaking only frames.

While the device runs a step, the host tells the results of the step before, plans the one after and queues it behind
the running one, so that the device never waits for the host. A device that is synchronous executes a plan when it is
collected; the order is the same.
"""

from typing import Any, Protocol

from hybserve.core.messages import FromRunner, FromScheduler, StepDone, StepFailed, Stop, ToRunner, ToScheduler
from hybserve.scheduler.scheduler import Scheduler
from hybserve.wire.codec import Codec


class RunnerLink(Protocol):
    """A runner, near or far: it executes submitted frames in order."""

    def submit(self, frame: bytes) -> None: ...

    def collect(self) -> bytes:
        """The result of the oldest plan submitted, waiting for it."""
        ...


class TextLink(Protocol):
    """The scheduler's end of the link to the text role; ``hybserve.wire.channel.Channel`` is one."""

    def send(self, messages: list[FromScheduler], /) -> None: ...

    def receive(self, timeout: float | None = None, /) -> list[ToScheduler]: ...


class Loop:
    """One ``turn`` is one pass; ``busy`` says whether the next has anything to do by itself."""

    def __init__(self, scheduler: Scheduler, runner: RunnerLink, text: TextLink) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._text = text
        self._plans: Codec[ToRunner] = Codec(ToRunner)
        self._results: Codec[FromRunner] = Codec(FromRunner)
        self._in_flight = 0  # plans launched and not collected: at most one runs and one waits
        self._result: StepDone | StepFailed | None = None
        self.turns = 0

    @property
    def busy(self) -> bool:
        return self._in_flight > 0 or self._result is not None

    def turn(self, wait: float) -> None:
        """``wait``: seconds to wait for a message if there is nothing else to do.

        Raises EngineLost when the engine cannot go on and ChannelClosed when the text role is gone.
        """
        for message in self._text.receive(0 if self.busy else wait):
            self._scheduler.receive(message)
        result, self._result = self._result, None
        try:
            if result is not None:
                self._scheduler.settle(result)
        finally:
            self.tell()
        plan = self._scheduler.plan()
        if plan is not None:
            self._runner.submit(self._plans.encode(plan))
            self._in_flight += 1
        if self._in_flight > (plan is not None):
            self._result = self._wait()
        self.turns += 1

    def tell(self, *more: Any) -> None:
        """Send what the scheduler has to say, and ``more``, as one frame."""
        messages = [*self._scheduler.outbox(), *more]
        if messages:
            self._text.send(messages)

    def stop(self) -> None:
        """Let the runner drop everything."""
        self._runner.submit(self._plans.encode([Stop()]))

    def _wait(self) -> StepDone | StepFailed:
        (result,) = self._results.decode(self._runner.collect())
        self._in_flight -= 1
        assert isinstance(result, StepDone | StepFailed), f"a runner answered a plan with {type(result).__name__}"
        return result
