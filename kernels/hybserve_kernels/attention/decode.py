"""Attention of one query per row over all pages of all rows at once, in fp32.

Pages are gathered once each, without padding rows to one length: softmax runs page by page and the pages of a row are
joined by their maxima and sums, so uneven rows cost no extra memory. What lies beyond a row's end is replaced before
use: scores by -inf, values by 0 (0 · NaN is NaN).

Legend: N rows, M pages of all rows, X most pages of a row, G tokens per page, H = J·r query heads, d head dim.
"""

import torch

from hybserve_kernels.attention.paging import DecodePages


def decode(q_NHd: torch.Tensor, pool_P2JGd: torch.Tensor, rows: DecodePages, scale: float) -> torch.Tensor:
    """[N, H, d] in fp32; every row's own key and value are in the pool already."""
    heads, dim = q_NHd.shape[1:]
    kv_heads, page_size = pool_P2JGd.shape[2:4]
    pages, group = rows.pages_M.shape[0], heads // kv_heads
    k_MJGd = pool_P2JGd[:, 0].index_select(0, rows.pages_M).float()
    v_MJGd = pool_P2JGd[:, 1].index_select(0, rows.pages_M).float()
    tails = v_MJGd.index_select(0, rows.last_N).masked_fill_(rows.beyond_NG[:, None, :, None], 0.0)
    v_MJGd.index_copy_(0, rows.last_N, tails)

    q_MHd = (q_NHd.float() * scale).index_select(0, rows.rows_M)
    scores = torch.bmm(
        q_MHd.view(pages * kv_heads, group, dim),
        k_MJGd.view(pages * kv_heads, page_size, dim).transpose(1, 2),
    ).view(pages, heads, page_size)
    scores.masked_fill_(rows.hidden_MG[:, None], float("-inf"))
    peak_NH = _per_row(scores.amax(-1), rows, float("-inf")).amax(1)
    weights = scores.sub_(peak_NH.index_select(0, rows.rows_M)[..., None]).exp_()
    total_NH = _per_row(weights.sum(-1), rows, 0.0).sum(1)
    parts = torch.bmm(weights.view(pages * kv_heads, group, page_size), v_MJGd.view(pages * kv_heads, page_size, dim))
    return _per_row(parts.view(pages, heads, dim), rows, 0.0).sum(1).div_(total_NH[..., None])


def _per_row(values_M: torch.Tensor, rows: DecodePages, fill: float) -> torch.Tensor:
    """[M, ...] to [N, X, ...], short rows filled up with ``fill``."""
    if rows.padded_NX is None:
        return values_M.view(rows.last_N.shape[0], -1, *values_M.shape[1:])
    filled = torch.cat((values_M, values_M.new_full((1, *values_M.shape[1:]), fill)))
    return filled.index_select(0, rows.padded_NX.flatten()).view(*rows.padded_NX.shape, *values_M.shape[1:])
