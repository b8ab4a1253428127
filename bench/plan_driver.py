"""Drives a real runner by hand-made plans: a scheduler that decides nothing, its caller forces every chunk, fork, park
and resume. The parity matrix and the runner's tests are written with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from hybserve.cache.pool import Pool
from hybserve.core.messages import FromRunner, SequenceStart, StepDone, StepFailed, StepPlan, ToRunner
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import SAMPLED
from hybserve.plan.result import EngineLimits
from hybserve.runner import execute
from hybserve.runner.main import Runner
from hybserve.runner.sampler import Sampled
from hybserve.runner.sequences import Sequence
from hybserve.wire.codec import Codec


class Live:
    """One choice of one request, on the device or parked."""

    def __init__(self, prompt: list[int], sampling: SamplingParams, choice: int) -> None:
        self.prompt, self.sampling, self.choice = prompt, sampling, choice
        self.output: list[int] = []
        self.logprobs: list[object] = []
        self.seq = -1  # -1 = not on the device
        self.computed = 0
        self.in_pool = False  # the last output token lies in the runner's token pool
        self.slot = 0
        self.table: list[int] = []
        self.started = False
        self.siblings: list[Live] = []  # forked from this one when its prompt is done

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def todo(self) -> int:
        """Tokens known and not yet computed."""
        return len(self.prompt) + len(self.output) - self.computed


class StepError(RuntimeError):
    """The runner answered StepFailed."""


class Driver:
    """Makes plans for a runner; owns the ids as a scheduler would. Plans run ahead of nothing: one at a time."""

    def __init__(self, runner: Runner, limits: EngineLimits, epoch: int = 1) -> None:
        self.runner, self.limits, self.epoch = runner, limits, epoch
        self.pages = Pool("pages", limits.kv_pages)
        self.slots = Pool("slots", limits.state_slots)
        self.step_number = 0
        self.prompt_logprobs: dict[int, list[object]] = {}
        self._seqs = list(range(limits.max_running - 1, -1, -1))
        self._freed: list[int] = []
        self._state_copies: list[int] = []
        self._page_copies: list[int] = []
        self._fork_seqs: list[int] = []
        self._fork_pages: list[int] = []
        self._starts: list[SequenceStart] = []
        self._encode = Codec[ToRunner](ToRunner).encode
        self._decode = Codec[FromRunner](FromRunner).decode

    def add(self, prompt: list[int], sampling: SamplingParams, choice: int = 0, n: int = 1) -> Live:
        """A request on the device; with ``n`` > 1 its siblings wait in ``live.siblings`` for the end of the prompt."""
        live = Live(prompt, sampling, choice)
        live.siblings = [Live(prompt, sampling, choice + other) for other in range(1, n)]
        for each in (live, *live.siblings):
            self._place(each)
        return live

    def _place(self, live: Live) -> None:
        live.seq = self._seqs.pop()
        live.slot = self.slots.take(1)[0]
        live.table, live.computed, live.in_pool = [], 0, False
        history = live.tokens if live.sampling.needs_history else []
        self._starts.append(
            SequenceStart(live.seq, self.epoch, live.choice, live.sampling, history, len(live.prompt), len(live.output))
        )

    def release(self, live: Live, shared: set[int] | None = None) -> None:
        """Take a sequence off the device (its end, or a park); ``shared`` pages still belong to others."""
        self._freed.append(live.seq)
        self._seqs.append(live.seq)
        self.pages.free([page for page in live.table if page not in (shared or ())], self.step_number)
        self.slots.free([live.slot], self.step_number)
        live.seq = -1

    def resume(self, live: Live) -> None:
        """Back onto the device, to be recomputed from position 0 with the tokens it has."""
        self._place(live)

    def step(self, work: list[tuple[Live, int]]) -> StepDone:
        """Compute ``count`` tokens of each sequence; those that reach their last known token sample the next."""
        rows = [(live, min(count, live.todo)) for live, count in work]
        starts, counts, tokens, page_rows, page_ids = [], [], [], [], []
        sample_rows, sampled = [], []
        for row, (live, count) in enumerate(rows):
            end = live.computed + count
            starts.append(live.computed)
            counts.append(count)
            decode = live.in_pool and count == 1 and end == len(live.tokens)
            tokens += [SAMPLED] if decode else live.tokens[live.computed : end]
            new = self.pages.take(-(-end // self.limits.page_size) - len(live.table))
            live.table += new
            page_rows += [row] * len(new)
            page_ids += new
            if end == len(live.tokens):
                group = [live, *live.siblings]
                sample_rows += [row] * len(group)
                sampled += group
        self.step_number += 1
        plan = StepPlan(
            step=self.step_number,
            epoch=self.epoch,
            seqs=[live.seq for live, _ in rows],
            starts=starts,
            counts=counts,
            slots=[live.slot for live, _ in rows],
            tokens=tokens,
            page_rows=page_rows,
            page_ids=page_ids,
            sample_rows=sample_rows,
            sample_seqs=[live.seq for live in sampled],
            sample_outputs=[len(live.output) for live in sampled],
            state_copies=self._state_copies,
            page_copies=self._page_copies,
            fork_seqs=self._fork_seqs,
            fork_pages=self._fork_pages,
            freed=self._freed,
        )
        self.runner.submit(self._encode([*self._starts, plan]))
        self._starts, self._freed = [], []
        self._state_copies, self._page_copies, self._fork_seqs, self._fork_pages = [], [], [], []
        done = self._decode(self.runner.collect())[0]
        if isinstance(done, StepFailed):
            raise StepError(done.reason)
        assert isinstance(done, StepDone)
        assert done.step == self.step_number
        self._settle(rows, sampled, done)
        return done

    def _settle(self, rows: list[tuple[Live, int]], sampled: list[Live], done: StepDone) -> None:
        for live, count in rows:
            live.computed += count
        for index, (live, token) in enumerate(zip(sampled, done.tokens, strict=True)):
            live.output.append(token)
            live.in_pool = True
            if done.logprobs:
                live.logprobs.append(done.logprobs[index])
        for row, entries in done.prompt_logprobs:
            self.prompt_logprobs.setdefault(id(rows[row][0]), []).extend(entries)
        for live in sampled:
            for sibling in live.siblings:
                self._fork(live, sibling)
            live.siblings = []

    def _fork(self, live: Live, sibling: Live) -> None:
        """[0, full pages) is shared, the partial page and the state are copied before the next forward."""
        full, rest = divmod(live.computed, self.limits.page_size)
        sibling.table = live.table[:full]
        sibling.computed = live.computed
        if rest:
            sibling.table = sibling.table + self.pages.take(1)
            self._page_copies += [live.table[full], sibling.table[full]]
        self._state_copies += [live.slot, sibling.slot]
        self._fork_seqs += [sibling.seq] * len(sibling.table)
        self._fork_pages += sibling.table


@contextmanager
def recorded_logits() -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Every row of logits that is sampled while the context lasts, as (output number, logits [C]), in order."""
    rows: list[tuple[int, torch.Tensor]] = []

    def spy(logits_RC: torch.Tensor, sequences: list[Sequence], outputs: list[int]) -> Sampled:
        rows.extend((output, logits.clone()) for output, logits in zip(outputs, logits_RC, strict=True))
        return sample(logits_RC, sequences, outputs)

    sample = execute.sample
    with mock.patch.object(execute, "sample", spy):
        yield rows
