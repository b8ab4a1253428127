"""From demand to pools: which numbers are demand, which are lowered to what fits, and how many pages and slots result.

Ids are global, so page and slot counts are equal on all ranks: they are chosen inside the intersection of every rank's
budget line ``a·pages + b·slots <= M``, where M is what weights, one step and the reserve leave. All
arithmetic is on integers.
"""

from collections.abc import Callable, Iterator

import msgspec

from hybserve.config.deployment import GPU_SCAN_TILE, Deployment
from hybserve.core.errors import ConfigError
from hybserve.core.units import GIB
from hybserve.plan.costs import (
    Dtypes,
    StepShape,
    checkpoint_cost_tokens,
    model_bytes,
    transients,
)
from hybserve.plan.facts import MemoryFacts
from hybserve.plan.floors import count_floors, pages_of
from hybserve.plan.layout import PageLayout, SlotLayout, page_layout, slot_layout
from hybserve.plan.result import Floors
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.split import RankShare, split_ranks, width

#: Bytes of weights that a share holds in a dtype.
WeightBytes = Callable[[ModelSpec, RankShare, str], int]

#: Ids are kept in lists on the host; more pages than this serve nobody.
MOST_PAGES = 1 << 20
#: KV that a defaulted number of running sequences should find, in tokens each.
_COMFORT_TOKENS = 2048
#: Bounds to which defaulted numbers are lowered, rung by rung: comfortable ones first.
_COMFORT_SEQ_LEN, _LEAST_SEQ_LEN = 8192, 1024
_COMFORT_RUNNING, _FEW_RUNNING = 8, 2
_COMFORT_STEP, _LEAST_STEP, _LEAST_STEP_GPU = 512, 64, 512
#: More would not leave room for a block of keys in shared memory.
_MOST_HEAD_DIM_GPU = 256


class Rank(msgspec.Struct, frozen=True):
    share: RankShare
    page: PageLayout
    slot: SlotLayout
    weight_bytes: int


class Frame(msgspec.Struct, frozen=True):
    """What is settled before any number is lowered."""

    spec: ModelSpec
    ranks: tuple[Rank, ...]
    distinct: tuple[Rank, ...]  # one of each kind of rank that differs in nothing that costs bytes
    dtypes: Dtypes
    page_size: int
    prefix: bool
    cuda: bool
    device: int  # bytes of one rank
    device_stated: bool
    reserve: int
    checkpoint_every: int

    def transient_bytes(self, rank: Rank, shape: StepShape) -> int:
        return transients(self.spec, rank.share, shape, self.dtypes, self.page_size, self.cuda).total

    def holds(self, shape: StepShape, pages: int, slots: int) -> bool:
        """Whether every rank holds its weights, the pools, one step and the reserve."""
        return all(
            rank.weight_bytes
            + rank.page.page_bytes * pages
            + rank.slot.slot_bytes * slots
            + self.transient_bytes(rank, shape)
            + self.reserve
            <= self.device
            for rank in self.distinct
        )

    def floors(self, shape: StepShape) -> Floors:
        return count_floors(shape.max_running, shape.max_seq_len, shape.step_tokens, self.page_size, self.prefix)


class Sizing(msgspec.Struct, frozen=True):
    """The planner's choice. Without ``fits`` the pools are the floors, which is what is needed."""

    fits: bool
    shape: StepShape
    floors: Floors
    pages: int
    slots: int


