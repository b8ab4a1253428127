"""Sampling on the device: the parameters of the running sequences, and rows that want more than the plain argmax."""

import torch
from hybserve_kernels.sampling import SamplingTable, logprob_rows, sample_rows

from hybserve.core.types import TokenLogprobs
from hybserve.runner.sampler import clamped
from hybserve.runner.sequences import Sequence


def to_logprobs(scores: tuple[torch.Tensor, ...], tops: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of tokens [R], with the likeliest alternatives [R, top], as they are reported."""
    own_R, values_RM, ids_RM = scores
    own, values, ids = clamped(own_R).tolist(), clamped(values_RM).tolist(), ids_RM.tolist()
    return [TokenLogprobs(own[row], tuple(ids[row][:top]), tuple(values[row][:top])) for row, top in enumerate(tops)]
