"""Which pages the rows of a step read: made once per step from block tables and lengths, used by every layer.

Legend: N rows, M pages read by all rows together, G tokens per page.
"""

from typing import NamedTuple

import torch


class DecodePages(NamedTuple):
    """The pages of N one-token rows, row after row. Every row has at least one."""

    pages_M: torch.Tensor
    rows_M: torch.Tensor  # the row that reads each page
    last_N: torch.Tensor  # index into M of each row's last page
    beyond_NG: torch.Tensor  # in that page: tokens at or beyond the row's length
    hidden_MG: torch.Tensor  # the same for every page
    padded_NX: torch.Tensor | None  # indices into M per row, short rows filled with M; None if all rows are as long


class PrefillPages(NamedTuple):
    """The pages of one row of several tokens."""

    pages_M: torch.Tensor
    length: int  # tokens the row's last query sees
    visible_TL: torch.Tensor | None  # True where a query may see a key; None if the row starts at position 0


def decode_pages(block_tables: list[list[int]], lengths: list[int], page_size: int) -> DecodePages:
    """``lengths`` count the tokens that each row's query sees, itself included (> 0)."""
    counts = [-(-length // page_size) for length in lengths]
    pages = [page for table, count in zip(block_tables, counts, strict=True) for page in table[:count]]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    ends = torch.tensor(counts).cumsum(0)
    fill = torch.tensor([length - (count - 1) * page_size for length, count in zip(lengths, counts, strict=True)])
    last_N = ends - 1
    beyond_NG = torch.arange(page_size) >= fill[:, None]
    hidden_MG = torch.zeros(len(pages), page_size, dtype=torch.bool)
    hidden_MG[last_N] = beyond_NG
    most = max(counts)
    padded_NX = None
    if min(counts) != most:
        places = torch.arange(most)
        padded_NX = torch.where(
            places < torch.tensor(counts)[:, None], (ends - torch.tensor(counts))[:, None] + places, len(pages)
        )
    return DecodePages(torch.tensor(pages), torch.tensor(rows), last_N, beyond_NG, hidden_MG, padded_NX)


def prefill_pages(block_table: list[int], start: int, count: int, page_size: int) -> PrefillPages:
    """The pages that hold positions 0 .. start + count - 1 of one row."""
    length = start + count
    pages = torch.tensor(block_table[: -(-length // page_size)])
    if start == 0:
        return PrefillPages(pages, length, None)
    return PrefillPages(pages, length, torch.arange(length) <= torch.arange(start, length)[:, None])
