"""Thousands of equal steps on a GPU without the host in between."""

from collections.abc import Callable

import torch
from hybserve_kernels.compiling import compiled_ahead


def repeated(step: Callable[[], None], reset: Callable[[], None], device: str) -> Callable[[], None]:
    """``step`` captured in a graph, its kernels compiled ahead; on CPU ``step`` itself. It may run before it is asked
    to: ``reset`` is called at last."""
    if device == "cpu":
        reset()
        return step
    with compiled_ahead():
        step()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    reset()
    return graph.replay
