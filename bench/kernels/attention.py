"""Attention over the paged pool: preparing heads, decode rows and prefill rows, at the shapes of Qwen3.5-9B and -35B.

``SWEEP=1`` times every shape of launch in ``DECODE_SWEEP`` and ``PREFILL_SWEEP`` too.
"""

import math
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from hybserve_kernels import rotary
from hybserve_kernels.attention import decode_rows, prefill_rows, prepare_rows, reference
from hybserve_kernels.attention.gpu import decode, prefill
from hybserve_kernels.rows import TILE, DecodeRows, PrefillRows

from bench.kernels import Row
from bench.kernels.timing import microseconds, rounds_of

DEVICE = "cuda"
M1, M2 = (16, 4, 256), (16, 2, 256)
SWEEP = os.environ.get("SWEEP") == "1"
#: Most pages of a sequence, as a server with 40k of context has them.
TABLE_WIDTH = 640
#: As many programs as stay on a multiprocessor at a time.
DECODE_SWEEP = [
    decode.Shape(*shape)
    for shape in (
        (2, 32, 4, 3), (2, 32, 4, 4), (2, 32, 8, 3), (2, 32, 8, 4), (2, 64, 4, 2), (1, 64, 4, 3), (1, 64, 4, 4),
        (1, 64, 8, 4), (3, 16, 4, 4), (4, 16, 2, 3), (3, 16, 2, 4),
    )
]  # fmt: skip
#: Of the form that any GPU has; without a shape the form for warpgroups runs where it can.
PREFILL_SWEEP = [prefill.Shape(*shape) for shape in ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3))]
Variant = decode.Shape | prefill.Shape | None
DECODE_PEERS = {
    (1, 4096): 15.7,
    (8, 4096): 43.0,
    (64, 4096): 257.0,
    (256, 1024): 294.0,
    (8, 32768): 253.0,
    (1, 32768): 46.0,
}
PREFILL_PEERS = {2048: 58.0, 8192: 696.0, 32768: 12107.0}
#: Largest error of the output of a head of a token, of its norm.
CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
CASES = [
    (M1, torch.bfloat16),
    (M2, torch.bfloat16),
    ((6, 2, 256), torch.float16),
    ((4, 4, 256), torch.bfloat16),
    ((8, 8, 128), torch.float16),
    ((8, 1, 64), torch.bfloat16),
    (M1, torch.float32),
    ((4, 2, 32), torch.float32),
]


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
    """Prints the errors of all cases. A variant of the sweep that fails is no failure: ``measure`` leaves it out."""
    torch.backends.cuda.matmul.allow_tf32 = False
    failed = [case for case in CASES if not all([_decodes(*case, None), _prefills(*case, None)])]
    if not _compare("few tiles", M1, torch.bfloat16, None, [300, 4300], [0, 4224]):
        failed.append(CASES[0])
    if SWEEP:
        for decode_shape in DECODE_SWEEP:
            _decodes(M1, torch.bfloat16, decode_shape)
        for prefill_shape in PREFILL_SWEEP:
            _prefills(M1, torch.bfloat16, prefill_shape)
    for tokens in (1, 64, 512):
        _prepare_call(tokens, M1)()
        _prepare_call(tokens, M2)()
    torch.cuda.synchronize()
    assert not failed, failed


def _decodes(heads: tuple[int, int, int], dtype: torch.dtype, shape: decode.Shape | None) -> bool:
    lengths = [1, 300, 64, 65, 4097, 2500, 63]
    starts = [length - 1 for length in lengths]
    return _compare("decode", heads, dtype, shape, lengths, starts)


def _prefills(heads: tuple[int, int, int], dtype: torch.dtype, shape: prefill.Shape | None) -> bool:
    return _compare("prefill", heads, dtype, shape, [1, 200, 64, 1025, 129, 700, 4300], [0, 0, 0, 0, 128, 512, 4096])


def _compare(
    what: str,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    shape: Variant,
    lengths: list[int],
    starts: list[int],
) -> bool:
    """Runs rows of ``lengths`` from ``starts`` on and prints their largest error, or why there is none."""
    kind = str(dtype).removeprefix("torch.")
    name = f"{what} {' '.join(map(str, heads))} {kind} {_name(shape)}"
    torch.manual_seed(0)
    try:
        batch = _batch(lengths, heads, 2, dtype)
        pool = batch.pool_PL2JGd[:, 1]
        q, gate, out = _q_gate_out(sum(lengths) - sum(starts) + 5, heads, dtype)
        _call(batch, starts, shape, pool, q, gate, out)()
        errors = list(_errors(batch, pool, starts, q, gate, out))
        left = bool(out[sum(lengths) - sum(starts) :].isnan().all())
    except Exception as error:  # of a compiler or a launch: the next case may still run
        print(f"{name:<46} failed: {type(error).__name__}: {str(error)[:200]}")
        return False
    good = left and all(error < CLOSE[dtype] for error in errors)
    told = f"{max(errors):.1e}"
    if not good:
        told = f"wrong: {' '.join(f'{error:.1e}' for error in errors)}{'' if left else ', padding written'}"
    print(f"{name:<46} {told}", flush=True)
    return good


def _call(
    batch: Batch,
    starts: list[int],
    shape: Variant,
    pool: torch.Tensor,
    q: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
) -> Callable[[], object]:
    """Decode rows if all rows start at their last token."""
    scale = pool.shape[4] ** -0.5
    if isinstance(shape, decode.Shape | None) and starts == [length - 1 for length in batch.lengths]:
        return partial(decode_rows, q, pool, _decode(batch), scale, gate, out, shape)
    assert not isinstance(shape, decode.Shape)
    return partial(prefill_rows, q, pool, _prefill(batch, starts), scale, gate, out, shape)


