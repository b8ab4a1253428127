"""RMS norms: zero-centred over the model dim, gated over the value dim of recurrent layers."""

import torch
from hybserve_kernels.rms_norm import rms_norm, rms_norm_gated

from hybserve.layers.params import Params


class RMSNorm:
    """Scales by 1 + weight; the sum is formed once, in fp32."""

    def __init__(self, params: Params, name: str, size: int, eps: float) -> None:
        self._params, self._name, self.eps = params, name, eps
        params.declare(f"{name}.weight", size)

    def bind(self) -> None:
        self.scale = self._params[f"{self._name}.weight"].float() + 1.0

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, self.scale, self.eps)


class HeadNorms:
    """The norms of query and key heads as one: heads [first queries, then keys] of [T, H + J, d], result in fp32."""

    def __init__(self, params: Params, prefix: str, q_heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        self._params, self._names, self.eps = params, (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"), eps
        self._heads = (q_heads, kv_heads)
        for name in self._names:
            params.declare(name, head_dim)

    def bind(self) -> None:
        self.q_scale_d, self.k_scale_d = (self._params[name].float() + 1.0 for name in self._names)
        scales = zip((self.q_scale_d, self.k_scale_d), self._heads, strict=True)
        self._scale_Hd = torch.cat([scale_d.expand(heads, -1) for scale_d, heads in scales])

    def __call__(self, qk_THd: torch.Tensor) -> torch.Tensor:
        return rms_norm(qk_THd, self._scale_Hd, self.eps, torch.float32)


class GatedRMSNorm:
    """Norm, times weight, times silu(gate)."""

    def __init__(self, params: Params, name: str, size: int, eps: float) -> None:
        self._params, self._name, self.eps = params, name, eps
        params.declare(f"{name}.weight", size)

    def bind(self) -> None:
        self.weight = self._params[f"{self._name}.weight"]

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``x`` in fp32; the result has the dtype of ``gate``."""
        return rms_norm_gated(x, gate, self.weight, self.eps)
