"""The smallest edits of a deployment that make it fit, each verified by sizing the edited deployment again."""

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError

from hybserve.config.deployment import Deployment
from hybserve.core.units import KIB, MIB
from hybserve.plan.sizing import Frame, largest

#: Whether a deployment fits.
Fits = Callable[[Deployment], bool]

#: How large an edit feels that changes precision instead of a number; numbers weigh old/new.
_DTYPE_WEIGHT = 2.0
_PARALLEL_WEIGHT = 3.0
_MOST_RANKS = 16
_MOST_DEVICE = 1 << 50


def edited(deployment: Deployment, changes: dict[str, Any]) -> Deployment | None:
    """The deployment with dotted keys stated anew, or None where they contradict what else is stated."""
    values = deployment.model_dump(mode="json", exclude_unset=True)
    for key, value in changes.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    try:
        return Deployment.build(values)
    except ValidationError:
        return None


def smallest_edits(deployment: Deployment, frame: Frame, fits: Fits, most: int = 3) -> tuple[str, ...]:
    """Up to ``most`` edits as ``section.key=value``: numbers and dtypes, smallest change first; two numbers at once (a
    space between them) and more ranks where those are not enough; more memory last."""

    def works(changes: dict[str, Any]) -> bool:
        candidate = edited(deployment, changes)
        return candidate is not None and fits(candidate)

    device = _device(frame, works)
    room = most - len(device)
    found = sorted([*_numbers(deployment, works), *_dtypes(frame, works)])
    if len(found) < room:
        found += _both(deployment, works)
    if len(found) < room:
        found += _parallel(deployment, frame, works)
    return tuple([text for _, text in found[:room]] + device)


Works = Callable[[dict[str, Any]], bool]
Weighed = Iterator[tuple[float, str]]


def _count(tokens: int) -> str:
    return f"{tokens // KIB}K" if tokens % KIB == 0 else str(tokens)


def _grain(value: int, unit: int) -> int:
    """Rounded down to a whole number of K from 4K on, of units below."""
    grain = KIB if value >= 4 * KIB and KIB % unit == 0 else unit
    return max(value // grain * grain, 1)


def _largest(works: Works, key: str, low: int, high: int, beside: dict[str, Any]) -> int | None:
    return largest(low, high, lambda value: works({**beside, key: value}))


def _numbers(deployment: Deployment, works: Works) -> Weighed:
    """The largest smaller value of each stated number."""
    engine, page = deployment.engine, deployment.cache.page_size
    for name, unit, low in (
        ("max_running", 1, 1),
        ("max_seq_len", page, page),
        ("step_tokens", page, max(page, engine.prefill_chunk or 0)),
    ):
        stated, key = getattr(engine, name), f"engine.{name}"
        if stated is None or stated <= low:
            continue
        best = _largest(works, key, low, stated - 1, {})
        if best is not None:
            value = max(low, _grain(best, unit))
            yield stated / value, f"{key}={_count(value) if name != 'max_running' else value}"


def _dtypes(frame: Frame, works: Works) -> Weighed:
    if frame.dtypes.state == "float32" and works({"memory.state_dtype": "bfloat16"}):
        yield _DTYPE_WEIGHT, "memory.state_dtype=bfloat16"
    for dtype in ("bfloat16", "float8_e4m3fn") if frame.cuda else ("bfloat16",):
        if frame.dtypes.kv in ("float32", "bfloat16", "float16") and dtype != frame.dtypes.kv:
            if dtype == "bfloat16" and frame.dtypes.kv == "float16":
                continue
            if works({"memory.kv_dtype": dtype}):
                yield _DTYPE_WEIGHT, f"memory.kv_dtype={dtype}"
                return


def _device(frame: Frame, works: Works) -> list[str]:
    """The least device memory, in whole MiB (KiB where that is coarse)."""
    unit, name = (MIB, "MiB") if frame.device >= 64 * MIB else (KIB, "KiB")
    low = frame.device // unit  # does not fit
    high = 2 * max(1, low)
    while not works({"memory.device": high * unit}):
        low, high = high, high * 2
        if high * unit > _MOST_DEVICE:
            return []
    least = low + 1 + _first(high - low - 1, lambda step: works({"memory.device": (low + 1 + step) * unit}))
    return [f"memory.device={least}{name}"]


def _first(most: int, good: Callable[[int], bool]) -> int:
    """The smallest of 0 .. most that is good; ``most`` is known to be."""
    last_bad = largest(0, most, lambda step: not good(step))
    return 0 if last_bad is None else last_bad + 1


def _parallel(deployment: Deployment, frame: Frame, works: Works) -> Weighed:
    """More ranks, where each brings a device of its own."""
    if not frame.cuda:
        return
    for name in ("tensor_parallel", "pipeline_parallel"):
        degree = getattr(deployment.engine, name) + 1
        while degree <= _MOST_RANKS:
            if works({f"engine.{name}": degree}):
                yield _PARALLEL_WEIGHT, f"engine.{name}={degree}"
                break
            degree += 1


def _both(deployment: Deployment, works: Works) -> Weighed:
    """Shorter and fewer together, where neither alone is enough."""
    engine, page = deployment.engine, deployment.cache.page_size
    if engine.max_running is None or engine.max_seq_len is None:
        return
    length = engine.max_seq_len
    while length > page:
        length = _grain(length // 2, page)
        best = _largest(works, "engine.max_running", 1, engine.max_running, {"engine.max_seq_len": length})
        if best is not None:
            weight = engine.max_seq_len / length * (engine.max_running / best)
            yield weight, f"engine.max_seq_len={_count(length)} engine.max_running={best}"
            return
