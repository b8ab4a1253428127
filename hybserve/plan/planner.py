"""``make_plan``: a model, a deployment and memory facts in, a frozen Plan out. The only authority over bytes.

No weight is touched and torch is never imported, so an H200 is planned on a laptop.
"""

import functools
from pathlib import Path

from hybserve.config.deployment import Deployment
from hybserve.core.errors import ConfigError
from hybserve.core.units import format_bytes, format_count
from hybserve.plan.costs import DECODE_STALL, PREFILL_BACKLOG, PREFILL_RATE, StepShape, matrix_flops, model_bytes
from hybserve.plan.edits import smallest_edits
from hybserve.plan.facts import MemoryFacts, probe_gpu, probe_memory
from hybserve.plan.floors import pages_of
from hybserve.plan.result import EngineLimits, ModelCounts, Plan, Pools, Shortfall, StagePlan
from hybserve.plan.sizing import Frame, Rank, Sizing, WeightBytes, default_shape, make_frame, size
from hybserve.spec.from_hf import read_model_spec
from hybserve.spec.inventory import bind, weight_bytes
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.safetensors import read_headers, weight_files


def plan_deployment(deployment: Deployment, facts: MemoryFacts | None = None, path: Path | None = None) -> Plan:
    """The plan of the model directory or config.json that ``model.path`` names, or of ``path`` where it names none.
    Weights that lie beside the configuration are checked against it by their headers. Facts are found here if not
    given. Raises ConfigError, ModelError; a plan that does not fit is returned (see ``report.require_fit``)."""
    if path is None:
        if deployment.model.path is None:
            raise ConfigError("model.path: not set; it names a model directory or a config.json")
        path = Path(deployment.model.path)
    spec = read_model_spec(path)
    if deployment.model.load == "weights" and path.is_dir() and weight_files(path):
        bind(spec, read_headers(path))  # every tensor is consumed and every parameter filled, or refused by name
    return make_plan(spec, deployment, facts or find_facts(deployment))


def find_facts(deployment: Deployment) -> MemoryFacts:
    """This machine: its first GPU, if it has one and the deployment does not ask for the CPU backend. Where a GPU is
    asked for and there is none, nothing is known and memory.device must be stated."""
    engine = deployment.engine
    if engine.backend == "cuda" or (engine.backend == "auto" and not engine.deterministic):
        free = probe_gpu()
        if free or engine.backend == "cuda":
            return MemoryFacts("cuda", free)
    return probe_memory()


def make_plan(spec: ModelSpec, deployment: Deployment, facts: MemoryFacts, weights: WeightBytes = weight_bytes) -> Plan:
    weights = functools.cache(weights)  # the search for edits asks again and again
    frame = make_frame(spec, deployment, facts, weights)
    sizing = size(frame, deployment)
    shortfalls: tuple[Shortfall, ...] = ()
    if not sizing.fits:

        def fits(candidate: Deployment) -> bool:
            try:
                return size(make_frame(spec, candidate, facts, weights), candidate).fits
            except ConfigError:  # a layout that the model cannot have
                return False

        shortfalls = _shortfalls(frame, sizing, smallest_edits(deployment, frame, fits))
    shape = sizing.shape
    return Plan(
        fits=sizing.fits,
        model=ModelCounts(len(spec.layers), spec.recurrent_layers, spec.attention_layers),
        bytes=model_bytes(spec, frame.dtypes),
        floors=sizing.floors,
        pools=Pools(sizing.slots, sizing.pages, sizing.slots - sizing.floors.state_slots),
        stages=tuple(_stage(frame, sizing, rank) for rank in frame.ranks),
        shortfalls=shortfalls,
        engine=_limits(frame, sizing, deployment) if sizing.fits else None,
        buys=_buys(frame, sizing) if sizing.fits else (),
        chosen=_chosen(frame, deployment, shape),
    )


def _limits(frame: Frame, sizing: Sizing, deployment: Deployment) -> EngineLimits:
    shape, whole = sizing.shape, model_bytes(frame.spec, frame.dtypes)
    stateful = frame.spec.recurrent_layers > 0
    return EngineLimits(
        page_size=frame.page_size,
        kv_pages=sizing.pages,
        state_slots=sizing.slots,
        max_running=shape.max_running,
        max_seq_len=shape.max_seq_len,
        step_tokens=shape.step_tokens,
        prefill_chunk=shape.prefill_chunk,
        kv_dtype=frame.dtypes.kv,
        state_dtype=frame.dtypes.state,
        conv_dtype=frame.dtypes.conv,
        deterministic=deployment.engine.deterministic,
        prefix=frame.prefix,
        stateful=stateful,
        slot_price=whole.state_slot / max(whole.kv_per_token * frame.page_size, 1),
        checkpoint_every=frame.checkpoint_every if stateful else 0,
        prefill_beside=min(_prefill_of(frame, DECODE_STALL), shape.step_tokens) if frame.cuda else 0,
        prefill_backlog=_prefill_of(frame, PREFILL_BACKLOG) if frame.cuda else 0,
        cuda=frame.cuda,
        graphs=deployment.engine.graphs != "off",
    )


