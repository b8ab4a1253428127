"""H query heads, J kv heads, d head dim, G tokens per page. Everything in the pool that no row owns is NaN."""

import random

import pytest
import torch
from hybserve_kernels.attention import (
    RowPages,
    attend_decode,
    attend_prefill,
    attend_tile,
    reference,
    row_pages,
    store_kv,
)

HEADS = [(4, 2, 16), (3, 1, 20), (4, 4, 8), (6, 2, 5)]
SCALE = 0.3


def _pool(pages: int, heads: tuple[int, int, int], page_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One layer's view of a page-major pool of two layers."""
    _, kv_heads, dim = heads
    shape = (pages, 2, 2, kv_heads, page_size, dim)
    return torch.full(shape, float("nan"), dtype=dtype)[:, 1]


def _fill(
    pool: torch.Tensor, table: list[int], length: int, page_size: int, start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store random keys and values at the positions start .. length - 1 and return them."""
    kv_heads, dim = pool.shape[2], pool.shape[4]
    k, v = torch.randn(length - start, kv_heads, dim), torch.randn(length - start, kv_heads, dim)
    positions = torch.arange(start, length)
    store_kv(pool, k, v, torch.tensor(table)[positions // page_size], positions % page_size)
    return k, v


def _ends(tables: list[list[int]], lengths: list[int], page_size: int) -> list[RowPages]:
    """Of one query at the end of every row."""
    return [row_pages(table, length - 1, 1, page_size) for table, length in zip(tables, lengths, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_is_the_reference_and_touches_nothing_else(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    got, want = _pool(6, HEADS[0], 4, dtype), _pool(6, HEADS[0], 4, dtype)
    k, v = torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    pages, offsets = [3, 3, 5, 5, 1], [2, 3, 0, 1, 0]
    store_kv(got, k, v, torch.tensor(pages), torch.tensor(offsets))
    reference.store_kv(want, k, v, pages, offsets)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert int(got.isnan().sum()) == got.numel() - 2 * 5 * 2 * 16


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("lengths", [[1], [2], [65], [130, 130], [1, 64, 65, 128, 7]])
@pytest.mark.usefixtures("poisoned_empty")
def test_decode_is_the_reference(lengths: list[int], page_size: int, heads: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    counts = [-(-length // page_size) for length in lengths]
    ids = list(range(1, sum(counts) + 20))
    random.Random(0).shuffle(ids)
    tables = [[ids.pop() for _ in range(count + 2)] for count in counts]
    pool = _pool(sum(counts) + 20 + 2 * len(counts), heads, page_size)
    for table, length in zip(tables, lengths, strict=True):
        _fill(pool, table, length, page_size)
    q = torch.randn(len(lengths), heads[0] + 3, heads[2])[:, : heads[0]]
    got = attend_decode(q, pool, _ends(tables, lengths, page_size), SCALE)
    for n, (table, length, count) in enumerate(zip(tables, lengths, counts, strict=True)):
        want = reference.attention(q[n : n + 1], pool, table[:count], length - 1, SCALE)
        torch.testing.assert_close(got[n : n + 1], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 65), (3, 1), (1, 63), (64, 64), (5, 40)])
@pytest.mark.parametrize("page_size", [4, 64])
@pytest.mark.usefixtures("poisoned_empty")
def test_prefill_is_the_reference(start: int, count: int, page_size: int, heads: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    table = list(range(1, 40))[::-1]
    pool = _pool(40, heads, page_size)
    k, v = _fill(pool, table, start + count, page_size)
    q = torch.randn(count, heads[0], heads[2])
    pages = row_pages(table, start, count, page_size)
    got = attend_prefill(q, k[start:], v[start:], pool, pages, SCALE)
    want = reference.attention(q, pool, table[: len(pages.pages_M)], start, SCALE)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_narrower_pool_is_read_even_from_position_zero() -> None:
    """What a later chunk will read is what the first one must have read."""
    torch.manual_seed(0)
    pool = _pool(8, HEADS[0], 4, torch.bfloat16)
    k, v = _fill(pool, [1, 2, 3], 10, 4)
    q = torch.randn(10, 4, 16)
    got = attend_prefill(q, k, v, pool, row_pages([1, 2, 3], 0, 10, 4), SCALE)
    torch.testing.assert_close(got, reference.attention(q, pool, [1, 2, 3], 0, SCALE), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.usefixtures("poisoned_empty")
def test_tile_is_the_reference_with_the_same_bits_however_it_is_cut(
    page_size: int, heads: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    table = [5, 2, 4]
    pool = _pool(6, heads, page_size)
    length = 3 * page_size
    _fill(pool, table, length, page_size)
    q = torch.randn(page_size, heads[0], heads[2])
    whole = attend_tile(q, pool, table, page_size, SCALE)
    want = reference.attention(q, pool, table, length - page_size, SCALE)
    torch.testing.assert_close(whole, want, rtol=1e-4, atol=1e-5)
    for filled in range(1, page_size + 1):
        cut = pool.clone()
        cut[table[-1], :, :, filled:] = float("nan")
        queries = q.clone()
        queries[filled:] = 0.0
        got = attend_tile(queries, cut, table, filled, SCALE)
        assert bool(got.isfinite().all())
        assert torch.equal(got[:filled], whole[:filled])


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    torch.manual_seed(0)
    pool = _pool(12, HEADS[0], 4)
    tables, lengths = [[1, 2], [3], [4, 5, 6]], [6, 3, 9]
    for table, length in zip(tables, lengths, strict=True):
        _fill(pool, table, length, 4)
    q = torch.randn(3, 4, 16)
    q[1] = float("nan")
    got = attend_decode(q, pool, _ends(tables, lengths, 4), SCALE)
    assert got.isfinite().flatten(1).all(1).tolist() == [True, False, True]
