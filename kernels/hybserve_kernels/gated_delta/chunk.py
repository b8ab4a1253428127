"""Gated delta rule over tiles of tokens, fp32: the same result as ``reference.recurrent`` with few matrix products.

Inside a tile the corrections d_t = b_t (v_t - (a_t S_{t-1})^T k_t) solve a unit lower triangular system. With c the
running sum of g inside the tile and G_ij = exp(c_i - c_j) for j <= i,

    (1 + tril(diag(b) (K K^T) * G, -1)) D = diag(b) (V - diag(exp c) K S_0)
    O = diag(exp c) Q S_0 + ((Q K^T) * G) D            S_n = exp(c_n) S_0 + (diag(exp(c_n - c)) K)^T D

(the WY form of arXiv 2406.06484 with the decay of arXiv 2412.06464). Everything but the S_0 terms is computed for all
tiles at once; then the tiles follow one another. Exponents are never positive, so nothing overflows.

Legend: T tokens of one row, n tiles, c tokens per tile, I key heads, U = I·r value heads, K key dim, V value dim.
"""

import torch

#: Most tokens per tile; a shorter rest of the row is a tile of its own.
TILE = 64


def chunk(
    q_TIK: torch.Tensor,
    k_TIK: torch.Tensor,
    v_TUV: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    state_UKV: torch.Tensor,
    tile: int = TILE,
) -> torch.Tensor:
    """The output [T, U, V]; ``state_UKV`` (fp32, contiguous) is the state before the row and becomes the one after it.

    All inputs fp32; ``q_TIK`` and ``k_TIK`` as the reference wants them.
    """
    tokens = q_TIK.shape[0]
    whole = tokens - tokens % tile
    parts = [(0, whole, tile), (whole, tokens, tokens - whole)]
    outputs = [
        _tiles(q_TIK[a:b], k_TIK[a:b], v_TUV[a:b], g_TU[a:b], beta_TU[a:b], state_UKV, size)
        for a, b, size in parts
        if b > a
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _tiles(
    q_TIK: torch.Tensor,
    k_TIK: torch.Tensor,
    v_TUV: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    state_UKV: torch.Tensor,
    size: int,
) -> torch.Tensor:
    tokens, key_heads, key_dim = q_TIK.shape
    heads, value_dim = v_TUV.shape[1:]
    tiles, group = tokens // size, heads // key_heads
    q_nIcK = q_TIK.reshape(tiles, size, key_heads, key_dim).transpose(1, 2)
    k_nIcK = k_TIK.reshape(tiles, size, key_heads, key_dim).transpose(1, 2)
    v_nUcV = v_TUV.reshape(tiles, size, heads, value_dim).transpose(1, 2)
    beta_nUc = beta_TU.reshape(tiles, size, heads).transpose(1, 2)
    sums_nUc = g_TU.reshape(tiles, size, heads).transpose(1, 2).cumsum(-1)

    above = torch.ones(size, size, dtype=torch.bool).triu_(1)
    pair_nUcc = (sums_nUc[..., :, None] - sums_nUc[..., None, :]).masked_fill_(above, float("-inf")).exp_()
    kk_nIcc = k_nIcK @ k_nIcK.transpose(-1, -2)
    qk_nIcc = q_nIcK @ k_nIcK.transpose(-1, -2)
    grouped = (tiles, key_heads, group, size, size)
    attend_nUcc = (pair_nUcc.view(grouped) * qk_nIcc[:, :, None]).view(tiles, heads, size, size)
    system_nUcc = pair_nUcc.mul_(beta_nUc[..., None]).view(grouped).mul_(kk_nIcc[:, :, None])
    system_nUcc = system_nUcc.view(tiles, heads, size, size)

    fall_nUc = sums_nUc.exp()
    keep_nUc = (sums_nUc[..., -1:] - sums_nUc).exp_()

    def per_head(x_nIcK: torch.Tensor, factor_nUc: torch.Tensor) -> torch.Tensor:
        spread = x_nIcK[:, :, None] * factor_nUc.reshape(tiles, key_heads, group, size, 1)
        return spread.view(tiles, heads, size, key_dim)

    given = torch.cat((v_nUcV, per_head(k_nIcK, fall_nUc)), dim=-1).mul_(beta_nUc[..., None])
    solved = torch.linalg.solve_triangular(system_nUcc, given, upper=False, unitriangular=True)
    own_nUcV, reads_nUcK = solved.split_with_sizes((value_dim, key_dim), dim=-1)
    reading = torch.cat((reads_nUcK, per_head(q_nIcK, fall_nUc)), dim=2)
    writing_nUKc = per_head(k_nIcK, keep_nUc).transpose(-1, -2)
    last = fall_nUc[..., -1:, None]

    out = torch.empty(tiles, size, heads, value_dim, dtype=v_TUV.dtype)
    for index in range(tiles):
        read = torch.bmm(reading[index], state_UKV)
        corrections = own_nUcV[index] - read[:, :size]
        out[index] = torch.baddbmm(read[:, size:], attend_nUcc[index], corrections).transpose(0, 1)
        state_UKV.mul_(last[index]).baddbmm_(writing_nUKc[index], corrections)
    return out.view(tokens, heads, value_dim)
