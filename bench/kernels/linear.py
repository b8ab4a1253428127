"""Linear maps of Qwen3.5-9B (M1) and 35B-A3B (M2) from 1 to 256 rows, beside the library's own product in the same run.

``SWEEP=1`` times every sensible configuration instead, and prints the best in the form of the table of
``hybserve_kernels/linear/gpu/table.py``.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from hybserve_kernels import linear as maps
from hybserve_kernels.linear import reference
from hybserve_kernels.linear.gpu.gemv import Gemv, gemv
from hybserve_kernels.linear.gpu.tiles import Tiles, tiles
from hybserve_kernels.rms_norm import rms_norm
from hybserve_kernels.swiglu import swiglu

from bench.kernels import Row
from bench.kernels.timing import microseconds, rounds_of

ROWS = (1, 8, 32, 64, 128, 256)
_DTYPE, _EPS = torch.bfloat16, 1e-6


class Shape(NamedTuple):
    """``outputs`` and ``inputs`` of the weight; ``swiglu``: it is [gate | up]; ``normed``: a norm stands before it."""

    name: str
    outputs: int
    inputs: int
    swiglu: bool = False
    normed: bool = False

    @property
    def stored(self) -> int:
        return self.outputs // 2 if self.swiglu else self.outputs

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the model calls at one row first."""
        plain = "swiglu" if self.swiglu else "plain"
        return ({"plain": "norm", "swiglu": "norm_swiglu"}[plain], plain) if self.normed else (plain,)


SHAPES = (
    Shape("M1 gate_up", 24576, 4096, swiglu=True, normed=True),
    Shape("M1 down", 4096, 12288),
    Shape("M1 gdn_in", 12352, 4096, normed=True),
    Shape("M1 qkvg", 10240, 4096, normed=True),
    Shape("M1 out", 4096, 4096),
    Shape("M1 lm_head", 248320, 4096),
    Shape("M2 gdn_in", 12352, 2048, normed=True),
    Shape("M2 qkvg", 9216, 2048, normed=True),
    Shape("M2 out", 2048, 4096),
    Shape("M2 router", 256, 2048),
    Shape("M2 shared gate_up", 1024, 2048, swiglu=True),
    Shape("M2 shared down", 2048, 512),
    Shape("M2 lm_head", 248320, 2048),
)


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
        self.scale = torch.rand(shape.inputs, device="cuda") + 0.5

    def time(self, call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object], repeat: int) -> float:
        calls: list[Callable[[], object]] = [
            partial(call, *operands) for operands in zip(self.xs, self.weights, self.outs, strict=True)
        ]
        return microseconds(calls, repeat, 4 if self.bytes > 1 << 30 else 12)

    def library(self) -> float:
        """µs of the library's product alone."""
        return self.time(lambda x, weight, out: F.linear(x, weight), 10)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=_DTYPE)


def run(
    kind: str, choice: Gemv | Tiles, scale: torch.Tensor, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor
) -> None:
    act = kind.endswith("swiglu")
    if isinstance(choice, Tiles):
        tiles(choice, x, w, out, swiglu=act)
    else:
        gemv(choice, x, w, out, norm=(scale, _EPS) if kind.startswith("norm") else None, swiglu=act)


