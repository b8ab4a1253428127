"""The pool of one layer as one matrix of rows of d elements, of which kernels fetch boxes of tokens."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def box(pool_P2JGd: torch.Tensor, tokens: int) -> TensorDescriptor:
    """Boxes of ``tokens`` rows. Token g of page p lies at row p · (page stride / d) + (2 · J) index · G + g: keys of
    kv head j have index j, its values J + j."""
    rows, dim = matrix_shape(pool_P2JGd)
    return TensorDescriptor(pool_P2JGd, [rows, dim], [dim, 1], [tokens, dim])


def matrix_shape(pool_P2JGd: torch.Tensor) -> tuple[int, int]:
    """Rows and d of the matrix, whose rows follow one another in memory from the layer's first page to its last."""
    pages, _, kv_heads, page, dim = pool_P2JGd.shape
    assert pool_P2JGd[0].is_contiguous()
    assert pool_P2JGd.stride(0) % dim == 0
    rows = (pages - 1) * (pool_P2JGd.stride(0) // dim) + 2 * kv_heads * page
    assert rows < 1 << 31
    return rows, dim
