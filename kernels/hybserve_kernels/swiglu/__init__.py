"""silu(gate) · up over a merged projection."""

import torch
import torch.nn.functional as F

from hybserve_kernels.device import require_cpu
from hybserve_kernels.swiglu import gpu

__all__ = ["swiglu"]


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2F] = [gate | up] to [..., F]. The input is not kept."""
    if gate_up.is_cuda:
        return gpu.swiglu(gate_up)
    require_cpu("swiglu", gate_up)
    half = gate_up.shape[-1] // 2
    return F.silu(gate_up.narrow(-1, 0, half)).mul_(gate_up.narrow(-1, half, half))