def candidates(kind: str, rows: int, stored: int, inputs: int) -> Iterator[Gemv | Tiles]:
    """Configurations that are worth a measurement."""
    if rows == 1:
        yield from _gemvs(kind, inputs)
    elif not kind.startswith("norm"):
        height = max(16, min(rows, 128))
        for outputs, depth, warps, stages in _TILES["swiglu" if kind == "swiglu" else "plain"][height]:
            count = -(-stored // outputs) * -(-rows // height)
            for splits in (1, 2, 3, 4, 6, 8):
                fits = inputs % depth == 0 and splits * depth * 2 <= inputs
                if fits and (splits == 1 or count * splits <= 600) and (count * splits >= 96 or splits == 8):
                    yield Tiles(outputs, height, depth, warps, stages, splits)
        if rows == 256 and kind == "plain":
            for outputs, depth, warps, stages in ((128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 4), (64, 128, 4, 2)):
                if inputs % depth == 0:
                    yield from (Tiles(outputs, 256, depth, warps, stages, splits) for splits in (1, 2, 4))


def _gemvs(kind: str, inputs: int) -> Iterator[Gemv]:
    if kind.startswith("norm"):
        outputs = (1, 2, 4) if kind == "norm_swiglu" else (1, 2, 4, 8)
        yield from (Gemv(each, inputs, warps) for each in outputs for warps in (4, 8, 16))
        return
    for each in (1, 2, 4):
        for depth, warps in ((512, 2), (512, 4), (512, 8), (1024, 4), (1024, 8), (2048, 8), (4096, 8), (4096, 16)):
            if depth <= inputs and each * depth <= 8192:
                yield Gemv(each, depth, warps)


#: (outputs, depth, warps, stages) by the rows of a tile.
_TILES: dict[str, dict[int, tuple[tuple[int, int, int, int], ...]]] = {
    "plain": {
        16: (
            (64, 128, 4, 4),
            (64, 128, 4, 6),
            (64, 256, 4, 3),
            (64, 256, 4, 4),
            (128, 128, 4, 4),
            (128, 64, 4, 6),
            (32, 256, 2, 4),
            (16, 256, 1, 5),
            (16, 512, 1, 4),
        ),
        32: ((64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (128, 128, 4, 4), (128, 64, 4, 6), (32, 256, 2, 4)),
        64: ((64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 4), (128, 64, 4, 6), (128, 128, 8, 3)),
        128: ((64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3)),
    },
    "swiglu": {
        16: ((64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6), (32, 128, 2, 5), (16, 256, 1, 4)),
        32: ((64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6), (32, 128, 2, 5)),
        64: ((64, 128, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (128, 64, 8, 4)),
        128: ((64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4)),
    },
}


def check() -> None:
    _compile_all()
    for rows in (1, 3, 16, 31, 64, 100, 256):
        for shape in (Shape("", 1000, 2048), Shape("", 4096, 512)):
            _check_functions(rows, shape)
    for shape in SHAPES[:-1]:
        if shape.outputs < 100_000:
            for rows in ROWS:
                _check_functions(rows, shape)
    if os.environ.get("SWEEP"):
        for kind, choice in _compiled():
            _check_candidate(kind, choice)


def _check_functions(rows: int, shape: Shape) -> None:
    torch.manual_seed(0)
    x, weight = _random(rows, shape.inputs), _random(shape.outputs, shape.inputs).mul_(shape.inputs**-0.5)
    scale, hidden = torch.rand(shape.inputs, device="cuda") + 0.5, _random(rows, shape.outputs)
    where = f"{shape} {rows}"
    _close(maps.linear(x, weight), reference.linear(x, weight), where)
    _close(maps.norm_linear(x, scale, _EPS, weight), reference.norm_linear(x, scale, _EPS, weight), where)
    _close(maps.linear_swiglu(x, weight), reference.linear_swiglu(x, weight), where)
    _close(maps.norm_linear_swiglu(x, scale, _EPS, weight), reference.norm_linear_swiglu(x, scale, _EPS, weight), where)
    expected = reference.linear_add(hidden, x, weight)
    _close(maps.linear_add_(hidden, x, weight), expected, where)


def _check_candidate(kind: str, choice: Gemv | Tiles) -> None:
    torch.manual_seed(0)
    rows = 1 if isinstance(choice, Gemv) else choice.rows - 1
    inputs = choice.depth if kind.startswith("norm") else 4096
    x, weight = _random(rows, inputs), _random(2000, inputs).mul_(inputs**-0.5)
    scale = torch.rand(inputs, device="cuda") + 0.5
    out = torch.full((rows, 1000 if kind.endswith("swiglu") else 2000), float("nan"), device="cuda", dtype=_DTYPE)
    run(kind, choice, scale, x, weight, out)
    if kind.startswith("norm"):
        x = rms_norm(x, scale, _EPS)
    expected = reference.linear_swiglu(x, weight) if kind.endswith("swiglu") else reference.linear(x, weight)
    _close(out, expected, f"{kind} {choice}")


def _close(got: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2, msg=lambda text: f"{where}: {text}")


def _compiled() -> list[tuple[str, Gemv | Tiles]]:
    """One configuration of each kernel that a sweep will want."""
    found: set[tuple[str, Gemv | Tiles]] = set()
    for shape in SHAPES:
        for kind in shape.kinds:
            for rows in ROWS:
                for choice in candidates(kind, rows, shape.stored, shape.inputs):
                    if isinstance(choice, Tiles) and choice.splits > 1:
                        choice = choice._replace(splits=2)
                    found.add((kind, choice))
    return sorted(found, key=str)


def _compile_all() -> None:
    """In several processes, which fill the compiler's cache on disk."""
    if not os.environ.get("SWEEP"):
        return
    work = _compiled()
    context = multiprocessing.get_context("spawn")
    with context.Pool(8) as pool:
        pool.map(_compile, [work[i::8] for i in range(8)])


def _compile(work: list[tuple[str, Gemv | Tiles]]) -> None:
    for kind, choice in work:
        for inputs in (choice.depth,) if kind.startswith("norm") else (4096, 12288, 2048):
            if isinstance(choice, Tiles) and inputs != 4096:
                continue
            x = _random(choice.rows if isinstance(choice, Tiles) else 1, inputs)
            out = _random(x.shape[0], 1024)
            run(kind, choice, torch.rand(inputs, device="cuda"), x, _random(2048, inputs), out)


def measure() -> list[Row]:
    rows = list(_steps())
    for shape in SHAPES:
        for count in ROWS:
            case = Case(shape, count)
            rows += list(_sweep(case) if os.environ.get("SWEEP") else _measure(case))
            del case
    return rows


def _steps() -> Iterator[Row]:
    """All linears of a decode step of M1 in a row, with what our functions take in: 32 layers, then the head."""
    layers = []
    for layer in range(32):
        width = 10240 if layer % 4 == 3 else 12352
        layers.append(
            [_random(*shape).mul_(0.02) for shape in ((width, 4096), (4096, 4096), (24576, 4096), (4096, 12288))]
        )
    head, scale = _random(248320, 4096).mul_(0.02), torch.rand(4096, device="cuda") + 0.5
    size = 2 * (sum(weight.numel() for layer in layers for weight in layer) + head.numel())

    def ours(hidden: torch.Tensor) -> torch.Tensor:
        for first, out, gate_up, down in layers:
            mixed = maps.norm_linear(hidden, scale, _EPS, first)
            maps.linear_add_(hidden, mixed[:, :4096], out)
            maps.linear_add_(hidden, maps.norm_linear_swiglu(hidden, scale, _EPS, gate_up), down)
        return maps.norm_linear(hidden, scale, _EPS, head)

    def products(hidden: torch.Tensor) -> torch.Tensor:
        x = hidden
        for first, out, gate_up, down in layers:
            x = F.linear(F.linear(x, first)[:, :4096], out)
            x = F.linear(F.linear(x, gate_up)[:, :12288], down)
        return F.linear(x, head)

    for rows in ROWS:
        hidden = _random(rows, 4096)
        peer = microseconds([partial(products, hidden)], 5, 1)
        flops, name = float(size * rows), f"M1 step {rows}"
        us = microseconds([partial(ours, hidden)], 5, 1)
        yield Row("linear", name, "norms, sums and all", us, size, flops, peer, "cuBLAS, products alone")
        if os.environ.get("SWEEP"):
            with _one_after_another():
                us = microseconds([partial(ours, hidden)], 5, 1)
            yield Row("linear", name, "same, no early launches", us, size, flops, peer, "cuBLAS, products alone")


@contextmanager
def _one_after_another() -> Iterator[None]:
    """No kernel begins before the one before it has ended."""
    with ExitStack() as stack:
        for module in ("linear.gpu.gemv", "linear.gpu.tiles", "rms_norm.gpu", "swiglu.gpu"):
            stack.enter_context(patch(f"hybserve_kernels.{module}.overlaps", lambda device: False))
        yield


def _row(case: Case, variant: str, us: float, peer: float) -> Row:
    name = f"{case.shape.name} {case.rows}"
    return Row("linear", name, variant, us, case.bytes, case.flops, peer, "cuBLAS, product alone")


def _measure(case: Case) -> Iterator[Row]:
    shape, peer = case.shape, case.library()
    scale = case.scale
    functions: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
        "linear": lambda x, weight, out: maps.linear(x, weight)
    }
    if shape.swiglu:
        functions["linear_swiglu"] = lambda x, weight, out: maps.linear_swiglu(x, weight)
        functions["linear, then swiglu"] = lambda x, weight, out: swiglu(F.linear(x, weight))
    else:
        functions["linear_add_"] = lambda x, weight, out: maps.linear_add_(out, x, weight)
    if shape.normed:
        fused = maps.norm_linear_swiglu if shape.swiglu else maps.norm_linear
        functions[fused.__name__] = lambda x, weight, out: fused(x, scale, _EPS, weight)
    for name, function in functions.items():
        yield _row(case, name, case.time(function, 10), peer)


def _sweep(case: Case) -> Iterator[Row]:
    shape, peer = case.shape, case.library()
    for kind in shape.kinds:
        times: dict[Gemv | Tiles, float] = {}
        for choice in candidates(kind, case.rows, shape.stored, shape.inputs):
            times[choice] = case.time(partial(run, kind, choice, case.scale), 4)
        best = sorted(times, key=lambda choice: times[choice])[:3]
        key = f'("{kind}", {shape.stored}, {shape.inputs})'
        for choice in best:
            print(f"{key}: ({case.rows}, {choice}),  # {times[choice]:.1f} of cuBLAS {peer:.1f} µs", flush=True)
            yield _row(case, f"{kind} {'/'.join(str(part) for part in choice)}", times[choice], peer)
