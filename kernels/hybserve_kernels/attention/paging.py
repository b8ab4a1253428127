"""Which pages the rows of a step read: made once per step from block tables and lengths, used by every layer.

Legend: T tokens of a row, L positions it reads, M pages that hold them, G tokens per page.
"""

from typing import NamedTuple

import torch


class RowPages(NamedTuple):
    """The pages of one row."""

    pages_M: torch.Tensor
    length: int  # L: positions the row's last query sees
    visible_TL: torch.Tensor | None  # which query sees which position; None for one query or a row from position 0


def row_pages(block_table: list[int], start: int, count: int, page_size: int) -> RowPages:
    """The pages that hold positions 0 .. start + count - 1 of one row of ``count`` queries."""
    length = start + count
    pages = torch.tensor(block_table[: -(-length // page_size)])
    if start == 0 or count == 1:
        return RowPages(pages, length, None)
    return RowPages(pages, length, torch.arange(length) <= torch.arange(start, length)[:, None])
