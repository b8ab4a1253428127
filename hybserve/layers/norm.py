"""RMS norms: zero-centred over the model dim, gated over the value dim of recurrent layers."""

import torch
from hybserve_kernels.rms_norm import rms_norm, rms_norm_gated

from hybserve.layers.params import Params


class RMSNorm:
    """Scales by 1 + weight; the sum is formed once, in fp32."""

    def __init__(self, params: Params, name: str, size: int, eps: float) -> None:
        self._params, self._name, self._eps = params, name, eps
        params.declare(f"{name}.weight", size)

    def bind(self) -> None:
        self._scale = self._params[f"{self._name}.weight"].float() + 1.0

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, self._scale, self._eps)


class HeadNorms:
    """The norms of query and key heads as one: heads [first queries, then keys] of [T, H + J, d], result in fp32."""

    def __init__(self, params: Params, prefix: str, q_heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        self._params, self._names, self._eps = params, (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"), eps
        self._heads = (q_heads, kv_heads)
        for name in self._names:
            params.declare(name, head_dim)

    def bind(self) -> None:
        scales = [
            (self._params[name].float() + 1.0).expand(heads, -1)
            for name, heads in zip(self._names, self._heads, strict=True)
        ]
        self._scale_Hd = torch.cat(scales)

    def __call__(self, qk_THd: torch.Tensor) -> torch.Tensor:
        return rms_norm(qk_THd, self._scale_Hd, self._eps, torch.float32)


class GatedRMSNorm:
    """Norm, times weight, times silu(gate)."""

    def __init__(self, params: Params, name: str, size: int, eps: float) -> None:
        self._params, self._name, self._eps = params, name, eps
        params.declare(f"{name}.weight", size)

    def bind(self) -> None:
        self._weight = self._params[f"{self._name}.weight"]

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``x`` in fp32; the result has the dtype of ``gate``."""
        return rms_norm_gated(x, gate, self._weight, self._eps)
