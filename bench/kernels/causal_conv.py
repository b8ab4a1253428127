"""What stands before the scan of prefill rows: convolution, silu, unit queries and keys, gates, windows; at the shape
of Qwen3.5-9B and -35B.

``SWEEP=1`` times every shape of launch in ``_SWEEP`` that passes its check too, and names the best as the table
``gpu.SHAPES`` is written.
"""

import os
from functools import partial
from typing import NamedTuple

import torch
from hybserve_kernels.causal_conv import conv_rows, reference
from hybserve_kernels.causal_conv.gpu import Shape
from hybserve_kernels.gated_delta import reference as gated_delta
from hybserve_kernels.rows import TILE, PrefillRows

from bench.kernels import Row
from bench.kernels.timing import microseconds, rounds_of

HEADS, WIDTH = (16, 32, 128, 128), 4
KEYS, VALUES, VALUE_HEADS = 16 * 128, 32 * 128, 32
CHANNELS = 2 * KEYS + VALUES
TOKENS = (128, 2048, 8192, 32768)
PEERS = {2048: 33.0, 8192: 106.0, 32768: 393.0}
_SWEEP = tuple(
    Shape(*of)
    for of in (
        (8, 4, 1, False),
        (8, 8, 1, False),
        (16, 4, 2, False),
        (16, 4, 4, False),
        (16, 8, 1, False),
        (16, 8, 2, False),
        (16, 8, 2, True),
        (32, 4, 4, False),
        (32, 8, 2, False),
        (32, 8, 4, False),
        (32, 8, 4, True),
        (64, 8, 8, False),
        (64, 16, 4, False),
        (16, 4, 4, True),
    )
)


class Layer(NamedTuple):
    projected: torch.Tensor
    windows: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    rows: PrefillRows
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def run(self, shape: Shape | None = None) -> None:
        conv_rows(self.projected, self.windows, *self.weights, HEADS, self.rows, *self.outputs, shape)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype).normal_()


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _rows(counts: list[int], starts: list[int], export_every: int) -> PrefillRows:
    """Row r has slot r + 1; checkpoints after every ``export_every`` whole tiles of a row."""
    tiles = [(row, offset) for row, count in enumerate(counts) for offset in range(0, count, TILE)]
    slots = iter(range(len(counts) + 1, len(counts) + 1 + len(tiles)))
    exports = [
        next(slots) if offset + TILE <= counts[row] and (offset // TILE + 1) % export_every == 0 else 0
        for row, offset in tiles
    ]
    begins = [sum(counts[:row]) for row in range(len(counts))]
    unused = torch.zeros(len(counts), 1, dtype=torch.int32, device="cuda")
    return PrefillRows(
        len(counts),
        len(tiles),
        _ints(begins),
        _ints(counts),
        _ints(starts),
        _ints(list(range(1, len(counts) + 1))),
        unused,
        _ints([begin // TILE for begin in begins]),
        _ints([row for row, _ in tiles]),
        _ints([offset for _, offset in tiles]),
        _ints(exports),
    )


def _layer(counts: list[int], starts: list[int], export_every: int, dtype: torch.dtype) -> Layer:
    rows, tokens = _rows(counts, starts, export_every), sum(counts)
    slots = 1 + len(counts) + int((rows.exports_X != 0).sum())
    weights = (
        _random(WIDTH, CHANNELS, dtype=torch.float32),
        -_random(VALUE_HEADS, dtype=torch.float32).exp(),
        _random(VALUE_HEADS, dtype=torch.float32),
    )
    gates = torch.empty(2, tokens, VALUE_HEADS, device="cuda")
    outputs = (torch.empty(tokens, CHANNELS, device="cuda", dtype=dtype), gates[0], gates[1])
    projected = _random(tokens, CHANNELS + VALUES + 2 * VALUE_HEADS, dtype=dtype)
    return Layer(projected, _random(slots, CHANNELS, WIDTH - 1, dtype=dtype), weights, rows, outputs)


def _check(dtype: torch.dtype, shape: Shape | None, repeat: int = 1) -> None:
    """``repeat``: how often the rows come; the default shape depends on how many tiles there are."""
    torch.manual_seed(0)
    counts, starts = [200, 1, 65, 2, 128] * repeat, [0, 64, 128, 0, 64] * repeat
    layer = _layer(counts, starts, 2, dtype)
    before = layer.windows.clone()
    layer.run(shape)
    taps, rate, bias = layer.weights
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (2e-2, 2e-2)
    begin = 0
    for row, (count, start) in enumerate(zip(counts, starts, strict=True)):
        own = slice(begin, begin + count)
        begin += count
        mixed, _, b, a = layer.projected[own].split_with_sizes([CHANNELS, VALUES, VALUE_HEADS, VALUE_HEADS], dim=1)
        y, window = reference.causal_conv(mixed, before[row + 1] if start else before[row + 1].zero_(), taps.T)
        q, k, v = y.split_with_sizes([KEYS, KEYS, VALUES], dim=1)
        q, k = gated_delta.unit_queries_keys(q.view(count, 16, -1), k.view(count, 16, -1))
        g, beta = gated_delta.decay_and_strength(a, b, (-rate).log(), bias)
        wants = (torch.cat((q.flatten(1), k.flatten(1), v.float()), dim=1), g, beta)
        for got, want in zip(layer.outputs, wants, strict=True):
            torch.testing.assert_close(got[own].float(), want, rtol=rtol, atol=atol)
        assert torch.equal(layer.windows[row + 1], window), (row, dtype, shape)
    for tile, export in enumerate(layer.rows.exports_X.tolist()):
        if export:
            row, offset = int(layer.rows.tile_rows_X[tile]), int(layer.rows.tile_offsets_X[tile])
            end = sum(counts[:row]) + offset + TILE
            assert torch.equal(layer.windows[export], layer.projected[end - WIDTH + 1 : end, :CHANNELS].T)
    assert torch.equal(layer.windows[0], before[0]), "the canary"


def check() -> None:
    """Raises for the shapes in use; of the others in the sweep it only says which fail."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        _check(dtype, None)
    _check(torch.bfloat16, None, 8)
    _swept()


def _swept() -> list[Shape]:
    """The shapes of the sweep that pass."""
    passed = []
    for shape in _SWEEP if os.environ.get("SWEEP") == "1" else ():
        try:
            _check(torch.bfloat16, shape)
        except Exception as error:  # the others are still worth their time
            print(f"# causal_conv {shape} failed: {type(error).__name__} {str(error)[:200]}")
        else:
            passed.append(shape)
    return passed


def measure() -> list[Row]:
    found = []
    swept = _swept()
    best: dict[int, Shape] = {}
    for tokens in TOKENS:
        size = 2 * tokens * (2 * CHANNELS + 2 * VALUE_HEADS) + 8 * tokens * VALUE_HEADS
        layers = [_layer([tokens], [0], 16, torch.bfloat16) for _ in range(rounds_of(size, 24))]
        peer = PEERS.get(tokens)
        times: dict[Shape, float] = {}
        for shape in (None, *swept):
            us = microseconds([partial(layer.run, shape) for layer in layers])
            name = "chosen" if shape is None else " ".join(map(str, shape))
            found.append(
                Row("causal_conv", f"1x{tokens}", name, us, size, 0, peer, "FLA, convolution only" if peer else "")
            )
            if shape:
                times[shape] = us
        if times:
            best[tokens // TILE] = min(times, key=times.__getitem__)
        del layers
    if best:
        print("# causal_conv by tiles", {tiles: tuple(shape) for tiles, shape in best.items()})
    return found
