"""One step on the device: copies, the forward, the logits of the positions that need them, and what is made of them.

Legend: T packed tokens, G tokens per page, R positions whose logits are wanted, D model dim, C vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from hybserve.core.messages import StepPlan
from hybserve.core.types import TokenLogprobs
from hybserve.layers.step_context import StepContext
from hybserve.plan.costs import LOGITS_SLICE
from hybserve.plan.result import EngineLimits
from hybserve.runner.copies import copy_runs
from hybserve.runner.device_pools import DevicePools
from hybserve.runner.inputs import Ints, Packed, exports_of, packed_tokens, page_tiles, step_context, tile_context
from hybserve.runner.sampler import sample, score
from hybserve.runner.sequences import Sequences


class Model(Protocol):
    """What the runner asks of a model file (models/base.py)."""

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """Every parameter of this rank by name."""

    def forward(self, tokens_T: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Final normed hidden states [T, D]; reads and writes the pools of the context."""

    def logits(self, hidden_ND: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
        """Logits [N, C] in fp32; ``deterministic``: of a whole tile."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Everything a rank owns: the model, the bytes, and the book of running sequences."""

    model: Model
    pools: DevicePools
    sequences: Sequences
    limits: EngineLimits
    vocab: int  # C


class Outcome(NamedTuple):
    """The columns of a StepDone."""

    tokens: list[int]
    bad: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]]
    export_positions: list[int]
    export_finite: list[bool]
    forward_ms: float | None = None  # as the device measured it


def run_step(plan: StepPlan, rank: Rank) -> Outcome:
    """Execute a plan whose sequences are already up to date (``Sequences.begin``)."""
    copy_runs(rank.pools.slots, plan.state_copies)
    copy_runs(rank.pools.pages, plan.page_copies)
    if not plan.seqs:
        return Outcome([], [], [], [], [], [])
    packed = Packed(plan)
    tokens_T = packed_tokens(plan, packed, rank.sequences)
    sampled = _Sampling(plan, packed, rank.sequences)
    scored = _Scoring(plan, packed, rank.sequences)
    wanted = np.unique(np.concatenate((sampled.at, scored.at)))
    logits = _tiled_logits if rank.limits.deterministic else _batched_logits
    for at, logits_RC in logits(plan, packed, tokens_T, wanted, rank):
        scored.take(at, logits_RC)
        sampled.take(at, logits_RC)
    logprobs = sampled.logprobs if sampled.asked else []
    return Outcome(sampled.tokens, sampled.bad, logprobs, scored.result(), *_export(plan, rank.pools))


def _export(plan: StepPlan, pools: DevicePools) -> tuple[list[int], list[bool]]:
    """Exports at the end of a row copy its active slot, those inside it were written by the layers; what stands in
    every exported slot is looked at here, and acknowledged."""
    positions, finite = [], []
    for row, tokens, slot in exports_of(plan):
        if tokens == plan.counts[row]:
            pools.slots[slot].copy_(pools.slots[plan.slots[row]])
        positions.append(plan.starts[row] + tokens)
        finite.append(pools.slot_finite(slot))
    return positions, finite


Logits: TypeAlias = Iterator[tuple[Ints, torch.Tensor]]  # ascending packed indices, and their logits [R, C]


