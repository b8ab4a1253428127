"""``GET /metrics``: the snapshots of all roles in Prometheus' text format, ``model_name`` on every sample."""

import re
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hybserve.core.messages import MetricsSnapshot

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_NAME = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\Z", re.DOTALL)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_UNESCAPE = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def split_name(name: str) -> tuple[str, dict[str, str]]:
    """``name{a="x"}`` into its parts. Raises ValueError."""
    match = _NAME.match(name)
    if match is None:
        raise ValueError(f"{name!r} is not a metric name")
    labels = {
        key: re.sub(r'\\[\\"n]', lambda m: _UNESCAPE[m.group()], value)
        for key, value in _LABEL.findall(match.group(2) or "")
    }
    return match.group(1), labels


class RoleCollector(Collector):
    """Turns role snapshots into metric families; samples of one name and several label sets share a family."""

    def __init__(self, snapshots: Iterable[MetricsSnapshot], model_name: str) -> None:
        self._snapshots = list(snapshots)
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for snapshot in self._snapshots:
            for name, value in snapshot.gauges.items():
                base, labels = self._parts(name)
                families.setdefault(base, GaugeMetricFamily(base, base)).add_sample(base, labels, value)
            for name, value in snapshot.counters.items():
                base, labels = self._parts(name)
                stem = base.removesuffix("_total")
                families.setdefault(stem, CounterMetricFamily(stem, stem)).add_sample(f"{stem}_total", labels, value)
            for name, (bounds, counts, total) in snapshot.histograms.items():
                self._histogram(families, name, bounds, counts, total)
        yield from families.values()

    def _parts(self, name: str) -> tuple[str, dict[str, str]]:
        base, labels = split_name(name)
        return base, {**labels, "model_name": self._model_name}

    def _histogram(
        self, families: dict[str, Metric], name: str, bounds: list[float], counts: list[int], total: float
    ) -> None:
        base, labels = self._parts(name)
        family = families.setdefault(base, HistogramMetricFamily(base, base))
        for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
            family.add_sample(f"{base}_bucket", {**labels, "le": bound}, count)
        family.add_sample(f"{base}_count", labels, counts[-1])
        family.add_sample(f"{base}_sum", labels, total)


def render_metrics(snapshots: Iterable[MetricsSnapshot], model_name: str) -> bytes:
    registry = CollectorRegistry()
    registry.register(RoleCollector(snapshots, model_name))
    return generate_latest(registry)
