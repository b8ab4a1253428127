"""Attention over the paged pool: preparing heads, decode rows and prefill rows, at the shapes of Qwen3.5-9B and -35B.

``SWEEP=1`` times every shape of launch in ``DECODE_SWEEP`` and ``PREFILL_SWEEP`` too.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from hybserve_kernels import rotary
from hybserve_kernels.attention import decode_rows, prefill_rows, prepare_rows, reference
from hybserve_kernels.attention.gpu import decode, prefill
from hybserve_kernels.attention.gpu.prefill_hopper import prefill_rows_hopper
from hybserve_kernels.rows import TILE, DecodeRows, PrefillRows

from bench.kernels import Row
from bench.kernels.timing import microseconds, rounds_of

DEVICE = "cuda"
M1, M2 = (16, 4, 256), (16, 2, 256)
SWEEP = os.environ.get("SWEEP") == "1"
#: Most pages of a sequence, as a server with 40k of context has them.
TABLE_WIDTH = 640
DECODE_SWEEP = [
    decode.Shape(*shape)
    for shape in [
        (2, 32, 4, 3),
        (2, 32, 4, 4),
        (2, 32, 8, 3),
        (2, 32, 8, 4),
        (2, 64, 4, 2),
        (2, 64, 8, 2),
        (1, 64, 4, 3),
        (1, 64, 4, 4),
        (1, 64, 8, 4),
        (4, 16, 4, 4),
        (4, 32, 4, 3),
    ]
]
PREFILL_SWEEP = [
    prefill.Shape(*shape)
    for shape in [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3)]
]
DECODE_PEERS = {
    (1, 4096): 15.7,
    (8, 4096): 43.0,
    (64, 4096): 257.0,
    (256, 1024): 294.0,
    (8, 32768): 253.0,
    (1, 32768): 46.0,
}
PREFILL_PEERS = {2048: 58.0, 8192: 696.0, 32768: 12107.0}
CLOSE = {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 4e-3), torch.bfloat16: (2e-2, 2e-2)}


class Batch(NamedTuple):
    """``layers`` pools of the same pages; rows of a step, of which row r is ``lengths[r]`` tokens long."""

    pool_PL2JGd: torch.Tensor
    lengths: list[int]
    tables: list[list[int]]

    @property
    def tables_NM(self) -> torch.Tensor:
        return torch.stack([_ints(table, TABLE_WIDTH, 1 << 30) for table in self.tables])


def _ints(values: list[int], size: int, rest: int) -> torch.Tensor:
    return torch.tensor(values + [rest] * (size - len(values)), dtype=torch.int32, device=DEVICE)


def _batch(lengths: list[int], heads: tuple[int, int, int], layers: int, dtype: torch.dtype) -> Batch:
    _, kv_heads, dim = heads
    counts = [-(-length // TILE) for length in lengths]
    ids = list(range(1, sum(counts) + 1))
    random.Random(0).shuffle(ids)
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    shape = (sum(counts) + 1, layers, 2, kv_heads, TILE, dim)
    pool = torch.empty(shape, dtype=dtype, device=DEVICE).normal_()
    pool[0] = float("nan")
    for length, table in zip(lengths, tables, strict=True):
        if length % TILE:
            pool[table[-1], :, :, :, length % TILE :] = float("nan")
    return Batch(pool, lengths, tables)


def _decode(batch: Batch) -> DecodeRows:
    rows = len(batch.lengths)
    lengths = _ints(batch.lengths, rows, 0)
    return DecodeRows(rows, lengths, torch.zeros_like(lengths), batch.tables_NM)


def _prefill(batch: Batch, starts: list[int]) -> PrefillRows:
    counts = [length - start for length, start in zip(batch.lengths, starts, strict=True)]
    rows = len(counts)
    tiles = [(row, offset) for row, count in enumerate(counts) for offset in range(0, count, TILE)]
    none = _ints([], rows, 0)
    return PrefillRows(
        rows,
        len(tiles),
        _ints([sum(counts[:row]) for row in range(rows)], rows, 0),
        _ints(counts, rows, 0),
        _ints(starts, rows, 0),
        none,
        batch.tables_NM,
        none,
        _ints([row for row, _ in tiles], len(tiles), -1),
        _ints([offset for _, offset in tiles], len(tiles), 0),
        _ints([], len(tiles), 0),
    )


def _q_gate_out(
    tokens: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gate as the projection has it, beside the query of its head; an output that nobody has written."""
    q_heads, _, dim = heads
    projected = torch.empty(tokens, q_heads, 2 * dim, dtype=dtype, device=DEVICE).normal_()
    out = torch.full((tokens, q_heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    return projected[..., :dim].contiguous(), projected[..., dim:], out


def check() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    hopper = ThreadPoolExecutor(1).submit(_hopper_works)
    cases = [
        (M1, torch.bfloat16),
        (M2, torch.bfloat16),
        ((8, 8, 128), torch.float16),
        ((8, 1, 64), torch.bfloat16),
        (M1, torch.float32),
        ((4, 2, 32), torch.float32),
    ]
    for heads, dtype in cases:
        _check(heads, dtype, None, None)
    if SWEEP:
        for decode_shape in DECODE_SWEEP:
            _check(M1, torch.bfloat16, decode_shape, None)
        for prefill_shape in PREFILL_SWEEP:
            _check(M1, torch.bfloat16, None, prefill_shape)
    for tokens in (1, 64):
        _prepare_call(tokens, M1)()
        _prepare_call(tokens, M2)()
    torch.cuda.synchronize()
    print("hopper works:", hopper.result())


def _check(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    decode_shape: decode.Shape | None,
    prefill_shape: prefill.Shape | None,
) -> None:
    name = f"{heads} {dtype} {decode_shape} {prefill_shape}"
    if prefill_shape is None:
        lengths = [1, 300, 64, 65, 4097, 2500, 63]
        batch = _batch(lengths, heads, 2, dtype)
        pool = batch.pool_PL2JGd[:, 1]
        q, gate, out = _q_gate_out(len(lengths) + 1, heads, dtype)
        decode_rows(q, pool, _decode(batch), heads[2] ** -0.5, gate, out, decode_shape)
        starts = [length - 1 for length in lengths]
        _compare(f"decode {name}", batch, pool, starts, q, gate, out)
    if decode_shape is None:
        lengths, starts = [1, 200, 64, 1025, 129, 700], [0, 0, 0, 0, 128, 512]
        batch = _batch(lengths, heads, 2, dtype)
        pool = batch.pool_PL2JGd[:, 1]
        q, gate, out = _q_gate_out(sum(lengths) - sum(starts) + 5, heads, dtype)
        prefill_rows(q, pool, _prefill(batch, starts), heads[2] ** -0.5, gate, out, prefill_shape)
        _compare(f"prefill {name}", batch, pool, starts, q, gate, out)


def _hopper_works() -> bool:
    """``check_hopper`` in a process of its own, so that one that hangs stops nothing else."""
    command = [sys.executable, "-c", "from bench.kernels import attention; attention.check_hopper()"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    except subprocess.TimeoutExpired:
        print("hopper hangs")
        return False
    if done.returncode:
        print(done.stdout[-2000:])
    return done.returncode == 0


def check_hopper() -> None:
    """Of the form for warpgroups."""
    torch.manual_seed(0)
    for heads in (M1, M2, (8, 8, 128)):
        lengths, starts = [1, 200, 64, 1025, 129, 700], [0, 0, 0, 0, 128, 512]
        batch = _batch(lengths, heads, 2, torch.bfloat16)
        pool = batch.pool_PL2JGd[:, 1]
        q, gate, out = _q_gate_out(sum(lengths) - sum(starts) + 5, heads, torch.bfloat16)
        prefill_rows_hopper(q, pool, _prefill(batch, starts), heads[2] ** -0.5, gate, out, 2)
        _compare(f"hopper {heads}", batch, pool, starts, q, gate, out)


def _compare(
    name: str,
    batch: Batch,
    pool: torch.Tensor,
    starts: list[int],
    q: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
) -> None:
    begin = 0
    rtol, atol = CLOSE[out.dtype]
    for length, table, start in zip(batch.lengths, batch.tables, starts, strict=True):
        own = slice(begin, begin + length - start)
        want = reference.attention(q[own], pool, table, start, pool.shape[4] ** -0.5) * torch.sigmoid(gate[own])
        got = out[own].view_as(want)
        assert torch.allclose(got, want, rtol=rtol, atol=atol), f"{name} {length}: {(got - want).abs().max()}"
        begin = own.stop
    assert bool(out[begin:].isnan().all()), name


def measure() -> list[Row]:
    rows = []
    hopper = _hopper_works()
    for tokens in (1, 64, 256, 2048, 8192):
        rows.append(_time_prepare(tokens, M1))
    shapes = [(1, 300), (1, 4096), (1, 32768), (8, 4096), (8, 32768), (64, 4096), (256, 300), (256, 1024)]
    for count, length in shapes:
        for variant in [None, *(DECODE_SWEEP if SWEEP else [])]:
            rows.append(
                _time_decode(f"{count}x{length}", [length] * count, M1, variant, DECODE_PEERS.get((count, length)))
            )
    random.seed(0)
    uneven = [40_000] + [int(2 ** random.uniform(0, 12)) for _ in range(63)]
    rows.append(_time_decode("64 of 1..40000", uneven, M1, None, None))
    rows.append(_time_decode("M2 64x4096", [4096] * 64, M2, None, None))
    for lengths, starts, name in [
        ([128], [0], "1x128"),
        ([2048], [0], "1x2048"),
        ([8192], [0], "1x8192"),
        ([32768], [0], "1x32768"),
        ([1024] * 8, [0] * 8, "8x1024"),
        ([17408], [16384], "1024 after 16384"),
    ]:
        for shape in [None, *([2] if hopper else []), *(PREFILL_SWEEP if SWEEP else [])]:
            peer = PREFILL_PEERS.get(lengths[0]) if not starts[0] else None
            rows.append(_time_prefill(name, lengths, starts, M1, shape, peer))
    rows.append(_time_prefill("M2 1x8192", [8192], [0], M2, None, None))
    return rows


def _prepare_call(tokens: int, heads: tuple[int, int, int]) -> Callable[[], object]:
    q_heads, kv_heads, dim = heads
    batch = _batch([tokens], heads, 1, torch.bfloat16)
    projected = torch.randn(tokens, 2 * (q_heads + kv_heads) * dim, device=DEVICE, dtype=torch.bfloat16)
    scale = torch.rand(dim, device=DEVICE)
    frequencies = rotary.inverse_frequencies(64, 1e7, torch.device(DEVICE))
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    locations = torch.tensor(batch.tables[0], dtype=torch.int32, device=DEVICE)[positions.long() // TILE] * TILE
    locations += positions % TILE
    pool = batch.pool_PL2JGd[:, 0]
    return lambda: prepare_rows(
        projected, scale, scale, 1e-6, frequencies, positions, locations, pool, heads, gated=True
    )


def _time_prepare(tokens: int, heads: tuple[int, int, int]) -> Row:
    q_heads, kv_heads, dim = heads
    traffic = 2 * tokens * (q_heads + 2 * kv_heads) * dim * 2
    calls = [_prepare_call(tokens, heads) for _ in range(rounds_of(traffic, 16))]
    return Row("attention", f"prepare {tokens}", "", microseconds(calls), traffic)


def _time_decode(
    name: str, lengths: list[int], heads: tuple[int, int, int], shape: decode.Shape | None, peer: float | None
) -> Row:
    _, kv_heads, dim = heads
    traffic = sum(lengths) * 2 * kv_heads * dim * 2
    layers = rounds_of(traffic, 256)
    batch = _batch(lengths, heads, layers, torch.bfloat16)
    q, gate, out = _q_gate_out(len(lengths), heads, torch.bfloat16)
    rows = _decode(batch)
    pools = batch.pool_PL2JGd.unbind(1)
    calls: list[Callable[[], object]] = [
        partial(decode_rows, q, pool, rows, dim**-0.5, gate, out, shape) for pool in pools
    ]
    us = microseconds(calls, repeat=10)
    return Row("attention", f"decode {name}", _name(shape), us, traffic, 0.0, peer, "FA3" if peer else "")


def _time_prefill(
    name: str,
    lengths: list[int],
    starts: list[int],
    heads: tuple[int, int, int],
    shape: prefill.Shape | int | None,
    peer: float | None,
) -> Row:
    q_heads, kv_heads, dim = heads
    tokens = sum(lengths) - sum(starts)
    seen = sum((length * (length + 1) - start * (start + 1)) / 2 for length, start in zip(lengths, starts, strict=True))
    traffic = 2 * sum(lengths) * kv_heads * dim * 2 + 2 * tokens * q_heads * dim * 2
    batch = _batch(lengths, heads, 2, torch.bfloat16)
    q, gate, out = _q_gate_out(tokens, heads, torch.bfloat16)
    rows = _prefill(batch, starts)
    pools = batch.pool_PL2JGd.unbind(1)
    run: Callable[..., object] = prefill_rows_hopper if isinstance(shape, int) else prefill_rows
    calls: list[Callable[[], object]] = [partial(run, q, pool, rows, dim**-0.5, gate, out, shape) for pool in pools]
    flops = 4 * q_heads * dim * seen
    us = microseconds(calls, repeat=5, least_calls=2 if flops > 1e12 else 8)
    return Row("attention", f"prefill {name}", _name(shape), us, traffic, flops, peer, "FA3" if peer else "")


def _name(shape: decode.Shape | prefill.Shape | int | None) -> str:
    if isinstance(shape, int):
        return f"hopper {shape}"
    return "" if shape is None else " ".join(map(str, shape))
