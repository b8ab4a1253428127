"""Linear maps of Qwen3.5-9B (M1) and 35B-A3B (M2) from 1 to 256 rows, beside the library's own product in the same run.

``SWEEP=1`` times at every shape the tiles that the table has for any shape, prints the best in the form of
``hybserve_kernels/linear/gpu/table.py``, and sums up a step of M1 with them.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from hybserve_kernels import linear as maps
from hybserve_kernels import overlap
from hybserve_kernels.linear import reference
from hybserve_kernels.linear.gpu import table
from hybserve_kernels.linear.gpu.table import Choice
from hybserve_kernels.linear.gpu.tiles import Tiles
from hybserve_kernels.swiglu import swiglu

from bench.kernels import Row
from bench.kernels.timing import microseconds, rounds_of

ROWS = (1, 8, 32, 64, 128, 256)
_SWEPT = (8, 16, 32, 64, 128)
_DTYPE, _EPS = torch.bfloat16, 1e-6
_SWEEP = bool(os.environ.get("SWEEP"))
#: What ``check`` found right, for ``measure`` in the next process: a line each.
_PASSED = Path(tempfile.gettempdir()) / f"hybserve-linear-sweep-{os.getuid()}.txt"
_PROCESSES, _SECONDS = 12, 150


class Shape(NamedTuple):
    """``outputs`` and ``inputs`` of the weight; ``kind``: the product is stored, added, or goes through swiglu."""

    name: str
    outputs: int
    inputs: int
    kind: str = "stored"

    @property
    def stored(self) -> int:
        return self.outputs // 2 if self.kind == "swiglu" else self.outputs

    @property
    def key(self) -> tuple[str, int, int]:
        return "swiglu" if self.kind == "swiglu" else "plain", self.stored, self.inputs


SHAPES = (
    Shape("M1 gate_up", 24576, 4096, "swiglu"),
    Shape("M1 down", 4096, 12288, "added"),
    Shape("M1 gdn_in", 12352, 4096),
    Shape("M1 qkvg", 10240, 4096),
    Shape("M1 out", 4096, 4096, "added"),
    Shape("M1 lm_head", 248320, 4096),
    Shape("M2 gdn_in", 12352, 2048),
    Shape("M2 qkvg", 9216, 2048),
    Shape("M2 out", 2048, 4096, "added"),
    Shape("M2 router and gate", 272, 2048),
    Shape("M2 shared gate_up", 1024, 2048, "swiglu"),
    Shape("M2 shared down", 2048, 512),
    Shape("M2 lm_head", 248320, 2048),
)


def candidates(shape: Shape, rows: int) -> Iterator[Tiles]:
    """All that the table has for such rows, each once."""
    kind, _, inputs = shape.key
    choices = [choice for key, found in table._H200.items() if key[0] == kind for _, choice in found]
    for choice in dict.fromkeys(choices):
        if isinstance(choice, Tiles) and choice.rows == max(16, rows) and inputs % choice.depth == 0:
            yield choice


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=_DTYPE)


def check() -> None:
    if _SWEEP:
        _check_sweep()
    failures: list[str] = []
    shapes = (Shape("odd", 1000, 2048), Shape("short", 4096, 512), *SHAPES)
    for shape in shapes:
        for rows in ROWS if shape in SHAPES else (1, 3, 16, 31, 64, 100, 256):
            if shape.outputs < 100_000:
                failures += _function_failures(rows, shape)
    assert not failures, "\n".join(failures)


def _function_failures(rows: int, shape: Shape) -> Iterator[str]:
    torch.manual_seed(0)
    x, weight = _random(rows, shape.inputs), _random(shape.outputs, shape.inputs).mul_(shape.inputs**-0.5)
    scale, hidden = torch.rand(shape.inputs, device="cuda") + 0.5, _random(rows, shape.outputs)
    pairs: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("linear", (x, weight)),
        ("norm_linear", (x, scale, _EPS, weight)),
        ("linear_swiglu", (x, weight)),
        ("norm_linear_swiglu", (x, scale, _EPS, weight)),
    )
    for name, arguments in pairs:
        expected = getattr(reference, name)(*arguments)
        yield from _failure(partial(getattr(maps, name), *arguments), expected, f"{name} {shape} {rows}")
    expected = reference.linear_add(hidden, x, weight)
    yield from _failure(partial(maps.linear_add_, hidden, x, weight), expected, f"linear_add_ {shape} {rows}")


def _failure(call: Callable[[], torch.Tensor], expected: torch.Tensor, where: str) -> Iterator[str]:
    try:
        torch.testing.assert_close(call(), expected, rtol=2e-2, atol=3e-2)
    except Exception as error:
        yield f"{where}: {type(error).__name__} {str(error)[:300]}"


def _check_sweep() -> None:
    """Compiles and checks all that ``measure`` will time, in processes that may break or hang without harm. What is
    not right is said, and left out of the sweep."""
    _PASSED.write_text("")
    jobs = [(shape, rows, choice) for shape in SHAPES for rows in _SWEPT for choice in candidates(shape, rows)]
    kernels = sorted({f"{shape.kind} {choice}" for shape, _, choice in jobs})  # as many are compiled
    parts = [
        [
            (shape, rows, choice)
            for shape, rows, choice in jobs
            if kernels.index(f"{shape.kind} {choice}") % _PROCESSES == i
        ]
        for i in range(_PROCESSES)
    ]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_sweep_part, args=(part,)) for part in parts]
    processes += [context.Process(target=_first_steps, args=(rows,)) for rows in ROWS]
    for process in processes:
        process.start()
    end = time.monotonic() + _SECONDS
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
        if process.exitcode is None:
            process.kill()
    passed = set(_PASSED.read_text().splitlines())
    print(f"{len(passed)} of {len(jobs)} configurations are right")
    for job in jobs:
        if str(job) not in passed:
            print("not right:", *job)


def _sweep_part(jobs: list[tuple[Shape, int, Tiles]]) -> None:
    torch.manual_seed(0)
    for job in jobs:
        shape, rows, choice = job
        x = _random(max(1, rows - 1), shape.inputs)
        weight = _random(shape.outputs, shape.inputs).mul_(shape.inputs**-0.5)
        problems: list[str] = []
        for early in (False, True):
            with _launches(early):
                problems += _failure(partial(_product, choice, shape, x, weight), _expected(shape, x, weight), str(job))
        print("\n".join(problems), end="\n" if problems else "", flush=True)
        if not problems:
            with _PASSED.open("a") as file:
                file.write(f"{job}\n")


def _product(choice: Tiles, shape: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.full((x.shape[0], shape.stored), float("nan"), device="cuda", dtype=_DTYPE)
    if shape.kind == "added":
        out.fill_(1.0)
    for _ in range(3):  # whatever a launch leaves behind must not matter to the next
        if shape.kind == "added":
            out.fill_(1.0)
        maps.launch(choice, x, weight, out, swiglu=shape.kind == "swiglu", add=shape.kind == "added")
    return out


def _expected(shape: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product = F.linear(x, weight)
    if shape.kind == "swiglu":
        return swiglu(product)
    return product + 1.0 if shape.kind == "added" else product


def measure() -> list[Row]:
    rows: list[Row] = []
    passed = set(_PASSED.read_text().splitlines()) if _SWEEP else set()
    best: dict[tuple[str, int, int], tuple[tuple[int, Choice | None], ...]] = {}
    for shape in SHAPES:
        for count in ROWS:
            if not _SWEEP or count in (1, 256):
                rows.append(_measured(shape, count))
        if _SWEEP:
            print(f"    {_quoted(shape.key)}: (")
            one_row = table.chosen(shape.key[0], 1, *shape.key[1:])
            print(f"        (1, {_code(one_row)}),")
            found: list[tuple[int, Choice | None]] = [(1, one_row)]
            for count in _SWEPT:
                choice, row = _swept(shape, count, passed)
                found.append((count, choice))
                rows.append(row)
            print("    ),", flush=True)
            best[shape.key] = tuple(found)
    with patch.dict(table._H200, best):
        table.chosen.cache_clear()
        rows += _steps()
    table.chosen.cache_clear()
    return rows


class Case:
    """One shape and number of rows with inputs past the cache."""

    def __init__(self, shape: Shape, rows: int) -> None:
        self.shape, self.rows = shape, rows
        self.bytes = 2 * (shape.outputs * shape.inputs + rows * (shape.inputs + shape.stored))
        self.flops = 2.0 * rows * shape.outputs * shape.inputs
        count = rounds_of(self.bytes)
        scaled = shape.inputs**-0.5
        self.weights = [_random(shape.outputs, shape.inputs).mul_(scaled) for _ in range(count)]
        self.xs = [_random(rows, shape.inputs) for _ in range(count)]
        self.outs = [_random(rows, shape.stored) for _ in range(count)]

    def time(self, call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> float:
        calls: list[Callable[[], object]] = [
            partial(call, *operands) for operands in zip(self.xs, self.weights, self.outs, strict=True)
        ]
        return microseconds(calls, 5, 4 if self.bytes > 1 << 30 else 12)

    def cublas(self) -> float:
        """µs of the library's product with what follows."""
        calls: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
            "stored": lambda x, weight, out: F.linear(x, weight),
            "added": lambda x, weight, out: out.addmm_(x, weight.T),
            "swiglu": lambda x, weight, out: swiglu(F.linear(x, weight)),
        }
        return self.time(calls[self.shape.kind])

    def row(self, variant: str, us: float, peer: float) -> Row:
        name = f"{self.shape.name} {self.rows}"
        return Row("linear", name, variant, us, self.bytes, self.flops, peer, "cuBLAS with the same after it")


