"""How many threads the engine computes with, decided before its libraries are loaded."""

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def claim_cores() -> None:
    """Leave a core to the other roles, and let threads that wait for each other sleep. ``OMP_NUM_THREADS`` and
    ``OMP_WAIT_POLICY`` win where they are set. To be called before torch is imported.

    A product is as late as its last thread. A thread too many, on a core that another role needs, costs not a share of
    the speed but most of it, and more when the others burn their cores meanwhile."""
    os.environ.setdefault("OMP_NUM_THREADS", str(engine_threads()))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def engine_threads(cgroup: Path = _CGROUP) -> int:
    """All cores this process may use but one, and no more than there are real ones; at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usable = min(usable, _quota(cgroup))
    return max(1, min(psutil.cpu_count(logical=False) or usable, usable - 1))


def _quota(cgroup: Path) -> int:
    """Cores' worth of time that the container may take, rounded down; a large number without a limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except OSError:
        limit, period = "max", "1"
    return int(limit) // int(period) if limit.isdigit() else 1 << 16
