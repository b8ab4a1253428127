"""I key heads, U value heads, K key dim, V value dim. Chunk in pieces through a slot = chunk whole = recurrent."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hybserve_kernels.gated_delta import decay_and_strength, reference, scan, step, unit_queries_keys, unit_scale

HEADS = [(2, 2, 16, 16), (2, 4, 20, 12), (1, 3, 12, 20), (3, 6, 8, 24), (1, 1, 1, 1)]
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


class Row(NamedTuple):
    qk: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def cut(self, begin: int, end: int) -> "Row":
        return Row(*(part[begin:end] for part in self))


def _row(tokens: int, heads: tuple[int, int, int, int], decay: float = 1.0, seed: int = 0) -> Row:
    torch.manual_seed(seed)
    key_heads, value_heads, key_dim, value_dim = heads
    raw = torch.randn(tokens, 2, key_heads, key_dim)
    qk = unit_queries_keys(raw, unit_scale(key_dim, raw.device))
    g = -decay * torch.rand(tokens, value_heads)
    return Row(qk, torch.randn(tokens, value_heads, value_dim), g, torch.rand(tokens, value_heads))


def _matrices(heads: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, slots: int = 6) -> torch.Tensor:
    """A view into a slot-major pool that holds NaN everywhere."""
    _, value_heads, key_dim, value_dim = heads
    size = value_heads * key_dim * value_dim
    pool = torch.full((slots * (size + 24),), float("nan"), dtype=dtype)
    strides = (size + 24, key_dim * value_dim, value_dim, 1)
    return pool.as_strided((slots, value_heads, key_dim, value_dim), strides)


def _oracle(row: Row, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.recurrent(row.qk[:, 0], row.qk[:, 1], row.v, row.g, row.beta, state)


def _zeros(matrices: torch.Tensor) -> torch.Tensor:
    return torch.zeros(matrices.shape[1:])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 500])
@pytest.mark.usefixtures("poisoned_empty")
def test_scan_of_a_fresh_row_is_recurrent_whatever_the_slot_holds(
    tokens: int, heads: tuple[int, int, int, int]
) -> None:
    row, matrices = _row(tokens, heads), _matrices(heads)
    want, state = _oracle(row, _zeros(matrices))
    torch.testing.assert_close(scan(*row, matrices, 4, True), want, **TOLERANCE)
    torch.testing.assert_close(matrices[4], state, **TOLERANCE)
    assert bool(matrices[[0, 1, 2, 3, 5]].isnan().all())


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("decay", [1e-4, 1.0, 60.0])
@pytest.mark.usefixtures("poisoned_empty")
def test_pieces_through_a_slot_are_the_whole(heads: tuple[int, int, int, int], decay: float) -> None:
    row, matrices = _row(200, heads, decay), _matrices(heads)
    want, state = _oracle(row, _zeros(matrices))
    cuts = [0, 1, 64, 65, 67, 130, 190]
    parts = [scan(*row.cut(a, b), matrices, 1, a == 0) for a, b in pairwise(cuts)]
    parts += [step(*row.cut(t, t + 1), matrices, [1]) for t in range(190, 200)]
    torch.testing.assert_close(torch.cat(parts), want, **TOLERANCE)
    torch.testing.assert_close(matrices[1], state, **TOLERANCE)
    other = _matrices(heads)
    torch.testing.assert_close(scan(*row, other, 2, True), want, **TOLERANCE)
    torch.testing.assert_close(other[2], state, **TOLERANCE)


@pytest.mark.parametrize("tile", [1, 4, 7, 64])
def test_any_tile_gives_the_same(tile: int) -> None:
    row, matrices = _row(50, HEADS[1]), _matrices(HEADS[1])
    want, _ = _oracle(row, _zeros(matrices))
    torch.testing.assert_close(scan(*row, matrices, 1, True, tile), want, **TOLERANCE)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("slots", [[3], [1, 2, 3, 4], [4, 1, 5]])
def test_step_moves_the_rows_own_slots(heads: tuple[int, int, int, int], slots: list[int]) -> None:
    row, matrices = _row(len(slots), heads), _matrices(heads)
    matrices[slots] = torch.randn(len(slots), *matrices.shape[1:])
    want = [_oracle(row.cut(n, n + 1), matrices[slot]) for n, slot in enumerate(slots)]
    got = step(*row, matrices, slots)
    torch.testing.assert_close(got, torch.cat([out for out, _ in want]), **TOLERANCE)
    for slot, (_, state) in zip(slots, want, strict=True):
        torch.testing.assert_close(matrices[slot], state, **TOLERANCE)
    untouched = [slot for slot in range(6) if slot not in slots]
    assert bool(matrices[untouched].isnan().all())


def test_equal_keys_that_nearly_repeat_stay_exact() -> None:
    """Powers of the triangular system would overflow here; solving it does not."""
    row, matrices = _row(128, HEADS[0], 1e-6), _matrices(HEADS[0])
    row.qk[:, 1] = row.qk[:1, 1]
    row.beta.fill_(1.0)
    want, state = _oracle(row, _zeros(matrices))
    torch.testing.assert_close(scan(*row, matrices, 1, True), want, **TOLERANCE)
    torch.testing.assert_close(matrices[1], state, **TOLERANCE)


def test_a_bf16_state_is_rounded_once_per_piece() -> None:
    row, matrices = _row(70, HEADS[1]), _matrices(HEADS[1], torch.bfloat16)
    _, state = _oracle(row, _zeros(matrices))
    scan(*row, matrices, 1, True)
    torch.testing.assert_close(matrices[1].float(), state, rtol=1e-2, atol=1e-2)
    more = _row(1, HEADS[1], seed=1)
    want, after = _oracle(more, matrices[1])
    torch.testing.assert_close(step(*more, matrices, [1]), want, **TOLERANCE)
    torch.testing.assert_close(matrices[1].float(), after, rtol=1e-2, atol=1e-2)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    row, matrices = _row(3, HEADS[1]), _matrices(HEADS[1])
    matrices[1:4] = 0.0
    row.v[1] = float("inf")
    assert step(*row, matrices, [1, 2, 3]).isfinite().flatten(1).all(1).tolist() == [True, False, True]
    assert matrices.isfinite().flatten(1).all(1)[1:4].tolist() == [True, False, True]


def test_gates_and_unit_vectors_are_the_reference() -> None:
    torch.manual_seed(0)
    a, b, a_log, dt_bias = torch.randn(9, 4) * 5, torch.randn(9, 4), torch.randn(4), torch.randn(4)
    got = decay_and_strength(a, b, -a_log.exp(), dt_bias)
    for ours, wanted in zip(got, reference.decay_and_strength(a, b, a_log, dt_bias), strict=True):
        torch.testing.assert_close(ours, wanted)
    raw = torch.randn(9, 2, 3, 20)
    raw[0] = 0.0
    unit = unit_queries_keys(raw, unit_scale(20, raw.device))
    q, k = reference.unit_queries_keys(raw[:, 0], raw[:, 1])
    torch.testing.assert_close(unit, torch.stack((q, k), 1), rtol=1e-5, atol=1e-6)


def test_gates_must_be_fp32() -> None:
    row, matrices = _row(2, HEADS[0]), _matrices(HEADS[0])
    with pytest.raises(TypeError, match="fp32"):
        scan(row.qk, row.v, row.g.bfloat16(), row.beta, matrices, 1, True)
    with pytest.raises(TypeError, match="fp32"):
        step(row.qk.bfloat16(), row.v, row.g, row.beta, matrices, [1, 2])
