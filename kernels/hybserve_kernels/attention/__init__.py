"""Causal attention over the paged pool: one query of many rows, whole rows, or fixed tiles (deterministic).

On a GPU ``prepare_rows``, ``decode_rows`` and ``prefill_rows`` take all rows of a step at once, see ``rows.py``.

Legend: T tokens, N rows, P pages of the pool, G tokens per page, H query heads, J kv heads, d head dim. The pool of a
layer is a view of the page-major pool: pages may lie anywhere, but inside a page [2, J, G, d] is contiguous.
"""

import torch
import torch.nn.functional as F

from hybserve_kernels.attention import tile as _tile
from hybserve_kernels.attention.gpu.decode import decode_rows
from hybserve_kernels.attention.gpu.prefill import prefill_rows
from hybserve_kernels.attention.gpu.prepare import prepare_rows
from hybserve_kernels.attention.paging import RowPages, row_pages
from hybserve_kernels.device import require_cpu

__all__ = [
    "RowPages",
    "attend_decode",
    "attend_prefill",
    "attend_tile",
    "decode_rows",
    "prefill_rows",
    "prepare_rows",
    "row_pages",
    "store_kv",
]


def store_kv(
    pool_P2JGd: torch.Tensor, k_TJd: torch.Tensor, v_TJd: torch.Tensor, pages_T: torch.Tensor, offsets_T: torch.Tensor
) -> None:
    """Writes keys and values of every token to page ``pages_T`` at ``offsets_T``, rounded to the dtype of the pool."""
    require_cpu("store_kv", pool_P2JGd, k_TJd, v_TJd, pages_T, offsets_T)
    places_P2GJd = pool_P2JGd.transpose(2, 3)
    places_P2GJd[:, 0].index_put_((pages_T, offsets_T), k_TJd.to(pool_P2JGd.dtype))
    places_P2GJd[:, 1].index_put_((pages_T, offsets_T), v_TJd.to(pool_P2JGd.dtype))


def attend_decode(q_NHd: torch.Tensor, pool_P2JGd: torch.Tensor, rows: list[RowPages], scale: float) -> torch.Tensor:
    """One query of each of N rows over the row's pages; its key and value are stored already. [N, H, d] in q's dtype.

    Row by row: uneven rows cost no padding, nothing beyond a row's end is read, and what is gathered at one time is
    one row's history however many rows share it. Plain products in fp32: a fused kernel turns scores that are not
    finite into zeros, which would hide them."""
    require_cpu("attend_decode", q_NHd, pool_P2JGd)
    kv_heads, dim = pool_P2JGd.shape[2], pool_P2JGd.shape[4]
    q_NJrd = q_NHd.float().mul(scale).view(len(rows), kv_heads, -1, dim)
    parts = [_decode_row(q_Jrd, pool_P2JGd, row) for q_Jrd, row in zip(q_NJrd.unbind(0), rows, strict=True)]
    return torch.stack(parts).view(q_NHd.shape).to(q_NHd.dtype)


def _decode_row(q_Jrd: torch.Tensor, pool_P2JGd: torch.Tensor, row: RowPages) -> torch.Tensor:
    k_JLd, v_JLd = _gather(pool_P2JGd, row, torch.float32).unbind(0)
    weights_JrL = torch.softmax(torch.bmm(q_Jrd, k_JLd.transpose(1, 2)), dim=-1)
    return torch.bmm(weights_JrL, v_JLd)


def attend_prefill(
    q_THd: torch.Tensor,
    k_TJd: torch.Tensor,
    v_TJd: torch.Tensor,
    pool_P2JGd: torch.Tensor,
    row: RowPages,
    scale: float,
) -> torch.Tensor:
    """The queries of one row over its pages. ``k_TJd`` and ``v_TJd`` are the row's own keys and values, stored
    already: a row that starts at position 0 reads them instead of the pool. [T, H, d] in q's dtype."""
    require_cpu("attend_prefill", q_THd, pool_P2JGd)
    tokens = q_THd.shape[0]
    if row.length == tokens and pool_P2JGd.dtype == k_TJd.dtype:
        k_JLd, v_JLd = k_TJd.transpose(0, 1), v_TJd.transpose(0, 1)
    else:
        k_JLd, v_JLd = _gather(pool_P2JGd, row, q_THd.dtype).unbind(0)
    out_HTd = F.scaled_dot_product_attention(
        q_THd.transpose(0, 1)[None],
        k_JLd[None],
        v_JLd[None],
        attn_mask=row.visible_TL,
        is_causal=row.visible_TL is None and tokens > 1,
        scale=scale,
        enable_gqa=q_THd.shape[1] != k_JLd.shape[0],
    )[0]
    return out_HTd.transpose(0, 1)


def _gather(pool_P2JGd: torch.Tensor, row: RowPages, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values of the row's positions in order, [2, J, L, d]: nothing beyond its end."""
    pages_2JMGd = pool_P2JGd.permute(1, 2, 0, 3, 4).index_select(2, row.pages_M)
    return pages_2JMGd.flatten(2, 3)[:, :, : row.length].to(dtype)


def attend_tile(
    q_GHd: torch.Tensor, pool_P2JGd: torch.Tensor, pages: list[int], filled: int, scale: float
) -> torch.Tensor:
    """A tile of G queries on the last of ``pages``, of which ``filled`` tokens are stored: the same bits however the
    row was cut into chunks. [G, H, d] in fp32; only queries below ``filled`` have a meaning."""
    require_cpu("attend_tile", q_GHd, pool_P2JGd)
    return _tile.tile(q_GHd, pool_P2JGd, pages, filled, scale)
