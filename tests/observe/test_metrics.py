from hybserve.core.messages import MetricsSnapshot
from hybserve.observe.metrics import Histogram, Metrics, labelled


def test_labels_are_ordered_and_escaped():
    assert labelled("x") == "x"
    assert labelled("x", b='say "hi"\n', a="c\\d") == 'x{a="c\\\\d",b="say \\"hi\\"\\n"}'


def test_histograms_count_by_upper_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    assert histogram.cumulative() == ([1.0, 2.0], [2, 4, 5], 104.0)


def test_a_snapshot_is_a_copy():
    metrics = Metrics("engine")
    metrics.count("steps_total")
    metrics.count("steps_total", 4)
    metrics.gauge("running", 3)
    metrics.histogram("wait_seconds", (1.0,)).observe(0.5)
    snapshot = metrics.snapshot()
    metrics.count("steps_total")
    metrics.histogram("wait_seconds").observe(2.0)
    assert snapshot == MetricsSnapshot(
        "engine", {"running": 3}, {"steps_total": 5}, {"wait_seconds": ([1.0], [1, 1], 0.5)}
    )
