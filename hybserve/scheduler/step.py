"""What the next step computes, as the columns of a StepPlan.

Pages are dealt in the total order; whoever finds none parks the last. So a victim always stands behind the sequence
that needs the page, where this pass has not been yet: nothing already planned is ever taken back. Rows of sequences
that decode come first in the plan, then prefill chunks by order, then what is newly admitted, all under step_tokens.
"""

from dataclasses import dataclass, field

from hybserve.cache.node import Node
from hybserve.cache.tree import Match
from hybserve.core.messages import SequenceStart, StepPlan, ToRunner
from hybserve.core.types import SAMPLED
from hybserve.plan.result import EngineLimits
from hybserve.scheduler.admission import pages_at_admission
from hybserve.scheduler.chunking import chunk_end
from hybserve.scheduler.prefix import Export
from hybserve.scheduler.queues import Waiting
from hybserve.scheduler.request import Sequence, State
from hybserve.scheduler.running import Running


@dataclass(slots=True)
class Chunk:
    """A prefill row: tokens [start, end) of a sequence, the pages it appends and who samples from its end."""

    sequence: Sequence
    start: int
    end: int
    pages: list[int]
    samplers: list[Sequence]
    exports: list[Export]


@dataclass(slots=True)
class Flight:
    """What must be remembered of a plan until its result comes back."""

    plan: StepPlan
    rows: list[Sequence]  # parallel to the plan's rows
    samplers: list[Sequence]  # parallel to the plan's sample columns
    decoding: int  # the first so many samples are those of decode rows
    chunks: list[Chunk]
    forked: list[tuple[int, Sequence]]  # (index, sequence) of choices forked by this plan
    exports: list[Export]  # parallel to the plan's export columns
    restored: list[Node]  # whose checkpoints this plan copies into active slots


@dataclass(slots=True)
class _Draft:
    """The plan being made."""

    rows: list[Sequence] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    page_rows: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    chunk_tokens: int = 0
    begun: list[SequenceStart] = field(default_factory=list)
    state_copies: list[int] = field(default_factory=list)
    page_copies: list[int] = field(default_factory=list)
    fork_seqs: list[int] = field(default_factory=list)
    fork_pages: list[int] = field(default_factory=list)
    forked: list[tuple[int, Sequence]] = field(default_factory=list)
    boundaries: list[tuple[int, Export]] = field(default_factory=list)  # (row, export) of decode rows
    restored: list[Node] = field(default_factory=list)
    leaving: list[Sequence] = field(default_factory=list)  # ended leads, for whom this fork was the last duty


