"""What was really allocated, beside what the plan granted: the drift line of the startup report."""

import psutil
import torch
from msgspec import Struct

from hybserve.core.units import format_bytes
from hybserve.plan.result import StagePlan
from hybserve.runner.device_pools import DevicePools


class Measured(Struct, frozen=True):
    """Bytes. ``resident`` is the whole process (pools count there only once they are written)."""

    weights: int
    kv_pool: int
    state_pool: int
    resident: int

    @property
    def pools(self) -> int:
        return self.kv_pool + self.state_pool


def measure(parameters: dict[str, torch.Tensor], pools: DevicePools) -> Measured:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in parameters.values()
    }
    return Measured(
        weights=sum(storages.values()),
        kv_pool=pools.page_pool_bytes,
        state_pool=pools.slot_pool_bytes,
        resident=psutil.Process().memory_info().rss,
    )


def drift(planned: StagePlan, real: Measured) -> list[tuple[str, str]]:
    """Report lines: planned, real and the difference of weights and pools."""
    pairs = (("weights", planned.weight_bytes, real.weights), ("pools", planned.pool_bytes, real.pools))
    lines = [
        (name, f"planned {format_bytes(want)}, real {format_bytes(have)}, drift {_signed(have - want)}")
        for name, want, have in pairs
    ]
    return [*lines, ("process", f"{format_bytes(real.resident)} resident after warm-up")]


def _signed(count: int) -> str:
    return "0 B" if count == 0 else f"{'+' if count > 0 else '-'}{format_bytes(abs(count))}"