def _errors(
    batch: Batch, pool: torch.Tensor, starts: list[int], q: torch.Tensor, gate: torch.Tensor, out: torch.Tensor
) -> Iterator[float]:
    """Of each row; NaN is infinite."""
    begin = 0
    for length, table, start in zip(batch.lengths, batch.tables, starts, strict=True):
        own = slice(begin, begin + length - start)
        want = reference.attention(q[own].float(), pool, table, start, pool.shape[4] ** -0.5)
        want = want * torch.sigmoid(gate[own].float())
        got = out[own].view_as(want).float()
        yield float(((got - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(nan=float("inf")).max())
        begin = own.stop


def measure() -> list[Row]:
    decodes: list[Variant] = [None, *(shape for shape in DECODE_SWEEP if SWEEP and _decodes(M1, torch.bfloat16, shape))]
    prefills: list[Variant] = [
        None,
        *(shape for shape in PREFILL_SWEEP if SWEEP and _prefills(M1, torch.bfloat16, shape)),
    ]
    rows = [_time_prepare(tokens, M1) for tokens in (1, 64, 256, 2048, 8192)]
    for count, length in [(1, 300), (1, 4096), (1, 32768), (8, 4096), (8, 32768), (64, 300), (64, 4096), (256, 300),
                          (256, 1024)]:  # fmt: skip
        peer = DECODE_PEERS.get((count, length))
        rows += _time(f"decode {count}x{length}", [length] * count, None, M1, decodes, peer)
    random.seed(0)
    uneven = [40_000] + [int(2 ** random.uniform(0, 12)) for _ in range(63)]
    rows += _time("decode 64 of 1..40000", uneven, None, M1, decodes, None)
    rows += _time("decode M2 64x4096", [4096] * 64, None, M2, [None], None)
    for lengths, starts, name in [
        ([128], [0], "1x128"),
        ([2048], [0], "1x2048"),
        ([8192], [0], "1x8192"),
        ([32768], [0], "1x32768"),
        ([1024] * 8, [0] * 8, "8x1024"),
        ([512], [0], "1x512"),
        ([17408], [16384], "1024 after 16384"),
        ([32832], [32768], "64 after 32768"),
    ]:
        peer = PREFILL_PEERS.get(lengths[0]) if not starts[0] else None
        rows += _time(f"prefill {name}", lengths, starts, M1, prefills, peer)
    rows += _time("prefill M2 1x8192", [8192], [0], M2, [None], None)
    if SWEEP:
        _print_best(rows, "decode")
        _print_best(rows, "prefill")
    return rows


def _print_best(rows: list[Row], what: str) -> None:
    """The best variant of each shape, then the one that is best over all (by the product of times)."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.shape.startswith(what):
            times.setdefault(row.shape, {})[row.variant] = row.us
    times = {shape: of for shape, of in times.items() if len(of) > 1}
    if not times:
        return
    for shape, of in times.items():
        best = min(of, key=of.__getitem__)
        print(f"# {shape}: {_code(best)} {of[best]:.1f} µs, as it stands {of['']:.1f}")
    common = set.intersection(*(set(of) for of in times.values()))
    overall = {variant: math.prod(of[variant] / of[""] for of in times.values()) for variant in common}
    for variant in sorted(common, key=overall.__getitem__)[:3]:
        print(f"# all of {what}: {_code(variant)} takes {overall[variant] ** (1 / len(times)):.3f} of the time")


def _code(variant: str) -> str:
    """As it is written in ``shape_of``."""
    return f"Shape({variant.replace(' ', ', ')})" if variant else "as it stands"


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


def _time(
    name: str,
    lengths: list[int],
    starts: list[int] | None,
    heads: tuple[int, int, int],
    variants: list[Variant],
    peer: float | None,
) -> list[Row]:
    """Rows of ``lengths`` from ``starts`` on (None = decode rows). A variant that fails is left out."""
    q_heads, kv_heads, dim = heads
    decoding = starts is None
    starts = [length - 1 for length in lengths] if starts is None else starts
    tokens = sum(lengths) - sum(starts)
    seen = sum((length * (length + 1) - start * (start + 1)) / 2 for length, start in zip(lengths, starts, strict=True))
    flops = 0.0 if decoding else 4 * q_heads * dim * seen
    traffic = 2 * sum(lengths) * kv_heads * dim * 2 + 2 * tokens * q_heads * dim * 2
    batch = _batch(lengths, heads, rounds_of(traffic, 256) if decoding else 2, torch.bfloat16)
    inputs = _q_gate_out(tokens, heads, torch.bfloat16)
    rows = []
    for variant in variants:
        calls = [_call(batch, starts, variant, pool, *inputs) for pool in batch.pool_PL2JGd.unbind(1)]
        try:
            us = microseconds(calls, repeat=5, least_calls=2 if flops > 1e12 else 8)
        except Exception as error:
            if variant is None:
                raise
            print(f"{name} {_name(variant)}: {type(error).__name__}: {str(error)[:200]}")
            continue
        rows.append(Row("attention", name, _name(variant), us, traffic, flops, peer, "FA3" if peer else ""))
    return rows


def _name(shape: Variant) -> str:
    return "" if shape is None else " ".join(map(str, shape))
