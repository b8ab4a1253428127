"""Copies of runs and the look at what stands in them, against plain indexing."""

import pytest
import torch
from hybserve_kernels.copies import SlotCells, copy_runs, runs_finite

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CANARY = 0xFF


def pool(runs: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    result = torch.randint(0, 256, (runs, size), dtype=torch.uint8, generator=generator)
    result[0] = CANARY
    return result.to(DEVICE)


def pairs_of(flat: list[int]) -> torch.Tensor:
    return torch.tensor(flat, dtype=torch.int32, device=DEVICE).view(-1, 2)


@pytest.mark.parametrize("size", [16, 256, 16_384, 16_640, 70_000])
def test_pairs_are_copied_and_nothing_else(size):
    runs = pool(7, size)
    expected = runs.clone()
    expected[5], expected[3] = runs[1], runs[6]
    copy_runs(runs, pairs_of([1, 5, 0, 0, 2, 0, 6, 3, 0, 0]))
    assert torch.equal(runs, expected)


def test_no_pairs_and_empty_runs():
    runs = pool(3, 256)
    before = runs.clone()
    copy_runs(runs, pairs_of([]))
    copy_runs(runs, pairs_of([0, 0] * 9))
    copy_runs(torch.empty(3, 0, dtype=torch.uint8, device=DEVICE), pairs_of([1, 2]))
    assert torch.equal(runs, before)


def cells_of(state: torch.dtype, conv: torch.dtype, layers: int = 3) -> SlotCells:
    matrix, window = 5000 * state.itemsize, 26 * conv.itemsize
    offset = -(-matrix // 16) * 16
    return SlotCells(layers, -(-(offset + window) // 16) * 16, matrix, state, offset, window, conv)


def slots(cells: SlotCells, count: int) -> torch.Tensor:
    """Finite floats; all that pads them is NaN."""
    size = -(-cells.layers * cells.layer_bytes // 256) * 256
    result = torch.full((count, size), CANARY, dtype=torch.uint8)
    for slot in range(1, count):
        for layer in range(cells.layers):
            for start, size, dtype in (
                (0, cells.matrix_bytes, cells.state_dtype),
                (cells.window_offset, cells.window_bytes, cells.conv_dtype),
            ):
                values = 1e4 * torch.randn(size // dtype.itemsize, generator=torch.Generator().manual_seed(layer))
                start += layer * cells.layer_bytes
                result[slot, start : start + size] = values.to(dtype).view(torch.uint8)
    return result.to(DEVICE)


def put(runs: torch.Tensor, slot: int, at: int, dtype: torch.dtype, value: float) -> None:
    runs[slot, at : at + dtype.itemsize] = torch.tensor([value], dtype=dtype).view(torch.uint8).to(DEVICE)


FLOATS = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
          (torch.float16, torch.float16), (torch.float32, torch.float32)]  # fmt: skip


@pytest.mark.parametrize(("state", "conv"), FLOATS, ids=str)
def test_every_float_of_a_slot_is_looked_at(state, conv):
    cells = cells_of(state, conv)
    runs = slots(cells, 10)
    last = (cells.layers - 1) * cells.layer_bytes
    put(runs, 2, 0, state, float("nan"))
    put(runs, 3, last + cells.matrix_bytes - state.itemsize, state, float("inf"))
    put(runs, 4, cells.layer_bytes + cells.window_offset, conv, float("-inf"))
    put(runs, 5, last + cells.window_offset + cells.window_bytes - conv.itemsize, conv, float("nan"))
    put(runs, 6, cells.layer_bytes + 3 * state.itemsize, state, float("-inf"))
    put(runs, 7, state.itemsize, state, torch.finfo(state).max)
    put(runs, 8, state.itemsize, state, torch.finfo(state).min)
    ids = torch.tensor([1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 0], dtype=torch.int32, device=DEVICE)
    good = [True, False, False, True, False, False, False, True, True, True, True]
    assert runs_finite(runs, ids, cells).tolist() == good


def test_slots_without_layers_are_finite():
    cells = SlotCells(0, 0, 0, torch.float32, 0, 0, torch.float32)
    runs = torch.empty(4, 0, dtype=torch.uint8, device=DEVICE)
    assert runs_finite(runs, torch.tensor([1, 2], dtype=torch.int32, device=DEVICE), cells).tolist() == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs the memory of a card")
def test_runs_beyond_four_gigabytes():
    """Offsets have 64 bits."""
    size = 48 << 20
    runs = torch.zeros(100, size, dtype=torch.uint8, device="cuda")
    runs[98] = 7
    copy_runs(runs, pairs_of([98, 99, 98, 1]))
    assert bool((runs[99] == 7).all())
    assert bool((runs[1] == 7).all())
    assert not bool(runs[2].any())
    cells = SlotCells(1, size, size, torch.float32, size, 0, torch.float32)
    put(runs, 99, size - 4, torch.float32, float("nan"))
    ids = torch.tensor([98, 99], dtype=torch.int32, device="cuda")
    assert runs_finite(runs, ids, cells).tolist() == [True, False]
