"""Gated DeltaNet decode, everything between the projections of a layer, at the shape of Qwen3.5-9B and -35B.

``SWEEP=1`` times every shape of launch in ``_SWEEP`` that passes its check too, and names the best by dtype and rows.
"""

import os
from functools import partial
from typing import NamedTuple

import torch
from hybserve_kernels.causal_conv import reference as convolution
from hybserve_kernels.gated_delta import reference
from hybserve_kernels.gated_delta.gpu.decode import Shape, decode_rows
from hybserve_kernels.rms_norm import reference as rms_norm
from hybserve_kernels.rows import DecodeRows

from bench.kernels import Row
from bench.kernels.timing import COLD_BYTES, microseconds

HEADS, WIDTH, EPS = (16, 32, 128, 128), 4, 1e-6
ROWS = (1, 8, 32, 64, 128, 256)
_SWEEP = tuple(Shape(*of) for of in ((16, 2), (16, 4), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4), (128, 8)))
#: µs of the peers: recurrence (FlashInfer or vLLM, the best) and update of the window; norms and gates come on top.
PEERS = {1: 5.2 + 2.2, 8: 13.0 + 2.5, 32: 39.8 + 3.5, 64: 73.3 + 4.5, 128: 140.0 + 7.0, 256: 273.0 + 11.8}


class Layer(NamedTuple):
    projected: torch.Tensor
    windows: torch.Tensor
    matrices: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    rows: DecodeRows
    out: torch.Tensor

    def run(self, shape: Shape | None = None) -> None:
        taps, rate, bias, weight = self.weights
        decode_rows(
            self.projected,
            self.windows,
            self.matrices,
            taps,
            rate,
            bias,
            weight,
            EPS,
            HEADS,
            self.rows,
            self.out,
            shape,
        )


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype).normal_()


def _layers(count: int, rows: int, dtype: torch.dtype, state_dtype: torch.dtype) -> list[Layer]:
    """Layers of one slot-major pool, each slot as in a server: all matrices of a slot, then all windows."""
    key_heads, value_heads, key_dim, value_dim = HEADS
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    matrices = _random(rows + 1, count, value_heads, key_dim, value_dim, dtype=state_dtype)
    windows = _random(rows + 1, count, channels, WIDTH - 1, dtype=dtype)
    slots = torch.randperm(rows, device="cuda").int() + 1
    lengths = torch.full_like(slots, 1000)
    step = DecodeRows(rows, lengths, slots, slots[:, None])
    layers = []
    for index in range(count):
        weights = (
            _random(WIDTH, channels, dtype=torch.float32),
            -_random(value_heads, dtype=torch.float32).exp(),
            _random(value_heads, dtype=torch.float32),
            _random(value_dim, dtype=dtype),
        )
        projected = _random(rows, channels + value_heads * (value_dim + 2), dtype=dtype)
        out = torch.empty(rows, value_heads * value_dim, device="cuda", dtype=dtype)
        layers.append(Layer(projected, windows[:, index], matrices[:, index], weights, step, out))
    return layers


