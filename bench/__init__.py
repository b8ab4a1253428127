"""Benchmarks: ``python -m bench NAME`` runs the tests of what is measured, and measures only if they are green.

A figure without its circumstances is worth nothing: ``record`` writes every result with hardware, versions, git
revision, command and date into ``bench/results/NAME.json``.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def circumstances(command: Sequence[str], packages: Sequence[str] = ()) -> dict[str, Any]:
    """What a figure was measured on and with. ``packages``: distributions whose version matters."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        **_CODE,
        "hardware": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "memory_gib": round(psutil.virtual_memory().total / 1024**3, 1),
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # imported from a folder that nobody installed
        return "unknown"


def record(name: str, figures: dict[str, Any], command: Sequence[str], packages: Sequence[str] = ()) -> Path:
    """Write ``figures`` with their circumstances, into the folder BENCH_RESULTS if that is set; returns the file."""
    path = Path(os.environ.get("BENCH_RESULTS", RESULTS)) / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"bench": name, **circumstances(command, packages), **figures}, indent=1) + "\n")
    return path


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


#: What was imported; a long run may end after others have committed.
_CODE = {
    "revision": _git("rev-parse", "HEAD"),
    "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
}


def _cpu() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
