"""Rows of a step by what is done with them."""

import torch

from hybserve.layers.step_context import StepContext


def context(rows: list[tuple[int, int]], page_size: int = 4) -> StepContext:
    """Rows of (start, count); row n uses slot n + 1 and pages from 10 · (n + 1) on."""
    bounds, positions, locations = [0], [], []
    tables = [list(range(10 * (n + 1), 10 * (n + 1) + 5)) for n in range(len(rows))]
    for (start, count), table in zip(rows, tables, strict=True):
        bounds.append(bounds[-1] + count)
        positions += range(start, start + count)
        locations += [table[p // page_size] * page_size + p % page_size for p in range(start, start + count)]
    slots = list(range(1, len(rows) + 1))
    return StepContext(
        bounds=bounds,
        starts=[start for start, _ in rows],
        slots=slots,
        block_tables=tables,
        page_size=page_size,
        positions_T=torch.tensor(positions),
        locations_T=torch.tensor(locations),
        slots_N=torch.tensor(slots),
        kv_layers=[],
        matrices=[],
        windows=[],
    )


def test_all_decode_rows_are_one_slice() -> None:
    decode, prefill = context([(5, 1), (1, 1), (9, 1)]).grouped
    assert prefill == []
    assert decode is not None
    assert decode.tokens == slice(0, 3)
    assert decode.lengths == [6, 2, 10]
    assert decode.slots.tolist() == decode.slot_ids == [1, 2, 3]


def test_the_first_token_of_a_sequence_is_a_prefill_row() -> None:
    decode, prefill = context([(0, 1), (3, 2)]).grouped
    assert decode is None
    assert [(row.begin, row.end, row.start, row.slot) for row in prefill] == [(0, 1, 0, 1), (1, 3, 3, 2)]


def test_mixed_rows_in_any_order() -> None:
    step = context([(0, 3), (5, 1), (8, 1), (2, 4)])
    decode, prefill = step.grouped
    assert decode is not None
    assert decode.tokens == slice(3, 5)
    assert decode.slots.tolist() == decode.slot_ids == [2, 3]
    assert [(row.begin, row.end) for row in prefill] == [(0, 3), (5, 9)]
    scattered, _ = context([(5, 1), (0, 3), (8, 1)]).grouped
    assert scattered is not None
    assert isinstance(scattered.tokens, torch.Tensor)
    assert scattered.tokens.tolist() == [0, 4]
    assert scattered.block_tables[1][0] == 30


def test_places_and_pages_of_rows() -> None:
    step = context([(2, 3), (6, 1)])
    pages, offsets = step.places
    assert pages.tolist() == [10, 10, 11, 21]
    assert offsets.tolist() == [2, 3, 0, 2]
    [read] = step.decode_pages
    assert (read.pages_M.tolist(), read.length, read.visible_TL) == ([20, 21], 7, None)
    [own] = step.prefill_pages
    assert (own.pages_M.tolist(), own.length) == ([10, 11], 5)
    assert own.visible_TL is not None
    assert own.visible_TL.tolist()[0] == [True, True, True, False, False]


def test_what_is_derived_is_derived_once() -> None:
    step = context([(2, 3), (6, 1)])
    assert step.grouped is step.grouped
    assert step.places is step.places
    assert step.prefill_pages is step.prefill_pages
    assert step.decode_pages is step.decode_pages


def test_first_position_of_a_tile() -> None:
    step = context([(8, 4)])
    step.tile = (2, 3)
    assert step.first_position == 10
