"""The planner's answer: frozen, printable, the only source of every pool size. Nobody writes into it.

``engine`` is what scheduler and runner obey; the rest is what a person or a script reads (``hybserve plan --json``).
All sizes in bytes, all lengths in tokens.
"""

import msgspec


class EngineLimits(msgspec.Struct, frozen=True):
    """The numbers that scheduler and runner run by. Page and slot counts include the padding page and slot 0."""

    page_size: int
    kv_pages: int
    state_slots: int
    max_running: int  # sequences, all microbatches counted
    max_seq_len: int
    step_tokens: int
    prefill_chunk: int
    kv_dtype: str
    state_dtype: str
    conv_dtype: str
    deterministic: bool = False
    prefix: bool = False  # keep and reuse prefixes
    stateful: bool = True  # has recurrent layers: a hit needs a checkpoint
    slot_price: float = 1.0  # bytes of a slot in units of a page's bytes, whole model
    checkpoint_every: int = 0  # spacing of the checkpoint grid in tokens; 0 = none
    prefill_beside: int = 0  # most prefill tokens of a step in which sequences decode; 0 = as many as the step has
    prefill_backlog: int = 0  # prompt tokens in the queue above which that does not hold; 0 = always
    cuda: bool = False  # model and pools live on a GPU
    graphs: bool = True  # steps run from captured graphs there


class ModelCounts(msgspec.Struct, frozen=True):
    layers: int
    recurrent_layers: int
    attention_layers: int


class ModelBytes(msgspec.Struct, frozen=True):
    """Whole model, all stages and ranks together."""

    state_slot: int
    state_slot_per_layer: int
    kv_per_token: int


class Floors(msgspec.Struct, frozen=True):
    state_slots: int
    kv_pages: int


class Pools(msgspec.Struct, frozen=True):
    state_slots: int
    kv_pages: int
    retention_slots: int


class StagePlan(msgspec.Struct, frozen=True):
    """One rank of one stage."""

    stage: int
    rank: int
    layers: int
    recurrent_layers: int
    attention_layers: int
    state_slot_bytes: int
    kv_page_bytes: int
    weight_bytes: int
    pool_bytes: int
    host_bytes: int
    transient_bytes: int
    reserve_bytes: int
    headroom_bytes: int
    device_bytes: int  # what was stated or found


class Shortfall(msgspec.Struct, frozen=True):
    """Something that cannot fit: what, needed and had (bytes or counts, see ``what``), smallest edits that would do,
    each alone: ``section.key=value``, or two of them with a space between."""

    what: str
    need: int
    have: int
    edits: tuple[str, ...]


class Plan(msgspec.Struct, frozen=True):
    fits: bool
    model: ModelCounts
    bytes: ModelBytes
    floors: Floors
    pools: Pools
    stages: tuple[StagePlan, ...]
    shortfalls: tuple[Shortfall, ...]
    engine: EngineLimits | None  # None if it does not fit
    #: What the pools buy, in words ("64 running x 4K, or 9 x 64K").
    buys: tuple[str, ...] = ()
    #: Numbers lowered or chosen by the planner: (key, value, why).
    chosen: tuple[tuple[str, str, str], ...] = ()