def _check(rows: int, dtype: torch.dtype, state_dtype: torch.dtype, shape: Shape | None) -> None:
    torch.manual_seed(0)
    key_heads, value_heads, key_dim, value_dim = HEADS
    keys, values = key_heads * key_dim, value_heads * value_dim
    (layer,) = _layers(1, rows, dtype, state_dtype)
    windows, matrices = layer.windows.clone(), layer.matrices.clone()
    layer.run(shape)
    taps, rate, bias, weight = layer.weights
    for n in {0, rows // 2, rows - 1}:
        slot = int(layer.rows.slots_N[n])
        x = layer.projected[n : n + 1]
        mixed, z, b, a = x.split_with_sizes([2 * keys + values, values, value_heads, value_heads], dim=1)
        y, window = convolution.causal_conv(mixed, windows[slot], taps.T)
        q, k, v = y.split_with_sizes([keys, keys, values], dim=1)
        q, k = reference.unit_queries_keys(q.view(1, key_heads, -1), k.view(1, key_heads, -1))
        g, beta = reference.decay_and_strength(a, b, (-rate).log(), bias)
        o, state = reference.recurrent(q, k, v.view(1, value_heads, -1), g, beta, matrices[slot])
        want = rms_norm.rms_norm_gated(o, z.view(o.shape), weight, EPS).flatten()
        rtol, atol = (1e-3, 1e-3) if dtype == state_dtype == torch.float32 else (3e-2, 5e-2)
        assert torch.equal(layer.windows[slot], window), (rows, dtype, shape)
        torch.testing.assert_close(layer.out[n].float(), want.float(), rtol=rtol, atol=atol)
        torch.testing.assert_close(layer.matrices[slot].float(), state, rtol=rtol, atol=atol)
    for pool, before in ((layer.windows, windows), (layer.matrices, matrices)):
        assert torch.equal(pool[0], before[0]), "the canary"


def check() -> None:
    """Raises for the shapes in use; of the others in the sweep it only says which fail."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for rows in (1, 3, 17, 65, 129, 256):
        _check(rows, torch.bfloat16, torch.float32, None)
        _check(rows, torch.bfloat16, torch.bfloat16, None)
    _check(3, torch.float32, torch.float32, None)
    _check(3, torch.float16, torch.float32, None)
    _swept()


def _swept() -> dict[torch.dtype, list[Shape]]:
    """The shapes of the sweep that pass, by dtype of the matrices."""
    passed: dict[torch.dtype, list[Shape]] = {torch.float32: [], torch.bfloat16: []}
    for shape in _SWEEP if os.environ.get("SWEEP") == "1" else ():
        for state_dtype, found in passed.items():
            try:
                _check(9, torch.bfloat16, state_dtype, shape)
            except Exception as error:  # the others are still worth their time
                print(f"# gated_delta_decode {state_dtype} {shape} failed: {type(error).__name__} {str(error)[:200]}")
            else:
                found.append(shape)
    return passed


def _bytes(rows: int, state_dtype: torch.dtype) -> int:
    """Matrices and windows in and out, the projection in, the result out."""
    key_heads, value_heads, key_dim, value_dim = HEADS
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    state = value_heads * key_dim * value_dim * state_dtype.itemsize
    window = channels * (WIDTH - 1) * 2
    return rows * (2 * state + 2 * window + 2 * (channels + 2 * value_heads * value_dim + 2 * value_heads))


def measure() -> list[Row]:
    found = []
    swept = _swept()
    best: dict[torch.dtype, dict[int, Shape]] = {torch.float32: {}, torch.bfloat16: {}}
    for rows in ROWS:
        for state_dtype, shapes in swept.items():
            size = _bytes(rows, state_dtype)
            layers = _layers(max(2, min(24, -(-COLD_BYTES // size))), rows, torch.bfloat16, state_dtype)
            peer = PEERS[rows] if state_dtype == torch.float32 else None
            times: dict[Shape, float] = {}
            for shape in (None, *shapes):
                us = microseconds([partial(layer.run, shape) for layer in layers])
                name = f"{str(state_dtype)[6:]} {'chosen' if shape is None else _short(shape)}"
                found.append(
                    Row("gated_delta_decode", f"B {rows}", name, us, size, 0, peer, "FlashInfer + vLLM" if peer else "")
                )
                if shape:
                    times[shape] = us
            if times:
                best[state_dtype][rows] = min(times, key=times.__getitem__)
            del layers
    if any(swept.values()):
        print("# gated_delta_decode", {str(dtype): {n: tuple(of) for n, of in best[dtype].items()} for dtype in best})
    return found


def _short(shape: Shape) -> str:
    return f"{shape.columns}/{shape.warps}"
