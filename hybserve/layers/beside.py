"""Two kinds of rows of a step at a time: what is launched inside ``beside`` may run next to what follows.

Decode rows wait for memory while prefill rows wait for one another; on a GPU each fills the other's gaps. The side
stream goes first where both could use a multiprocessor: it has the longer chain.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from hybserve_kernels.overlap import urgent_stream


@contextmanager
def beside(device: torch.device, wanted: bool) -> Iterator[Callable[[], None]]:
    """Yields what has to be called before anything may use the results of either, or free what they read."""
    if not wanted or device.type != "cuda":
        yield lambda: None
        return
    own, side = torch.cuda.current_stream(device), urgent_stream(device, "prefill")
    side.wait_stream(own)
    with torch.cuda.stream(side):
        yield lambda: own.wait_stream(side)
