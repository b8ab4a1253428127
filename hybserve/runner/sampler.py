"""From the logits of sampled positions to tokens, bad rows and log-probabilities.

Legend: R rows to sample, C vocabulary, X scattered (row, token) pairs.

Order per row: penalties, logit bias, masking of stop ids while the output is shorter than ``min_tokens``; then argmax
if greedy, else temperature, top-k, top-p, min-p and the draw. Log-probabilities are those of the model's own
distribution, before all of that, as OpenAI and vLLM report them, and never below LOGPROB_FLOOR.
"""

from typing import NamedTuple

import numpy as np
import torch
from hybserve_kernels.sampling import (
    Filters,
    add_bias_,
    draw,
    greedy,
    mask_,
    penalise_,
    position_key,
    token_logprobs,
)

from hybserve.core.types import LOGPROB_FLOOR, TokenLogprobs
from hybserve.runner.sequences import Sequence

#: What a row with non-finite logits "samples": any id that the embedding knows.
SAFE_TOKEN = 0


class Sampled(NamedTuple):
    tokens: torch.Tensor  # int64 [R]
    bad: list[int]  # rows whose logits were not finite
    logprobs: list[TokenLogprobs | None]  # empty when no row asked


def sample(logits_RC: torch.Tensor, rows: list[Sequence], outputs: list[int]) -> Sampled:
    """One token per row; ``outputs`` are the 0-based output numbers. Records the tokens in the rows' counts."""
    tokens_R, finite_R = greedy(logits_RC)
    bad = [] if bool(finite_R.all()) else torch.nonzero(~finite_R).flatten().tolist()
    if bad:
        tokens_R[bad] = SAFE_TOKEN
        logits_RC = logits_RC.clone()
        logits_RC[bad] = 0.0
    if all(row.plain for row in rows):
        return Sampled(tokens_R, bad, [])
    wants = any(row.sampling.logprobs >= 0 for row in rows)
    raw_RC = logits_RC.float()
    altered = [index for index, row in enumerate(rows) if not row.plain and index not in bad]
    if altered:
        shaped_RC = raw_RC[altered]  # a copy: indexed by a list
        chosen = [rows[index] for index in altered]
        tokens_R[altered] = _sample_shaped(shaped_RC, chosen, [outputs[index] for index in altered])
    tokens = tokens_R.tolist()
    for row, token in zip(rows, tokens, strict=True):
        if row.counts is not None:
            row.counts.add(token)
    return Sampled(tokens_R, bad, _logprobs(raw_RC, tokens_R, rows) if wants else [])


def _sample_shaped(logits_RC: torch.Tensor, rows: list[Sequence], outputs: list[int]) -> torch.Tensor:
    """Tokens of rows that want more than the plain argmax. Overwrites the logits."""
    _penalise(logits_RC, rows)
    _bias(logits_RC, rows)
    _mask_stops(logits_RC, rows, outputs)
    tokens_R = logits_RC.argmax(dim=-1)
    drawn = [index for index, row in enumerate(rows) if not row.sampling.greedy]
    if drawn:
        some = [rows[index].sampling for index in drawn]
        filters = Filters(
            [params.temperature for params in some],
            [params.top_k for params in some],
            [params.top_p for params in some],
            [params.min_p for params in some],
        )
        keys = [position_key(rows[index].stream, outputs[index]) for index in drawn]
        tokens_R[drawn] = draw(logits_RC if len(drawn) == len(rows) else logits_RC[drawn], filters, keys)
    return tokens_R


def _penalise(logits_RC: torch.Tensor, rows: list[Sequence]) -> None:
    counted = [(index, row.counts) for index, row in enumerate(rows) if row.counts is not None]
    if not counted:
        return
    sizes = [len(counts.ids) for _, counts in counted]
    penalise_(
        logits_RC,
        torch.from_numpy(np.repeat([index for index, _ in counted], sizes)),
        torch.from_numpy(np.concatenate([counts.ids for _, counts in counted])),
        torch.from_numpy(np.concatenate([counts.counts for _, counts in counted])),
        torch.tensor([row.sampling.repetition_penalty for row in rows]),
        torch.tensor([row.sampling.presence_penalty for row in rows]),
        torch.tensor([row.sampling.frequency_penalty for row in rows]),
    )


def _bias(logits_RC: torch.Tensor, rows: list[Sequence]) -> None:
    entries = [(index, token, bias) for index, row in enumerate(rows) for token, bias in row.sampling.logit_bias]
    if entries:
        index_X, ids_X, bias_X = zip(*entries, strict=True)
        add_bias_(logits_RC, torch.tensor(index_X), torch.tensor(ids_X), torch.tensor(bias_X, dtype=torch.float32))


def _mask_stops(logits_RC: torch.Tensor, rows: list[Sequence], outputs: list[int]) -> None:
    entries = [
        (index, token)
        for index, (row, output) in enumerate(zip(rows, outputs, strict=True))
        if output < row.sampling.min_tokens
        for token in row.sampling.stop_ids
    ]
    if entries:
        index_X, ids_X = zip(*entries, strict=True)
        mask_(logits_RC, torch.tensor(index_X), torch.tensor(ids_X))


def _logprobs(raw_RC: torch.Tensor, tokens_R: torch.Tensor, rows: list[Sequence]) -> list[TokenLogprobs | None]:
    asking = [index for index, row in enumerate(rows) if row.sampling.logprobs >= 0]
    result: list[TokenLogprobs | None] = [None] * len(rows)
    tops = [rows[index].sampling.logprobs for index in asking]
    for index, entry in zip(asking, score(raw_RC[asking], tokens_R[asking], tops), strict=True):
        result[index] = entry
    return result


def score(logits_RC: torch.Tensor, tokens_R: torch.Tensor, tops: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of the given tokens, each with its ``tops[r]`` likeliest alternatives."""
    own_R, values_RM, ids_RM = token_logprobs(logits_RC, tokens_R, max(tops))
    own = clamped(own_R).tolist()
    values, ids = clamped(values_RM).tolist(), ids_RM.tolist()
    return [TokenLogprobs(own[row], tuple(ids[row][:top]), tuple(values[row][:top])) for row, top in enumerate(tops)]


def clamped(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.nan_to_num(nan=LOGPROB_FLOOR).clamp(min=LOGPROB_FLOOR)
