"""Attention of one tile of queries that lie on one page of positions: the deterministic form.

The pages of the row are visited in order from its first, each with products of one fixed shape, and joined by a running
maximum. A query's result therefore depends on its position and on what it may see, not on how the row was cut: keys
and values that are not there yet are zeroed before use and masked like those ahead of the query.

Legend: G tokens per page = queries of the tile, H = J·r query heads, d head dim.
"""

import torch


def tile(q_GHd: torch.Tensor, pool_P2JGd: torch.Tensor, pages: list[int], filled: int, scale: float) -> torch.Tensor:
    """Query t lies at offset t of the last page in ``pages``, of which the first ``filled`` tokens are stored (at
    least one). [G, H, d] in fp32; queries at or beyond ``filled`` give finite values without meaning."""
    size, heads, dim = q_GHd.shape
    kv_heads = pool_P2JGd.shape[2]
    group = heads // kv_heads
    q_JRd = (q_GHd.float() * scale).view(size, kv_heads, group, dim).permute(1, 2, 0, 3)
    q_JRd = q_JRd.reshape(kv_heads, group * size, dim)
    ahead = torch.ones(size, size, dtype=torch.bool).triu_(1)
    peak = torch.full((kv_heads, group * size, 1), float("-inf"))
    total = torch.zeros_like(peak)
    out = torch.zeros(kv_heads, group * size, dim)
    for index, page in enumerate(pages):
        k_JGd, v_JGd = pool_P2JGd[page].to(torch.float32, copy=True)
        last = index == len(pages) - 1
        if last:
            k_JGd[:, filled:] = 0.0
            v_JGd[:, filled:] = 0.0
        scores = torch.bmm(q_JRd, k_JGd.transpose(1, 2))
        if last:
            scores.view(kv_heads, group, size, size).masked_fill_(ahead, float("-inf"))
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = scores.sub_(higher).exp_()
        carry = (peak - higher).exp_()
        total = total * carry + weights.sum(-1, keepdim=True)
        out = out * carry + torch.bmm(weights, v_JGd)
        peak = higher
    return (out / total).view(kv_heads, group, size, dim).permute(2, 0, 1, 3).reshape(size, heads, dim)
