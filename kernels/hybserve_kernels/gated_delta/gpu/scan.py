"""Prefill rows of a Gated DeltaNet layer through the gated delta rule and the gated norm, over tiles of 64 tokens.

The formula of ``gated_delta.chunk`` in two launches and a last one for the norm. With c the running sum of g in a tile,
G_ij = exp(c_i - c_j) for j <= i and b the strengths, ``_prepare_kernel`` makes for all tiles at once

    W = (1 + tril(diag(b) (K K^T) * G, -1))^-1 diag(b)          A = (Q K^T) * G

and ``_scan_kernel`` follows the tiles of a row, a slice of a head's value columns per program:

    D = W V - W diag(exp c) K S     O = diag(exp c) Q S + A D     S <- exp(c_n) S + K^T diag(exp(c_n - c)) D

It computes the transpose of each: what depends on S is then the left factor of the next product, which the matrix unit
takes from registers; the right ones wait in shared memory, loaded ahead.

Only W, A (64 x 64 per tile and head), exp c and exp(c_n - c) go through memory. A program that has all columns of a
head norms its output at once; otherwise ``_norm_kernel`` does, in place.

Legend: T tokens, S slots, I key heads, U = I·r value heads, K key dim, V value dim, X tiles, c tokens of a tile.
In kernels: BK, BV a power of two that holds K, a slice of V.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.gated_delta.gpu.rounding import round_to_bf16
from hybserve_kernels.rows import TILE, PrefillRows

#: The interpreter multiplies 16-bit floats as if they were integers.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Shape(NamedTuple):
    """Value columns of a program of the scan, its warps and stages."""

    columns: int
    warps: int
    stages: int


@triton.jit
def _dot(left, right, acc=None):
    """Factors of fp32 as sums of three of TF32: nearly as exact as fp32, which has no matrix instruction."""
    if _INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc)
    return tl.dot(left, right, acc, input_precision="tf32x3")


@triton.jit
def _inverse(lower, TILE: tl.constexpr, PRODUCTS: tl.constexpr):
    """(1 + ``lower``)^-1 of a strictly lower triangular matrix: if X inverts the diagonal blocks of one size and N is
    what ``lower`` has below them in blocks of twice the size, X - X N X inverts these. Up to 16 x 16 each block has a
    warp of its own. ``PRODUCTS`` is the dtype of the factors: fp16 has room, for an entry of X is b k·(a product of
    contractions)k."""
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
    apart = o[:, None] ^ o[None, :]
    for level in tl.static_range(4, 6):
        new = tl.where(apart >> level == 1, lower, 0.0).to(PRODUCTS)
        narrow = inverse.to(PRODUCTS)
        inverse -= _dot(_dot(narrow, new).to(PRODUCTS), narrow)
    return inverse


@triton.jit
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
    u, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_rows_ptr + tile)
    if row < 0:
        return
    offset = tl.load(tile_offsets_ptr + tile)
    count = tl.load(counts_ptr + row) - offset
    first = tl.load(begins_ptr + row).to(tl.int64) + offset
    o_c, o_k = tl.arange(0, TILE), tl.arange(0, BK)
    known = o_c < count
    tokens = first + o_c
    g = tl.load(g_ptr + tokens * g_stride + u, mask=known, other=0.0)
    beta = tl.load(beta_ptr + tokens * beta_stride + u, mask=known, other=0.0)
    p_q = qkv_ptr + tokens[:, None] * qkv_stride + (u // (U // I)) * K + o_k[None, :]
    in_k = known[:, None] & (o_k < K)[None, :]
    q = tl.load(p_q, mask=in_k, other=0.0)
    k = tl.load(p_q + I * K, mask=in_k, other=0.0)

    sums = tl.cumsum(g, 0)
    not_above = o_c[:, None] >= o_c[None, :]
    pair = tl.exp(tl.where(not_above, sums[:, None] - sums[None, :], float("-inf")))
    here = tile.to(tl.int64) * U + u
    o_cc = o_c[:, None] * TILE + o_c[None, :]
    tl.store(falls_ptr + here * 2 * TILE + 2 * o_c, tl.exp(sums))
    tl.store(falls_ptr + here * 2 * TILE + 2 * o_c + 1, tl.exp(tl.sum(g, 0) - sums))
    tl.store(squares_ptr + (here * 2 + 1) * TILE * TILE + o_cc, _dot(q, tl.trans(k)) * pair)
    lower = _dot(k, tl.trans(k)) * pair * beta[:, None]
    lower = tl.where(o_c[:, None] > o_c[None, :], lower, 0.0)
    solve = _inverse(lower, TILE, PRODUCTS) * beta[None, :]
    tl.store(squares_ptr + here * 2 * TILE * TILE + o_cc, solve)


@triton.jit
def _gated_norm(o, z, weight, eps, V: tl.constexpr):
    """``rms_norm.reference.rms_norm_gated`` of [tokens, V] in fp32; columns beyond V are 0."""
    normed = (o * tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None]).to(z.dtype).to(tl.float32)
    scaled = (normed * weight.to(tl.float32)[None, :]).to(z.dtype).to(tl.float32)
    wide = z.to(tl.float32)
    return scaled * (wide / (1.0 + tl.exp(-wide)))


@triton.jit
def _store_state(p_state, state, mask, position, row, column):
    if p_state.dtype.element_ty == tl.bfloat16:
        tl.store(p_state, round_to_bf16(state, position, row, column), mask=mask)
    else:
        tl.store(p_state, state, mask=mask)


@triton.jit
def _scan_tile(
    state,
    p_q,  # [c, BK]
    p_v,  # [c, BV]
    p_z,  # [c, BV]
    p_out,  # [c, BV]
    p_squares,  # of the tile and head
    p_falls,  # of the tile and head
    in_q,
    in_v,
    weight,
    eps,
    KEYS: tl.constexpr,
    V: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Stores the output of a tile, normed if a program has the ``WHOLE`` head; the state [BV, BK] after the tile."""
    o_c = tl.arange(0, TILE)
    p_squares += o_c[:, None] * TILE + o_c[None, :]
    k = tl.load(p_q + KEYS, mask=in_q, other=0.0)
    v = tl.load(p_v, mask=in_v, other=0.0)
    solve = tl.load(p_squares)
    q = tl.load(p_q, mask=in_q, other=0.0)
    attend = tl.load(p_squares + TILE * TILE)
    fall, keep = tl.split(tl.reshape(tl.load(p_falls + tl.arange(0, 2 * TILE)), (TILE, 2)))
    last = tl.load(p_falls + 2 * (TILE - 1))

    narrow = state.to(k.dtype)
    told = -fall[None, :] * _dot(narrow, tl.trans(k))
    change = _dot(tl.trans(v), tl.trans(solve))
    change = _dot(told.to(k.dtype), tl.trans(solve), change)
    o = fall[None, :] * _dot(narrow, tl.trans(q))
    o = tl.trans(_dot(change.to(k.dtype), tl.trans(attend), o))
    if WHOLE:
        o = _gated_norm(o, tl.load(p_z, mask=in_v, other=0.0), weight, eps, V)
    tl.store(p_out, o.to(p_out.dtype.element_ty), mask=in_v)
    return _dot((change * keep[None, :]).to(k.dtype), k, state * last)


