"""Counters, gauges and histograms of one role. Plain Python numbers in one thread: a count costs a dict update.

Roles send ``snapshot()`` upstream; only the api role knows Prometheus. A metric is named ``name`` or, with labels,
``name{label="x"}`` as ``labelled`` makes it; names with labels are few and fixed, so memory is bounded.
"""

from bisect import bisect_left
from collections.abc import Sequence

from hybserve.core.messages import MetricsSnapshot

#: Upper bounds in seconds: for waits and first tokens, and for the time between tokens.
LATENCY_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)


def labelled(name: str, **labels: str) -> str:
    """``name{key="value",…}`` with keys in order, values escaped as Prometheus wants them."""
    pairs = ",".join(f'{key}="{_quote(value)}"' for key, value in sorted(labels.items()))
    return f"{name}{{{pairs}}}" if pairs else name


def _quote(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Histogram:
    """Counts by upper bound. ``bounds`` ascend; a last bucket takes what is above them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> tuple[list[float], list[int], float]:
        """(bounds, cumulative counts including +Inf, sum), the form of a MetricsSnapshot."""
        running, counts = 0, []
        for count in self.counts:
            running += count
            counts.append(running)
        return list(self.bounds), counts, self.total


class Metrics:
    """The metrics of one role. Everything in it is made on first use."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}

    def count(self, name: str, amount: float = 1) -> None:
        self._counters[name] = self._counters.get(name, 0) + amount

    def gauge(self, name: str, value: float) -> None:
        self._gauges[name] = value

    def histogram(self, name: str, bounds: Sequence[float] = LATENCY_BOUNDS) -> Histogram:
        """The histogram of that name; keep the object where it is fed often. The first call fixes the bounds."""
        found = self._histograms.get(name)
        if found is None:
            found = self._histograms[name] = Histogram(bounds)
        return found

    def snapshot(self) -> MetricsSnapshot:
        histograms = {name: histogram.cumulative() for name, histogram in self._histograms.items()}
        return MetricsSnapshot(self.role, dict(self._gauges), dict(self._counters), histograms)