def _measured(shape: Shape, rows: int) -> Row:
    case = Case(shape, rows)
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
        "stored": lambda x, weight, out: maps.linear(x, weight),
        "added": lambda x, weight, out: maps.linear_add_(out, x, weight),
        "swiglu": lambda x, weight, out: maps.linear_swiglu(x, weight),
    }
    return case.row(shape.kind, case.time(calls[shape.kind]), case.cublas())


def _swept(shape: Shape, rows: int, passed: set[str]) -> tuple[Choice | None, Row]:
    """The best choice at a shape, None for the library's; prints its line of the table."""
    case = Case(shape, rows)
    peer = case.cublas()
    times: dict[Tiles, float] = {}
    for choice in candidates(shape, rows):
        if str((shape, rows, choice)) in passed:
            call = partial(maps.launch, choice, swiglu=shape.kind == "swiglu", add=shape.kind == "added")
            times[choice] = case.time(call)
    order = sorted(times, key=lambda choice: times[choice])
    said = ", ".join(f"{_code(choice)} {times[choice]:.1f}" for choice in order)
    best = order[0] if order and times[order[0]] < 0.99 * peer else None
    print(f"        ({rows}, {_code(best)}),  # library {peer:.1f}, {said}")
    return best, case.row(_code(order[0]) if order else "library", times[order[0]] if order else peer, peer)