class StepMaker:
    """Makes plans, one after another, from what runs and what waits."""

    def __init__(self, limits: EngineLimits, running: Running, waiting: Waiting, epoch: int) -> None:
        self._limits = limits
        self._running = running
        self._waiting = waiting
        self._epoch = epoch
        self.admitted: list[Sequence] = []  # leads let in by the last plan

    def make(self, settled: int) -> tuple[list[ToRunner], Flight] | None:
        """The next plan with the sequences it names first; None if there is nothing to do.

        ``settled``: the last plan whose result is known.
        """
        self.admitted = []
        draft = _Draft()
        self._deal(draft)
        if len(self._waiting):
            self._admit(draft, settled)
        made = self._finish(draft) if draft.rows or draft.chunks or draft.state_copies else None
        for lead in draft.leaving:
            self._running.leave(lead, State.GONE)
        return made

    def _deal(self, draft: _Draft) -> None:
        """Rows for what runs, in the total order."""
        sequences = self._running.sequences
        decode, prefill, most = State.DECODE, State.PREFILL, self._limits.step_tokens
        rows, seqs, starts, slots, outputs = draft.rows, draft.seqs, draft.starts, draft.slots, draft.outputs
        position = 0
        while position < len(sequences):
            sequence = sequences[position]
            position += 1
            if sequence.state is prefill:
                self._chunk(draft, sequence, position)
                continue
            if sequence.state is not decode:
                self._leave_fork(draft, sequence)
                if sequence.state is not decode:
                    continue
            output = sequence.sampled
            if output == sequence.max_tokens or len(rows) == most:
                continue
            start = sequence.planned
            if start >= sequence.edge and not self._at_edge(draft, sequence, start):
                continue
            rows.append(sequence)
            seqs.append(sequence.index)
            starts.append(start)
            slots.append(sequence.slot)
            outputs.append(output)
            sequence.planned = start + 1
            sequence.sampled = output + 1

    def _at_edge(self, draft: _Draft, sequence: Sequence, start: int) -> bool:
        """A decode row at the first or last token of a page: a new page, an export. False if it was parked instead."""
        running, page = self._running, self._limits.page_size
        if start == sequence.capacity:
            if not running.room_to_grow(sequence):
                return False
            draft.page_rows.append(len(draft.rows))
            draft.page_ids += running.grow(sequence, 1)
        last = start // page * page + page - 1
        if start < last:
            sequence.edge = last
            return True
        sequence.edge = start + 1
        if running.prefix.exports_states:
            export = running.prefix.boundary(sequence, start + 1, running.step)
            if export is not None:
                draft.boundaries.append((len(draft.rows), export))
        return True

    def _chunk(self, draft: _Draft, sequence: Sequence, position: int) -> None:
        """The next prefill chunk of the running sequence at ``position``: what budget and free pages allow, or none."""
        limits, running = self._limits, self._running
        start = sequence.planned
        spare = self._spare(draft, len(draft.rows) + self._decode_demand(position))
        end = chunk_end(start, sequence.fill, limits.page_size, min(limits.prefill_chunk, spare))
        if end <= start:
            return
        pages: list[int] = []
        if end > sequence.capacity:
            if start == sequence.capacity and not running.room_to_grow(sequence):
                return
            needed = running.pages_needed(sequence, end)
            running.prefix.reclaim_pages(needed, running.step)
            pages = running.grow(sequence, min(needed, running.pages.available))
            end = min(end, sequence.capacity)
        self._add_chunk(draft, sequence, end, pages)

    def _spare(self, draft: _Draft, decoding: int) -> int:
        """Prefill tokens that the step still has room for beside ``decoding`` rows. These must not wait long for it,
        unless so much waits for admission that everybody is better off when it is done with."""
        limits = self._limits
        most = limits.step_tokens - decoding
        long_queue = 0 < limits.prefill_backlog < self._waiting.tokens
        if decoding and limits.prefill_beside and not long_queue:
            most = min(most, limits.prefill_beside)
        return most - draft.chunk_tokens

    def _decode_demand(self, position: int) -> int:
        """Most rows that sequences from ``position`` on can take in this step for decoding."""
        demand = 0
        for sequence in self._running.sequences[position:]:
            if sequence.state is State.DECODE:
                demand += sequence.sampled < sequence.max_tokens
            elif sequence.state is State.FORK:
                demand += sequence.request.sequences[0].state is not State.PREFILL
        return demand

    def _add_chunk(self, draft: _Draft, sequence: Sequence, end: int, pages: list[int]) -> None:
        prefix, start = self._running.prefix, sequence.planned
        exports = prefix.exports(sequence, start, end, self._running.step) if prefix.exports_states else []
        chunk = Chunk(sequence, start, end, pages, [], exports)
        draft.chunks.append(chunk)
        draft.chunk_tokens += end - start
        sequence.planned = end
        if not sequence.started:
            self._begin(draft, sequence)
        if end == sequence.fill:
            self._sample_at_end(draft, chunk)

    def _sample_at_end(self, draft: _Draft, chunk: Chunk) -> None:
        """The last chunk of a prefill samples once for every choice that was admitted with it."""
        lead = chunk.sequence
        lead.state = State.FORK if len(lead.group) > 1 else State.DECODE
        for member in lead.group:
            if not member.started:
                self._begin(draft, member)
            member.sampled = len(member.output) + 1
            chunk.samplers.append(member)

    def _begin(self, draft: _Draft, sequence: Sequence) -> None:
        self._running.name(sequence)
        request = sequence.request
        history = request.prompt + sequence.output if request.sampling.needs_history else []
        draft.begun.append(
            SequenceStart(
                seq=sequence.index,
                epoch=self._epoch,
                choice=sequence.choice,
                sampling=request.sampling,
                history=history,
                prompt_len=len(request.prompt),
                generated=len(sequence.output),
            )
        )

    def _leave_fork(self, draft: _Draft, sequence: Sequence) -> None:
        """From FORK to DECODE, as soon as the prefill that it waits for has been planned to its end."""
        if sequence.sampled == sequence.max_tokens:
            return
        if sequence.choice == 0:
            self._open_fork(draft, sequence)
        elif sequence.request.sharers:
            self._fork(draft, sequence)

    def _open_fork(self, draft: _Draft, lead: Sequence) -> None:
        """The lead decodes from here; in this same plan its siblings, next in the order, are forked from it."""
        self._running.share(lead)
        if lead.ended:  # this plan's copies read what it holds: it leaves when the plan is made
            lead.sampled = lead.max_tokens
            draft.leaving.append(lead)
        else:
            lead.state = State.DECODE

    def _fork(self, draft: _Draft, choice: Sequence) -> None:
        """A copy of the lead's state, and of its partial page or else a fresh page; parked if there is no page."""
        running, request = self._running, choice.request
        if not running.room_to_grow(choice):
            return
        lead = request.sequences[0]
        running.join(choice)
        (page,) = running.grow(choice, 1)
        if len(request.prompt) % self._limits.page_size:
            draft.page_copies += [lead.table[len(choice.table) - 1], page]
        draft.state_copies += [lead.slot, choice.slot]
        table = choice.table
        draft.fork_seqs += [choice.index] * len(table)
        draft.fork_pages += table
        draft.forked.append((choice.index, choice))
        choice.state = State.DECODE

    def _admit(self, draft: _Draft, settled: int) -> None:
        """Let in what waits, first come first served, while its first step fits whole.

        Who waits for a prefix that a running prefill is about to publish holds nothing and is passed.
        """
        running, waiting = self._running, self._waiting
        place = 0
        while place < len(waiting):
            spare = self._spare(draft, len(draft.rows))
            lead = waiting.at(place)
            if spare <= 0 or lead.resume_after > settled or not running.has_seats(len(lead.group)):
                return
            if running.prefix.still_awaits(lead):
                place += 1
                continue
            lead.fill = lead.length
            match = running.prefix.look(lead)
            if match is not None and running.prefix.awaited(lead, match):
                place += 1
                continue
            if not self._let_in(draft, lead, match, spare):
                return

    def _let_in(self, draft: _Draft, lead: Sequence, match: Match | None, spare: int) -> bool:
        limits, running = self._limits, self._running
        hit, kv_hit = (match.hit, match.kv_hit) if match is not None else (0, 0)
        end = chunk_end(hit, lead.fill, limits.page_size, min(limits.prefill_chunk, spare))
        pages = max(pages_at_admission(lead, end, limits.page_size) - kv_hit // limits.page_size, 0)
        if end == hit:
            return False
        self._waiting.remove(lead)  # counts it by the state that admission changes
        if not running.admit(lead, pages, match):
            self._waiting.add(lead)
            return False
        request = lead.request
        if not request.admitted_at:
            request.cache = running.prefix.truth(match)
            running.prefix.count(request)
        if match is not None and match.source is not None and match.source.checkpoint is not None:
            draft.state_copies += [match.source.checkpoint.slot, lead.slot]
            draft.restored.append(match.source)
        self.admitted.append(lead)
        self._add_chunk(draft, lead, end, list(lead.table))
        return True

    def _finish(self, draft: _Draft) -> tuple[list[ToRunner], Flight]:
        running, decoding = self._running, len(draft.rows)
        rows, samplers = draft.rows, list(draft.rows)
        sample_rows, sample_seqs, sample_outputs = list(range(decoding)), list(draft.seqs), draft.outputs
        counts, tokens = [1] * decoding, [SAMPLED] * decoding
        exports = [export for _, export in draft.boundaries]
        export_rows = [row for row, _ in draft.boundaries]
        gap_rows: list[int] = []
        gap_ends: list[int] = []
        for chunk in draft.chunks:
            sequence, row = chunk.sequence, len(rows)
            rows.append(sequence)
            draft.seqs.append(sequence.index)
            draft.starts.append(chunk.start)
            draft.slots.append(sequence.slot)
            counts.append(chunk.end - chunk.start)
            tokens += sequence.ids(chunk.start, chunk.end)
            draft.page_rows += [row] * len(chunk.pages)
            draft.page_ids += chunk.pages
            if chunk.start < sequence.write_from:
                gap_rows.append(row)
                gap_ends.append(sequence.write_from)
            exports += chunk.exports
            export_rows += [row] * len(chunk.exports)
            samplers += chunk.samplers
            sample_rows += [row] * len(chunk.samplers)
            sample_seqs += [member.index for member in chunk.samplers]
            sample_outputs += [member.sampled - 1 for member in chunk.samplers]
        running.step += 1
        plan = StepPlan(
            step=running.step,
            epoch=self._epoch,
            seqs=draft.seqs,
            starts=draft.starts,
            counts=counts,
            slots=draft.slots,
            tokens=tokens,
            page_rows=draft.page_rows,
            page_ids=draft.page_ids,
            sample_rows=sample_rows,
            sample_seqs=sample_seqs,
            sample_outputs=sample_outputs,
            state_copies=draft.state_copies,
            page_copies=draft.page_copies,
            fork_seqs=draft.fork_seqs,
            fork_pages=draft.fork_pages,
            freed=running.freed,
            gap_rows=gap_rows,
            gap_ends=gap_ends,
            export_rows=export_rows,
            export_positions=[export.position for export in exports],
            export_slots=[export.slot for export in exports],
        )
        running.freed = []
        flight = Flight(plan, rows, samplers, decoding, draft.chunks, draft.forked, exports, draft.restored)
        return [*draft.begun, plan], flight
