"""H query heads, J kv heads, d head dim, G tokens per page. Everything in the pool that no row owns is NaN, and page 0
is a canary."""

import random
from typing import NamedTuple

import pytest
import torch
from hybserve_kernels import rotary
from hybserve_kernels.attention import decode_rows, prefill_rows, prepare_rows, reference
from hybserve_kernels.attention.gpu import prepare
from hybserve_kernels.rms_norm import reference as rms_norm
from hybserve_kernels.rotary import reference as rotary_reference
from hybserve_kernels.rows import TILE, DecodeRows, PrefillRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.3
HEADS = [(4, 2, 16), (4, 1, 32), (2, 2, 24), (3, 1, 64)]
DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 4e-3), torch.bfloat16: (2e-2, 2e-2)}


class Batch(NamedTuple):
    """A pool with the keys and values of some sequences, the others' places NaN."""

    pool: torch.Tensor
    tables: list[list[int]]
    lengths: list[int]


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    rtol, atol = CLOSE[got.dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=rtol, atol=atol)


def _pool(pages: int, heads: tuple[int, int, int], page: int, dtype: torch.dtype) -> torch.Tensor:
    """One layer's view of a page-major pool of three layers."""
    shape = (pages, 3, 2, heads[1], page, heads[2])
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)[:, 1]