def _batched_logits(plan: StepPlan, packed: Packed, tokens_T: torch.Tensor, wanted: Ints, rank: Rank) -> Logits:
    """The whole step in one forward; logits in slices as large as was planned for."""
    context = step_context(plan, packed, rank.sequences, rank.pools, rank.limits.page_size)
    hidden_TD = rank.model.forward(tokens_T, context)
    rows = max(1, LOGITS_SLICE // rank.vocab)
    for low in range(0, len(wanted), rows):
        at = wanted[low : low + rows]
        yield at, rank.model.logits(hidden_TD[torch.from_numpy(at)])


def _tiled_logits(plan: StepPlan, packed: Packed, tokens_T: torch.Tensor, wanted: Ints, rank: Rank) -> Logits:
    """Law 7: every row page by page on tiles of one fixed shape, logits too, and one position at a time after that."""
    page_size, wanted_set, slots = rank.limits.page_size, set(wanted.tolist()), rank.pools.slots
    gaps = dict(zip(plan.gap_rows, plan.gap_ends, strict=True))
    cuts = {(row, plan.starts[row] + tokens): slot for row, tokens, slot in exports_of(plan)}
    for row, seq in enumerate(plan.seqs):
        table, slot = rank.sequences[seq].table, plan.slots[row]
        start, base = plan.starts[row], int(packed.bounds[row])
        for page, low, high in page_tiles(start, plan.counts[row], page_size):
            first = base + page * page_size + low - start  # packed index of the tile's first real token
            tile_G = tokens_T.new_zeros(page_size)
            tile_G[low:high] = tokens_T[first : first + high - low]
            shared = page * page_size < gaps.get(row, 0)
            context = tile_context(table, slot, page, (low, high), rank.pools, page_size, shared)
            hidden_GD = rank.model.forward(tile_G, context)
            export = cuts.get((row, page * page_size + high), 0)
            if export:
                slots[export].copy_(slots[slot])
            inside = [offset for offset in range(low, high) if first + offset - low in wanted_set]
            if inside:
                logits_GC = rank.model.logits(hidden_GD, deterministic=True)
            for offset in inside:
                yield np.array([first + offset - low]), logits_GC[offset : offset + 1].clone()


class _Sampling:
    """The sample columns of a plan, filled as the logits of their positions arrive."""

    def __init__(self, plan: StepPlan, packed: Packed, sequences: Sequences) -> None:
        self.at: Ints = packed.bounds[1:][np.asarray(plan.sample_rows, dtype=np.int64)] - 1
        self.tokens = [0] * len(plan.sample_rows)
        self.bad: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = [None] * len(plan.sample_rows)
        self.asked = False
        self._plan, self._sequences = plan, sequences

    def take(self, at: Ints, logits_RC: torch.Tensor) -> None:
        columns = np.flatnonzero(np.isin(self.at, at))
        if not len(columns):
            return
        pick = np.searchsorted(at, self.at[columns])
        if len(pick) != len(at) or (pick != np.arange(len(at))).any():
            logits_RC = logits_RC[torch.from_numpy(pick)]
        seqs = [self._plan.sample_seqs[column] for column in columns.tolist()]
        outputs = [self._plan.sample_outputs[column] for column in columns.tolist()]
        drawn = sample(logits_RC, [self._sequences[seq] for seq in seqs], outputs)
        self._sequences.remember(seqs, drawn.tokens)
        for column, token in zip(columns.tolist(), drawn.tokens.tolist(), strict=True):
            self.tokens[column] = token
        self.bad += columns[drawn.bad].tolist()
        for column, entry in zip(columns.tolist(), drawn.logprobs, strict=False):
            self.logprobs[column] = entry
        self.asked |= bool(drawn.logprobs)


def scored_rows(plan: StepPlan, packed: Packed, sequences: Sequences) -> Iterator[tuple[int, int, int, list[int], int]]:
    """Rows whose positions have a successor in a prompt that is to be scored: row, first and end packed index, the
    successors, and how many likeliest alternatives are wanted."""
    for row, seq in enumerate(plan.seqs):
        prompt = sequences[seq].prompt
        start = plan.starts[row]
        count = 0 if prompt is None else min(plan.counts[row], len(prompt) - 1 - start)
        if prompt is not None and count > 0:
            first = int(packed.bounds[row])
            successors = prompt[start + 1 : start + 1 + count]
            yield row, first, first + count, successors, sequences[seq].sampling.prompt_logprobs


class _Scoring:
    """Prompt log-probabilities: for each row that owes them, the positions whose successor stands in the prompt."""

    def __init__(self, plan: StepPlan, packed: Packed, sequences: Sequences) -> None:
        self._rows = list(scored_rows(plan, packed, sequences))
        self.at: Ints = np.concatenate(
            [np.empty(0, dtype=np.int64)] + [np.arange(first, end) for _, first, end, _, _ in self._rows]
        )
        self._entries: dict[int, list[TokenLogprobs]] = {row: [] for row, *_ in self._rows}

    def take(self, at: Ints, logits_RC: torch.Tensor) -> None:
        """``at`` ascends, from call to call too, so entries arrive in order."""
        for row, first, end, successors, top in self._rows:
            low, high = np.searchsorted(at, (first, end)).tolist()
            if low < high:
                offset = int(at[low]) - first
                tokens_R = torch.tensor(successors[offset : offset + high - low])
                self._entries[row] += score(logits_RC[low:high], tokens_R, [top] * (high - low))

    def result(self) -> list[tuple[int, list[TokenLogprobs]]]:
        return list(self._entries.items())
