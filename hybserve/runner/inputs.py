"""A plan turned into what the forward reads: packed tokens and the StepContext. No per-token Python.

Legend: T packed tokens, N rows, G tokens per page.
"""

from collections.abc import Iterator

import numpy as np
import torch

from hybserve.core.messages import StepPlan
from hybserve.core.types import SAMPLED
from hybserve.layers.step_context import StepContext
from hybserve.runner.device_pools import DevicePools
from hybserve.runner.sequences import Sequences

Ints = np.ndarray


class Packed:
    """Where the tokens of a plan lie: bounds of rows in T, and for each token its row and position."""

    __slots__ = ("bounds", "counts", "positions_T", "rows_T", "starts")

    def __init__(self, plan: StepPlan) -> None:
        self.starts: Ints = np.asarray(plan.starts, dtype=np.int64)
        self.counts: Ints = np.asarray(plan.counts, dtype=np.int64)
        self.bounds: Ints = np.concatenate(([0], np.cumsum(self.counts)))
        self.rows_T: Ints = np.repeat(np.arange(len(self.counts)), self.counts)
        self.positions_T: Ints = np.arange(self.bounds[-1]) + (self.starts - self.bounds[:-1])[self.rows_T]


def packed_tokens(plan: StepPlan, packed: Packed, sequences: Sequences) -> torch.Tensor:
    """Token ids [T], with every SAMPLED replaced from the token pool."""
    ids = np.asarray(plan.tokens, dtype=np.int64)
    assert len(ids) == packed.bounds[-1], "the plan's tokens and counts disagree"
    tokens_T = torch.from_numpy(ids)
    open_ids = np.flatnonzero(ids == SAMPLED)
    if len(open_ids):
        seqs = np.asarray(plan.seqs, dtype=np.int64)[packed.rows_T[open_ids]]
        tokens_T[torch.from_numpy(open_ids)] = sequences.last_tokens(seqs)
    return tokens_T


def step_context(
    plan: StepPlan, packed: Packed, sequences: Sequences, pools: DevicePools, page_size: int
) -> StepContext:
    tables = [sequences[seq].table for seq in plan.seqs]
    cuts: dict[int, list[tuple[int, int]]] = {}
    for row, tokens, slot in exports_of(plan):
        if tokens < plan.counts[row]:
            cuts.setdefault(row, []).append((tokens, slot))
    return StepContext(
        bounds=packed.bounds.tolist(),
        starts=plan.starts,
        slots=plan.slots,
        block_tables=tables,
        page_size=page_size,
        positions_T=torch.from_numpy(packed.positions_T),
        locations_T=torch.from_numpy(locations(packed, tables, page_size)),
        slots_N=torch.tensor(plan.slots, dtype=torch.int64),
        kv_layers=pools.kv_layers,
        matrices=pools.matrices,
        windows=pools.windows,
        stored_T=_stored(plan, packed),
        cuts=cuts,
    )


def exports_of(plan: StepPlan) -> Iterator[tuple[int, int, int]]:
    """The checkpoints to export as (row, tokens of the row before it, slot)."""
    for row, position, slot in zip(plan.export_rows, plan.export_positions, plan.export_slots, strict=True):
        yield row, position - plan.starts[row], slot


def _stored(plan: StepPlan, packed: Packed) -> torch.Tensor | None:
    """Indices of the tokens whose KV is written; None = all of them."""
    if not plan.gap_rows:
        return None
    write_from_N = packed.starts.copy()
    write_from_N[plan.gap_rows] = plan.gap_ends
    return torch.from_numpy(np.flatnonzero(packed.positions_T >= write_from_N[packed.rows_T]))


def locations(packed: Packed, tables: list[list[int]], page_size: int) -> Ints:
    """KV locations [T]: page · G + offset."""
    first_N = packed.starts // page_size
    last_N = (packed.starts + packed.counts - 1) // page_size
    touched: list[int] = []
    for table, first, last in zip(tables, first_N.tolist(), last_N.tolist(), strict=True):
        touched += table[first : last + 1]
    spans_N = last_N - first_N + 1
    assert len(touched) == spans_N.sum(), "a block table does not reach the end of its row"
    shift_N = np.cumsum(spans_N) - spans_N - first_N
    pages_T, offsets_T = np.divmod(packed.positions_T, page_size)
    touched_T: Ints = np.asarray(touched, dtype=np.int64)[pages_T + shift_N[packed.rows_T]]
    return touched_T * page_size + offsets_T


def page_tiles(start: int, count: int, page_size: int) -> Iterator[tuple[int, int, int]]:
    """The pages that positions [start, start + count) touch, as (page index, first, end) with row offsets inside."""
    for page in range(start // page_size, (start + count - 1) // page_size + 1):
        base = page * page_size
        yield page, max(start - base, 0), min(start + count - base, page_size)


def tile_context(
    table: list[int], slot: int, page: int, tile: tuple[int, int], pools: DevicePools, page_size: int, shared: bool
) -> StepContext:
    """The context of one fixed tile: position p is row p mod G, whatever the plan cut (law 7). ``shared``: the page is
    in the gap of a prefix hit, and nothing is stored."""
    offsets_T = torch.arange(page_size)
    return StepContext(
        bounds=[0, page_size],
        starts=[page * page_size],
        slots=[slot],
        block_tables=[table],
        page_size=page_size,
        positions_T=page * page_size + offsets_T,
        locations_T=table[page] * page_size + offsets_T,
        slots_N=torch.tensor([slot]),
        kv_layers=pools.kv_layers,
        matrices=pools.matrices,
        windows=pools.windows,
        stored_T=torch.empty(0, dtype=torch.int64) if shared else None,
        deterministic=True,
        tile=tile,
    )
