"""Gated delta rule, one token of each of N rows at once, in fp32: the decode form and the deterministic scan.

The formula of ``reference`` with the state read once: with r = S_{t-1}^T [k, q],

    d = b (v - a · r_k)        o = a · r_q + (q · k) d        S_t = a · S_{t-1} + k ⊗ d

Legend: N rows, I key heads, U = I·r value heads, K key dim, V value dim, S slots.
"""

import torch

from hybserve_kernels.slots import gather, scatter_


def step(
    qk_N2IK: torch.Tensor,
    v_NUV: torch.Tensor,
    g_NU: torch.Tensor,
    beta_NU: torch.Tensor,
    matrices_SUKV: torch.Tensor,
    slots_N: torch.Tensor,
) -> torch.Tensor:
    """The output [N, U, V] in fp32; the rows' slots (distinct) move on by one token. Inputs fp32, unit q and k."""
    rows, _, key_heads, key_dim = qk_N2IK.shape
    heads = v_NUV.shape[1]
    group = heads // key_heads
    state_NUKV = gather(matrices_SUKV, slots_N).float()
    qk_NU2K = (
        qk_N2IK.permute(0, 2, 1, 3)[:, :, None]
        .expand(rows, key_heads, group, 2, key_dim)
        .reshape(rows, heads, 2, key_dim)
    )
    decay_NU1 = g_NU.exp()[..., None]
    read_NU2V = torch.matmul(qk_NU2K, state_NUKV).mul_(decay_NU1[..., None])
    q_NUK, k_NUK = qk_NU2K.unbind(2)
    corrections_NUV = torch.sub(v_NUV, read_NU2V[:, :, 1]).mul_(beta_NU[..., None])
    match_NU1 = (q_NUK * k_NUK).sum(-1, keepdim=True)
    out_NUV = torch.addcmul(read_NU2V[:, :, 0], match_NU1, corrections_NUV)
    state_NUKV.mul_(decay_NU1[..., None]).addcmul_(k_NUK[..., None], corrections_NUV[:, :, None])
    scatter_(matrices_SUKV, slots_N, state_NUKV)
    return out_NUV
