"""A plan on its way to the device: one buffer of int32 words, filled on the host, copied at once, read by all kernels.

The buffer on the device is one and the same for every step, so that captured graphs find the words where they were;
copies and steps follow one another on one stream. The host's side is a ring, because a copy may still be under way
while the next plan is written.

    words   [real tokens, real rows | places of sampled rows in what is read, their sequences and outputs: max_running
             each | rows of the shape | lists]

Legend: T packed tokens, N decode rows, R prefill rows, X tiles, S sequences, M pages of a block table.
"""

from typing import NamedTuple

import numpy as np
import torch
from hybserve_kernels.rows import TILE, DecodeRows, DeviceStep, LastTokens, PrefillRows

from hybserve.core.messages import StepPlan
from hybserve.plan.floors import pages_of
from hybserve.plan.result import EngineLimits
from hybserve.runner.inputs import Ints, Packed, exports_of, locations
from hybserve.runner.sequences import Sequences

#: Steps whose words may be under way at once: one runs, one waits, one is written.
_RING = 3
_HEAD = 16  # words before the first section: real tokens at 0, real rows at
_REAL_ROWS = 4  # aligned too, so that kernels are the same for both
_LAST = -4  # the sections about last tokens
_TILE_ROWS = _LAST - 3
_ALIGNED = 4  # words; every section and list begins at 16 bytes


