"""Stand-ins for neighbours: a runner without tensors that tells on every mistake, and channels in memory.

The tattletale runner speaks the same frames as the real one. A slot holds a hash of all tokens its state has seen, a
page holds per token a hash of that state and of all KV that was read before it; the next token is a function of both.
So an aliased or stale page, a wrong start, a missed or misdirected copy changes tokens at once. ``expected_tokens``
computes the right ones from the prompt alone.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import mul, xor
from typing import Any

import msgspec

from hybserve.core.messages import FromRunner, SequenceStart, StepDone, StepFailed, StepPlan, Stop, ToRunner
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import SAMPLED, TokenLogprobs
from hybserve.plan.result import EngineLimits
from hybserve.wire.channel import ChannelClosed
from hybserve.wire.codec import Codec

_MASK = (1 << 64) - 1
_POISON = 0xDEAD_BEEF_DEAD_BEEF


def mix(value: int) -> int:
    """A 64-bit hash of 64 bits: every input bit reaches the top bits."""
    value = ((value ^ (value >> 31)) * 0x9E37_79B9_7F4A_7C15) & _MASK
    return value ^ (value >> 29)


def limits(**changes: Any) -> EngineLimits:
    """Small limits that a test changes where it cares."""
    values: dict[str, Any] = {
        "page_size": 4, "kv_pages": 64, "state_slots": 9, "max_running": 8, "max_seq_len": 128,
        "step_tokens": 32, "prefill_chunk": 16,
        "kv_dtype": "float32", "state_dtype": "float32", "conv_dtype": "float32",
    }  # fmt: skip
    return EngineLimits(**(values | changes))


class Pages:
    """KV content: one hash per location, and per page the fold of what stands in it."""

    def __init__(self, count: int, page_size: int) -> None:
        self.page_size = page_size
        self.content = [[_POISON] * page_size for _ in range(count)]
        self.folds = [_fold(page) for page in self.content]

    def write(self, page: int, offset: int, value: int) -> None:
        content = self.content[page]
        self.folds[page] ^= content[offset] ^ value
        content[offset] = value

    def copy(self, source: int, target: int) -> None:
        self.content[target] = list(self.content[source])
        self.folds[target] = self.folds[source]

    def poison(self, page: int) -> None:
        self.content[page] = [mix(_POISON + page * self.page_size + offset) for offset in range(self.page_size)]
        self.folds[page] = _fold(self.content[page])

    def read(self, table: list[int], length: int) -> int:
        """One number for all KV before ``length``: which pages, in which order, with what in them."""
        full, rest = divmod(length, self.page_size)
        total = sum(map(mul, range(1, 2 * full, 2), map(self.folds.__getitem__, table[:full])))
        if rest:
            total += (2 * full + 1) * _fold(self.content[table[full]][:rest])
        return total & _MASK


def _fold(values: Iterable[int]) -> int:
    return reduce(xor, values, 0)


def next_state(state: int, token: int, kv: int) -> int:
    return mix(state + (token + 1) * 0xD6E8_FEB8_6659_FD93 ^ kv)


def sample(state: int, kv: int, stream: int, output: int, vocab: int) -> int:
    return (mix(state + kv * 0x5851_F42D_4C95_7F2D ^ stream + (output << 40)) >> 33) % vocab


def stream_of(sampling: SamplingParams, choice: int) -> int:
    """The random stream of one choice; greedy choices have none."""
    return 0 if sampling.greedy else mix(sampling.seed * 1_000_003 + choice + 1 & _MASK)


def expected_tokens(
    prompt: list[int], sampling: SamplingParams, n: int, page_size: int, vocab: int = 64, stateful: bool = True
) -> list[list[int]]:
    """What each choice must generate, computed alone and from scratch; the last token may be a stop token."""
    return [_expected(prompt, sampling, choice, page_size, vocab, stateful) for choice in range(n)]


def _expected(
    prompt: list[int], sampling: SamplingParams, choice: int, page_size: int, vocab: int, stateful: bool
) -> list[int]:
    stream, state, output = stream_of(sampling, choice), 0, list[int]()
    folds: list[int] = []
    kv = 0
    position = 0
    tokens = list(prompt)
    while True:
        for token in tokens:
            state = next_state(state if stateful else 0, token, kv)
            page = position // page_size
            if page == len(folds):
                folds.append(0)
            value = mix(state ^ position)
            kv = (kv + (2 * page + 1) * ((folds[page] ^ value) - folds[page])) & _MASK
            folds[page] ^= value
            position += 1
        token = sample(state, kv, stream, len(output), vocab)
        output.append(token)
        if token in sampling.stop_ids or len(output) == sampling.max_tokens:
            return output
        tokens = [token]


@dataclass(slots=True)
class _Seq:
    start: SequenceStart
    stream: int
    table: list[int] = field(default_factory=list)
    slot: int = 0
    last: int = SAMPLED


class TattletaleRunner:
    """A ``RunnerLink``. Executes one plan per ``collect``, so the caller decides how late results are.

    ``bad``: samples that are not finite, as (seed, choice, output); ``bad_states``: exports, as (seed, position).
    ``evil``: called with each plan before it runs; a StepFailed that it returns is the result, and everything the step
    would have written is ruined.
    """

    def __init__(
        self,
        limits: EngineLimits,
        vocab: int = 64,
        bad: Iterable[tuple[int, int, int]] = (),
        bad_states: Iterable[tuple[int, int]] = (),
        evil: Callable[[StepPlan, "TattletaleRunner"], StepFailed | None] | None = None,
    ) -> None:
        self.limits = limits
        self.vocab = vocab
        self.bad = set(bad)
        self.bad_states = set(bad_states)
        self.exported: dict[int, int] = {}  # slot -> position, until acknowledged
        self.evil = evil
        self.pages = Pages(limits.kv_pages, limits.page_size)
        self.slots = [_POISON] * limits.state_slots
        self.seqs: dict[int, _Seq] = {}
        self.plans: list[StepPlan] = []  # executed
        self.page_named = [0] * limits.kv_pages  # the last submitted plan that names it
        self.slot_named = [0] * limits.state_slots
        self.stopped = False
        self._tables: dict[int, list[int]] = {}  # as of the last submitted plan
        self._condemned: dict[int, tuple[set[int], set[int]]] = {}
        self._queue: deque[tuple[list[SequenceStart], StepPlan]] = deque()
        self._in: Codec[ToRunner] = Codec(ToRunner)
        self._out: Codec[FromRunner] = Codec(FromRunner)

    @property
    def pending(self) -> int:
        return len(self._queue)

    def submit(self, frame: bytes) -> None:
        starts: list[SequenceStart] = []
        for message in self._in.decode(frame):
            if isinstance(message, SequenceStart):
                starts.append(message)
            elif isinstance(message, StepPlan):
                check_plan(message, self.limits)
                self._note(message)
                self._queue.append((starts, message))
                starts = []
            else:
                assert isinstance(message, Stop)
                self._queue.clear()
                self.stopped = True

    def collect(self) -> bytes:
        starts, plan = self._queue.popleft()
        return self._out.encode([self.execute(starts, plan)])

    def execute(self, starts: list[SequenceStart], plan: StepPlan) -> StepDone | StepFailed:
        self.plans.append(plan)
        for seq in plan.freed:
            del self.seqs[seq]
        for start in starts:
            assert start.seq not in self.seqs, f"sequence {start.seq} starts twice"
            self.seqs[start.seq] = _Seq(start, stream_of(start.sampling, start.choice))
        for seq, page in zip(plan.fork_seqs, plan.fork_pages, strict=True):
            self.seqs[seq].table.append(page)
        for row, page in zip(plan.page_rows, plan.page_ids, strict=True):
            self.seqs[plan.seqs[row]].table.append(page)
        self._poison(plan)
        failed = self.evil(plan, self) if self.evil is not None else None
        if failed is not None:
            self._ruin(plan)
            return failed
        slots, pairs = self.slots, plan.state_copies
        for source, target in zip(pairs[0::2], pairs[1::2], strict=True):
            slots[target] = slots[source]
        pairs = plan.page_copies
        for source, target in zip(pairs[0::2], pairs[1::2], strict=True):
            self.pages.copy(source, target)
        ends, prompt_logprobs = self._forward(plan)
        done = self._sample(plan, ends, prompt_logprobs)
        positions = [self.exported.pop(slot) for slot in plan.export_slots]
        finite = [(seq, at) not in self.bad_states for seq, at in self._names(plan)]
        for slot, sound in zip(plan.export_slots, finite, strict=True):
            if not sound:
                self.slots[slot] = mix(_POISON ^ slot)
        return msgspec.structs.replace(done, export_positions=positions, export_finite=finite)

    def _names(self, plan: StepPlan) -> list[tuple[int, int]]:
        """(seed of the sequence, position) of every export."""
        rows = [self.seqs[plan.seqs[row]].start.sampling.seed for row in plan.export_rows]
        return list(zip(rows, plan.export_positions, strict=True))

    def _note(self, plan: StepPlan) -> None:
        """Which pages and slots a plan names, block tables of its rows included."""
        for seq in plan.freed:
            self._tables.pop(seq)
        for seq, page in zip(plan.fork_seqs, plan.fork_pages, strict=True):
            self._tables.setdefault(seq, []).append(page)
        for row, page in zip(plan.page_rows, plan.page_ids, strict=True):
            self._tables.setdefault(plan.seqs[row], []).append(page)
        for seq in plan.sample_seqs:
            self._tables.setdefault(seq, [])
        for seq in plan.seqs:
            for page in self._tables[seq]:
                self.page_named[page] = plan.step
        for page in plan.page_copies + plan.fork_pages:
            self.page_named[page] = plan.step
        for slot in plan.slots + plan.state_copies + plan.export_slots:
            self.slot_named[slot] = plan.step

    def condemn(self, plan: StepPlan, pages: Iterable[int], slots: Iterable[int]) -> None:
        """Ids that were free when ``plan`` was made: poisoned just before it runs, but for what it still reads."""
        named = {*plan.page_copies, *plan.state_copies, *plan.slots}
        self._condemned[plan.step] = set(pages) - named, set(slots) - named

    def _poison(self, plan: StepPlan) -> None:
        pages, slots = self._condemned.pop(plan.step, ((), ()))
        for page in pages:
            self.pages.poison(page)
        for slot in slots:
            self.slots[slot] = mix(_POISON + slot)

    def _ruin(self, plan: StepPlan) -> None:
        """A step that failed half-way: nobody knows what it has written, but never into a gap."""
        gaps = dict(zip(plan.gap_rows, plan.gap_ends, strict=True))
        for row, (seq, start, count, slot) in enumerate(
            zip(plan.seqs, plan.starts, plan.counts, plan.slots, strict=True)
        ):
            self.slots[slot] = mix(_POISON ^ slot)
            table, page_size = self.seqs[seq].table, self.limits.page_size
            for position in range(max(start, gaps.get(row, 0)), start + count):
                self.pages.write(table[position // page_size], position % page_size, mix(_POISON ^ position))
        for target in plan.state_copies[1::2]:
            self.slots[target] = mix(_POISON ^ target)

    def _forward(self, plan: StepPlan) -> tuple[list[tuple[int, int]], list[tuple[int, list[TokenLogprobs]]]]:
        """(state, kv) at the end of every row, and what prompt log-probabilities are owed."""
        at = 0
        wanted = list(zip(plan.export_rows, plan.export_positions, plan.export_slots, strict=True))
        gaps = dict(zip(plan.gap_rows, plan.gap_ends, strict=True))
        ends: list[tuple[int, int]] = []
        scored: list[tuple[int, list[TokenLogprobs]]] = []
        for row, (seq, start, count, slot) in enumerate(
            zip(plan.seqs, plan.starts, plan.counts, plan.slots, strict=True)
        ):
            book = self.seqs[seq]
            book.slot = slot
            entries = [] if book.start.sampling.prompt_logprobs >= 0 and book.start.generated == 0 else None
            exports = {p: s for r, p, s in wanted if r == row} if wanted else {}
            ends.append(self._row(book, start, plan.tokens[at : at + count], entries, gaps.get(row, 0), exports))
            at += count
            if entries:
                scored.append((row, entries))
        return ends, scored

    def _row(
        self,
        book: _Seq,
        start: int,
        tokens: list[int],
        entries: list[TokenLogprobs] | None,
        write_from: int,
        exports: dict[int, int],
    ) -> tuple[int, int]:
        pages, page_size, table = self.pages, self.limits.page_size, book.table
        state, kv = (self.slots[book.slot] if start else 0), pages.read(table, start)
        offset = start % page_size
        within = _fold(pages.content[table[start // page_size]][:offset]) if offset else 0
        for position, token in enumerate(tokens, start):
            before = state if self.limits.stateful else 0
            state = next_state(before, book.last if token == SAMPLED else token, kv)
            index, offset = divmod(position, page_size)
            if position < write_from:
                value = pages.content[table[index]][offset]
            else:
                value = mix(state ^ position)
                pages.write(table[index], offset, value)
            if position + 1 in exports:
                slot = exports[position + 1]
                self.slots[slot], self.exported[slot] = state, position + 1
            before = within if offset else 0
            within = before ^ value
            kv = (kv + (2 * index + 1) * (within - before)) & _MASK
            if entries is not None and position + 1 < book.start.prompt_len:
                entries.append(TokenLogprobs(-(mix(state ^ kv) % 1000) / 100))
        self.slots[book.slot] = state
        return state, kv

    def _sample(
        self, plan: StepPlan, ends: list[tuple[int, int]], scored: list[tuple[int, list[TokenLogprobs]]]
    ) -> StepDone:
        tokens: list[int] = []
        bad: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        asked = False
        for row, seq, output in zip(plan.sample_rows, plan.sample_seqs, plan.sample_outputs, strict=True):
            book = self.seqs[seq]
            sampling = book.start.sampling
            token = sample(*ends[row], book.stream, output, self.vocab)
            if self.bad and (sampling.seed, book.start.choice, output) in self.bad:
                bad.append(len(tokens))
                token = 0
            book.last = token
            tokens.append(token)
            wanted = sampling.logprobs >= 0
            asked |= wanted
            logprobs.append(TokenLogprobs(-token / 8, (token,), (-token / 8,)) if wanted else None)
        return StepDone(plan.step, plan.epoch, tokens, bad, logprobs if asked else [], scored, 1.0)


def check_plan(plan: StepPlan, limits: EngineLimits) -> None:
    """What every plan must satisfy whatever it means."""
    rows = len(plan.seqs)
    assert rows == len(plan.starts) == len(plan.counts) == len(plan.slots)
    assert len(set(plan.seqs)) == rows, "a sequence has two rows"
    assert len(set(plan.slots)) == rows, "two rows share an active slot"
    assert all(0 < slot < limits.state_slots for slot in plan.slots), "a row uses the padding slot"
    assert all(0 < page < limits.kv_pages for page in plan.page_ids + plan.fork_pages), "the padding page is named"
    assert all(0 <= seq < limits.max_running for seq in plan.seqs), "sequence indices are not dense"
    assert sum(plan.counts) == len(plan.tokens) <= limits.step_tokens, "more tokens than a step may have"
    assert all(0 < count <= limits.prefill_chunk for count in plan.counts)
    assert len(plan.sample_rows) == len(plan.sample_seqs) == len(plan.sample_outputs)
    assert len(set(plan.sample_seqs)) == len(plan.sample_seqs), "a sequence samples twice"
    assert len(plan.export_rows) == len(plan.export_positions) == len(plan.export_slots)
    assert len(set(plan.export_slots)) == len(plan.export_slots), "two exports into one slot"
    used = {*plan.slots, *plan.state_copies}
    assert not used & set(plan.export_slots), "an export into a slot that is in use"
    assert all(0 < slot < limits.state_slots for slot in plan.export_slots)
    for row, position in zip(plan.export_rows, plan.export_positions, strict=True):
        assert plan.starts[row] < position <= plan.starts[row] + plan.counts[row], "an export outside its row"
        assert position % limits.page_size == 0, "an export inside a page"
    for row, gap in zip(plan.gap_rows, plan.gap_ends, strict=True):
        assert plan.starts[row] < gap, "a gap that is none"
    for pairs in (plan.state_copies, plan.page_copies):
        sources, targets = pairs[0::2], pairs[1::2]
        assert len(set(targets)) == len(targets), "two copies into one"
        assert not set(targets) & set(sources), "copies overlap"
        assert 0 not in targets, "a copy into padding"
    sampling = set(plan.sample_rows)
    for row, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        end = start + count
        assert row in sampling or end % limits.page_size == 0, "a chunk ends inside a page and is not the last"


class Link:
    """One end of an in-memory channel with the methods of ``hybserve.wire.channel.Channel``."""

    def __init__(self) -> None:
        self.inbox: deque[Any] = deque()
        self.sent: list[Any] = []  # messages, frame borders dropped
        self.frames = 0
        self.closed = False  # the peer is gone

    def send(self, messages: Iterable[Any]) -> None:
        self.sent += messages
        self.frames += 1

    def receive(self, timeout: float | None = None) -> list[Any]:
        messages = list(self.inbox)
        self.inbox.clear()
        if not messages and self.closed:
            raise ChannelClosed("closed by the test")
        return messages


class PoisoningLink:
    """A real runner whose freed pages and slots turn to NaN before the first plan that cannot name them any more."""

    def __init__(self, runner: Any, scheduler: Any) -> None:
        self._runner = runner
        self._pools = scheduler.running
        self._known: tuple[set[int], set[int]] = (set(), set())
        self._condemned: deque[tuple[set[int], set[int]]] = deque()
        self._plans: Codec[ToRunner] = Codec(ToRunner)
        self._plan = scheduler.plan
        scheduler.plan = self._note

    def _note(self) -> Any:
        frame = self._plan()
        if frame is not None:
            plan, free = frame[-1], (self._pools.pages.free_ids(), self._pools.slots.free_ids())
            named = {*plan.page_copies, *plan.fork_pages}, {*plan.state_copies, *plan.slots}
            self._condemned.append((free[0] - self._known[0] - named[0], free[1] - self._known[1] - named[1]))
            self._known = free
        return frame

    def submit(self, frame: bytes) -> None:
        self._runner.submit(frame)

    def collect(self) -> bytes:
        pages, slots = self._condemned.popleft()
        self._runner.pools.poison_pages(pages)
        self._runner.pools.poison_slots(slots)
        return bytes(self._runner.collect())
