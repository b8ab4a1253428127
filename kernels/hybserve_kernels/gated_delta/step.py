"""Gated delta rule, one token of each of N rows at once, in fp32: the decode form and the deterministic scan.

The formula of ``reference`` with the state read once: with r = S_{t-1}^T [k, q],

    d = b (v - a · r_k)        o = a · r_q + (q · k) d        S_t = a · S_{t-1} + k ⊗ d

The states are read and written where they lie, row after row, so that each one is in the cache when it is written;
the small rest is done for all rows together.

Legend: N rows, I key heads, U = I·r value heads, K key dim, V value dim, S slots.
"""

import torch


def step(
    qk_N2IK: torch.Tensor,
    v_NUV: torch.Tensor,
    g_NU: torch.Tensor,
    beta_NU: torch.Tensor,
    matrices_SUKV: torch.Tensor,
    slots: list[int],
) -> torch.Tensor:
    """The output [N, U, V] in fp32; the rows' slots (distinct) move on by one token. Inputs fp32, unit q and k."""
    rows, _, key_heads, key_dim = qk_N2IK.shape
    heads = v_NUV.shape[1]
    group = heads // key_heads
    qk_NU2K = (
        qk_N2IK.permute(0, 2, 1, 3)[:, :, None]
        .expand(rows, key_heads, group, 2, key_dim)
        .reshape(rows, heads, 2, key_dim)
    )
    held = [matrices_SUKV[slot] for slot in slots]
    states = held if matrices_SUKV.dtype == torch.float32 else [state_UKV.float() for state_UKV in held]
    read_NU2V = torch.empty(rows, heads, 2, v_NUV.shape[2], dtype=torch.float32)
    for state_UKV, qk_U2K, read_U2V in zip(states, qk_NU2K.unbind(0), read_NU2V.unbind(0), strict=True):
        torch.bmm(qk_U2K, state_UKV, out=read_U2V)

    decay_NU11 = g_NU.exp()[..., None, None]
    read_q_NUV, read_k_NUV = read_NU2V.mul_(decay_NU11).unbind(2)
    q_NUK, k_NUK = qk_NU2K.unbind(2)
    corrections_NUV = torch.sub(v_NUV, read_k_NUV).mul_(beta_NU[..., None])
    out_NUV = torch.addcmul(read_q_NUV, (q_NUK * k_NUK).sum(-1, keepdim=True), corrections_NUV)
    factors = (decay_NU11, k_NUK[..., None], corrections_NUV[:, :, None])
    for state_UKV, decay_U11, k_UK1, change_U1V in zip(states, *(part.unbind(0) for part in factors), strict=True):
        state_UKV.mul_(decay_U11).addcmul_(k_UK1, change_U1V)
    if states is not held:
        for held_UKV, state_UKV in zip(held, states, strict=True):
            held_UKV.copy_(state_UKV)
    return out_NUV
