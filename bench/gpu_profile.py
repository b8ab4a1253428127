"""Where the time of a step goes: kernels of a Chrome trace, by what they do.

Kernels may begin before the one ahead of them has ended and wait inside (programmatic dependent launch). So each is
given only the time by which it prolongs what ran before it: the parts add up to the span, and what is left of the span
is time in which nothing ran.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

#: What a kernel does, by its name; the first that is found in it.
_PARTS = [
    ("products (library)", r"nvjet|gemm|cutlass|cublas|splitK"),
    ("products (own, one row)", r"^_gemv"),
    ("products (own, few rows)", r"^_tiles"),
    ("experts", r"^_grouped|^_blocks|^_up_kernel|^_down_kernel|^_combine"),
    ("routing", r"^_route|^_order|^_alone"),
    ("gated delta: decode rows", r"^_recurrence"),
    ("gated delta: convolution", r"^_conv|^_windows"),
    ("gated delta: prepare", r"^_prepare_kernel"),
    ("gated delta: scan", r"^_scan"),
    ("gated delta: norm", r"^_norm_kernel"),
    ("attention: norms, rotary, store", r"^_prepare$"),
    ("attention", r"^_attend|^_join|^_?prefill"),
    ("norms", r"^_rms_norm"),
    ("swiglu", r"^_swiglu"),
    ("tokens", r"^_pieces|^_best|^_gather|^_remember|^_survey|^_draw|^_choose|^_cut|^_search"),
    ("checkpoints", r"^_check|^_copy_kernel"),
    ("to and from the host", r"Memcpy|Memset"),
]
_REST, IDLE = "rest", "nothing runs"
#: The kernel that ends a step: it makes known which tokens were sampled.
_LAST = "_remember_kernel"


class Kernel(NamedTuple):
    """Times in µs."""

    name: str
    begin: float
    end: float


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """What ran on the device, in order of its beginning."""
    found = [
        Kernel(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda kernel: kernel.begin)


def steps_before(kernels: Sequence[Kernel], steps: int, after: int) -> list[Kernel]:
    """The kernels of so many steps, from the end of the step before them, which so many others come ``after``."""
    ends = [index for index, kernel in enumerate(kernels) if kernel.name == _LAST]
    first = len(ends) - after - steps - 1
    if first < 0:
        raise ValueError(f"the trace has {len(ends)} steps, and {steps + after + 1} are needed")
    return list(kernels[ends[first] + 1 : ends[first + steps] + 1])


def part_of(name: str) -> str:
    return next((part for part, pattern in _PARTS if re.search(pattern, name)), _REST)


def breakdown(kernels: Iterable[Kernel], steps: int = 1) -> dict[str, float]:
    """µs a step of every part and of the time in which nothing runs, most first."""
    parts: dict[str, float] = defaultdict(float)
    reached: float | None = None
    for kernel in kernels:
        if reached is None:
            reached = kernel.begin
        parts[IDLE] += max(0.0, kernel.begin - reached)
        parts[part_of(kernel.name)] += max(0.0, kernel.end - max(reached, kernel.begin))
        reached = max(reached, kernel.end)
    return {part: parts[part] / steps for part in sorted(parts, key=lambda part: -parts[part])}
