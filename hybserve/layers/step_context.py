"""All that one forward needs beside the hidden states: the rows of a step and the pools they read and write.

Legend: T packed tokens, N rows, P pages of the pool, G tokens per page, J kv heads, d head dim, S slots, U value heads,
K key dim, V value dim, W conv width.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from hybserve_kernels.attention import RowPages, row_pages
from hybserve_kernels.rows import DeviceStep


class PrefillRow(NamedTuple):
    """A row of several tokens, or the first token of a sequence: tokens [begin, end) of T."""

    begin: int
    end: int
    start: int  # position of its first token; 0 = the state before it is zero, whatever the slot holds
    slot: int
    block_table: list[int]
    cuts: list[tuple[int, int]]  # checkpoints inside the row: after how many of its tokens, into which slot


class DecodeRows(NamedTuple):
    """All rows of one token that continue a state, taken together."""

    tokens: slice | torch.Tensor  # which of T: a slice where they follow one another
    slots: torch.Tensor  # int64
    slot_ids: list[int]  # the same
    lengths: list[int]  # tokens each one sees, itself included
    block_tables: list[list[int]]


class Rows(NamedTuple):
    """The rows of a step by what is done with them."""

    decode: DecodeRows | None
    prefill: list[PrefillRow]


@dataclass(slots=True)
class StepContext:
    """Rows are packed one after another: row n owns tokens [bounds[n], bounds[n+1]) of T, which are the positions
    [starts[n], starts[n] + bounds[n+1] - bounds[n]) of its sequence. Host lists and tensors say the same; the torch
    forms of the layers read both, the Triton forms read ``step`` alone.

    ``deterministic`` (law 7): N is 1, T is G, token t lies at position ``page start + t``; only the tokens
    [tile[0], tile[1]) are real, the others are zero rows that must not be read or written anywhere.

    What every layer would derive in the same way (rows by kind, pages, places) is derived once, on first use.
    """

    bounds: list[int]
    starts: list[int]
    slots: list[int]
    block_tables: list[list[int]]  # page ids of each row, covering at least its last position
    page_size: int
    positions_T: torch.Tensor  # int64
    locations_T: torch.Tensor  # int64 kv location page·G + offset of each token
    slots_N: torch.Tensor  # int64
    kv_layers: list[torch.Tensor]  # per attention layer [P, 2, J, G, d], a view of the page-major pool
    matrices: list[torch.Tensor]  # per recurrent layer [S, U, K, V], a view of the slot-major pool
    windows: list[torch.Tensor]  # per recurrent layer [S, channels, W - 1], a view of the slot-major pool
    #: Tokens whose KV is written; None = all. The rest lie in pages that are shared (the gap of a prefix hit).
    stored_T: torch.Tensor | None = None
    #: Row -> checkpoints strictly inside it, ascending: (tokens of the row before it, slot). One at the end of a row is
    #: a copy of the active slot after the forward, and not told here.
    cuts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    deterministic: bool = False
    tile: tuple[int, int] = (0, 0)
    #: The same rows for the Triton forms of the layers; then the lists are empty, and nothing above but the pools is
    #: read.
    step: DeviceStep | None = None
    _grouped: Rows | None = field(default=None, init=False, repr=False)
    _places: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False, repr=False)
    _decode_pages: list[RowPages] | None = field(default=None, init=False, repr=False)
    _prefill_pages: list[RowPages] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of_step(
        cls,
        step: DeviceStep,
        page_size: int,
        kv_layers: list[torch.Tensor],
        matrices: list[torch.Tensor],
        windows: list[torch.Tensor],
    ) -> "StepContext":
        """For the Triton forms."""
        slots_N = step.positions_T[:0]
        return cls(
            [], [], [], [], page_size, step.positions_T, step.locations_T, slots_N, kv_layers, matrices, windows,
            step=step,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        return len(self.starts)

    @property
    def first_position(self) -> int:
        """Of the first real token of a deterministic tile."""
        return self.starts[0] - self.bounds[0] + self.tile[0]

    @property
    def grouped(self) -> Rows:
        if self._grouped is None:
            self._grouped = self._group()
        return self._grouped

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and offset of every token."""
        if self._places is None:
            pages_T = torch.div(self.locations_T, self.page_size, rounding_mode="floor")
            self._places = pages_T, self.locations_T - pages_T * self.page_size
        return self._places

    @property
    def decode_pages(self) -> list[RowPages]:
        """Of every row in ``grouped.decode``."""
        if self._decode_pages is None:
            decode = self.grouped.decode
            rows = [] if decode is None else zip(decode.block_tables, decode.lengths, strict=True)
            self._decode_pages = [row_pages(table, length - 1, 1, self.page_size) for table, length in rows]
        return self._decode_pages

    @property
    def prefill_pages(self) -> list[RowPages]:
        """Of every row in ``grouped.prefill``."""
        if self._prefill_pages is None:
            self._prefill_pages = [
                row_pages(row.block_table, row.start, row.end - row.begin, self.page_size)
                for row in self.grouped.prefill
            ]
        return self._prefill_pages

    def _group(self) -> Rows:
        prefill: list[PrefillRow] = []
        single: list[int] = []
        for row, start in enumerate(self.starts):
            begin, end = self.bounds[row], self.bounds[row + 1]
            if end - begin == 1 and start > 0:
                single.append(row)
            else:
                cuts = self.cuts.get(row, [])
                prefill.append(PrefillRow(begin, end, start, self.slots[row], self.block_tables[row], cuts))
        if not single:
            return Rows(None, prefill)
        if not prefill:
            lengths = [start + 1 for start in self.starts]
            return Rows(
                DecodeRows(slice(0, len(single)), self.slots_N, self.slots, lengths, self.block_tables), prefill
            )
        at = [self.bounds[row] for row in single]
        follow = at[-1] - at[0] == len(at) - 1
        decode = DecodeRows(
            tokens=slice(at[0], at[-1] + 1) if follow else torch.tensor(at),
            slots=torch.tensor([self.slots[row] for row in single]),
            slot_ids=[self.slots[row] for row in single],
            lengths=[self.starts[row] + 1 for row in single],
            block_tables=[self.block_tables[row] for row in single],
        )
        return Rows(decode, prefill)