def _batch(lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype, page: int = TILE) -> Batch:
    counts = [-(-length // page) for length in lengths]
    ids = list(range(1, sum(counts) + 4))
    random.Random(1).shuffle(ids)
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    pool = _pool(sum(counts) + 4, heads, page, dtype)
    for table, length in zip(tables, lengths, strict=True):
        for index, number in enumerate(table):
            filled = min(page, length - index * page)
            pool[number, :, :, :filled] = torch.randn(2, heads[1], filled, heads[2], device=DEVICE).to(dtype)
    return Batch(pool, tables, lengths)


def _ints(values: list[int], size: int, rest: int) -> torch.Tensor:
    return torch.tensor(values + [rest] * (size - len(values)), dtype=torch.int32, device=DEVICE)


def _tables(tables: list[list[int]], rows: int) -> torch.Tensor:
    """Whatever lies beyond a table's end is no page at all."""
    width = max(map(len, tables)) + 2
    filled = [_ints(table, width, 1 << 30) for table in tables]
    return torch.stack(filled + [_ints([], width, 1 << 30)] * (rows - len(tables)))


def _decode(batch: Batch, rows: int) -> DecodeRows:
    lengths = _ints(batch.lengths, rows, 0)
    return DecodeRows(rows, lengths, torch.zeros_like(lengths), _tables(batch.tables, rows))


def _prefill(batch: Batch, starts: list[int], begin: int, rows: int, spare_tiles: int) -> PrefillRows:
    """Row r computes the positions from ``starts[r]`` on; its tokens begin at packed index ``begin`` of the first."""
    counts = [length - start for length, start in zip(batch.lengths, starts, strict=True)]
    begins = [begin + sum(counts[:row]) for row in range(len(counts))]
    tiles = [(row, offset) for row, count in enumerate(counts) for offset in range(0, count, TILE)]
    firsts = [[row for row, _ in tiles].index(row) for row in range(len(counts))]
    total = len(tiles) + spare_tiles
    slots = _ints([], rows, 0)
    return PrefillRows(
        rows,
        total,
        _ints(begins, rows, 0),
        _ints(counts, rows, 0),
        _ints(starts, rows, 0),
        slots,
        _tables(batch.tables, rows),
        _ints(firsts, rows, 0),
        _ints([row for row, _ in tiles], total, -1),
        _ints([offset for _, offset in tiles], total, 0),
        _ints([], total, 0),
    )


def _gated(attended_THd: torch.Tensor, gate_THd: torch.Tensor | None) -> torch.Tensor:
    out = attended_THd if gate_THd is None else attended_THd * torch.sigmoid(gate_THd)
    return out.flatten(1)


def _gate(tokens: int, heads: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """As the projection has it: beside the query of its head."""
    both = torch.randn(tokens, heads[0], 2 * heads[2], device=DEVICE).to(dtype)
    return both[..., heads[2] :]


def _unwritten(tokens: int, heads: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full((tokens, heads[0] * heads[2]), float("nan"), dtype=dtype, device=DEVICE)


def _random_q(tokens: int, heads: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, heads[0], heads[2], device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "gated"), zip(HEADS, [True, False, True, False], strict=True))
@pytest.mark.usefixtures("poisoned_empty")
def test_decode_rows_are_the_reference(heads: tuple[int, int, int], dtype: torch.dtype, gated: bool) -> None:
    torch.manual_seed(0)
    batch = _batch([1, 140, 64, 65, 63, 129], heads, dtype)
    q, gate = _random_q(9, heads, dtype), _gate(9, heads, dtype) if gated else None
    out = _unwritten(9, heads, dtype)
    decode_rows(q, batch.pool, _decode(batch, 8), SCALE, gate, out)
    for n, (table, length) in enumerate(zip(batch.tables, batch.lengths, strict=True)):
        want = reference.attention(q[n : n + 1], batch.pool, table, length - 1, SCALE)
        _close(out[n : n + 1], _gated(want, None if gate is None else gate[n : n + 1]))
    assert bool(out[len(batch.lengths) :].isnan().all())


@pytest.mark.parametrize("lengths", [[1], [700], [0, 5, 0, 300, 0]])
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.usefixtures("poisoned_empty")
def test_decode_rows_of_any_length_and_page(page: int, lengths: list[int]) -> None:
    torch.manual_seed(0)
    heads = HEADS[0]
    batch = _batch(lengths, heads, torch.float16, page)
    q, out = _random_q(len(lengths), heads, torch.float16), _unwritten(len(lengths), heads, torch.float16)
    decode_rows(q, batch.pool, _decode(batch, len(lengths)), SCALE, None, out)
    for n, (table, length) in enumerate(zip(batch.tables, lengths, strict=True)):
        if length:
            want = reference.attention(q[n : n + 1], batch.pool, table, length - 1, SCALE)
            _close(out[n : n + 1], want.flatten(1))
        else:
            assert bool(out[n].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "gated"), zip(HEADS, [True, False, True, False], strict=True))
@pytest.mark.usefixtures("poisoned_empty")
def test_prefill_rows_are_the_reference(heads: tuple[int, int, int], dtype: torch.dtype, gated: bool) -> None:
    torch.manual_seed(0)
    lengths, starts = [1, 130, 64, 193, 129], [0, 0, 0, 64, 128]
    batch = _batch(lengths, heads, dtype)
    rows = _prefill(batch, starts, begin=3, rows=6, spare_tiles=3)
    tokens = 3 + sum(lengths) - sum(starts)
    q, gate = _random_q(tokens + 2, heads, dtype), _gate(tokens + 2, heads, dtype) if gated else None
    out = _unwritten(tokens + 2, heads, dtype)
    prefill_rows(q, batch.pool, rows, SCALE, gate, out)
    for row, (table, start) in enumerate(zip(batch.tables, starts, strict=True)):
        own = slice(int(rows.begins_R[row]), int(rows.begins_R[row] + rows.counts_R[row]))
        want = reference.attention(q[own], batch.pool, table, start, SCALE)
        _close(out[own], _gated(want, None if gate is None else gate[own]))
    assert bool(out[:3].isnan().all())
    assert bool(out[tokens:].isnan().all())


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize(("start", "count"), [(0, 63), (0, 65), (192, 1), (128, 130)])
@pytest.mark.usefixtures("poisoned_empty")
def test_prefill_rows_from_any_tile_and_page(page: int, start: int, count: int) -> None:
    torch.manual_seed(0)
    heads = HEADS[0]
    batch = _batch([start + count], heads, torch.float16, page)
    q, out = _random_q(count, heads, torch.float16), _unwritten(count, heads, torch.float16)
    prefill_rows(q, batch.pool, _prefill(batch, [start], 0, 1, 0), SCALE, None, out)
    _close(out, reference.attention(q, batch.pool, batch.tables[0], start, SCALE).flatten(1))


@pytest.mark.parametrize(("heads", "dtype"), [((4, 1, 16), torch.float32), ((3, 1, 64), torch.bfloat16)])
@pytest.mark.usefixtures("poisoned_empty")
def test_prefill_rows_share_a_long_history(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths, starts = [663, 3], [640, 0]
    batch = _batch(lengths, heads, dtype)
    tokens = sum(lengths) - sum(starts)
    q, gate = _random_q(tokens, heads, dtype), _gate(tokens, heads, dtype)
    out = _unwritten(tokens, heads, dtype)
    rows = _prefill(batch, starts, 0, 3, 0)
    prefill_rows(q, batch.pool, rows, SCALE, gate, out)
    for row, (table, start) in enumerate(zip(batch.tables, starts, strict=True)):
        own = slice(int(rows.begins_R[row]), int(rows.begins_R[row] + rows.counts_R[row]))
        _close(out[own], _gated(reference.attention(q[own], batch.pool, table, start, SCALE), gate[own]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["query", "key"])
def test_scores_that_are_not_finite_show_in_their_row_alone(where: str, bad: float) -> None:
    torch.manual_seed(0)
    heads, dtype = HEADS[0], torch.bfloat16
    batch = _batch([70, 150, 5], heads, dtype)
    q = _random_q(3, heads, dtype)
    if where == "query":
        q[1, :, 3] = bad
    else:
        batch.pool[batch.tables[1][0], 0, :, 9] = bad
    out = _unwritten(3, heads, dtype)
    decode_rows(q, batch.pool, _decode(batch, 3), SCALE, None, out)
    assert out.isfinite().all(1).tolist() == [True, False, True]

    tokens = sum(batch.lengths)
    q = _random_q(tokens, heads, dtype)
    if where == "query":
        q[70 + 140, :, 3] = bad
    out = _unwritten(tokens, heads, dtype)
    prefill_rows(q, batch.pool, _prefill(batch, [0, 0, 0], 0, 3, 0), SCALE, None, out)
    finite = out.isfinite().all(1)
    first_bad, last_bad = (210, 211) if where == "query" else (79, 220)
    assert bool(finite[:first_bad].all())
    assert bool(finite[220:].all())
    assert not bool(finite[first_bad:last_bad].any()) or (where == "key" and bad == float("inf"))
    assert not bool(finite[first_bad:last_bad].all())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "rotary_dim", "many"),
    [((4, 2, 16), 8, 512), ((3, 1, 64), 64, 512), ((9, 3, 256), 64, 512), ((9, 3, 256), 64, 1)],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_prepared_rows_are_what_the_layer_makes(
    heads: tuple[int, int, int],
    rotary_dim: int,
    many: int,
    dtype: torch.dtype,
    gated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare, "_MANY_TOKENS", many)
    torch.manual_seed(0)
    q_heads, kv_heads, dim = heads
    positions = [0, 1, 65, 4097, 262_143, 1_000_000, 7]
    tokens = len(positions)
    wide = q_heads * dim * (2 if gated else 1)
    projected = torch.randn(tokens, wide + 2 * kv_heads * dim + 8, device=DEVICE).to(dtype)[:, :-8]
    scales = [torch.rand(dim, device=DEVICE) + 0.5 for _ in range(2)]
    positions_T = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    locations = [64, 64 + 63, 3 * 64 + 5, -1, 2 * 64, 5 * 64 + 1, -1]
    pool = _pool(6, heads, TILE, dtype)
    frequencies = rotary.inverse_frequencies(rotary_dim, 1e7, torch.device(DEVICE))
    q = prepare_rows(
        projected,
        scales[0],
        scales[1],
        1e-6,
        frequencies,
        positions_T,
        torch.tensor(locations, dtype=torch.int32, device=DEVICE),
        pool,
        heads,
        gated,
    )
    queries, keys, values = projected.split_with_sizes((wide, kv_heads * dim, kv_heads * dim), dim=1)
    queries = queries.reshape(tokens, q_heads, -1)[..., :dim]
    want_q, want_k = (
        rotary_reference.rotary(rms_norm.rms_norm(part.float(), scale, 1e-6), positions_T, rotary_dim, 1e7).to(dtype)
        for part, scale in zip((queries, keys.reshape(tokens, kv_heads, dim)), scales, strict=True)
    )
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 1e-4)
    torch.testing.assert_close(q, want_q, rtol=rtol, atol=atol)
    stored = [t for t, location in enumerate(locations) if location >= 0]
    for t in stored:
        page, offset = divmod(locations[t], TILE)
        torch.testing.assert_close(pool[page, 0, :, offset], want_k[t], rtol=rtol, atol=atol)
        torch.testing.assert_close(pool[page, 1, :, offset], values.reshape(tokens, kv_heads, dim)[t], rtol=0, atol=0)
    assert int((~pool.isnan()).sum()) == len(stored) * 2 * kv_heads * dim


@pytest.mark.usefixtures("poisoned_empty")
def test_families_without_head_norms_only_turn() -> None:
    torch.manual_seed(0)
    heads = (2, 1, 32)
    projected = torch.randn(3, 4 * 32, device=DEVICE)
    positions = torch.tensor([5, 900_000, 2], dtype=torch.int32, device=DEVICE)
    nowhere = torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
    frequencies = rotary.inverse_frequencies(16, 1e4, torch.device(DEVICE))
    pool = _pool(1, heads, TILE, torch.float32)
    q = prepare_rows(projected, None, None, 0.0, frequencies, positions, nowhere, pool, heads, gated=False)
    want = rotary_reference.rotary(projected[:, : 2 * 32].view(3, 2, 32), positions, 16, 1e4)
    torch.testing.assert_close(q, want, rtol=1e-5, atol=1e-5)
    assert bool(pool.isnan().all())
