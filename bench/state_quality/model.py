"""A trained model through the Triton forms, several kinds of state side by side over the same tokens.

Every kind has pools of its own and sees the same tokens at once, so that its distribution is compared with that of the
first kind on the spot. Rounding to nearest, which no GPU form does, is a pool in fp32 rounded after every step.

Legend: N rows, M pages of a row, T tokens of a row, C vocabulary.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from hybserve_kernels.compiling import compiled_ahead
from hybserve_kernels.rows import TILE, DecodeRows, DeviceStep, PrefillRows

from bench.demo.tokenizer import END_OF_TEXT, IM_END
from bench.state_quality.replay import repeated
from hybserve.layers.step_context import StepContext
from hybserve.models.base import Model
from hybserve.models.load import load_weights
from hybserve.models.registry import build_model
from hybserve.plan.result import EngineLimits
from hybserve.runner.device_pools import DevicePools
from hybserve.spec.from_hf import read_model_spec
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.split import split_ranks


class Kind(NamedTuple):
    """``nearest``: the state is rounded to the nearest bf16 after each step."""

    name: str
    dtype: torch.dtype
    state_dtype: str
    nearest: bool = False


#: The first is the truth. The last says what the activations' rounding does, for comparison.
KINDS = (
    Kind("fp32 state", torch.float32, "float32"),
    Kind("bf16 state, stochastic", torch.float32, "bfloat16"),
    Kind("bf16 state, nearest", torch.float32, "float32", nearest=True),
    Kind("fp32 state, bf16 model", torch.bfloat16, "float32"),
)


class Score(NamedTuple):
    """Over ``tokens`` predicted ones: nats of the text, divergence from the truth in nats a token, and how often the
    likeliest token is the same."""

    kind: str
    tokens: int
    nats: float
    divergence: float
    same: float


class Subject:
    """One kind: its pools for N rows of at most T tokens. Row n has slot n + 1 and M pages one after another."""

    def __init__(self, kind: Kind, model: Model, spec: ModelSpec, rows: int, tokens: int, device: str) -> None:
        self.kind, self._model, self._nearest = kind, model, kind.nearest
        pages = -(-tokens // TILE)
        dtype = str(kind.dtype).removeprefix("torch.")
        limits = EngineLimits(
            page_size=TILE, kv_pages=1 + rows * pages, state_slots=1 + rows, max_running=rows, max_seq_len=tokens,
            step_tokens=rows, prefill_chunk=TILE, kv_dtype=dtype, state_dtype=kind.state_dtype, conv_dtype=dtype,
        )  # fmt: skip
        self._pools = DevicePools(spec, split_ranks(spec)[0], limits, device)
        self.tables_NM = 1 + torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
        self.tokens_NT = torch.zeros(rows, tokens, dtype=torch.int64, device=device)

    def reset(self) -> None:
        """No row has begun."""
        self._pools.slots[1:].zero_()

    def logits(self, tokens_T: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """fp32 [T, C]."""
        pools = self._pools
        context = StepContext.of_step(step, TILE, pools.kv_layers, pools.matrices, pools.windows)
        logits_TC = self._model.logits_rows(self._model.forward(tokens_T, context)).float()
        for matrices in pools.matrices if self._nearest else ():
            matrices[1:] = matrices[1:].bfloat16()
        return logits_TC


class Reader:
    """Reads texts token after token, or tile after tile, with every kind. At most ``rows`` texts at a time, of at most
    ``tokens`` tokens."""

    def __init__(self, directory: Path, rows: int, tokens: int, device: str) -> None:
        spec, self._device, self._rows = read_model_spec(directory), device, rows
        models: dict[torch.dtype, Model] = {}
        for dtype in {kind.dtype: None for kind in KINDS}:
            models[dtype] = build_model(spec, split_ranks(spec)[0], dtype, device, triton=True)
            load_weights(directory, spec, split_ranks(spec)[0], models[dtype].params)
            models[dtype].bind()
        self._subjects = [Subject(kind, models[kind.dtype], spec, rows, tokens, device) for kind in KINDS]
        self._slots_N = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
        self._counts_N, self._given_N = torch.zeros(2, rows, dtype=torch.int32, device=device).unbind(0)
        self._place_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._sums = torch.zeros(len(KINDS), 3, dtype=torch.float64, device=device)
        self._one_token = repeated(self._decode, self._reset, device)

    def _reset(self) -> None:
        for subject in self._subjects:
            subject.reset()
        self._place_1.zero_()
        self._sums.zero_()

    def _begin(self, texts: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """``counts``: tokens of each row in the end; those beyond its text it says itself."""
        given = [len(text) for text in texts]
        empty = [0] * (self._rows - len(texts))
        self._counts_N.copy_(torch.tensor([*counts, *empty]))
        self._given_N.copy_(torch.tensor([*given, *empty]))
        padded = torch.zeros(self._rows, max(given), dtype=torch.int64)
        for row, text in enumerate(texts):
            padded[row, : len(text)] = torch.tensor(text)
        for subject in self._subjects:
            subject.tokens_NT[:, : padded.shape[1]] = padded
        self._reset()

    # token after token

    def decoded(self, texts: Sequence[Sequence[int]]) -> list[Score]:
        """How well texts are predicted by the decode forms: the state is rounded at every token."""
        predicted = 0
        sums = torch.zeros_like(self._sums)
        for low in range(0, len(texts), self._rows):
            batch = texts[low : low + self._rows]
            self._begin(batch, [len(text) for text in batch])
            for _ in range(max(len(text) for text in batch) - 1):
                self._one_token()
            sums += self._sums
            predicted += sum(len(text) - 1 for text in batch)
        return _scores(sums, predicted)

    def continued(self, prompts: Sequence[Sequence[int]], longest: int) -> list[list[list[int]]]:
        """Of each kind the greedy answers, up to the end of the turn, of at most ``longest`` tokens."""
        assert len(prompts) <= self._rows
        self._begin(prompts, [len(prompt) + longest for prompt in prompts])
        for _ in range(max(len(prompt) for prompt in prompts) + longest - 1):
            self._one_token()
        answers = []
        for subject in self._subjects:
            said = zip(subject.tokens_NT.tolist(), prompts, strict=False)
            answers.append([_until_end(row[len(prompt) : len(prompt) + longest]) for row, prompt in said])
        return answers

    def _decode(self) -> None:
        place_N = self._place_1.int().expand(self._rows)
        in_use_N = place_N < self._counts_N - 1  # the last token predicts nothing
        lengths_N = (place_N + 1).masked_fill(~in_use_N, 0)
        page_N = self._subjects[0].tables_NM.index_select(1, self._place_1 // TILE)[:, 0]
        locations_N = (page_N * TILE + place_N % TILE).masked_fill(~in_use_N, -1)
        real_1 = torch.full_like(self._place_1, self._rows, dtype=torch.int32)
        truth = None
        for subject, sums in zip(self._subjects, self._sums, strict=True):
            rows = DecodeRows(self._rows, lengths_N, self._slots_N, subject.tables_NM)
            step = DeviceStep(real_1, place_N.contiguous(), locations_N, rows, None)
            tokens_NT = subject.tokens_NT
            logits_NC = subject.logits(tokens_NT.index_select(1, self._place_1)[:, 0], step)
            next_N1 = tokens_NT.index_select(1, self._place_1 + 1)
            truth = self._add(sums, logits_NC, next_N1[:, 0], in_use_N, truth)
            own_N1 = logits_NC.argmax(-1, keepdim=True)
            next_N1 = torch.where((place_N + 1 < self._given_N)[:, None], next_N1, own_N1)
            tokens_NT.index_copy_(1, self._place_1 + 1, next_N1)
        self._place_1 += 1

    # tile after tile

    def prefilled(self, texts: Sequence[Sequence[int]]) -> list[Score]:
        """The same by the prefill forms, in chunks of one tile, the shortest there are: the state is rounded after each
        of them. All texts at once, of one length that is a multiple of a tile, and one token."""
        rows, length = len(texts), len(texts[0]) - 1
        assert {len(text) for text in texts} == {length + 1}
        assert length % TILE == 0
        if self._device == "cuda":
            with compiled_ahead():
                self._prefill(rows, 0)
        self._begin(texts, [length + 1] * rows)
        for start in range(0, length, TILE):
            self._prefill(rows, start)
        return _scores(self._sums, rows * length)

    def _prefill(self, rows: int, start: int) -> None:
        device, tokens = self._device, rows * TILE
        each_R = torch.arange(rows, dtype=torch.int32, device=device)
        inside = torch.arange(TILE, dtype=torch.int32, device=device)
        tables_RM = self._subjects[0].tables_NM[:rows]
        prefill = PrefillRows(
            rows,
            rows,
            begins_R=each_R * TILE,
            counts_R=torch.full_like(each_R, TILE),
            starts_R=torch.full_like(each_R, start),
            slots_R=self._slots_N[:rows],
            tables_RM=tables_RM,
            first_tiles_R=each_R,
            tile_rows_X=each_R,
            tile_offsets_X=torch.zeros_like(each_R),
            exports_X=torch.zeros_like(each_R),
        )
        positions_T = (start + inside).repeat(rows)
        locations_T = (tables_RM[:, start // TILE, None] * TILE + inside).flatten()
        step = DeviceStep(torch.full_like(each_R[:1], tokens), positions_T, locations_T, None, prefill)
        in_use_T, truth = torch.ones_like(positions_T, dtype=torch.bool), None
        for subject, sums in zip(self._subjects, self._sums, strict=True):
            own = subject.tokens_NT[:rows, start : start + TILE + 1]
            logits_TC = subject.logits(own[:, :-1].flatten(), step)
            truth = self._add(sums, logits_TC, own[:, 1:].flatten(), in_use_T, truth)

    @staticmethod
    def _add(
        sums: torch.Tensor,
        logits_TC: torch.Tensor,
        targets_T: torch.Tensor,
        in_use_T: torch.Tensor,
        truth_TC: torch.Tensor | None,
    ) -> torch.Tensor:
        """Nats, divergence and agreement of the tokens in use. Log-probabilities of the truth come in and go out."""
        scores_TC = logits_TC.log_softmax(-1)
        truth_TC = scores_TC if truth_TC is None else truth_TC
        nats_T = -scores_TC.gather(1, targets_T[:, None])[:, 0]
        apart_T = (truth_TC.exp() * (truth_TC - scores_TC)).sum(-1)
        same_T = truth_TC.argmax(-1) == scores_TC.argmax(-1)
        seen_3T = torch.stack((nats_T, apart_T, same_T.float()))
        sums += seen_3T.masked_fill(~in_use_T, 0.0).double().sum(1)
        return truth_TC


def _scores(sums: torch.Tensor, tokens: int) -> list[Score]:
    return [
        Score(kind.name, tokens, nats, divergence / tokens, same / tokens)
        for kind, (nats, divergence, same) in zip(KINDS, sums.tolist(), strict=True)
    ]


def _until_end(tokens: list[int]) -> list[int]:
    """Up to the end of the turn, that included."""
    ends = [tokens.index(end) + 1 for end in (IM_END, END_OF_TEXT) if end in tokens]
    return tokens[: min(ends, default=len(tokens))]


def bits_per_byte(score: Score, size: int) -> float:
    return score.nats / math.log(2) / size