def make_frame(spec: ModelSpec, deployment: Deployment, facts: MemoryFacts, weights: WeightBytes) -> Frame:
    """Raises ConfigError for a layout or a device that cannot be."""
    engine, memory, cache = deployment.engine, deployment.memory, deployment.cache
    cuda = facts.backend == "cuda"
    dtypes = choose_dtypes(spec, deployment)
    try:
        shares = split_ranks(spec, engine.tensor_parallel, engine.pipeline_parallel)
    except ValueError as error:
        raise ConfigError(f"engine: {error}") from None
    if memory.device is None and facts.free == 0:
        raise ConfigError("memory.device: there is no GPU to ask; state the memory of one, such as 139GiB")
    if cuda and cache.page_size % GPU_SCAN_TILE:
        raise ConfigError(f"cache.page_size: must be a multiple of {GPU_SCAN_TILE} on a GPU, got {cache.page_size}")
    head_dim = spec.attention.head_dim if spec.attention is not None else 64
    if cuda and head_dim > _MOST_HEAD_DIM_GPU:
        raise ConfigError(f"engine.backend: the GPU kernels take a head_dim up to {_MOST_HEAD_DIM_GPU}, got {head_dim}")
    known: dict[object, int] = {}

    def weigh(share: RankShare) -> int:
        kind = _kind(spec, share)
        if kind not in known:
            known[kind] = weights(spec, share, dtypes.model)
        return known[kind]

    ranks = tuple(
        Rank(
            share,
            page_layout(spec, share, cache.page_size, dtypes.kv),
            slot_layout(spec, share, dtypes.state, dtypes.conv),
            weigh(share),
        )
        for share in shares
    )
    return Frame(
        spec=spec,
        ranks=ranks,
        distinct=tuple({_kind(spec, rank.share): rank for rank in ranks}.values()),
        dtypes=dtypes,
        page_size=cache.page_size,
        prefix=cache.prefix,
        cuda=cuda,
        device=facts.auto_device if memory.device is None else memory.device,
        device_stated=memory.device is not None or cuda,
        reserve=(GIB if cuda else 0) if memory.reserve is None else memory.reserve,
        checkpoint_every=cache.checkpoint_every or checkpoint_cost_tokens(model_bytes(spec, dtypes), cache.page_size),
    )


def _kind(spec: ModelSpec, share: RankShare) -> tuple[object, ...]:
    """Equal for ranks whose bytes are equal: the same kinds of layers and the same widths."""
    spans = (share.q_heads, share.kv_heads, share.key_heads, share.ffn, share.expert_ffn, share.shared_ffn, share.vocab)
    return share.layer_specs(spec), share.first, share.last, *(width(span) for span in spans)


def choose_dtypes(spec: ModelSpec, deployment: Deployment) -> Dtypes:
    memory = deployment.memory
    model = spec.dtype if deployment.model.dtype == "auto" else deployment.model.dtype
    return Dtypes(
        model=model,
        kv=model if memory.kv_dtype == "auto" else memory.kv_dtype,
        state=memory.state_dtype,
        conv=model if memory.conv_dtype == "auto" else memory.conv_dtype,
    )


def size(frame: Frame, deployment: Deployment) -> Sizing:
    """Lower the defaulted numbers until the floors fit every rank, then fill the pools."""
    for shape in _ladder(frame, deployment):
        if _fits(frame, shape, comfortable=deployment.engine.max_running is None):
            return _filled(frame, shape)
    if _fits(frame, shape, comfortable=False):
        return _filled(frame, shape)
    floors = frame.floors(shape)
    return Sizing(False, shape, floors, floors.kv_pages, floors.state_slots)


def default_shape(frame: Frame, deployment: Deployment) -> StepShape:
    """Stated numbers, and the defaults of the others before anything is lowered."""
    engine, page = deployment.engine, frame.page_size
    running = engine.max_running or (256 if frame.cuda else 16)
    step = engine.step_tokens or pages_of(max(8192 if frame.cuda else 512, running + page), page) * page
    return _shape(frame, deployment, running, engine.max_seq_len or frame.spec.max_seq_len, step)


