"""RMS norm over the last dimension: plain (scale given ready, 1 + w for zero-centred weights) and gated by silu."""

import torch
import torch.nn.functional as F

from hybserve_kernels.device import require_cpu
from hybserve_kernels.rms_norm import gpu

__all__ = ["rms_norm", "rms_norm_gated"]


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``scale`` in fp32, [D] or broadcastable to ``x``. The result is a new tensor in ``dtype`` (default: of ``x``)."""
    if x.is_cuda:
        return gpu.rms_norm(x, scale, eps, dtype)
    require_cpu("rms_norm", x, scale)
    wide = x if x.dtype == torch.float32 else x.float()
    if scale.dim() == 1:
        normed = F.rms_norm(wide, scale.shape, scale, eps)
    else:
        normed = F.rms_norm(wide, wide.shape[-1:], None, eps).mul_(scale)
    return normed.to(dtype or x.dtype)


def rms_norm_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` in fp32 or the dtype of ``gate``; ``weight`` [D] in the dtype of ``gate``, which the result has too."""
    require_cpu("rms_norm_gated", x, gate, weight)
    if gate.dtype == torch.float32:
        return F.rms_norm(x.float(), weight.shape, weight, eps).mul_(F.silu(gate))
    normed = F.rms_norm(x.float(), weight.shape, None, eps).to(gate.dtype).mul_(weight)
    return normed.float().mul_(F.silu(gate.float())).to(gate.dtype)