def _code(choice: Choice | None) -> str:
    return "None" if choice is None else f"{type(choice).__name__}({', '.join(map(str, choice))})"


def _quoted(key: tuple[str, int, int]) -> str:
    return f'("{key[0]}", {key[1]}, {key[2]})'


class _Step:
    """All linears of decode steps of M1 in a row, with norms, sums and activations: layers, then the head."""

    def __init__(self, layers: int) -> None:
        widths = [10240 if layer % 4 == 3 else 12352 for layer in range(layers)]
        self.layers = [
            [_random(*shape).mul_(0.02) for shape in ((width, 4096), (4096, 4096), (24576, 4096), (4096, 12288))]
            for width in widths
        ]
        self.head, self.scale = _random(248320, 4096).mul_(0.02), torch.rand(4096, device="cuda") + 0.5
        self.bytes = 2 * (sum(weight.numel() for layer in self.layers for weight in layer) + self.head.numel())

    def ours(self, hidden: torch.Tensor) -> torch.Tensor:
        for first, out, gate_up, down in self.layers:
            mixed = maps.norm_linear(hidden, self.scale, _EPS, first)
            maps.linear_add_(hidden, mixed[:, :4096], out)
            maps.linear_add_(hidden, maps.norm_linear_swiglu(hidden, self.scale, _EPS, gate_up), down)
        return maps.norm_linear(hidden, self.scale, _EPS, self.head)

    def products(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden
        for first, out, gate_up, down in self.layers:
            x = F.linear(F.linear(x, first)[:, :4096], out)
            x = F.linear(F.linear(x, gate_up)[:, :12288], down)
        return F.linear(x, self.head)


@contextmanager
def _launches(early: bool) -> Iterator[None]:
    """Every kernel of the op, or none, begins before the one before it has ended."""
    with patch.object(overlap, "_MOST_ROWS", 1 << 20 if early else 0):
        yield


def _first_steps(rows: int) -> None:
    """Compiles what a step of the table's choices needs."""
    step = _Step(4)
    for early in (False, True):
        with _launches(early):
            step.ours(_random(rows, 4096))
    torch.cuda.synchronize()


def _steps() -> Iterator[Row]:
    step = _Step(32)
    for rows in ROWS:
        hidden, name = _random(rows, 4096), f"M1 step {rows}"
        peer = microseconds([partial(step.products, hidden)], 5, 1)
        for early in (False, True):
            with _launches(early):
                us = microseconds([partial(step.ours, hidden)], 5, 1)
            variant = "early launches" if early else "one after another"
            yield Row("linear", name, variant, us, step.bytes, float(step.bytes * rows), peer, "cuBLAS, products alone")
