"""Prefill rows of a Gated DeltaNet layer through the gated delta rule and the gated norm, over tiles of 64 tokens.

The formula of ``gated_delta.chunk`` in two launches and a last one for the norm. With c the running sum of g in a tile,
G_ij = exp(c_i - c_j) for j <= i and b the strengths, ``_prepare_kernel`` makes for all tiles at once

    W = (1 + tril(diag(b) (K K^T) * G, -1))^-1 diag(b)          A = (Q K^T) * G

and ``_scan_kernel`` follows the tiles of a row, a slice of a head's value columns per program:

    D = W (V - diag(exp c) K S)     O = diag(exp c) Q S + A D     S <- exp(c_n) S + K^T diag(exp(c_n - c)) D

It computes the transpose of each: what depends on S is then the left factor of the next product, which the matrix unit
takes from registers; the right ones wait in shared memory, loaded ahead.

Only W, A (64 x 64 per tile and head), exp c and exp(c_n - c) go through memory. A program that has all columns of a
head norms its output at once; otherwise ``_norm_kernel`` does, in place. One long row alone leaves half of the card
idle: it is cut into pieces, so that the other two work on pieces beside the scan, which hands its state on in fp32.

Legend: T tokens, S slots, I key heads, U = I·r value heads, K key dim, V value dim, X tiles, c tokens of a tile.
In kernels: BK, BV a power of two that holds K, a slice of V.
"""

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hybserve_kernels.elementwise import power_of_two, rounded, silu
from hybserve_kernels.gated_delta.gpu.rounding import round_to_bf16
from hybserve_kernels.overlap import urgent_stream
from hybserve_kernels.rows import TILE, PrefillRows

#: The interpreter multiplies 16-bit floats as if they were integers.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Shape(NamedTuple):
    """Value columns of a program of the scan, its warps and stages; whether whole tiles of 16 bits are stored through a
    tensor descriptor (which takes room for one more tile); tiles of the first piece, 0 = all at once."""

    columns: int
    warps: int
    stages: int
    box: bool = False
    piece: int = 0


@triton.jit
def _dot(left, right, acc=None):
    """Factors of fp32 as sums of three of TF32: nearly as exact as fp32, which has no matrix instruction."""
    if _INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc)
    return tl.dot(left, right, acc, input_precision="tf32x3")


