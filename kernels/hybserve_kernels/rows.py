"""The rows of a step as the Triton forms read them: int32 tensors on the device, of fixed sizes.

A captured graph replays over the same tensors, so all that changes from step to step stands in them; the plain ints
beside them are upper bounds that size a launch grid, and programs beyond the real counts leave at once.

The packed tokens of a step are [decode rows, one token each | prefill rows, one after another | padding]. Padding is
never read into a result and never written to a pool: page 0 and slot 0 hold a canary.

Legend: T packed tokens (with padding), N decode rows, R prefill rows, X tiles, M pages of a block table.
"""

from typing import NamedTuple

import torch

#: Tokens of a tile of a prefill row. A page holds whole tiles.
TILE = 64


class DecodeRows(NamedTuple):
    """Row n is the packed token n, one more token of a sequence whose state lies in its slot."""

    rows: int  # N, an upper bound: the rows in use come first
    lengths_N: torch.Tensor  # tokens the row sees, its own included (its position is one less); 0 = no row
    slots_N: torch.Tensor
    tables_NM: torch.Tensor  # page ids, right as far as ``lengths`` reaches


class PrefillRows(NamedTuple):
    """Rows of several tokens, or the first token of a sequence. Each begins at a multiple of TILE of its sequence and
    is cut into tiles from there, so that page boundaries are ends of tiles. A row's tiles follow one another.

    ``starts`` 0 = the state before the row is zero, whatever the slot holds."""

    rows: int  # R and X, upper bounds: the rows and tiles in use come first
    tiles: int
    begins_R: torch.Tensor  # packed index of the row's first token
    counts_R: torch.Tensor  # its tokens; 0 = no row
    starts_R: torch.Tensor  # position of its first token
    slots_R: torch.Tensor
    tables_RM: torch.Tensor  # page ids, right as far as start + count reaches
    first_tiles_R: torch.Tensor  # index into X of the row's first tile
    tile_rows_X: torch.Tensor  # the row of a tile; -1 = no tile
    tile_offsets_X: torch.Tensor  # of its first token inside the row, a multiple of TILE
    exports_X: torch.Tensor  # slot that the state after this tile goes to as a checkpoint; 0 = none


class LastTokens(NamedTuple):
    """The last token of every row, in the order of the rows: all that is read of the hidden states where only sampled
    tokens have logits. Each is like a row of one token that sees all of its row's tokens."""

    rows_1: torch.Tensor  # how many are real: the first
    at_N: torch.Tensor  # packed index
    positions_N: torch.Tensor
    queries: DecodeRows


class DeviceStep(NamedTuple):
    """All rows of a step. A kind that the step (or the captured graph) has no room for is None."""

    tokens_1: torch.Tensor  # packed tokens that are real
    positions_T: torch.Tensor
    locations_T: torch.Tensor  # page · G + offset where the token's key and value go; -1 = nowhere
    decode: DecodeRows | None
    prefill: PrefillRows | None
    last: LastTokens | None = None  # if given, the last layer's output is needed for these alone

    @property
    def mixed(self) -> bool:
        return self.decode is not None and self.prefill is not None
