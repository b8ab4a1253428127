"""From logits to token ids: penalties, truncation, draws and log-probabilities. Host functions only."""

from hybserve_kernels.sampling.gpu import (
    SamplingTable,
    gather_tokens,
    greedy_rows,
    logprob_rows,
    remember,
    sample_rows,
)
from hybserve_kernels.sampling.noise import position_key, stream_key
from hybserve_kernels.sampling.reference import (
    Filters,
    add_bias_,
    draw,
    greedy,
    kept,
    mask_,
    penalise_,
    token_logprobs,
)

__all__ = [
    "Filters",
    "SamplingTable",
    "add_bias_",
    "draw",
    "gather_tokens",
    "greedy",
    "greedy_rows",
    "kept",
    "logprob_rows",
    "mask_",
    "penalise_",
    "position_key",
    "remember",
    "sample_rows",
    "stream_key",
    "token_logprobs",
]
