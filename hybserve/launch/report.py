"""The startup report: what is served, what it costs, what fits, how long the start took, and a command that works.

At most 25 lines, the same text on a terminal (in colour) and in a file.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import TextIO

import msgspec

from hybserve.core.messages import Ready
from hybserve.core.types import ServingFacts
from hybserve.core.units import format_bytes, format_count
from hybserve.plan.result import Plan
from hybserve.spec.model_spec import DTYPE_BYTES, LayerSpec, ModelSpec

MAX_LINES = 25
_UNITS = (("B", 1e9), ("M", 1e6), ("K", 1e3))
_DTYPE_WORDS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}


class Started(msgspec.Struct, frozen=True):
    """Everything the report tells of."""

    spec: ModelSpec
    plan: Plan
    facts: ServingFacts
    backend: str
    dtype: str
    url: str
    key_variable: str | None  # environment variable with the API key, if one must be sent
    ready: list[Ready]
    stages: list[tuple[str, float]]  # seconds; they sum to the time since the process began


def report_lines(started: Started) -> list[tuple[str, str]]:
    """(label, text) pairs, at most 25 lines with the title."""
    pairs = [
        ("model", _model(started)),
        ("layers", layer_stack(started.spec.layers)),
        ("bytes", _bytes(started.plan)),
        *_pools(started.plan),
        *[(label, text) for ready in started.ready for label, text in ready.report],
        *[("capacity", text) for text in started.plan.buys],
        ("prefix", _grain(started.plan)),
        ("sampling", _sampling(started.facts)),
        *[("chosen", f"{key}: {value} ({why})") for key, value, why in started.plan.chosen],
    ]
    last = [("start", _times(started.stages)), ("try", _curl(started)), ("ready at", started.url)]
    room = MAX_LINES - 1 - len(last)
    if len(pairs) > room:
        dropped = len(pairs) - room + 1
        pairs = [*pairs[: room - 1], ("", f"{dropped} more lines: hybserve plan shows them")]
    return pairs + last


def print_report(started: Started, stream: TextIO) -> None:
    """Write the report. Its last line is always ``ready at URL``, alone on the line."""
    title = f"hybserve {started.facts.version} serves {', '.join(started.facts.served_names)}"
    lines = report_lines(started)
    if stream.isatty():
        _print_rich(title, lines, stream)
        return
    print(title, file=stream)
    for label, text in lines[:-1]:
        print(f"  {label:<9} {text}", file=stream)
    print(f"ready at {started.url}", file=stream, flush=True)


def _print_rich(title: str, lines: Sequence[tuple[str, str]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    console.print(Text(title, style="bold"))
    for label, text in lines[:-1]:
        console.print(Text.assemble((f"  {label:<9} ", "cyan"), text), soft_wrap=True)
    console.print(Text.assemble(("ready at ", "bold green"), (lines[-1][1], "bold")), soft_wrap=True)


def layer_stack(layers: Sequence[LayerSpec]) -> str:
    """``64 layers: 16 x (3 gated_delta, 1 attention)``, mixture-of-experts layers marked ``+moe``."""
    names = [layer.mixer + ("+moe" if layer.mlp == "moe" else "") for layer in layers]
    if len(set(names)) == 1:
        return f"{len(names)} x {names[0]}"
    period = next(size for size in range(1, len(names) + 1) if _repeats(names, size))
    runs = ", ".join(f"{len(list(run))} {name}" for name, run in groupby(names[:period]))
    repeats, rest = divmod(len(names), period)
    if repeats == 1 and rest == 0:
        return f"{len(names)} layers: {runs}"
    tail = "" if rest == 0 else ", " + ", ".join(f"{len(list(run))} {name}" for name, run in groupby(names[-rest:]))
    return f"{len(names)} layers: {repeats} x ({runs}){tail}"


def _repeats(names: Sequence[str], size: int) -> bool:
    return all(names[index] == names[index - size] for index in range(size, len(names)))


def _model(started: Started) -> str:
    weights = sum(stage.weight_bytes for stage in started.plan.stages)
    parameters = weights / DTYPE_BYTES[started.dtype]
    unit, size = next(((unit, size) for unit, size in _UNITS if parameters >= size), ("", 1.0))
    return (
        f"{started.spec.family}, about {parameters / size:.1f}{unit} parameters, "
        f"{format_bytes(weights)} in {_DTYPE_WORDS[started.dtype]} on {started.backend}"
    )


def _bytes(plan: Plan) -> str:
    return f"{format_bytes(plan.bytes.kv_per_token)} of KV per token, {format_bytes(plan.bytes.state_slot)} per state"


def _pools(plan: Plan) -> list[tuple[str, str]]:
    limits = plan.engine
    assert limits is not None
    pages = sum(stage.kv_page_bytes for stage in plan.stages) * limits.kv_pages
    slots = sum(stage.state_slot_bytes for stage in plan.stages) * limits.state_slots
    kv = f"{limits.kv_pages} pages of {limits.page_size} tokens ({format_bytes(pages)}; floor {plan.floors.kv_pages})"
    state = f"{limits.state_slots} slots ({format_bytes(slots)}; floor {plan.floors.state_slots})"
    spare = f"{format_count(plan.pools.retention_slots)} slots beyond the floor"
    return [("kv pool", kv), ("states", f"{state}, {spare}")]


def _grain(plan: Plan) -> str:
    limits = plan.engine
    assert limits is not None
    if not limits.prefix:
        return "off (cache.prefix: false); every request runs cold"
    if not limits.stateful:
        return f"reused in multiples of {limits.page_size} tokens"
    spacing = format_count(limits.checkpoint_every)
    spare = "" if plan.pools.retention_slots else "; no slots beyond the floor, so few will last"
    return (
        f"reused in multiples of {limits.page_size} tokens; checkpoints at turn ends and every {spacing} tokens{spare}"
    )


def _sampling(facts: ServingFacts) -> str:
    values = ", ".join(f"{key} {value:g}" for key, value in sorted(facts.sampling_defaults.items())) or "greedy"
    return f"{values} (from {facts.sampling_source})"


def _times(stages: Sequence[tuple[str, float]]) -> str:
    total = sum(seconds for _, seconds in stages)
    parts = " + ".join(f"{name} {seconds:.2f}" for name, seconds in stages if seconds >= 0.005)
    return f"{total:.2f} s = {parts}"


def _curl(started: Started) -> str:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32})
    key = f' -H "Authorization: Bearer ${started.key_variable}"' if started.key_variable else ""
    return f"curl {started.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