def _prefill_of(frame: Frame, seconds: float) -> int:
    """Tokens that a GPU prefills in some time, in whole pages, at least one."""
    page = frame.page_size
    return max(int(seconds * PREFILL_RATE / matrix_flops(frame.spec)) // page * page, page)


def _stage(frame: Frame, sizing: Sizing, rank: Rank) -> StagePlan:
    transient = frame.transient_bytes(rank, sizing.shape)
    pools = rank.page.page_bytes * sizing.pages + rank.slot.slot_bytes * sizing.slots
    low, high = rank.share.layers
    return StagePlan(
        stage=rank.share.stage,
        rank=rank.share.rank,
        layers=high - low,
        recurrent_layers=sum(layer.mixer != "attention" for layer in rank.share.layer_specs(frame.spec)),
        attention_layers=sum(layer.mixer == "attention" for layer in rank.share.layer_specs(frame.spec)),
        state_slot_bytes=rank.slot.slot_bytes,
        kv_page_bytes=rank.page.page_bytes,
        weight_bytes=rank.weight_bytes,
        pool_bytes=pools,
        host_bytes=0,
        transient_bytes=transient,
        reserve_bytes=frame.reserve,
        headroom_bytes=max(0, frame.device - frame.reserve - rank.weight_bytes - transient - pools),
        device_bytes=frame.device,
    )


def _shortfalls(frame: Frame, sizing: Sizing, edits: tuple[str, ...]) -> tuple[Shortfall, ...]:
    """One per stage that does not fit, for its worst rank."""
    worst: dict[int, Shortfall] = {}
    for rank in frame.ranks:
        stage = _stage(frame, sizing, rank)
        need = stage.weight_bytes + stage.transient_bytes + stage.reserve_bytes + stage.pool_bytes
        if need > frame.device and (stage.stage not in worst or need > worst[stage.stage].need):
            what = (
                f"device memory of stage {stage.stage} rank {stage.rank}: weights {format_bytes(stage.weight_bytes)}, "
                f"pools at their floors {format_bytes(stage.pool_bytes)} ({sizing.floors.state_slots} slots, "
                f"{sizing.floors.kv_pages} pages), one step {format_bytes(stage.transient_bytes)}, reserve "
                f"{format_bytes(stage.reserve_bytes)}"
            )
            worst[stage.stage] = Shortfall(what, need, frame.device, edits)
    return tuple(worst[stage] for stage in sorted(worst))


def _tokens(count: int) -> str:
    """A token count in words, rounded down to whole K above 1K."""
    return format_count(count // 1024 * 1024 if count >= 1024 else count)


def _buys(frame: Frame, sizing: Sizing) -> tuple[str, ...]:
    shape, spec = sizing.shape, frame.spec
    if spec.attention_layers == 0:
        lines = [f"{shape.max_running} running x any length up to {format_count(shape.max_seq_len)} (no KV)"]
    else:
        tokens = (sizing.pages - 1) * frame.page_size
        each = min(shape.max_seq_len, tokens // shape.max_running)
        line = f"{shape.max_running} running x {_tokens(each)}"
        if each < shape.max_seq_len:
            longest = (sizing.pages - 1) // pages_of(shape.max_seq_len, frame.page_size)
            line += f", or {min(longest, shape.max_running)} x {format_count(shape.max_seq_len)}"
        lines = [line]
    extra = sizing.pages - sizing.floors.kv_pages
    if not frame.prefix:
        lines.append("nothing is retained: cache.prefix is false")
    elif extra == 0:
        lines.append("retention budget zero: prefixes are kept only as long as running requests leave room")
    else:
        kept = f"up to {_tokens(extra * frame.page_size)} tokens of prefixes retained"
        slots = sizing.slots - sizing.floors.state_slots
        lines.append(f"{kept} with {slots} checkpoint{'s' if slots > 1 else ''}" if slots else kept)
    return tuple(lines)


def _chosen(frame: Frame, deployment: Deployment, shape: StepShape) -> tuple[tuple[str, str, str], ...]:
    """Every number that the operator did not state, with its reason; and stated ones that deserve a remark."""
    wanted, spec = default_shape(frame, deployment), frame.spec
    rows: list[tuple[str, str, str]] = []

    def number(name: str, default: str) -> None:
        value, first = getattr(shape, name), getattr(wanted, name)
        why = default if value == first else f"lowered from {format_count(first)} to what fits"
        if getattr(deployment.engine, name) is None:
            rows.append((f"engine.{name}", format_count(value), why))

    number("max_running", "default on a GPU" if frame.cuda else "default on CPU")
    number("max_seq_len", "the model's")
    number("step_tokens", "default on a GPU" if frame.cuda else "default on CPU")
    number("prefill_chunk", "a step" if frame.cuda else "default on CPU")
    if deployment.memory.device is None:
        why = "found" if frame.cuda else "the smaller of 4 GiB and half of what is free"
        rows.append(("memory.device", format_bytes(frame.device), why))
    if frame.prefix and deployment.cache.checkpoint_every is None and spec.recurrent_layers:
        rows.append(("cache.checkpoint_every", format_count(frame.checkpoint_every), "what a checkpoint costs in KV"))
    if shape.max_seq_len > spec.max_seq_len:
        remark = (
            f"stated beyond the model's own {format_count(spec.max_seq_len)}; it was not trained for those positions"
        )
        rows.append(("engine.max_seq_len", format_count(shape.max_seq_len), remark))
    return tuple(rows)