def _shape(frame: Frame, deployment: Deployment, running: int, seq_len: int, step: int) -> StepShape:
    page = frame.page_size
    chunk = deployment.engine.prefill_chunk or max(min(step, step if frame.cuda else 256) // page, 1) * page
    return StepShape(running, seq_len, max(step, chunk), chunk)


def _ladder(frame: Frame, deployment: Deployment) -> Iterator[StepShape]:
    """The shapes to try, best first: everything as wanted; then one defaulted number after the other lowered, to a
    comfortable bound first and to the least bound when all are comfortable."""
    engine, page = deployment.engine, frame.page_size
    shape = default_shape(frame, deployment)
    least_step = max(_LEAST_STEP_GPU if frame.cuda else _LEAST_STEP, page)
    comfort_seq_len = min(_COMFORT_SEQ_LEN, max(shape.max_seq_len // 4, _LEAST_SEQ_LEN))
    rungs = [
        ("max_running", _COMFORT_RUNNING),
        ("step_tokens", max(4 * page, _COMFORT_STEP)),
        ("max_seq_len", comfort_seq_len),
        ("max_running", _FEW_RUNNING),
        ("max_seq_len", _LEAST_SEQ_LEN),
        ("step_tokens", least_step),
        ("max_running", 1),
    ]
    yield shape
    for name, low in rungs:
        if getattr(engine, name) is None and getattr(shape, name) > low:
            shape = _lower(frame, deployment, shape, name, low)
            yield shape


def _lower(frame: Frame, deployment: Deployment, shape: StepShape, name: str, low: int) -> StepShape:
    """The shape with one number at the largest value from ``low`` on that fits, at ``low`` if none does."""

    def at(value: int) -> StepShape:
        changed = msgspec.structs.replace(shape, **{name: value})
        return _shape(frame, deployment, changed.max_running, changed.max_seq_len, changed.step_tokens)

    comfortable = deployment.engine.max_running is None
    best = largest(low, getattr(shape, name), lambda value: _fits(frame, at(value), comfortable))
    if best is None:
        return at(low)
    return at(best if name == "max_running" else max(low, best // frame.page_size * frame.page_size))


def largest(low: int, high: int, good: Callable[[int], bool]) -> int | None:
    """The largest value in [low, high] that is good, where good is monotone (true below some point); None if none."""
    if not good(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if good(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(frame: Frame, shape: StepShape, comfortable: bool) -> bool:
    """Whether every rank holds the floors; ``comfortable`` asks for some KV and, with a prefix cache, one checkpoint
    per running sequence as well."""
    floors = frame.floors(shape)
    pages, slots = floors.kv_pages, floors.state_slots
    if comfortable:
        each = pages_of(min(shape.max_seq_len, _COMFORT_TOKENS), frame.page_size)
        pages = max(pages, shape.max_running * each + pages_of(shape.step_tokens, frame.page_size) + 1)
        slots += shape.max_running if frame.prefix else 0
    return frame.holds(shape, pages, slots)


def _filled(frame: Frame, shape: StepShape) -> Sizing:
    """Both pools for a shape whose floors fit. What lies above the floors is retention: pages, and with a prefix cache
    as many checkpoints as the retained tokens need at the retention spacing."""
    floors = frame.floors(shape)
    running = shape.max_running * pages_of(shape.max_seq_len, frame.page_size)
    useful = running + pages_of(shape.step_tokens, frame.page_size) + 1
    if frame.prefix:
        useful = MOST_PAGES if frame.device_stated else 2 * useful

    def good(extra: int) -> bool:
        return frame.holds(shape, floors.kv_pages + extra, floors.state_slots + retention_slots(frame, extra))

    extra = largest(0, max(0, min(useful, MOST_PAGES) - floors.kv_pages), good)
    assert extra is not None, "the floors fit, so no page beyond them fits as well"
    slots = floors.state_slots + retention_slots(frame, extra)
    return Sizing(True, shape, floors, floors.kv_pages + extra, slots)


def retention_slots(frame: Frame, pages: int) -> int:
    """Checkpoints that ``pages`` retained pages need at the retention spacing."""
    if not frame.prefix or frame.spec.recurrent_layers == 0:
        return 0
    return -(-pages * frame.page_size // frame.checkpoint_every)
