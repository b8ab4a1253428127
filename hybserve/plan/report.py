"""A plan for people and for scripts."""

import msgspec

from hybserve.core.errors import PlanError
from hybserve.core.units import format_bytes
from hybserve.plan.facts import MemoryFacts
from hybserve.plan.result import Plan, Shortfall, StagePlan

#: Stages printed one by one; of more, the first ones stand for all.
_MOST_STAGES = 12


def plan_json(plan: Plan) -> bytes:
    """The whole plan as one JSON object; sizes are bytes."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2)


def require_fit(plan: Plan) -> None:
    """Raises PlanError (exit 3) with need, have and edits if the plan does not fit."""
    if not plan.fits:
        raise PlanError("\n".join(_shortfall_lines(plan)))


def require_memory(plan: Plan, facts: MemoryFacts) -> None:
    """Raises PlanError if a CPU plan asks for more than this machine has free, whatever was stated: all its ranks live
    in one memory, and the system would kill the server in the middle of its work."""
    need = sum(stage.weight_bytes + stage.pool_bytes + stage.transient_bytes for stage in plan.stages)
    if facts.backend == "cpu" and need > facts.free:
        raise PlanError(
            f"this machine has {format_bytes(facts.free)} ({_exact(facts.free)}) of memory free, the plan needs "
            f"{format_bytes(need)} ({_exact(need)}); lower memory.device below what is free"
        )


def format_plan(plan: Plan) -> str:
    """At most 40 lines."""
    model, bytes_ = plan.model, plan.bytes
    lines = [
        f"model     {model.layers} layers: {model.recurrent_layers} recurrent, {model.attention_layers} attention",
        f"bytes     state {format_bytes(bytes_.state_slot)} per slot ({format_bytes(bytes_.state_slot_per_layer)} per "
        f"layer), KV {format_bytes(bytes_.kv_per_token)} per token",
        f"floors    {plan.floors.state_slots} state slots, {plan.floors.kv_pages} KV pages",
    ]
    if plan.fits:
        lines.append(
            f"pools     {plan.pools.state_slots} state slots ({plan.pools.retention_slots} for retention), "
            f"{plan.pools.kv_pages} KV pages"
        )
    lines += [_stage_line(stage, plan) for stage in plan.stages[:_MOST_STAGES]]
    if len(plan.stages) > _MOST_STAGES:
        lines.append(f"          and {len(plan.stages) - _MOST_STAGES} more ranks")
    lines += [f"buys      {line}" for line in plan.buys]
    lines += [f"chosen    {key} = {value}  ({why})" for key, value, why in plan.chosen]
    if not plan.fits:
        lines += _shortfall_lines(plan)
    return "\n".join(lines)


def _stage_line(stage: StagePlan, plan: Plan) -> str:
    name = "rank" if len(plan.stages) == 1 else f"stage {stage.stage}.{stage.rank}"
    return (
        f"{name:<9} {stage.layers} layers; weights {format_bytes(stage.weight_bytes)} + pools "
        f"{format_bytes(stage.pool_bytes)} + step {format_bytes(stage.transient_bytes)} + reserve "
        f"{format_bytes(stage.reserve_bytes)} of {format_bytes(stage.device_bytes)}"
        + (f", {format_bytes(stage.headroom_bytes)} left" if plan.fits else "")
    )


def _shortfall_lines(plan: Plan) -> list[str]:
    lines = ["does not fit"]
    for shortfall in plan.shortfalls[:4]:
        lines += _need_have(shortfall)
    edits = plan.shortfalls[0].edits if plan.shortfalls else ()
    lines.append("any one of these would make it fit:" if edits else "no single edit would make it fit")
    return [*lines, *(f"  {edit}" for edit in edits)]


def _need_have(shortfall: Shortfall) -> list[str]:
    missing = shortfall.need - shortfall.have
    return [
        f"  {shortfall.what}",
        f"    need {format_bytes(shortfall.need)} ({_exact(shortfall.need)}), have {format_bytes(shortfall.have)} "
        f"({_exact(shortfall.have)}), short of {format_bytes(missing)}",
    ]


def _exact(count: int) -> str:
    return f"{count:,} B".replace(",", " ")
