"""What memory there is: found on this machine, or stated for another one."""

import os
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import pynvml

from hybserve.core.units import GIB

#: Without a stated `memory.device` the CPU backend takes no more than this, nor more than half of what is free.
CPU_DEVICE_MOST = 4 * GIB

_CGROUP = Path("/sys/fs/cgroup")


class MemoryFacts(msgspec.Struct, frozen=True):
    """One rank's device. ``free`` in bytes; 0 = there is no such device here, so `memory.device` must be stated."""

    backend: Literal["cpu", "cuda"]
    free: int

    @property
    def auto_device(self) -> int:
        """`memory.device` where it is not stated."""
        return min(CPU_DEVICE_MOST, self.free // 2) if self.backend == "cpu" else self.free


def probe_memory(cgroup: Path = _CGROUP) -> MemoryFacts:
    """Free memory of this machine for the CPU backend, container limits included."""
    free = psutil.virtual_memory().available
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(cgroup / limit_file), _number(cgroup / used_file)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return MemoryFacts("cpu", free)


def probe_gpu() -> int:
    """Free bytes of the first GPU that this process may use; 0 where there is none. The driver is asked, not torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    if first in ("", "-1"):
        return 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        by_index = first.isdigit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(first)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(first)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


def _number(path: os.PathLike[str]) -> int | None:
    """A counter of the kernel; None where it is absent or says ``max``."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