class Shape(NamedTuple):
    """Room of a step: of a captured graph, or exactly what one plan needs. ``pages``: width of its block tables;
    ``last``: rows whose last tokens alone are read, 0 = all tokens are."""

    tokens: int
    decode_rows: int
    prefill_rows: int
    tiles: int
    pages: int
    last: int

    @property
    def sizes(self) -> list[int]:
        """Words of its sections, padding included."""
        return [-(-count // _ALIGNED) * _ALIGNED for count in self.counts]

    @property
    def counts(self) -> list[int]:
        rows = [self.decode_rows] * 3 + [self.prefill_rows] * 6 + [self.tiles] * 3
        return [self.tokens] * 4 + rows + [self.last] * 4

    @property
    def words(self) -> int:
        return sum(self.sizes)


class Lists(NamedTuple):
    """What a step brings beside its rows, as int32 tensors on the device of exactly the length that is needed."""

    table_places: torch.Tensor  # seq · M + index of new pages in the block tables, and the pages
    table_pages: torch.Tensor
    state_copies_X2: torch.Tensor
    page_copies_X2: torch.Tensor
    state_exports_X2: torch.Tensor  # active slot and checkpoint of decode rows, copied after the forward
    exported_X: torch.Tensor  # every checkpoint that the step writes


class Step(NamedTuple):
    """A plan as numbers: what ``Staging.send`` puts into words."""

    plan: StepPlan
    packed: Packed
    decoding: int  # rows of one token that continue a state, at the front
    places: list[int]
    pages: list[int]

    def shape(self, limits: EngineLimits, scored: bool) -> Shape:
        """The least room it needs. ``scored``: tokens inside its rows are read, not only the last ones."""
        counts = self.packed.counts[self.decoding :]
        ends = self.packed.starts + self.packed.counts
        return Shape(
            tokens=int(self.packed.bounds[-1]),
            decode_rows=self.decoding,
            prefill_rows=len(counts),
            tiles=int((-(-counts // TILE)).sum()),
            pages=pages_of(int(ends.max()), limits.page_size),
            last=0 if scored or not len(counts) else len(ends),
        )


def make_step(plan: StepPlan, places: list[int], pages: list[int]) -> Step:
    packed = Packed(plan)
    single = (packed.counts == 1) & (packed.starts > 0)
    decoding = len(single) if single.all() else int(single.argmin())
    return Step(plan, packed, decoding, places, pages)


class Staging:
    """``device_words`` are what kernels read. Not thread-safe, one stream."""

    def __init__(self, limits: EngineLimits, device: torch.device) -> None:
        self._limits, self._device = limits, device
        self.table_width = pages_of(limits.max_seq_len, limits.page_size)
        running, tokens = limits.max_running, limits.step_tokens
        self._room = room = -(-running // _ALIGNED) * _ALIGNED  # of each of the sampled columns
        self._rows_at = _HEAD + 3 * room
        largest = Shape(tokens, running, running, tokens // TILE + running, self.table_width, running)
        lists = 2 * running * self.table_width + 8 * (tokens // TILE + 2 * running) + 64
        size = self._rows_at + largest.words + lists
        self.device_words = torch.zeros(size, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._ring = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(_RING)]
        self._sent: list[torch.cuda.Event | None] = [None] * _RING
        self._next = 0
        columns = self.device_words[_HEAD : self._rows_at].view(3, room)[:, :running]
        self.sample_at, self.sample_seqs, self.sample_outputs = columns.unbind(0)

    def views(self, shape: Shape, tables_SM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, DeviceStep]:
        """Token ids [T] (SAMPLED still inside), the sequences they belong to [T], and the rows of a step of this shape.
        The block tables are gathered on the device at the time of the call, or of the replay."""
        tokens, seqs, *sections = self._sections(self.device_words, shape)
        positions, locations_T, lengths, slots, decode_seqs, *prefill = sections[:_LAST]
        tables_SM = tables_SM[:, : shape.pages]
        decode = None
        if shape.decode_rows:
            decode = DecodeRows(shape.decode_rows, lengths, slots, tables_SM.index_select(0, decode_seqs))
        rows = None
        if shape.prefill_rows:
            begins, counts, starts, slots, prefill_seqs, first_tiles, *tiles = prefill
            tables_RM = tables_SM.index_select(0, prefill_seqs)
            rows = PrefillRows(
                shape.prefill_rows, shape.tiles, begins, counts, starts, slots, tables_RM, first_tiles, *tiles
            )
        last = None
        if shape.last:
            at, last_positions, lengths, last_seqs = sections[_LAST:]
            no_slots = at[:0]  # attention has none
            queries = DecodeRows(shape.last, lengths, no_slots, tables_SM.index_select(0, last_seqs))
            last = LastTokens(self.device_words[_REAL_ROWS : _REAL_ROWS + 1], at, last_positions, queries)
        return tokens, seqs, DeviceStep(self.device_words[:1], positions, locations_T, decode, rows, last)

    def _sections(self, words: torch.Tensor, shape: Shape) -> list[torch.Tensor]:
        at = self._rows_at
        sections = words[at : at + shape.words].split_with_sizes(shape.sizes)
        return [section[:count] for section, count in zip(sections, shape.counts, strict=True)]

    def send(self, step: Step, shape: Shape, sequences: Sequences) -> Lists:
        """Write the words of a step into a shape that has room for it, and start their copy."""
        host = self._host()
        self._fill(host, step, shape, sequences)
        plan = step.plan
        at = self._rows_at + shape.words
        exports = list(exports_of(plan))
        decode_exports = [word for row, _, slot in exports if row < step.decoding for word in (plan.slots[row], slot)]
        columns = (
            step.places,
            step.pages,
            plan.state_copies,
            plan.page_copies,
            decode_exports,
            [slot for _, _, slot in exports],
        )
        spans = []
        numbers = host.numpy()
        for column in columns:
            end = at + len(column)
            numbers[at:end] = column
            spans.append((at, end))
            at = -(-end // _ALIGNED) * _ALIGNED
        self.device_words[:at].copy_(host[:at], non_blocking=True)
        self._mark()
        places, pages, states, copies, exported, slots = (self.device_words[low:high] for low, high in spans)
        return Lists(places, pages, states.view(-1, 2), copies.view(-1, 2), exported.view(-1, 2), slots)

    def send_empty(self, shape: Shape) -> None:
        """The words of a step in which every row, tile and token is padding."""
        host = self._host()
        host[: self._rows_at].zero_()
        self._clear(host, shape)
        at = self._rows_at + shape.words
        self.device_words[:at].copy_(host[:at], non_blocking=True)
        self._mark()

    def _host(self) -> torch.Tensor:
        """The oldest buffer of the ring, once its copy is through."""
        self._next = (self._next + 1) % _RING
        sent = self._sent[self._next]
        if sent is not None:
            sent.synchronize()
        return self._ring[self._next]

    def _mark(self) -> None:
        if self._device.type == "cuda":
            event = self._sent[self._next]
            if event is None:
                event = self._sent[self._next] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()

    def _clear(self, host: torch.Tensor, shape: Shape) -> None:
        at = self._rows_at
        host[at : at + shape.words].zero_()
        sections = self._sections(host, shape)
        sections[3].fill_(-1)  # locations
        sections[_TILE_ROWS].fill_(-1)
        host[_HEAD + self._room : _HEAD + 2 * self._room].fill_(-1)  # sampled sequences

    def _fill(self, host: torch.Tensor, step: Step, shape: Shape, sequences: Sequences) -> None:
        plan, packed = step.plan, step.packed
        self._clear(host, shape)
        count = int(packed.bounds[-1])
        words = host.numpy()
        words[0] = count
        samples = len(plan.sample_rows)
        at, seqs, outputs = words[_HEAD : self._rows_at].reshape(3, self._room)
        at[:] = 0
        ends = packed.bounds[1:] - 1
        at[:samples] = plan.sample_rows if shape.last else ends[plan.sample_rows]
        seqs[:samples] = plan.sample_seqs
        outputs[:samples] = plan.sample_outputs
        sections = [section.numpy() for section in self._sections(host, shape)]
        tokens, seqs, positions, places, lengths, slots, decode_seqs, *prefill = sections[:_LAST]
        all_seqs = np.asarray(plan.seqs, dtype=np.int32)
        tokens[:count] = plan.tokens
        seqs[:count] = all_seqs[packed.rows_T]
        positions[:count] = packed.positions_T
        tables = [sequences[seq].table for seq in plan.seqs]
        found = locations(packed, tables, self._limits.page_size)
        if plan.gap_rows:
            write_from_N = packed.starts.copy()
            write_from_N[plan.gap_rows] = plan.gap_ends
            found[packed.positions_T < write_from_N[packed.rows_T]] = -1
        places[:count] = found
        decoding = step.decoding
        lengths[:decoding] = packed.starts[:decoding] + 1
        slots[:decoding] = plan.slots[:decoding]
        decode_seqs[:decoding] = all_seqs[:decoding]
        if decoding < len(plan.seqs):
            self._fill_prefill(step, all_seqs, prefill)
        if shape.last:
            rows = words[_REAL_ROWS] = len(ends)
            last_at, last_positions, last_lengths, last_seqs = sections[_LAST:]
            last_at[:rows] = ends
            last_lengths[:rows] = packed.starts + packed.counts
            last_positions[:rows] = last_lengths[:rows] - 1
            last_seqs[:rows] = all_seqs

    def _fill_prefill(self, step: Step, all_seqs: Ints, sections: list[Ints]) -> None:
        plan, packed, decoding = step.plan, step.packed, step.decoding
        begins, counts, starts, slots, seqs, first_tiles, tile_rows, tile_offsets, exports = sections
        rows = len(plan.seqs) - decoding
        own = packed.counts[decoding:]
        begins[:rows] = packed.bounds[decoding:-1]
        counts[:rows] = own
        starts[:rows] = packed.starts[decoding:]
        slots[:rows] = plan.slots[decoding:]
        seqs[:rows] = all_seqs[decoding:]
        tiles_R = -(-own // TILE)
        ends_R = np.cumsum(tiles_R)
        first_R = ends_R - tiles_R
        first_tiles[:rows] = first_R
        of_tile = np.repeat(np.arange(rows), tiles_R)
        tile_rows[: len(of_tile)] = of_tile
        tile_offsets[: len(of_tile)] = (np.arange(len(of_tile)) - first_R[of_tile]) * TILE
        for row, tokens, slot in exports_of(plan):
            if row >= decoding:
                assert tokens % TILE == 0, f"a checkpoint after {tokens} tokens of a row, which is inside a tile"
                exports[int(first_R[row - decoding]) + tokens // TILE - 1] = slot
