"""Gated delta rule (Yang, Kautz & Hatamizadeh, arXiv 2412.06464, eq. 10), token by token in fp32: the specification.

Per value head, with the state S [K, V], unit key k, unit query q scaled by K^-1/2, decay a = exp(g), strength b:

    S_t = a_t · S_{t-1} + k_t ⊗ b_t (v_t - (a_t · S_{t-1})^T k_t)          o_t = S_t^T q_t

Value heads come in groups: head u uses the key head u // (U / I).

Legend: T tokens of one row, I key heads, U value heads, K key dim, V value dim.
"""

import torch

#: Under the root of the l2 norm, so that zero vectors stay zero.
L2_EPS = 1e-6


def unit_queries_keys(q_TIK: torch.Tensor, k_TIK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(sum(x^2) + 1e-6) in fp32, queries scaled by K^-1/2."""

    def unit(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + L2_EPS)

    return unit(q_TIK) * q_TIK.shape[-1] ** -0.5, unit(k_TIK)


def decay_and_strength(
    a_TU: torch.Tensor, b_TU: torch.Tensor, a_log_U: torch.Tensor, dt_bias_U: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = -exp(A_log) · softplus(a + dt_bias) <= 0 and beta = sigmoid(b), both fp32 (beta rounded to b's dtype)."""
    decay = -a_log_U.float().exp() * torch.nn.functional.softplus(a_TU.float() + dt_bias_U)
    return decay, torch.sigmoid(b_TU).float()


def recurrent(
    q_TIK: torch.Tensor,
    k_TIK: torch.Tensor,
    v_TUV: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    state_UKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q_TIK`` and ``k_TIK`` from ``unit_queries_keys``. The output [T, U, V] and the state after the row, fp32."""
    group = v_TUV.shape[1] // k_TIK.shape[1]
    q_TUK = q_TIK.float().repeat_interleave(group, dim=1)
    k_TUK = k_TIK.float().repeat_interleave(group, dim=1)
    state = state_UKV.float().clone()
    outputs = []
    for t in range(q_TUK.shape[0]):
        state = state * g_TU[t].exp()[:, None, None]
        predicted = torch.einsum("ukv,uk->uv", state, k_TUK[t])
        correction = beta_TU[t][:, None] * (v_TUV[t].float() - predicted)
        state = state + k_TUK[t][:, :, None] * correction[:, None, :]
        outputs.append(torch.einsum("ukv,uk->uv", state, q_TUK[t]))
    return torch.stack(outputs), state
