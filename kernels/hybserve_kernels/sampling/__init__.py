"""From logits to token ids: penalties, truncation, draws and log-probabilities. Host functions only."""

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
    "add_bias_",
    "draw",
    "greedy",
    "kept",
    "mask_",
    "penalise_",
    "position_key",
    "stream_key",
    "token_logprobs",
]
