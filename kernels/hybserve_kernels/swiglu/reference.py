"""SwiGLU (Shazeer, arXiv 2002.05202): silu(gate) · up over a merged projection [gate | up]."""

import torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2F] to [..., F], in the dtype of the input; the activation is rounded before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide * torch.sigmoid(wide)).to(gate_up.dtype) * up
