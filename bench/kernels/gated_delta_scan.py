"""Prefill rows through the gated delta rule and the gated norm, at the heads of Qwen3.5-9B and -35B.

``SWEEP=1`` times every shape of launch in ``SHAPES`` too.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from hybserve_kernels.gated_delta import reference, scan_rows
from hybserve_kernels.gated_delta.gpu.scan import Shape
from hybserve_kernels.rms_norm import reference as rms_norm
from hybserve_kernels.rows import TILE, PrefillRows

from bench.kernels import Row
from bench.kernels.timing import microseconds, rounds_of

DEVICE = "cuda"
HEADS = (16, 32, 128, 128)
SWEEP = os.environ.get("SWEEP") == "1"
SHAPES = [
    Shape(*shape)
    for shape in [
        (16, 4, 2, 4),
        (32, 4, 1, 4),
        (32, 4, 2, 4),
        (32, 4, 2, 8),
        (32, 4, 3, 4),
        (32, 8, 2, 4),
        (64, 4, 1, 4),
        (64, 4, 2, 4),
        (64, 8, 1, 4),
        (64, 8, 2, 4),
    ]
]
PEERS = {(1, 2048): 110.0, (1, 8192): 258.0, (1, 32768): 839.0, (8, 1024): 111.0, (4, 4096): 192.0}
#: What the bar of a factor 1.5 counts from.
FLA = {(1, 2048): 146.0, (1, 8192): 522.0, (1, 32768): 2048.0, (8, 1024): 488.0, (4, 4096): 939.0}


class Inputs(NamedTuple):
    qkv: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    z: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _rows(counts: list[int], starts: list[int], slots: list[int], exports: dict[int, int]) -> PrefillRows:
    tiles = [(row, offset) for row, count in enumerate(counts) for offset in range(0, count, TILE)]
    owners = [row for row, _ in tiles]
    return PrefillRows(
        len(counts),
        len(tiles),
        _ints([sum(counts[:row]) for row in range(len(counts))]),
        _ints(counts),
        _ints(starts),
        _ints(slots),
        torch.zeros(len(counts), 1, dtype=torch.int32, device=DEVICE),
        _ints([owners.index(row) for row in range(len(counts))]),
        _ints(owners),
        _ints([offset for _, offset in tiles]),
        _ints([exports.get(x, 0) for x in range(len(tiles))]),
    )


def _inputs(tokens: int, dtype: torch.dtype) -> Inputs:
    key_heads, value_heads, key_dim, value_dim = HEADS
    q, k = reference.unit_queries_keys(*torch.randn(2, tokens, key_heads, key_dim, device=DEVICE).unbind(0))
    v = torch.randn(tokens, value_heads * value_dim, device=DEVICE)
    qkv = torch.cat([q.flatten(1), k.flatten(1), v], dim=1).to(dtype)
    z = torch.randn(tokens, value_heads, value_dim, device=DEVICE, dtype=dtype)
    gates = -(torch.rand(tokens, value_heads, device=DEVICE) ** 4), torch.rand(tokens, value_heads, device=DEVICE)
    weight = torch.rand(value_dim, device=DEVICE).to(dtype) + 0.5
    out = torch.full((tokens, value_heads * value_dim), float("nan"), dtype=dtype, device=DEVICE)
    return Inputs(qkv, *gates, z, weight, out)


def _run(inputs: Inputs, matrices: torch.Tensor, rows: PrefillRows, shape: Shape | None) -> None:
    scan_rows(*inputs[:3], matrices, rows, HEADS, *inputs[3:5], 1e-6, inputs.out, shape)


def check() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    for dtype, state_dtype, shape in [
        (torch.bfloat16, torch.float32, None),
        (torch.bfloat16, torch.bfloat16, None),
        *[(torch.bfloat16, torch.float32, shape) for shape in (SHAPES if SWEEP else [])],
    ]:
        _check(dtype, state_dtype, shape)
    for rows in (1, 64):
        _call([128] * rows, torch.float32, None)()
    torch.cuda.synchronize()


def _check(dtype: torch.dtype, state_dtype: torch.dtype, shape: Shape | None) -> None:
    name = f"{dtype} {state_dtype} {shape}"
    counts, starts, slots = [200, 1, 64, 129], [0, 64, 128, 0], [1, 2, 3, 4]
    inputs = _inputs(sum(counts), dtype)
    key_heads, value_heads, key_dim, value_dim = HEADS
    matrices = torch.full((7, 2, value_heads, key_dim, value_dim), float("nan"), dtype=state_dtype, device=DEVICE)[:, 1]
    matrices[2:4].normal_()
    before = matrices.clone().float()
    _run(inputs, matrices, _rows(counts, starts, slots, {1: 5}), shape)
    after = matrices.float()
    begin = 0
    for count, start, slot in zip(counts, starts, slots, strict=True):
        own = slice(begin, begin + count)
        q, k, v = torch.split(inputs.qkv[own], [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], 1)
        q, k, v = (x.reshape(count, -1, dim) for x, dim in ((q, key_dim), (k, key_dim), (v, value_dim)))
        g, beta = inputs.g[own], inputs.beta[own]
        state = before[slot] if start else torch.zeros_like(before[slot])
        o, end = reference.recurrent(q, k, v, g, beta, state)
        want = rms_norm.rms_norm_gated(o, inputs.z[own], inputs.weight, 1e-6).flatten(1)
        _near(f"output {name} {count}", inputs.out[own].float(), want.float())
        _near(f"state {name} {count}", after[slot], end)
        if begin == 0:
            _, end = reference.recurrent(q[:128], k[:128], v[:128], g[:128], beta[:128], state)
            _near(f"export {name}", after[5], end)
        begin += count
    assert bool(after[[0, 6]].isnan().all()), name


def _near(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error = ((got - want).norm() / want.norm()).item()
    assert error < 1.5e-2, f"{name}: relative error {error}"
    assert torch.allclose(got, want, rtol=0.1, atol=0.2), f"{name}: {(got - want).abs().max()}"


def _cases() -> list[tuple[str, list[int], tuple[int, int] | None]]:
    named = [(f"{rows}x{tokens}", [tokens] * rows, (rows, tokens)) for rows, tokens in PEERS]
    return [("1x128", [128], None), *named, ("64x128", [128] * 64, None)]


def _call(counts: list[int], state_dtype: torch.dtype, shape: Shape | None) -> Callable[[], object]:
    _, value_heads, key_dim, value_dim = HEADS
    matrices = torch.randn(len(counts) + 1, value_heads, key_dim, value_dim, device=DEVICE).to(state_dtype)
    rows = _rows(counts, [0] * len(counts), [1 + row for row in range(len(counts))], {})
    return partial(_run, _inputs(sum(counts), torch.bfloat16), matrices, rows, shape)


def measure() -> list[Row]:
    rows = []
    for name, counts, key in _cases():
        for shape in [None, *(SHAPES if SWEEP else [])]:
            rows.append(_time(name, counts, torch.float32, shape, key))
    rows.append(_time("8x1024 bf16 state", [1024] * 8, torch.bfloat16, None, None))
    return rows


def _time(
    name: str, counts: list[int], state_dtype: torch.dtype, shape: Shape | None, key: tuple[int, int] | None
) -> Row:
    key_heads, value_heads, key_dim, value_dim = HEADS
    tokens = sum(counts)
    traffic = 2 * tokens * (2 * key_heads * key_dim + 3 * value_heads * value_dim)
    traffic += len(counts) * value_heads * key_dim * value_dim * state_dtype.itemsize
    tiles = sum(-(-count // TILE) for count in counts)
    products = 2 * key_dim + value_dim + 2 * value_dim * key_dim * 3 // TILE // 2 + TILE
    flops = 2.0 * tiles * value_heads * TILE * TILE * products
    calls = [_call(counts, state_dtype, shape) for _ in range(rounds_of(traffic, 8))]
    us = microseconds(calls, repeat=5, least_calls=4)
    peer = PEERS.get(key) if key else None
    whose = f"CuTe; FLA {FLA[key]:.0f}" if key else ""
    return Row("gated_delta_scan", name, " ".join(map(str, shape or ())), us, traffic, flops, peer, whose)
