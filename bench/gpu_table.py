"""One readable table of what was measured on a GPU: ``python -m bench.gpu_table`` writes bench/results/GPU.md.

From the records of ``bench gpu``, ``bench serve`` and ``bench kernels``; every part names the command, the versions and
the date of its record. A figure that misses its bar is marked.
"""

import json
from typing import Any

from bench import RESULTS
from bench.serve import READY_BAR, SCENARIOS

TARGET = RESULTS / "GPU.md"


def main() -> None:
    parts = [
        "# Measured on a GPU",
        "Peer: vLLM 0.26 on the same kind of card; limit: bytes over copy bandwidth or operations over matrix rate. "
        'A "!" marks what is slower than the bar. Random weights and ids, greedy, bf16, fp32 state.',
    ]
    for name, title in (("gpu_m1", "M1: Qwen3.5-9B, engine without HTTP"), ("gpu_m2", "M2: Qwen3.5-35B-A3B")):
        record = _read(name)
        if record is not None:
            parts += [f"## {title}", _where(record), _figures(record["figures"])]
            parts += [part for name, shares in record.get("parts_us", {}).items() for part in _profile(name, shares)]
    record = _read("serve_gpu_m1")
    if record is not None:
        parts += ["## M1 over HTTP", _where(record), _served(record)]
    record = _read("kernels")
    if record is not None:
        parts += ["## Kernels", _where(record), _kernels(record["rows"])]
    TARGET.write_text("\n\n".join(parts) + "\n")
    print(f"written to {TARGET}")


def _read(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _where(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    start = f"; ready after {record['start_seconds']} s" if "start_seconds" in record else ""
    return f"`{record['command']}`, {record['date']}, {record.get('gpu', 'GPU')}, {versions}{start}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _marked(ours: float, bar: float | None, more_is_better: bool = False) -> str:
    missed = bar is not None and (ours < bar if more_is_better else ours > bar)
    return f"{_number(ours)}{' !' if missed else ''}"


def _figures(figures: list[dict[str, Any]]) -> str:
    rows = []
    for figure in figures:
        ours, bar, limit = figure["ours"], figure["bar"], figure["limit"]
        share = "" if limit is None else f"{100 * limit / ours:.0f} %"
        name = f"{figure['what']} ({figure['unit']})"
        rows.append([
            name, _marked(ours, bar, figure["unit"] == "%"), _number(bar), _number(figure["peer"]), _number(limit),
            share, figure["more"],
        ])  # fmt: skip
    return _table(["scenario", "ours", "bar", "peer", "limit", "of limit", ""], rows)


def _profile(name: str, shares: dict[str, float]) -> list[str]:
    """Where the time of a step goes; parts below one in a thousand together."""
    whole = sum(shares.values())
    large = {part: us for part, us in shares.items() if us >= whole / 1000}
    rows = [[part, f"{us:,.0f}", f"{100 * us / whole:.1f} %"] for part, us in large.items()]
    if len(large) < len(shares):
        rest = whole - sum(large.values())
        rows.append(["all others", f"{rest:,.0f}", f"{100 * rest / whole:.1f} %"])
    return [f"Where the time goes, {name}: {whole:,.0f} µs", _table(["part", "µs", "share"], rows)]


def _served(record: dict[str, Any]) -> str:
    rows = [["start", "ready, s", _marked(record["ready_s"], READY_BAR), _number(READY_BAR), "122"]]
    for run in record["runs"]:
        for bar in SCENARIOS[run["scenario"]][1]:
            ours = bar.of(run["results"])
            cells = [_marked(ours, bar.bar, bar.more_is_better), _number(bar.bar), _number(bar.peer)]
            rows.append([run["scenario"], bar.what, *cells])
    return _table(["scenario", "figure", "ours", "bar", "peer"], rows)


def _kernels(rows: list[dict[str, Any]]) -> str:
    return _table(
        ["op", "shape", "variant", "µs", "limit", "of limit", "peer", "whose"],
        [
            [
                row["op"], row["shape"], row["variant"], f"{row['us']:.1f}", f"{row['limit']:.1f}",
                f"{100 * row['limit'] / row['us']:.0f} %", _number(row["peer"]), row["whose"],
            ]
            for row in rows
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
