"""RMS norm (Zhang & Sennrich, arXiv 1910.07467), the specification: computed in fp32, rounded once at the end.

Two forms as in Qwen3-Next and Qwen3.5: the zero-centred one scales by 1 + w; the gated one of the recurrent layers
scales by w and then multiplies by silu(gate). ``scale`` is the factor itself, so the first form is given 1 + w.
"""

import torch


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) · scale over the last dimension, in the dtype of ``x``."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * scale.float()).to(x.dtype)


def rms_norm_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(x) · weight, then · silu(gate). The normed value is rounded to the model dtype before the weight."""
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(gate.dtype)
    gated = (weight * normed).float() * torch.nn.functional.silu(gate.float())
    return gated.to(gate.dtype)