@triton.jit
def _inverse(lower, TILE: tl.constexpr, PRODUCTS: tl.constexpr):
    """(1 + N)^-1 of the strictly lower triangle N of ``lower``, which has zeros above its diagonal: if X inverts the
    diagonal blocks of one size and M is what N has below them in blocks of twice the size, X - X M X inverts these.
    Up to 16 x 16 each block has a warp of its own. ``PRODUCTS`` is the dtype of the factors: fp16 has room, for an
    entry of X is b k·(a product of contractions)k."""
    BLOCK: tl.constexpr = 16
    BLOCKS: tl.constexpr = TILE // BLOCK
    o_block, o_b = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    diagonal = o_block[:, None, None, None] == o_block[None, None, :, None]
    own = tl.sum(tl.where(diagonal, tl.reshape(lower, (BLOCKS, BLOCK, BLOCKS, BLOCK)), 0.0), 2)
    apart = o_b[None, :, None] ^ o_b[None, None, :]  # its highest bit: the size of blocks with this entry below them
    blocks = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, own, 0.0)
    for level in tl.static_range(1, 4):
        new = tl.where(apart >> level == 1, own, 0.0).to(PRODUCTS)
        narrow = blocks.to(PRODUCTS)
        blocks -= _dot(_dot(narrow, new).to(PRODUCTS), narrow)
    inverse = tl.reshape(tl.where(diagonal, blocks[:, :, None, :], 0.0), (TILE, TILE))
    o = tl.arange(0, TILE)
    lower = tl.reshape(lower, (TILE, BLOCKS, BLOCK))
    apart = (o // BLOCK)[:, None, None] ^ o_block[None, :, None]
    for level in tl.static_range(0, 2):
        new = tl.reshape(tl.where(apart >> level == 1, lower, 0.0), (TILE, TILE)).to(PRODUCTS)
        narrow = inverse.to(PRODUCTS)
        inverse -= _dot(_dot(narrow, new).to(PRODUCTS), narrow)
    return inverse


@triton.jit(do_not_specialize=["low"])
def _prepare_kernel(
    qkv_ptr,  # [T, .]: unit q I·K | unit k I·K | v
    g_ptr,  # fp32 [T, U]
    beta_ptr,  # fp32 [T, U]
    begins_ptr,
    counts_ptr,
    tile_rows_ptr,
    tile_offsets_ptr,
    squares_ptr,  # W and A [X, U, 2, c, c]
    falls_ptr,  # exp c and exp(c_n - c), fp32 [X, U, c, 2]
    low,
    qkv_stride,
    g_stride,
    beta_stride,
    I: tl.constexpr,
    U: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    TILE: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    u, tile = tl.program_id(0), low + tl.program_id(1)
    row = tl.load(tile_rows_ptr + tile)
    if row < 0:
        return
    offset = tl.load(tile_offsets_ptr + tile)
    count = tl.load(counts_ptr + row) - offset
    first = tl.load(begins_ptr + row).to(tl.int64) + offset
    o_c, o_k = tl.arange(0, TILE), tl.arange(0, BK)
    known = o_c < count
    p_q = qkv_ptr + first * qkv_stride + (u // (U // I)) * K + o_c[:, None] * qkv_stride + o_k[None, :]
    in_k = known[:, None] & (o_k < K)[None, :]
    q = tl.load(p_q, mask=in_k, other=0.0)
    k = tl.load(p_q + I * K, mask=in_k, other=0.0)
    not_above = o_c[:, None] >= o_c[None, :]
    o_cc = o_c[:, None] * TILE + o_c[None, :]
    squares_ptr += (tile.to(tl.int64) * U + u) * (2 * TILE * TILE)
    falls_ptr += (tile.to(tl.int64) * U + u) * (2 * TILE)
    g_ptr += first * g_stride + u
    beta_ptr += first * beta_stride + u
    g = tl.load(g_ptr + o_c * g_stride, mask=known, other=0.0) * LOG2_E
    beta = tl.load(beta_ptr + o_c * beta_stride, mask=known, other=0.0)
    sums = tl.cumsum(g, 0)
    pair = power_of_two(tl.where(not_above, sums[:, None] - sums[None, :], float("-inf")))
    tl.store(falls_ptr + 2 * o_c, power_of_two(sums))
    tl.store(falls_ptr + 2 * o_c + 1, power_of_two(tl.sum(g, 0) - sums))
    tl.store(squares_ptr + TILE * TILE + o_cc, _dot(q, tl.trans(k)) * pair)
    lower = _dot(k, tl.trans(k)) * pair * beta[:, None]
    tl.store(squares_ptr + o_cc, _inverse(lower, TILE, PRODUCTS) * beta[None, :])


@triton.jit
def _gated_norm(o, z, weight, eps, V: tl.constexpr):
    """``rms_norm.reference.rms_norm_gated`` of [tokens, V] in fp32; columns beyond V are 0."""
    normed = rounded(o * tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None], z.dtype)
    scaled = rounded(normed * weight.to(tl.float32)[None, :], z.dtype)
    return scaled * silu(z.to(tl.float32))


@triton.jit
def _store_state(p_state, state, mask, position, row, column):
    if p_state.dtype.element_ty == tl.bfloat16:
        tl.store(p_state, round_to_bf16(state, position, row, column), mask=mask)
    else:
        tl.store(p_state, state, mask=mask)


@triton.jit
def _scan_tile(
    state,  # [BV, BK]
    q,  # [c, BK]
    k,  # [c, BK]
    v,  # [c, BV]
    z,  # [c, BV], if a program has the ``WHOLE`` head
    solve,  # [c, c]
    attend,  # [c, c]
    p_falls,  # of the tile and head
    weight,
    eps,
    V: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The output [c, BV] of a tile, normed if a program has the ``WHOLE`` head; the state after it."""
    fall, keep = tl.split(tl.reshape(tl.load(p_falls + tl.arange(0, 2 * TILE)), (TILE, 2)))
    last = tl.load(p_falls + 2 * (TILE - 1))
    narrow = state.to(k.dtype)
    untold = tl.trans(v).to(tl.float32) - fall[None, :] * _dot(narrow, tl.trans(k))
    change = _dot(untold.to(k.dtype), tl.trans(solve))
    o = _dot(narrow, tl.trans(q))
    state = _dot((change * keep[None, :]).to(k.dtype), k, state * last)
    o = tl.trans(_dot(change.to(k.dtype), tl.trans(attend), fall[None, :] * o))
    if WHOLE:
        o = _gated_norm(o, z, weight, eps, V)
    return o.to(k.dtype), state


@triton.jit(do_not_specialize=["low", "high"])
def _scan_kernel(
    qkv_ptr,  # [T, .]: unit q I·K | unit k I·K | v U·V
    matrices_ptr,  # [S, U, K, V]
    squares_ptr,
    falls_ptr,
    z_ptr,  # [T, U, V]
    weight_ptr,  # [V]
    out_ptr,  # [T, U·V]
    carried_ptr,  # fp32 [R, U, V, K]: states between pieces
    keys_box,  # qkv by [c, K]
    values_box,  # qkv by [c, BV]
    squares_box,  # by [c, c]
    z_box,  # [T, U·V] by [c, BV]
    out_box,  # by [c, BV]
    begins_ptr,
    counts_ptr,
    starts_ptr,
    slots_ptr,
    first_tiles_ptr,
    exports_ptr,
    low,
    high,
    qkv_stride,
    matrices_stride,
    z_stride,
    eps,
    I: tl.constexpr,
    U: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PIECES: tl.constexpr,  # the launch is for the tiles [low, high) of all
    BOXES: tl.constexpr,  # whole tiles are loaded through tensor descriptors
    BOX: tl.constexpr,  # and stored
):
    SLICES: tl.constexpr = (V + BV - 1) // BV
    u, row = tl.program_id(0) // SLICES, tl.program_id(1)
    count = tl.load(counts_ptr + row)
    if count <= 0:
        return
    begin = tl.load(begins_ptr + row).to(tl.int64)
    start = tl.load(starts_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    first_tile = tl.load(first_tiles_ptr + row).to(tl.int64)
    from_x, to_x = 0, tl.cdiv(count, TILE)
    if PIECES:
        from_x, to_x = tl.maximum(low - first_tile, 0).to(tl.int32), tl.minimum(high - first_tile, to_x).to(tl.int32)
        if from_x >= to_x:
            return
    is_last = to_x * TILE >= count

    o_c, o_k = tl.arange(0, TILE), tl.arange(0, BK)
    o_v = (tl.program_id(0) % SLICES) * BV + tl.arange(0, BV)
    in_k, in_v = o_k < K, o_v < V
    o_state = u * K * V + o_k[:, None] * V + o_v[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    p_state = matrices_ptr + slot * matrices_stride + o_state
    continued = o_k < tl.where(start > 0, K, 0)
    if PIECES:
        in_carried = in_v[:, None] & in_k[None, :]
        p_carried = carried_ptr + ((row * U + u).to(tl.int64) * V + o_v[:, None]) * K + o_k[None, :]
        continued = o_k < tl.where((start > 0) & (from_x == 0), K, 0)
        old = tl.trans(tl.load(p_state, mask=continued[:, None] & in_v[None, :], other=0.0).to(tl.float32))
        state = old + tl.load(p_carried, mask=in_carried & (o_k < tl.where(from_x > 0, K, 0))[None, :], other=0.0)
    else:
        state = tl.trans(tl.load(p_state, mask=continued[:, None] & in_v[None, :], other=0.0).to(tl.float32))
    state_row = u * K + o_k
    weight = tl.load(weight_ptr + o_v, mask=in_v, other=0.0)
    begin += from_x * TILE
    p_q = qkv_ptr + begin * qkv_stride + (u // (U // I)) * K
    p_v = qkv_ptr + begin * qkv_stride + 2 * I * K + u * V
    p_z = z_ptr + begin * z_stride + u * V
    p_out = out_ptr + begin * (U * V) + u * V
    p_squares = squares_ptr + ((first_tile + from_x) * U + u) * (2 * TILE * TILE)
    p_falls = falls_ptr + ((first_tile + from_x) * U + u) * (2 * TILE)
    o_q, o_vs = o_c[:, None] * qkv_stride + o_k[None, :], o_c[:, None] * qkv_stride + o_v[None, :]
    o_z, o_out = o_c[:, None] * z_stride + o_v[None, :], o_c[:, None] * (U * V) + o_v[None, :]

    o_cc = o_c[:, None] * TILE + o_c[None, :]
    token, pair = begin.to(tl.int32), ((first_tile + from_x) * U + u).to(tl.int32) * (2 * TILE)
    column_q, column_v = (u // (U // I)) * K, u * V + (tl.program_id(0) % SLICES) * BV
    for x in tl.range(from_x, tl.minimum(to_x, count // TILE), num_stages=STAGES):
        export = tl.load(exports_ptr + first_tile + x)
        z = 0
        if BOXES:
            k = keys_box.load([token, I * K + column_q])
            v = values_box.load([token, 2 * I * K + column_v])
            solve = squares_box.load([pair, 0])
            q = keys_box.load([token, column_q])
            attend = squares_box.load([pair + TILE, 0])
            if SLICES == 1:
                z = z_box.load([token, column_v])
        else:
            k = tl.load(p_q + I * K + o_q, mask=in_k[None, :], other=0.0)
            v = tl.load(p_v + o_vs, mask=in_v[None, :], other=0.0)
            solve = tl.load(p_squares + o_cc)
            q = tl.load(p_q + o_q, mask=in_k[None, :], other=0.0)
            attend = tl.load(p_squares + TILE * TILE + o_cc)
            if SLICES == 1:
                z = tl.load(p_z + o_z, mask=in_v[None, :], other=0.0)
        o, state = _scan_tile(state, q, k, v, z, solve, attend, p_falls, weight, eps, V, TILE, SLICES == 1)
        if BOX:
            out_box.store([token, column_v], o)
        else:
            tl.store(p_out + o_out, o, mask=in_v[None, :])
        token += TILE
        pair += 2 * U * TILE
        if export != 0:
            p_export = matrices_ptr + export.to(tl.int64) * matrices_stride + o_state
            _store_state(p_export, tl.trans(state), in_state, start + (x + 1) * TILE - 1, state_row, o_v)
        p_q += TILE * qkv_stride
        p_v += TILE * qkv_stride
        p_z += TILE * z_stride
        p_out += TILE * U * V
        p_squares += U * 2 * TILE * TILE
        p_falls += U * 2 * TILE

    if is_last & (count % TILE > 0):
        known = (o_c < count % TILE)[:, None]
        k = tl.load(p_q + I * K + o_q, mask=known & in_k[None, :], other=0.0)
        v = tl.load(p_v + o_vs, mask=known & in_v[None, :], other=0.0)
        solve = tl.load(p_squares + o_cc)
        q = tl.load(p_q + o_q, mask=known & in_k[None, :], other=0.0)
        attend = tl.load(p_squares + TILE * TILE + o_cc)
        z = 0
        if SLICES == 1:
            z = tl.load(p_z + o_z, mask=known & in_v[None, :], other=0.0)
        o, state = _scan_tile(state, q, k, v, z, solve, attend, p_falls, weight, eps, V, TILE, SLICES == 1)
        tl.store(p_out + o_out, o, mask=known & in_v[None, :])
        export = tl.load(exports_ptr + first_tile + count // TILE)
        if export != 0:
            p_export = matrices_ptr + export.to(tl.int64) * matrices_stride + o_state
            _store_state(p_export, tl.trans(state), in_state, start + count - 1, state_row, o_v)

    if is_last:
        _store_state(p_state, tl.trans(state), in_state, start + count - 1, state_row, o_v)
    elif PIECES:
        tl.store(p_carried, state, mask=in_carried)


@triton.jit(do_not_specialize=["low"])
def _norm_kernel(
    out_ptr,  # [T, U·V]
    z_ptr,  # [T, U, V]
    weight_ptr,  # [V]
    begins_ptr,
    counts_ptr,
    tile_rows_ptr,
    tile_offsets_ptr,
    low,
    z_stride,
    eps,
    U: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    u, tile = tl.program_id(0), low + tl.program_id(1)
    row = tl.load(tile_rows_ptr + tile)
    if row < 0:
        return
    offset = tl.load(tile_offsets_ptr + tile)
    count = tl.load(counts_ptr + row) - offset
    o_c, o_v = tl.arange(0, TILE), tl.arange(0, BLOCK)
    first = tl.load(begins_ptr + row).to(tl.int64) + offset
    mask = (o_c < count)[:, None] & (o_v < V)[None, :]
    p_out = out_ptr + first * (U * V) + u * V + o_c[:, None] * (U * V) + o_v[None, :]
    o = tl.load(p_out, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + first * z_stride + u * V + o_c[:, None] * z_stride + o_v[None, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + o_v, mask=o_v < V, other=0.0)
    tl.store(p_out, _gated_norm(o, z, weight, eps, V), mask=mask)


#: Rows, as if of 32 heads of 128 columns, -> shape: the first entry with room for them, as measured on an H200. Half
#: heads, for a program of a whole one is slower than two of half a one; two stages, for two programs share a
#: multiprocessor. Never one stage with 16 bits: seen to give wrong results on an H200 (Triton 3.6), for a reason not
#: known.
SHAPES = {
    1: Shape(64, 4, 3, True, 32),
    2: Shape(64, 4, 3, True),
    1 << 30: Shape(64, 4, 2),
}
#: For fp32, whatever the rows: larger ones have no room in registers.
FP32 = Shape(16, 8, 1)


def default_shape(rows: int, value_heads: int, value_dim: int, dtype: torch.dtype) -> Shape:
    whole = rows * value_heads * value_dim / (32 * 128)
    shape = FP32 if dtype == torch.float32 else next(shape for most, shape in SHAPES.items() if whole <= most)
    columns = min(shape.columns, triton.next_power_of_2(value_dim))
    return shape._replace(columns=columns, piece=shape.piece if rows == 1 else 0)


def _spans(tiles: int, first: int) -> list[tuple[int, int]]:
    """Pieces [low, high) of all tiles: of ``first`` tiles, twice as many and so on from either side."""
    cuts, size = {0, tiles}, first
    while 0 < size <= tiles - size:
        cuts |= {size, tiles - size}
        size = 2 * size + first
    return list(itertools.pairwise(sorted(cuts)))


class _Boxes(NamedTuple):
    """Tensor descriptors of ``_scan_kernel``; None where it does without."""

    keys: TensorDescriptor | None = None
    values: TensorDescriptor | None = None
    squares: TensorDescriptor | None = None
    z: TensorDescriptor | None = None
    out: TensorDescriptor | None = None


def _boxes(
    qkv_TC: torch.Tensor,
    squares: torch.Tensor,
    z_TX: torch.Tensor | None,
    out_TX: torch.Tensor | None,
    key_dim: int,
    value_dim: int,
    columns: int,
) -> _Boxes:
    """Only of 16-bit tensors whose heads fill their blocks and whose rows begin at multiples of 16 bytes."""
    fill = key_dim == max(16, triton.next_power_of_2(key_dim)) and value_dim % columns == 0
    given = [tensor for tensor in (qkv_TC, z_TX, out_TX) if tensor is not None]
    aligned = all(tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 8 == 0 for tensor in given)
    if qkv_TC.itemsize != 2 or not fill or not aligned:
        return _Boxes()
    block = [TILE, columns]
    return _Boxes(
        TensorDescriptor.from_tensor(qkv_TC, [TILE, key_dim]),
        TensorDescriptor.from_tensor(qkv_TC, block),
        TensorDescriptor.from_tensor(squares.view(-1, TILE), [TILE, TILE]),
        None if z_TX is None else TensorDescriptor.from_tensor(z_TX, block),
        None if out_TX is None else TensorDescriptor.from_tensor(out_TX, block),
    )


def scan_rows(
    qkv_TC: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    matrices_SUKV: torch.Tensor,
    rows: PrefillRows,
    heads: tuple[int, int, int, int],
    z_TUV: torch.Tensor,
    norm_weight_V: torch.Tensor,
    eps: float,
    out_TX: torch.Tensor,
    shape: Shape | None = None,
) -> None:
    """The gated normed output [T, U·V] of the tokens of ``rows``; the state of each row's slot (zero if the row begins
    its sequence) becomes the one after the row, and the one after tile x goes to slot ``exports_X[x]`` if not 0.

    ``heads`` (I, U, K, V). ``qkv_TC`` in the model dtype: unit q (scaled by K^-1/2), unit k, v side by side, after the
    convolution; ``g_TU`` (log of the decay, <= 0) and ``beta_TU`` fp32; ``matrices_SUKV`` fp32 or bf16 (rounded up or
    down by chance, see ``rounding``); ``z_TUV`` and ``norm_weight_V`` in the model dtype. ``shape`` of the launches:
    by the number of rows unless given."""
    key_heads, value_heads, key_dim, value_dim = heads
    assert value_heads % key_heads == 0
    assert qkv_TC.shape[1] == 2 * key_heads * key_dim + value_heads * value_dim
    assert matrices_SUKV.shape[1:] == (value_heads, key_dim, value_dim)
    assert matrices_SUKV[0].is_contiguous()
    assert z_TUV.shape[1:] == (value_heads, value_dim)
    assert z_TUV[0].is_contiguous()
    assert qkv_TC.stride(1) == g_TU.stride(1) == beta_TU.stride(1) == 1
    assert out_TX.is_contiguous()
    assert out_TX.shape[1] == value_heads * value_dim
    if matrices_SUKV.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"matrices of the gated delta rule are kept in fp32 or bf16, got {matrices_SUKV.dtype}")
    if g_TU.dtype != torch.float32 or beta_TU.dtype != torch.float32:
        raise TypeError(f"gates of the gated delta rule in fp32, got {g_TU.dtype} and {beta_TU.dtype}")
    if not rows.tiles:
        return
    columns, warps, stages, box, piece = shape or default_shape(rows.rows, value_heads, value_dim, qkv_TC.dtype)
    wide, device = qkv_TC.dtype == torch.float32, qkv_TC.device
    columns, block_k = max(16, columns), max(16, triton.next_power_of_2(key_dim))
    slices = triton.cdiv(value_dim, columns)
    spans = _spans(rows.tiles, piece if slices > 1 else 0)
    pieces = len(spans) > 1
    squares = torch.empty((rows.tiles, value_heads, 2, TILE, TILE), dtype=qkv_TC.dtype, device=device)
    falls = torch.empty((rows.tiles, value_heads, 2, TILE), dtype=torch.float32, device=device)
    carried = torch.empty((rows.rows, value_heads, value_dim, key_dim), device=device) if pieces else falls
    z_TX = z_TUV.flatten(1) if slices == 1 else None
    boxes = _boxes(qkv_TC, squares, z_TX, out_TX if box else None, key_dim, value_dim, columns)

    def prepare(low: int, high: int) -> None:
        _prepare_kernel[(value_heads, high - low)](
            qkv_TC,
            g_TU,
            beta_TU,
            rows.begins_R,
            rows.counts_R,
            rows.tile_rows_X,
            rows.tile_offsets_X,
            squares,
            falls,
            low,
            qkv_TC.stride(0),
            g_TU.stride(0),
            beta_TU.stride(0),
            I=key_heads,
            U=value_heads,
            K=key_dim,
            BK=block_k,
            TILE=TILE,
            PRODUCTS=tl.float32 if wide else tl.float16,
            num_warps=4,
            maxnreg=None if wide else 128,  # four programs per multiprocessor
        )

    def follow(low: int, high: int) -> None:
        _scan_kernel[(value_heads * slices, rows.rows)](
            qkv_TC,
            matrices_SUKV,
            squares,
            falls,
            z_TUV,
            norm_weight_V,
            out_TX,
            carried,
            *boxes,
            rows.begins_R,
            rows.counts_R,
            rows.starts_R,
            rows.slots_R,
            rows.first_tiles_R,
            rows.exports_X,
            low,
            high,
            qkv_TC.stride(0),
            matrices_SUKV.stride(0),
            z_TUV.stride(0),
            eps,
            I=key_heads,
            U=value_heads,
            K=key_dim,
            V=value_dim,
            BK=block_k,
            BV=columns,
            TILE=TILE,
            STAGES=stages,
            PIECES=pieces,
            BOXES=boxes.keys is not None,
            BOX=boxes.out is not None,
            num_warps=warps,
        )

    def norm(low: int, high: int) -> None:
        _norm_kernel[(value_heads, high - low)](
            out_TX,
            z_TUV,
            norm_weight_V,
            rows.begins_R,
            rows.counts_R,
            rows.tile_rows_X,
            rows.tile_offsets_X,
            low,
            z_TUV.stride(0),
            eps,
            U=value_heads,
            V=value_dim,
            BLOCK=triton.next_power_of_2(value_dim),
            TILE=TILE,
        )

    if not pieces or device.type != "cuda":
        for span in spans:
            prepare(*span)
            follow(*span)
            if slices > 1:
                norm(*span)
        return
    here, beside, followed = torch.cuda.current_stream(device), urgent_stream(device, "scan"), []
    for span in spans:
        prepare(*span)
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            follow(*span)
            followed.append(beside.record_event())
    for span, event in zip(spans, followed, strict=True):
        here.wait_event(event)
        norm(*span)