@triton.jit
def _scan_kernel(
    qkv_ptr,  # [T, .]: unit q I·K | unit k I·K | v U·V
    matrices_ptr,  # [S, U, K, V]
    squares_ptr,
    falls_ptr,
    z_ptr,  # [T, U, V]
    weight_ptr,  # [V]
    out_ptr,  # [T, U·V]
    begins_ptr,
    counts_ptr,
    starts_ptr,
    slots_ptr,
    first_tiles_ptr,
    exports_ptr,
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

    o_c, o_k = tl.arange(0, TILE), tl.arange(0, BK)
    o_v = (tl.program_id(0) % SLICES) * BV + tl.arange(0, BV)
    in_k, in_v = o_k < K, o_v < V
    o_state = u * K * V + o_k[:, None] * V + o_v[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    p_state = matrices_ptr + slot * matrices_stride + o_state
    continued = o_k < tl.where(start > 0, K, 0)
    state = tl.trans(tl.load(p_state, mask=continued[:, None] & in_v[None, :], other=0.0).to(tl.float32))
    state_row = u * K + o_k
    weight = tl.load(weight_ptr + o_v, mask=in_v, other=0.0)
    p_q = qkv_ptr + begin * qkv_stride + (u // (U // I)) * K
    p_v = qkv_ptr + begin * qkv_stride + 2 * I * K + u * V
    p_z = z_ptr + begin * z_stride + u * V
    p_out = out_ptr + begin * (U * V) + u * V
    p_squares = squares_ptr + (first_tile * U + u) * (2 * TILE * TILE)
    p_falls = falls_ptr + (first_tile * U + u) * (2 * TILE)
    o_q, o_vs = o_c[:, None] * qkv_stride + o_k[None, :], o_c[:, None] * qkv_stride + o_v[None, :]
    o_z, o_out = o_c[:, None] * z_stride + o_v[None, :], o_c[:, None] * (U * V) + o_v[None, :]

    for x in tl.range(0, count // TILE, num_stages=STAGES):
        export = tl.load(exports_ptr + first_tile + x)
        state = _scan_tile(
            state,
            p_q + o_q,
            p_v + o_vs,
            p_z + o_z,
            p_out + o_out,
            p_squares,
            p_falls,
            in_k[None, :],
            in_v[None, :],
            weight,
            eps,
            I * K,
            V,
            TILE,
            SLICES == 1,
        )
        if export != 0:
            p_export = matrices_ptr + export.to(tl.int64) * matrices_stride + o_state
            _store_state(p_export, tl.trans(state), in_state, start + (x + 1) * TILE - 1, state_row, o_v)
        p_q += TILE * qkv_stride
        p_v += TILE * qkv_stride
        p_z += TILE * z_stride
        p_out += TILE * U * V
        p_squares += U * 2 * TILE * TILE
        p_falls += U * 2 * TILE

    if count % TILE > 0:
        known = (o_c < count % TILE)[:, None]
        state = _scan_tile(
            state,
            p_q + o_q,
            p_v + o_vs,
            p_z + o_z,
            p_out + o_out,
            p_squares,
            p_falls,
            known & in_k[None, :],
            known & in_v[None, :],
            weight,
            eps,
            I * K,
            V,
            TILE,
            SLICES == 1,
        )
        export = tl.load(exports_ptr + first_tile + count // TILE)
        if export != 0:
            p_export = matrices_ptr + export.to(tl.int64) * matrices_stride + o_state
            _store_state(p_export, tl.trans(state), in_state, start + count - 1, state_row, o_v)

    _store_state(p_state, tl.trans(state), in_state, start + count - 1, state_row, o_v)


@triton.jit
def _norm_kernel(
    out_ptr,  # [T, U·V]
    z_ptr,  # [T, U, V]
    weight_ptr,  # [V]
    begins_ptr,
    counts_ptr,
    tile_rows_ptr,
    tile_offsets_ptr,
    z_stride,
    eps,
    U: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    u, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_rows_ptr + tile)
    if row < 0:
        return
    offset = tl.load(tile_offsets_ptr + tile)
    count = tl.load(counts_ptr + row) - offset
    o_c, o_v = tl.arange(0, TILE), tl.arange(0, BLOCK)
    tokens = tl.load(begins_ptr + row).to(tl.int64) + offset + o_c
    mask = (o_c < count)[:, None] & (o_v < V)[None, :]
    p_out = out_ptr + tokens[:, None] * (U * V) + u * V + o_v[None, :]
    o = tl.load(p_out, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + tokens[:, None] * z_stride + u * V + o_v[None, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + o_v, mask=o_v < V, other=0.0)
    tl.store(p_out, _gated_norm(o, z, weight, eps, V), mask=mask)


#: Rows, as if of 32 heads of 128 columns, -> shape: the first entry with room for them.
#: Half heads while the rows are too few to fill the card. Never one stage with 16 bits: seen to give wrong
#: results on an H200 (Triton 3.6), for a reason not known.
SHAPES = {
    16: Shape(64, 4, 3),
    1 << 30: Shape(128, 8, 2),
}
#: For fp32, whatever the rows: larger ones have no room in registers.
FP32 = Shape(16, 8, 1)


def default_shape(rows: int, value_heads: int, value_dim: int, dtype: torch.dtype) -> Shape:
    whole = rows * value_heads * value_dim / (32 * 128)
    shape = FP32 if dtype == torch.float32 else next(shape for most, shape in SHAPES.items() if whole <= most)
    return shape._replace(columns=min(shape.columns, triton.next_power_of_2(value_dim)))


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
    columns, warps, stages = shape or default_shape(rows.rows, value_heads, value_dim, qkv_TC.dtype)
    wide = qkv_TC.dtype == torch.float32
    block_k = max(16, triton.next_power_of_2(key_dim))
    columns = max(16, columns)
    squares = torch.empty((rows.tiles, value_heads, 2, TILE, TILE), dtype=qkv_TC.dtype, device=qkv_TC.device)
    falls = torch.empty((rows.tiles, value_heads, 2, TILE), dtype=torch.float32, device=qkv_TC.device)
    _prepare_kernel[(value_heads, rows.tiles)](
        qkv_TC,
        g_TU,
        beta_TU,
        rows.begins_R,
        rows.counts_R,
        rows.tile_rows_X,
        rows.tile_offsets_X,
        squares,
        falls,
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
    slices = triton.cdiv(value_dim, columns)
    _scan_kernel[(value_heads * slices, rows.rows)](
        qkv_TC,
        matrices_SUKV,
        squares,
        falls,
        z_TUV,
        norm_weight_V,
        out_TX,
        rows.begins_R,
        rows.counts_R,
        rows.starts_R,
        rows.slots_R,
        rows.first_tiles_R,
        rows.exports_X,
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
        num_warps=warps,
    )
    if slices > 1:
        _norm_kernel[(value_heads, rows.tiles)](
            out_TX,
            z_TUV,
            norm_weight_V,
            rows.begins_R,
            rows.counts_R,
            rows.tile_rows_X,
            rows.tile_offsets_X,
            z_TUV.stride(0),
            eps,
            U=value_heads,
            V=value_dim,
            BLOCK=triton.next_power_of_2(value_dim),
            TILE=TILE,
        )
