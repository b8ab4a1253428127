"""What was really allocated, beside what the plan granted: the drift line of the startup report."""

import psutil
import torch
from msgspec import Struct

from hybserve.core.units import format_bytes
from hybserve.plan.facts import probe_gpu
from hybserve.plan.result import StagePlan
from hybserve.runner.device_pools import DevicePools


class Measured(Struct, frozen=True):
    """Bytes. ``resident`` is the whole process (pools count there only once they are written); ``device``: what the
    driver says this process took of a GPU, context and libraries included; ``peak``: the most that torch held of it."""

    weights: int
    kv_pool: int
    state_pool: int
    resident: int
    device: int | None = None
    peak: int | None = None

    @property
    def pools(self) -> int:
        return self.kv_pool + self.state_pool


def measure(parameters: dict[str, torch.Tensor], pools: DevicePools, free_before: int | None = None) -> Measured:
    """``free_before``: what the driver had free on the GPU before this process touched it."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in parameters.values()
    }
    return Measured(
        weights=sum(storages.values()),
        kv_pool=pools.page_pool_bytes,
        state_pool=pools.slot_pool_bytes,
        resident=psutil.Process().memory_info().rss,
        device=None if free_before is None else free_before - probe_gpu(),
        peak=None if free_before is None else torch.cuda.max_memory_reserved(),
    )


def drift(planned: StagePlan, real: Measured) -> list[tuple[str, str]]:
    """Report lines: planned, real and the difference of weights and pools, and on a GPU of all that was planned."""
    pairs = (("weights", planned.weight_bytes, real.weights), ("pools", planned.pool_bytes, real.pools))
    lines = [
        (name, f"planned {format_bytes(want)}, real {format_bytes(have)}, drift {_signed(have - want)}")
        for name, want, have in pairs
    ]
    if real.device is not None and real.peak is not None:
        whole = planned.weight_bytes + planned.pool_bytes + planned.transient_bytes
        share = 100 * (real.device - whole) / whole
        lines.append((
            "device",
            f"planned {format_bytes(whole)}, real {format_bytes(real.device)} (torch {format_bytes(real.peak)}), "
            f"drift {share:+.1f} %",
        ))  # fmt: skip
    return [*lines, ("process", f"{format_bytes(real.resident)} resident after warm-up")]


def _signed(count: int) -> str:
    return "0 B" if count == 0 else f"{'+' if count > 0 else '-'}{format_bytes(abs(count))}"
