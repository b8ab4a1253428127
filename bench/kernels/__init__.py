"""Kernels on a GPU: each op is checked against its reference, then timed beside the limit of the card.

``python -m bench kernels [op …]``. A module of this package offers

    check()             every variant on awkward sizes against the reference; raises AssertionError. Also launches once
                        whatever ``measure`` will time, so that compilation is over (ops are checked side by side)
    measure() -> rows   one ``Row`` per shape and variant

The limit of a row is the larger of its bytes over the copy bandwidth and its floating-point operations over the matrix
rate, both as measured on an H200 (see LIMITS).
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench import RESULTS, ROOT, circumstances

OPS = (
    "attention",
    "causal_conv",
    "copies",
    "gated_delta_decode",
    "gated_delta_scan",
    "linear",
    "moe",
    "norm",
    "sampling",
)
#: Bytes a second of a copy (read + write), and bf16 FLOP a second of a large product, on an H200.
BANDWIDTH, MATRIX_RATE = 4253e9, 780e12


class Row(NamedTuple):
    """``peer``: µs of the best known kernel at this shape, and whose it is."""

    op: str
    shape: str
    variant: str
    us: float
    bytes: float = 0.0
    flops: float = 0.0
    peer: float | None = None
    whose: str = ""

    @property
    def limit(self) -> float:
        """µs."""
        return max(self.bytes / BANDWIDTH, self.flops / MATRIX_RATE) * 1e6


def main(arguments: list[str]) -> int:
    ops = tuple(arguments) or OPS
    with ThreadPoolExecutor(len(ops)) as pool:
        checks = dict(zip(ops, pool.map(lambda op: _worker("check", op), ops), strict=True))
    rows: list[Row] = []
    failed = [op for op, done in checks.items() if done.returncode]
    for op, done in checks.items():
        print(f"--- check {op}: {'failed' if done.returncode else 'passed'}\n{done.stdout[-3000:]}", flush=True)
    for op in ops:
        if op in failed:
            continue
        done = _worker("measure", op)
        if done.returncode:
            failed.append(op)
            print(f"--- measure {op}: failed\n{done.stdout[-3000:]}", flush=True)
            continue
        *said, last = done.stdout.strip().splitlines()
        if said:
            print("\n".join(said), flush=True)
        rows += [Row(*row) for row in json.loads(last)]
    _print(rows)
    _record(rows, failed, arguments)
    return 1 if failed else 0


def _worker(what: str, op: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.kernels.worker", what, op]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400)


def _print(rows: list[Row]) -> None:
    print(f"{'op':<20}{'shape':<26}{'variant':<26}{'µs':>10}{'limit':>9}{'%':>6}{'peer':>9}  whose")
    for row in rows:
        share = f"{100 * row.limit / row.us:.0f}" if row.us else ""
        peer = "" if row.peer is None else f"{row.peer:.1f}"
        figures = f"{row.us:>10.1f}{row.limit:>9.1f}{share:>6}{peer:>9}"
        print(f"{row.op:<20}{row.shape:<26}{row.variant:<26}{figures}  {row.whose}")


def _record(rows: list[Row], failed: list[str], arguments: list[str]) -> None:
    import torch

    figures = {
        "gpu": torch.cuda.get_device_name(),
        "failed": failed,
        "rows": [row._asdict() | {"limit": row.limit} for row in rows],
    }
    target = Path(os.environ.get("BENCH_RESULTS", RESULTS)) / "kernels.json"
    text = {"bench": "kernels", **circumstances(["python", "-m", "bench", "kernels", *arguments], ("torch", "triton"))}
    target.write_text(json.dumps(text | figures, indent=1) + "\n")
