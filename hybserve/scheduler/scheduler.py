"""The scheduler: the one authority over requests, pages and slots. No I/O, no tensors, no clock of its own.

A caller alternates ``receive``, ``plan`` and ``settle``; plans may be made before the results of earlier ones are
settled (results are settled in order). What there is to tell the text role collects in ``outbox``.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import assert_never

from hybserve.core.errors import RequestError, deadline_exceeded, engine_error, numerical_error
from hybserve.core.messages import (
    Accepted,
    Cancel,
    Drain,
    Failed,
    Finished,
    Flush,
    Flushed,
    FromScheduler,
    Generate,
    MetricsSnapshot,
    Probe,
    Probed,
    StepDone,
    StepFailed,
    StopAt,
    ToRunner,
    ToScheduler,
)
from hybserve.core.types import Timing
from hybserve.plan.result import EngineLimits
from hybserve.scheduler import integrity
from hybserve.scheduler.admission import Door
from hybserve.scheduler.books import Books
from hybserve.scheduler.prefix import Export
from hybserve.scheduler.queues import Waiting
from hybserve.scheduler.request import NEVER, Request, Sequence, State
from hybserve.scheduler.running import Running
from hybserve.scheduler.settle import broken, settle
from hybserve.scheduler.step import Flight, StepMaker


class EngineLost(Exception):
    """A step failed and nobody is to blame: every request has been told, nothing can go on."""


class Scheduler:
    """``clock``: seconds, monotonic, the clock of ``Generate.arrival``. ``max_queue_tokens`` None = no such bound."""

    def __init__(
        self,
        limits: EngineLimits,
        max_queue: int,
        max_queue_tokens: int | None,
        clock: Callable[[], float],
        epoch: int = 1,
    ) -> None:
        if min(limits.step_tokens, limits.prefill_chunk) < limits.page_size:
            raise ValueError("step_tokens and prefill_chunk must hold a page, or no prompt would ever advance")
        self.limits = limits
        self.requests: dict[int, Request] = {}
        self.waiting = Waiting()
        self.running = Running(limits, self.waiting)
        self.books = Books()
        self.settled = 0  # the last plan whose result is known
        self._clock = clock
        self._epoch = epoch
        self._door = Door(limits, max_queue, max_queue_tokens)
        self._maker = StepMaker(limits, self.running, self.waiting, epoch)
        self._flights: deque[Flight] = deque()
        self._deadlines: list[tuple[float, int]] = []  # a heap; requests that have ended stay until their time
        self._outbox: list[FromScheduler] = []

    @property
    def idle(self) -> bool:
        """Nothing to plan and nothing in flight."""
        return not self.requests and not self._flights

    @property
    def in_flight(self) -> int:
        """Plans made whose result has not been settled."""
        return len(self._flights)

    @property
    def next_deadline(self) -> float:
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def outbox(self) -> list[FromScheduler]:
        """What has to be told since the last call."""
        messages, self._outbox = self._outbox, []
        return messages

    # what comes from text

    def receive(self, message: ToScheduler) -> None:
        match message:
            case Generate():
                self._arrive(message)
            case Cancel():
                self._cancel(message.uid)
            case StopAt():
                self._stop_at(message)
            case Probe():
                self._outbox.append(Probed(message.uid, self.running.prefix.probe(message)))
            case Flush():
                pages, states = self.running.prefix.flush(self.running.step)
                self._outbox.append(Flushed(message.uid, pages, states))
            case Drain():
                self._door.draining = True
            case _:
                assert_never(message)

    def _arrive(self, message: Generate) -> None:
        assert message.uid not in self.requests, f"request {message.uid} came twice"
        refusal = self._door.refusal(message, self.waiting)
        if refusal is not None:
            self.books.refused(refusal.body.code)
            self._outbox.append(Failed(message.uid, refusal.body))
            return
        request = Request(message)
        self.requests[request.uid] = request
        self.waiting.add(request.sequences[0])
        if message.timeout > 0:
            heapq.heappush(self._deadlines, (request.deadline, request.uid))
        self.books.accepted += 1
        self._outbox.append(Accepted(request.uid, len(request.prompt)))

    def _cancel(self, uid: int) -> None:
        request = self.requests.get(uid)
        if request is not None:  # else it has ended, and its last event is on the way
            self._drop(request)
            self.books.ended("cancelled")

    def _stop_at(self, message: StopAt) -> None:
        request = self.requests.get(message.uid)
        if request is None or not 0 <= message.choice < request.n:
            return
        sequence = request.sequences[message.choice]
        # a stop string lies in tokens that were delivered; without any there is nothing to stop
        if sequence.output and sequence.state is not State.GONE and not sequence.ended:
            sequence.exporting = 0  # what stands behind a stop string is not worth waiting for
            self._end(sequence)
            if not request.alive:
                self._finish(request)

    # plans and their results

    def plan(self) -> list[ToRunner] | None:
        """The next frame for the runners (SequenceStarts, then one StepPlan), or None if there is nothing to do."""
        now = self._clock()
        self._expire(now)
        made = self._maker.make(self.settled)
        if made is None:
            return None
        frame, flight = made
        for lead in self._maker.admitted:
            request = lead.request
            if not request.admitted_at:
                request.admitted_at = now
                self._door.last_wait = now - request.arrival
                self.books.queue_time.observe(now - request.arrival)
        self._flights.append(flight)
        return frame

    def settle(self, result: StepDone | StepFailed) -> None:
        """Take the result of the oldest plan in flight. Raises EngineLost, after telling every request."""
        flight = self._flights.popleft()
        plan = flight.plan
        assert (result.step, result.epoch) == (plan.step, plan.epoch), (
            f"expected the result of step {plan.step} (epoch {plan.epoch}), got {result.step} ({result.epoch})"
        )
        self.settled = plan.step
        match result:
            case StepDone():
                self._done(flight, result)
            case StepFailed():
                self._failed(flight, result)
            case _:
                assert_never(result)

    def _done(self, flight: Flight, done: StepDone) -> None:
        now = self._clock()
        for request in broken(flight, done):
            self._fail(request, numerical_error("The model's output for this request was not finite."))
        self._publish(flight, done)
        outcome = settle(flight, done)
        self._outbox += outcome.scored
        if outcome.tokens is not None:
            self._outbox.append(outcome.tokens)
        for sequence in flight.samplers[flight.decoding :]:
            request = sequence.request
            if sequence.output and not request.first_token_at:
                request.first_token_at = now
                self.books.ttft.observe(now - request.arrival)
        for sequence in outcome.ended:
            self._end(sequence)
            if not sequence.request.alive:
                self._finish(sequence.request)
        self.books.step(flight, done, now, len(outcome.tokens.tokens) if outcome.tokens else 0)

    def _publish(self, flight: Flight, done: StepDone | None) -> None:
        """Acknowledged KV and states become the tree's; ``done`` None: the step failed, nothing of it counts."""
        prefix, step, fence = self.running.prefix, flight.plan.step, self.running.step
        for chunk in flight.chunks if done is not None else ():
            sequence = chunk.sequence
            if sequence.lease is not None and step >= sequence.live_from:
                sequence.settled = chunk.end
                prefix.publish(sequence, chunk.end)
        positions = done.export_positions if done is not None else [export.position for export in flight.exports]
        finite = done.export_finite if done is not None else [True] * len(flight.exports)
        for export, position, sound in zip(flight.exports, positions, finite, strict=True):
            sequence = export.sequence
            if sequence.parting:
                self._part(export, position, sound and done is not None and _finite(flight, done, sequence))
                continue
            live = done is not None and step >= sequence.live_from
            if live and not sound:
                self._fail(sequence.request, numerical_error("The model's state of this request was not finite."))
            prefix.settle(export, live and sound, position, fence)
        for node in flight.restored:
            prefix.unpin(node, fence)

    def _part(self, export: Export, position: int, valid: bool) -> None:
        """The last boundary of a sequence that has ended came back: if ``valid``, all its tokens are computed."""
        sequence = export.sequence
        assert export.position == sequence.length
        if valid:
            sequence.settled = sequence.length
        self.running.prefix.settle(export, valid, position, self.running.step)
        self.running.leave(sequence, State.GONE)

    def _failed(self, flight: Flight, failed: StepFailed) -> None:
        """The step moved states in place before it failed: what was in it is recomputed, never run again."""
        self._publish(flight, None)
        named = dict(zip(flight.plan.seqs, flight.rows, strict=True)) | dict(flight.forked)
        if not failed.culprits or not named.keys() >= set(failed.culprits):
            for request in list(self.requests.values()):
                self._fail(request, engine_error("The engine failed and cannot go on."))
            raise EngineLost(failed.reason)
        for request in {named[index].uid: named[index].request for index in failed.culprits}.values():
            if request.uid in self.requests:
                self._fail(request, engine_error("The engine failed on this request."))
        while self.running.sequences:
            self.running.park(self.running.sequences[-1])
        for lead in self.waiting:
            if lead.state is State.PARKED:  # what plans in flight say of them was computed from broken states
                for sequence in lead.group:
                    sequence.live_from = self.running.step + 1
        self.books.step_failed()

    # ends

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.requests.get(heapq.heappop(self._deadlines)[1])
            if request is None:
                continue
            where = "while it ran" if request.admitted_at else "in the queue"
            self._fail(request, deadline_exceeded(f"The deadline passed {where} ({now - request.arrival:.1f} s)."))

    def _end(self, sequence: Sequence) -> None:
        """One choice has all its tokens."""
        request = sequence.request
        request.alive -= 1
        siblings = request.sequences[1:] if sequence.choice == 0 and sequence.state is State.FORK else []
        if any(sibling.state is State.FORK for sibling in siblings):
            sequence.ended = True  # it stays as the source of the fork
            sequence.live_from = NEVER
        elif sequence.state is State.DECODE and sequence.exporting == sequence.length:
            sequence.ended = True  # parting: its overshoot computes just what the next turn will ask for
            sequence.live_from = NEVER
            sequence.sampled = sequence.max_tokens
        else:
            self._release(sequence)

    def _finish(self, request: Request) -> None:
        now = self._clock()
        for sequence in request.sequences:
            if not sequence.parting:
                self._release(sequence)
        del self.requests[request.uid]
        self._outbox.append(Finished(request.uid, request.cache, _timing(request, now)))
        self.books.ended("finished")

    def _fail(self, request: Request, error: RequestError) -> None:
        self._drop(request, publish=False)
        self._outbox.append(Failed(request.uid, error.body))
        self.books.ended(error.body.code)

    def _drop(self, request: Request, *, publish: bool = True) -> None:
        """Forget a request in whatever state; everything it holds is free, or the tree's."""
        for sequence in request.sequences:
            self._release(sequence, publish=publish)
        del self.requests[request.uid]

    def _release(self, sequence: Sequence, *, publish: bool = True) -> None:
        if sequence.on_device:
            self.running.leave(sequence, State.GONE, publish=publish)
            return
        if sequence.state is not State.GONE and sequence.group and sequence is sequence.group[0]:
            self.waiting.remove(sequence)
        sequence.retire()

    # what is reported

    def check(self) -> None:
        """Recount everything from scratch. Raises IntegrityError with ids and owners."""
        integrity.check(self.running, self.waiting, self.requests, self.books, self._flights)

    def rebuild(self) -> None:
        """Start the pools anew after a violation; only when idle, so nothing is lost but the evidence."""
        assert self.idle, "pools cannot be rebuilt under live requests"
        self.running.rebuild()
        self.books.violation()

    def snapshot(self) -> MetricsSnapshot:
        return self.books.snapshot(self.running, self.waiting)


def _finite(flight: Flight, done: StepDone, sequence: Sequence) -> bool:
    """Whether the step's rows of that sequence were finite."""
    return all(flight.samplers[entry] is not sequence for entry in done.bad)


def _timing(request: Request, now: float) -> Timing:
    """Milliseconds, by the scheduler's clock."""
    admitted, first = request.admitted_at, request.first_token_at
    return Timing(
        queue=1e3 * (admitted - request.arrival),
        prefill=1e3 * (first - admitted),
        ttft=1e3 * (first - request.arrival),
        decode=1e3 * (now - first),
    )
