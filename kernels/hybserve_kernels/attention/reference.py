"""Causal softmax attention over paged keys and values with grouped query heads (arXiv 2305.13245): specification.

The pool of one layer is [P, 2, J, G, d]: page, key or value, kv head, token in the page, head dim. Position p of a
sequence lies in page ``pages[p // G]`` at offset p % G. Query head h reads kv head h // (H / J). Softmax in fp32.

Legend: T tokens of one row, P pages of the pool, G tokens per page, H query heads, J kv heads, d head dim.
"""

import torch


def store_kv(
    pool_P2JGd: torch.Tensor, k_TJd: torch.Tensor, v_TJd: torch.Tensor, pages_T: list[int], offsets_T: list[int]
) -> None:
    """Writes keys and values of every token into its place, rounded to the dtype of the pool."""
    for t, (page, offset) in enumerate(zip(pages_T, offsets_T, strict=True)):
        pool_P2JGd[page, 0, :, offset] = k_TJd[t].to(pool_P2JGd.dtype)
        pool_P2JGd[page, 1, :, offset] = v_TJd[t].to(pool_P2JGd.dtype)


def attention(
    q_THd: torch.Tensor, pool_P2JGd: torch.Tensor, pages: list[int], start: int, scale: float
) -> torch.Tensor:
    """Queries at the positions start .. start + T - 1, each over the keys up to its own position, in q's dtype."""
    tokens, heads = q_THd.shape[:2]
    length = start + tokens
    joined = torch.cat([pool_P2JGd[page] for page in pages], dim=2)[:, :, :length].float()
    k_HLd, v_HLd = (part.repeat_interleave(heads // part.shape[0], dim=0) for part in joined)
    scores_HTL = q_THd.float().transpose(0, 1) @ k_HLd.transpose(1, 2) * scale
    positions_L = torch.arange(length, device=q_THd.device)
    ahead = positions_L > positions_L[start:, None]
    weights_HTL = torch.softmax(scores_HTL.masked_fill(ahead, float("-inf")), dim=-1)
    out_HTd: torch.Tensor = weights_HTL @ v_HLd
    return out_HTd.transpose(0, 1).to(q_THd.dtype)
