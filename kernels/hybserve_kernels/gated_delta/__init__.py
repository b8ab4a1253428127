"""Gated delta rule on the slots of the state pool: rows of many tokens (``scan``), one token of many rows (``step``).

``scan`` in pieces through a slot = ``scan`` whole = the reference, within rounding; ``step`` token by token as well.
On a GPU ``decode_rows`` takes all decode rows of a step at once, with what stands before and after the rule, and
``scan_rows`` all prefill rows, with the norm that stands after it.

Legend: T tokens of one row, N rows, I key heads, U value heads, K key dim, V value dim, S slots.
"""

import torch
import torch.nn.functional as F

from hybserve_kernels.device import require_cpu
from hybserve_kernels.gated_delta.chunk import TILE, chunk
from hybserve_kernels.gated_delta.gpu.decode import decode_rows
from hybserve_kernels.gated_delta.gpu.scan import scan_rows
from hybserve_kernels.gated_delta.reference import L2_EPS
from hybserve_kernels.gated_delta.step import step as _step

__all__ = ["decay_and_strength", "decode_rows", "scan", "scan_rows", "step", "unit_queries_keys", "unit_scale"]


def unit_scale(key_dim: int, device: torch.device) -> torch.Tensor:
    """What turns the rms norm of [queries, keys] into unit vectors, queries scaled by K^-1/2: [2, 1, 1]."""
    return torch.tensor([1.0 / key_dim, key_dim**-0.5], device=device)[:, None, None]


def unit_queries_keys(qk_T2IK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Unit queries and keys in fp32; ``scale`` from ``unit_scale``; sum + eps is K · (mean + eps / K)."""
    require_cpu("unit_queries_keys", qk_T2IK)
    key_dim = qk_T2IK.shape[-1]
    return F.rms_norm(qk_T2IK.float(), (key_dim,), None, L2_EPS / key_dim).mul_(scale)


def decay_and_strength(
    a_TU: torch.Tensor, b_TU: torch.Tensor, rate_U: torch.Tensor, dt_bias_U: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta of every token in fp32; ``rate_U`` = -exp(A_log) in fp32, made once."""
    require_cpu("decay_and_strength", a_TU, b_TU, rate_U, dt_bias_U)
    return F.softplus(a_TU.float() + dt_bias_U).mul_(rate_U), torch.sigmoid(b_TU).float()


def scan(
    qk_T2IK: torch.Tensor,
    v_TUV: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    matrices_SUKV: torch.Tensor,
    slot: int,
    fresh: bool,
    tile: int = TILE,
) -> torch.Tensor:
    """One row. Starts from the slot's state, or from zeros if ``fresh`` whatever the slot holds, and leaves the state
    after the row in the slot. The output [T, U, V] in fp32."""
    require_cpu("gated_delta.scan", qk_T2IK, v_TUV, matrices_SUKV)
    _check_fp32(qk_T2IK, g_TU, beta_TU)
    held = matrices_SUKV[slot]
    state = torch.zeros(held.shape, dtype=torch.float32) if fresh else held.to(torch.float32, copy=True)
    q_TIK, k_TIK = qk_T2IK.unbind(1)
    out = chunk(q_TIK, k_TIK, v_TUV.float(), g_TU, beta_TU, state, tile)
    held.copy_(state)
    return out


def step(
    qk_N2IK: torch.Tensor,
    v_NUV: torch.Tensor,
    g_NU: torch.Tensor,
    beta_NU: torch.Tensor,
    matrices_SUKV: torch.Tensor,
    slots: list[int],
) -> torch.Tensor:
    """One token of each of N rows that have distinct slots. The output [N, U, V] in fp32; the slots move on."""
    require_cpu("gated_delta.step", qk_N2IK, v_NUV, matrices_SUKV)
    _check_fp32(qk_N2IK, g_NU, beta_NU)
    return _step(qk_N2IK, v_NUV.float(), g_NU, beta_NU, matrices_SUKV, slots)


def _check_fp32(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.float32:
            raise TypeError(f"the gated delta rule takes fp32 gates, queries and keys, got {tensor.dtype}")
