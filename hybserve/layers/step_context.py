"""All that one forward needs beside the hidden states: the rows of a step and the pools they read and write.

Legend: T packed tokens, N rows, P pages of the pool, G tokens per page, J kv heads, d head dim, S slots, U value heads,
K key dim, V value dim, W conv width.
"""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class StepContext:
    """Rows are packed one after another: row n owns tokens [bounds[n], bounds[n+1]) of T, which are the positions
    [starts[n], starts[n] + bounds[n+1] - bounds[n]) of its sequence. Host lists and device tensors say the same; the
    reference backend reads the lists, a GPU reads the tensors.

    ``deterministic`` (law 7): N is 1, T is G, token t lies at position ``page start + t``; only the tokens
    [tile[0], tile[1]) are real, the others are zero rows that must not be read or written anywhere.
    """

    bounds: list[int]
    starts: list[int]
    slots: list[int]
    block_tables: list[list[int]]  # page ids of each row, covering at least its last position
    page_size: int
    positions_T: torch.Tensor  # int64
    locations_T: torch.Tensor  # int64 kv location page·G + offset of each token
    slots_N: torch.Tensor  # int64
    kv_layers: list[torch.Tensor]  # per attention layer [P, 2, J, G, d], a view of the page-major pool
    matrices: list[torch.Tensor]  # per recurrent layer [S, U, K, V], a view of the slot-major pool
    windows: list[torch.Tensor]  # per recurrent layer [S, channels, W - 1], a view of the slot-major pool
    deterministic: bool = False
    tile: tuple[int, int] = (0, 0)

    @property
    def rows(self) -> int:
        return len(self.starts)
