"""What matrix rate a GPU holds when it is kept busy: python -m bench sustained [--seconds 1.0]

A card that multiplies without pause meets its power limit and lowers its clock. A figure from a short burst is then not
the limit of a long prefill; this is. The products of one Gated DeltaNet layer of M1 with its MLP, in 16 bits, over
weights that rotate past the cache, on random numbers and, to show that it is power and not the library, on zeros.
"""

import argparse
import sys
import time
from threading import Event, Thread
from typing import NamedTuple

import pynvml
import torch
import torch.nn.functional as F

from bench import record

#: Outputs and inputs of the products, and whether the result is added to the residual stream.
_PRODUCTS = {
    "gate_up": (24576, 4096, False),
    "down": (4096, 12288, True),
    "in": (12352, 4096, False),
    "out": (4096, 4096, True),
}
_FLOPS = sum(2 * outputs * inputs for outputs, inputs, _ in _PRODUCTS.values())
_LAYERS = 4


class Point(NamedTuple):
    tokens: int
    numbers: str
    tflops: float
    mhz: float
    watts: float


class Meter(Thread):
    """Clock and power of the card, ten times a second, while it is open."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        pynvml.nvmlInit()
        self._card = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        self._ended = Event()
        self.samples: list[tuple[float, float]] = []

    def run(self) -> None:
        while not self._ended.wait(0.1):
            clock = pynvml.nvmlDeviceGetClockInfo(self._card, pynvml.NVML_CLOCK_SM)
            self.samples.append((float(clock), pynvml.nvmlDeviceGetPowerUsage(self._card) / 1e3))

    def end(self) -> tuple[float, float]:
        """Medians."""
        self._ended.set()
        self.join()
        clocks, watts = (sorted(column) for column in zip(*self.samples, strict=True))
        return clocks[len(clocks) // 2], watts[len(watts) // 2]


def measure(tokens: int, numbers: str, seconds: float) -> Point:
    def draw(rows: int, columns: int, scale: float) -> torch.Tensor:
        drawn = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * scale
        return drawn if numbers == "random" else torch.zeros_like(drawn)

    weights = [{name: draw(n, k, 0.02) for name, (n, k, _) in _PRODUCTS.items()} for _ in range(_LAYERS)]
    inputs = {columns: draw(tokens, columns, 1.0) for columns in (4096, 12288)}
    hidden = draw(tokens, 4096, 1.0)

    def layer(index: int) -> None:
        for name, (_, columns, added) in _PRODUCTS.items():
            weight = weights[index % _LAYERS][name]
            if added:
                hidden.addmm_(inputs[columns], weight.T)
            else:
                F.linear(inputs[columns], weight)

    def keep_busy(seconds: float) -> float:
        """Layers a second."""
        layers, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for _ in range(max(1, 32768 // tokens)):
                layer(layers)
                layers += 1
            torch.cuda.synchronize()
        return layers / (time.perf_counter() - began)

    keep_busy(0.4 * seconds)
    meter = Meter()
    meter.start()
    rate = keep_busy(seconds)
    clock, watts = meter.end()
    return Point(tokens, numbers, rate * tokens * _FLOPS / 1e12, clock, watts)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench sustained", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench sustained: needs a GPU", file=sys.stderr)
        return 2
    points = []
    print(f"{'tokens':>7} {'numbers':<8}{'TFLOP/s':>8}{'MHz':>6}{'W':>5}")
    for tokens, numbers in ((1024, "random"), (2048, "random"), (8192, "random"), (8192, "zeros")):
        points.append(measure(tokens, numbers, options.seconds))
        print("{:>7} {:<8}{:>8.0f}{:>6.0f}{:>5.0f}".format(*points[-1]), flush=True)
    figures = {"gpu": torch.cuda.get_device_name(), "points": [point._asdict() for point in points]}
    record("sustained", figures, ["python", "-m", "bench", "sustained", *arguments], ("torch",))
    return 0
