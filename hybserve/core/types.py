"""Small shared types that cross roles. Integers name things; what they mean stands here once.

``uid``: a request, unique for the life of the server. ``choice``: index 0..n-1 inside it. ``seq``: dense index of a
running sequence on the runner (one choice = one sequence), reused after it is freed. ``step``: number of a plan,
from 1. ``epoch``: layout epoch, which rank holds which layers and heads.
"""

import enum

import msgspec


class Ended(enum.IntEnum):
    """Why the scheduler ended a sequence, as far as token ids tell (stop strings are the text role's)."""

    NO = 0
    STOP = 1  # an end-of-sequence or stop token id was sampled (it is the token beside this mark)
    LENGTH = 2  # max_tokens or the context is full


class FinishReason(enum.StrEnum):
    """What the client reads in ``finish_reason``."""

    STOP = "stop"
    LENGTH = "length"


#: A token id of -1 in a plan: "the token you sampled last for this sequence".
SAMPLED = -1

#: JSON cannot carry -inf or NaN; log-probabilities are clamped here.
LOGPROB_FLOOR = -9999.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: of the token itself and of the ``len(top_ids)`` likeliest, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class CacheTruth(msgspec.Struct, frozen=True):
    """The ``hybserve.cache`` block of a response (tokens). Cold engine: all zero, reason ``cold``."""

    kv_hit: int = 0
    state_hit: int = 0
    hit: int = 0
    reason: str = "cold"
    at: int = 0
    device: int = 0
    host: int = 0
    file: int = 0


class Timing(msgspec.Struct, frozen=True):
    """Milliseconds of one request, by the scheduler's monotonic clock. ``ttft`` counts from arrival."""

    queue: float = 0.0
    restore: float = 0.0
    prefill: float = 0.0
    ttft: float = 0.0
    decode: float = 0.0


class ServingFacts(msgspec.Struct, frozen=True):
    """What api and text must know of the model and the plan; made by ``launch`` before any role starts."""

    served_names: tuple[str, ...]
    model_dir: str
    family: str
    vocab_size: int  # width of the embedding and the logits; every token id must be below
    max_seq_len: int
    max_running: int
    page_size: int
    capacity_tokens: int  # KV tokens one sequence can ever hold
    eos_ids: tuple[int, ...]
    bos_id: int | None
    sampling_defaults: dict[str, float | int]  # effective defaults, generation_config.json already applied
    sampling_source: str  # where the defaults came from: "generation_config.json" or "built in"
    created: int  # unix seconds, for /v1/models
    version: str
