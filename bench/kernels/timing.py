"""Time of a call on the device: replays of a captured graph over rotating inputs, so that no host time is in it."""

import statistics
from collections.abc import Callable

import torch

#: Inputs are rotated until a round reads more than this, several times the L2 cache.
COLD_BYTES = 256 << 20


def rounds_of(bytes_per_call: int, most: int = 64) -> int:
    """How many sets of inputs a measurement needs so that none is still in the cache when it comes again."""
    return max(2, min(most, -(-COLD_BYTES // max(bytes_per_call, 1))))


def microseconds(calls: list[Callable[[], object]], repeat: int = 20, least_calls: int = 16) -> float:
    """Median time of one call in µs. ``calls`` do the same on different inputs; each is warmed up once, then all are
    captured in one graph (several times over, if they are few) that is replayed ``repeat`` times."""
    torch.cuda.synchronize()  # the inputs are being made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    passes = -(-least_calls // len(calls))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(passes):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (passes * len(calls)))
    return statistics.median(times)
