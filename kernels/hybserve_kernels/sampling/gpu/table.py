"""What the sampler must know of every running sequence, on the device: one record a sequence, and how often it has seen
every token where penalties ask for it.

A record is a row of 64-bit words: the fields below, then the listed tokens (stop ids, then biases), each as
``bias bits << 32 | token id``. Floats are the host's own, as fp64. Legend: S sequence indices, C vocabulary.
"""

import math
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
import triton.language as tl

#: Words of a record.
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
FLOOR = tl.constexpr(2)  # log(min_p)
REPETITION = tl.constexpr(3)
PRESENCE = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
STREAM = tl.constexpr(6)
TOP_K = tl.constexpr(7)
PENALISED = tl.constexpr(8)
MIN_TOKENS = tl.constexpr(9)
STOPS = tl.constexpr(10)
LISTED = tl.constexpr(11)  # stop ids and biases
ENTRIES = tl.constexpr(12)  # the first of them

_FIELDS = struct.Struct("<6dQ5q")
#: Listed tokens of a sequence at most, and ids of a vocabulary at most.
MOST_LISTED = 1280
MOST_IDS = 1 << 20


class Wishes(Protocol):
    """Sampling of a request, in range. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...


class SamplingTable:
    """Records of ``max_running`` sequences. ``counts``: also room for penalties, ``4 · max_running · vocab`` bytes,
    which otherwise comes with the first sequence that is penalised (an address that no captured graph knows)."""

    def __init__(self, max_running: int, vocab: int, device: str | torch.device, counts: bool = False) -> None:
        assert vocab <= MOST_IDS, f"vocabulary of {vocab} tokens; at most {MOST_IDS} are possible"
        self.vocab = vocab
        self.records_S = torch.zeros(max_running, ENTRIES.value + MOST_LISTED, dtype=torch.int64, device=device)
        #: int32 [S, C]: 0 = never seen, else 1 + how often it was generated. Rows of unpenalised sequences are stale.
        self.counts_SC = torch.zeros((max_running, vocab) if counts else (1, 1), dtype=torch.int32, device=device)

    def set(
        self,
        seq: int,
        wishes: Wishes,
        stream: int,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
    ) -> None:
        """A sequence starts, or goes on after it was parked. ``stream``: its ``stream_key``. ``prompt`` and ``output``
        are the tokens so far; only penalties read them. Queues small copies on the current stream and does not wait."""
        stops, biases = wishes.stop_ids if wishes.min_tokens else (), wishes.logit_bias
        listed = len(stops) + len(biases)
        if listed > MOST_LISTED:
            raise ValueError(f"{listed} stop ids and biases of one sequence; at most {MOST_LISTED} are possible")
        penalties = (wishes.repetition_penalty, wishes.presence_penalty, wishes.frequency_penalty)
        penalised = penalties != (1.0, 0.0, 0.0)
        record = bytearray(_FIELDS.size + 8 * listed)
        _FIELDS.pack_into(
            record,
            0,
            wishes.temperature,
            wishes.top_p,
            math.log(wishes.min_p) if wishes.min_p else -math.inf,
            *penalties,
            stream,
            wishes.top_k,
            penalised,
            wishes.min_tokens,
            len(stops),
            listed,
        )
        entries = [part for token in stops for part in (token, 0.0)] + [part for pair in biases for part in pair]
        struct.pack_into("<" + "if" * listed, record, _FIELDS.size, *entries)
        self._upload(torch.frombuffer(record, dtype=torch.int64), self.records_S[seq])
        if penalised:
            self._count(seq, prompt, output)

    def _count(self, seq: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        if self.counts_SC.shape[1] != self.vocab:
            shape = (self.records_S.shape[0], self.vocab)
            self.counts_SC = torch.zeros(shape, dtype=torch.int32, device=self.records_S.device)
        counts_C = self.counts_SC[seq].zero_()
        history = self._upload(torch.tensor([*prompt, *output], dtype=torch.int64))
        counts_C.index_fill_(0, history, 1)
        generated = history[len(prompt) :]
        counts_C.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def _upload(self, values: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Without waiting: torch keeps the pinned memory until the copy is over."""
        if self.records_S.is_cuda:
            values = values.pin_memory()
        if target is None:
            return values.to(self.records_S.device, non_blocking=True)
        return target[: len(values)].copy_(values, non_blocking=True)
