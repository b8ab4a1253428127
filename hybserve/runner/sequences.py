"""What the runner remembers of running sequences between plans: block tables, sampling, and the last token sampled."""

from collections.abc import Iterable

import numpy as np
import torch
from hybserve_kernels.sampling import stream_key

from hybserve.core.messages import SequenceStart, StepPlan
from hybserve.core.sampling import SamplingParams


class TokenCounts:
    """The distinct tokens of a sequence and how often each was generated, in arrays that grow with the output."""

    def __init__(self, prompt: list[int], output: list[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._index = {token: place for place, token in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.int64)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """One more generated token."""
        place = self._index.setdefault(token, len(self._index))
        if place == len(self._ids):
            room = np.zeros(max(16, place), dtype=np.int64)
            self._ids, self._counts = np.concatenate((self._ids, room)), np.concatenate((self._counts, room))
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """How often each of ``ids`` was generated; 0 = it stands in the prompt only."""
        return self._counts[: len(self._index)]


class Sequence:
    """One running sequence. ``prompt`` is kept only while prompt log-probabilities are owed."""

    __slots__ = ("counts", "plain", "plain_draw", "prompt", "sampling", "slot", "stream", "table")

    def __init__(self, start: SequenceStart) -> None:
        sampling = start.sampling
        self.sampling: SamplingParams = sampling
        self.table: list[int] = []
        self.slot = 0
        self.stream = stream_key(sampling.seed, start.choice)
        prompt = start.history[: len(start.history) - start.generated]
        output = start.history[len(start.history) - start.generated :]
        self.counts: TokenCounts | None = TokenCounts(prompt, output) if _penalised(sampling) else None
        # a sequence that has output has had its whole prompt scored before it was parked
        self.prompt: list[int] | None = prompt if sampling.prompt_logprobs >= 0 and start.generated == 0 else None
        #: The token is the argmax of the model's own logits …
        self.plain_draw = (
            sampling.greedy
            and self.counts is None
            and not sampling.logit_bias
            and not (sampling.min_tokens and sampling.stop_ids)
        )
        #: … and nothing else is wanted.
        self.plain = self.plain_draw and sampling.logprobs < 0


def _penalised(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


class Sequences:
    """All running sequences by their dense index, and the token pool, which stays on the device."""

    def __init__(self, device: torch.device | str = "cpu", table_width: int = 0) -> None:
        self._table_width = table_width
        self._running: dict[int, Sequence] = {}
        self._last_token = torch.zeros(64, dtype=torch.int64, device=device)

    def __getitem__(self, seq: int) -> Sequence:
        return self._running[seq]

    def __len__(self) -> int:
        return len(self._running)

    def forget(self, seqs: Iterable[int]) -> list[Sequence]:
        """Drop freed sequences, before anything else of their plan: their indices may start anew in it."""
        return [self._running.pop(seq) for seq in seqs]

    def begin(self, plan: StepPlan, starts: Iterable[SequenceStart]) -> tuple[list[int], list[int]]:
        """Bring the book up to date with a plan before it runs: new sequences, forked tables, new pages, slots.

        Returns what was appended to block tables, as columns: seq · ``table_width`` + index in the table, and page."""
        places: list[int] = []
        for start in starts:
            assert start.seq not in self._running, f"sequence {start.seq} starts twice"
            self._running[start.seq] = Sequence(start)
            self._reserve(start.seq)
        seqs = [*plan.fork_seqs, *(plan.seqs[row] for row in plan.page_rows)]
        pages = [*plan.fork_pages, *plan.page_ids]
        for seq, page in zip(seqs, pages, strict=True):
            table = self._running[seq].table
            places.append(seq * self._table_width + len(table))
            table.append(page)
        for seq, slot in zip(plan.seqs, plan.slots, strict=True):
            self._running[seq].slot = slot
        return places, pages

    def _reserve(self, seq: int) -> None:
        if seq >= len(self._last_token):
            grown = self._last_token.new_zeros(2 * seq)
            grown[: len(self._last_token)] = self._last_token
            self._last_token = grown

    def last_tokens(self, seqs: np.ndarray) -> torch.Tensor:
        return self._last_token[torch.from_numpy(seqs)]

    def remember(self, seqs: list[int], tokens: torch.Tensor) -> None:
        self._last_token[torch.tensor(seqs, dtype=torch.int64)] = tokens

    def clear(self) -> None:
        self._running.clear()

    def unreachable(self, freed: list[Sequence], plan: StepPlan) -> tuple[list[int], list[int]]:
        """Pages and slots whose content died with ``freed``: no running sequence has them, and no copy or fork of
        this plan takes from them. Ask between ``forget`` and ``begin``."""
        running = self._running.values()
        pages = {page for sequence in freed for page in sequence.table}
        pages -= {page for sequence in running for page in sequence.table}
        slots = {sequence.slot for sequence in freed if sequence.slot}
        slots -= {sequence.slot for sequence in running}
        return (
            sorted(pages - set(plan.page_copies[0::2]) - set(plan.fork_pages)),
            sorted(slots - set(plan.state_copies[0::2])),
        )
