"""Copies of slots and pages and the look at slots: one checkpoint of Qwen3.5-9B (24 layers in fp32), many pages.

``SWEEP=1`` times every shape of launch in ``SHAPES`` too.
"""

import os
from collections.abc import Callable
from functools import partial

import torch
from hybserve_kernels.copies import SlotCells, copy_runs, runs_finite
from hybserve_kernels.copies.gpu import SHAPE, Shape

from bench.kernels import Row
from bench.kernels.timing import microseconds, rounds_of

DEVICE = "cuda"
MATRIX, WINDOW = 32 * 128 * 128 * 4, 8192 * 3 * 2
SLOT = SlotCells(24, MATRIX + WINDOW, MATRIX, torch.float32, MATRIX, WINDOW, torch.bfloat16)
SLOT_BYTES = SLOT.layers * SLOT.layer_bytes
PAGE_BYTES = 8 * 2 * 4 * 64 * 256 * 2
#: Pairs that a launch has room for, whatever it copies.
ROOM = 64
SHAPES = [
    Shape(132 * programs, words, warps)
    for programs, words, warps in (
        (2, 8192, 8), (4, 4096, 4), (4, 4096, 8), (4, 8192, 8), (8, 2048, 4), (8, 4096, 4), (8, 4096, 8),
        (16, 2048, 4), (16, 4096, 4), (16, 4096, 8), (32, 2048, 4), (32, 4096, 8),
    )
]  # fmt: skip


def check() -> None:
    runs = torch.randint(0, 256, (12, SLOT_BYTES), dtype=torch.uint8, device=DEVICE)
    for slot in range(12):  # finite floats
        runs[slot].view(torch.float32).normal_()
        for layer in range(SLOT.layers):
            start = layer * SLOT.layer_bytes + SLOT.window_offset
            runs[slot, start : start + WINDOW].view(torch.bfloat16).normal_()
    bad = SLOT.layer_bytes * 23 + SLOT.window_offset + WINDOW - 2
    runs[7, bad : bad + 2] = 255
    for shape in (SHAPES if os.environ.get("SWEEP") else []) + [SHAPE]:
        expected = runs.clone()
        expected[3], expected[9] = runs[7], runs[8]
        got = runs.clone()
        copy_runs(got, _pairs([7, 3, 8, 9, 1, 0]), shape=shape)
        assert torch.equal(got, expected), f"copy with {shape}"
        ids = torch.tensor([7, 3, 0, 9], dtype=torch.int32, device=DEVICE)
        assert runs_finite(expected, ids, SLOT, shape).tolist() == [False, False, True, True], f"look with {shape}"
    free = torch.cuda.mem_get_info()[0]
    size = 40 << 20
    if free > 110 * size:
        many = torch.empty(101, size, dtype=torch.uint8, device=DEVICE)
        many[99].random_(256)
        copy_runs(many, _pairs([99, 100, 99, 1]))
        assert torch.equal(many[99], many[100]), "offsets beyond 4 GiB"
        assert torch.equal(many[99], many[1])


def measure() -> list[Row]:
    rows = []
    for shape in (SHAPES if os.environ.get("SWEEP") else []) + [SHAPE]:
        name = f"{shape.programs // 132}x132, {shape.words}, {shape.warps}w"
        rows += [_copies(1, SLOT_BYTES, "slot", shape, name), _copies(64, PAGE_BYTES, "page", shape, name)]
        rows += [_looks(1, shape, name), _looks(8, shape, name)]
    rows += [_copies(8, SLOT_BYTES, "slot", SHAPE, ""), _copies(1, PAGE_BYTES, "page", SHAPE, "")]
    runs = torch.empty(8, SLOT_BYTES, dtype=torch.uint8, device=DEVICE).random_()
    nothing = partial(copy_runs, runs, _pairs([0, 0] * ROOM))
    rows.append(Row("copies", "no pair", "", microseconds([nothing])))
    torch_copies: list[Callable[[], object]] = [partial(runs[2 * k].copy_, runs[2 * k + 1]) for k in range(4)]
    rows.append(Row("copies", "1 slot", "torch", microseconds(torch_copies), 2.0 * SLOT_BYTES))
    return rows


def _pairs(flat: list[int]) -> torch.Tensor:
    return torch.tensor(flat, dtype=torch.int32, device=DEVICE).view(-1, 2)


def _copies(count: int, size: int, what: str, shape: Shape, name: str) -> Row:
    rounds = rounds_of(2 * count * size)
    runs = torch.empty(2 * count * rounds + 1, size, dtype=torch.uint8, device=DEVICE).random_()
    ids = (torch.randperm(2 * count * rounds) + 1).view(rounds, -1).tolist()
    calls = [partial(copy_runs, runs, _pairs(line + [0, 0] * (ROOM - count)), shape) for line in ids]
    return Row("copies", f"{count} {what}", name, microseconds(calls), 2.0 * count * size)


def _looks(count: int, shape: Shape, name: str) -> Row:
    rounds = rounds_of(count * SLOT_BYTES)
    runs = torch.empty(count * rounds + 1, SLOT_BYTES // 4, dtype=torch.float32, device=DEVICE).normal_()
    ids = torch.randperm(count * rounds, dtype=torch.int32, device=DEVICE).view(rounds, -1) + 1
    padding = torch.zeros(ROOM - count, dtype=torch.int32, device=DEVICE)
    calls = [partial(runs_finite, runs.view(torch.uint8), torch.cat((line, padding)), SLOT, shape) for line in ids]
    return Row("copies", f"look at {count} slot", name, microseconds(calls), 1.0 * count * SLOT_BYTES)
