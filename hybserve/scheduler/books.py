"""The scheduler's counts: the ledger of requests, which must balance, and its metrics."""

from bisect import bisect_left
from collections import Counter

from hybserve.core.messages import MetricsSnapshot, StepDone
from hybserve.observe.metrics import TOKEN_BOUNDS, Metrics, labelled
from hybserve.scheduler.queues import Waiting
from hybserve.scheduler.running import Running
from hybserve.scheduler.step import Flight

_PREFIX = "hybserve_"


class Books:
    """``accepted`` = the sum of ``ends`` + requests alive, always."""

    def __init__(self) -> None:
        self.accepted = 0
        self.ends: Counter[str] = Counter()  # of accepted requests: finished, cancelled or an error code
        self._metrics = Metrics("engine")
        self.queue_time = self._metrics.histogram(_PREFIX + "queue_seconds")
        self.ttft = self._metrics.histogram(_PREFIX + "ttft_seconds")
        self._itl = self._metrics.histogram(_PREFIX + "itl_seconds", TOKEN_BOUNDS)
        self._step = self._metrics.histogram(_PREFIX + "step_seconds", TOKEN_BOUNDS)
        self._last_settle = 0.0
        self._parks = 0
        self._seen: dict[str, int] = {}  # totals of the prefix tree at the last snapshot

    def refused(self, code: str) -> None:
        self._metrics.count(labelled(_PREFIX + "refusals_total", code=code))

    def ended(self, kind: str) -> None:
        self.ends[kind] += 1
        self._metrics.count(labelled(_PREFIX + "terminal_events_total", kind=kind))

    def step(self, flight: Flight, done: StepDone, now: float, tokens: int) -> None:
        """A step was settled and ``tokens`` of its samples counted.

        Every decoding sequence has a row in every step, so the time between its tokens is the time between steps.
        """
        self._metrics.count(_PREFIX + "steps_total")
        self._metrics.count(_PREFIX + "generation_tokens_total", tokens)
        if flight.chunks:
            computed = sum(chunk.end - chunk.start for chunk in flight.chunks)
            self._metrics.count(_PREFIX + "prefill_tokens_total", computed)
        self._step.observe(done.forward_ms / 1e3)
        if flight.decoding and self._last_settle:
            gap = now - self._last_settle
            self._itl.counts[bisect_left(self._itl.bounds, gap)] += flight.decoding
            self._itl.total += gap * flight.decoding
        self._last_settle = now

    def step_failed(self) -> None:
        self._metrics.count(_PREFIX + "failed_steps_total")

    def violation(self) -> None:
        """The books were wrong while nothing was alive; they balance from here."""
        self.accepted = sum(self.ends.values())
        self._seen = {}
        self._metrics.count(_PREFIX + "integrity_violations_total")

    def snapshot(self, running: Running, waiting: Waiting) -> MetricsSnapshot:
        gauge = self._metrics.gauge
        tree = running.prefix.tree
        for pool, name, cached in (
            (running.pages, "pages", tree.cached_pages),
            (running.slots, "slots", tree.checkpoints),
        ):
            gauge(labelled(_PREFIX + name, state="active"), pool.held - cached)
            gauge(labelled(_PREFIX + name, state="cached"), cached)
            gauge(labelled(_PREFIX + name, state="free"), pool.available)
        gauge(_PREFIX + "prefix_tree_nodes", tree.nodes)
        gauge(_PREFIX + "sequences_running", len(running.sequences))
        gauge(_PREFIX + "sequences_parked", waiting.parked)
        gauge(_PREFIX + "requests_waiting", waiting.requests)
        self._metrics.count(_PREFIX + "parks_total", running.parks - self._parks)
        self._parks = running.parks
        for name, total in running.prefix.totals().items():
            self._metrics.count(name, total - self._seen.get(name, 0))
            self._seen[name] = total
        return self._metrics.snapshot()
