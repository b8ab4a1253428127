"""What stands before the scan of prefill rows, in one pass: convolution, silu, unit queries and keys, gates.

A program owns some tokens of a tile and one head. Its threads go through runs of tokens and keep the last X inputs in
registers, so that an input is read once, but for the X before a run. A second kernel writes the windows, when all have
been read.

Legend: T packed tokens, S slots, I key heads, U value heads, K key dim, V value dim, W conv width, X = W - 1,
C channels under the convolution = 2·I·K + U·V. Tokens of a row count from its first one; those before are negative.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.elementwise import rounded, silu, softplus
from hybserve_kernels.gated_delta.reference import L2_EPS
from hybserve_kernels.overlap import overlaps
from hybserve_kernels.overlap.gpu import begin
from hybserve_kernels.rows import TILE, PrefillRows


class Shape(NamedTuple):
    """How a call is launched: tokens of a program (a divisor of TILE), of a run (a divisor of these), warps of a
    program, early launches or not."""

    tokens: int
    run: int
    warps: int
    early: bool


#: Tiles of a step, at most, to the best shape for heads of 128 channels on an H200.
SHAPES = {4: Shape(16, 4, 4, True), 1 << 30: Shape(32, 8, 4, True)}
#: Channels of a program that writes windows.
_CHANNELS = 512


@triton.jit
def _gates(
    projected_ptr,
    rate_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    token,
    mask_t,
    stride,
    first,
    U: tl.constexpr,
    BU: tl.constexpr,
):
    o_u = tl.arange(0, BU)
    in_u = o_u < U
    mask = mask_t[:, None] & in_u[None, :]
    p_b = projected_ptr + token[:, None] * stride + first + o_u[None, :]
    b = tl.load(p_b, mask=mask, other=0.0)
    a = tl.load(p_b + U, mask=mask, other=0.0).to(tl.float32)
    rate = tl.load(rate_ptr + o_u, mask=in_u, other=0.0)
    bias = tl.load(dt_bias_ptr + o_u, mask=in_u, other=0.0)
    beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)
    at = token[:, None] * U + o_u[None, :]
    tl.store(beta_ptr + at, beta, mask=mask)
    tl.store(g_ptr + at, rate[None, :] * softplus(a + bias[None, :]), mask=mask)


@triton.jit
def _inputs(
    p_x,  # [runs, BC]: the first token of each run
    p_window,  # [BC]
    o_t,
    count,
    continues,
    in_c,
    stride,
    X: tl.constexpr,
    RUN: tl.constexpr,
    INNER: tl.constexpr,
    FULL: tl.constexpr,
):
    """Inputs of the runs, X before each and RUN of its own, [runs, BC] each. ``INNER``: all tokens are of the row;
    ``FULL``: all channels are of the head."""
    inputs: tl.tuple = ()
    for at in tl.static_range(-X, RUN):
        if INNER and FULL:
            x = tl.load(p_x + at * stride)
        elif INNER:
            x = tl.load(p_x + at * stride, mask=in_c[None, :], other=0.0)
        else:
            o_x = o_t + at
            x = tl.load(p_x + at * stride, mask=((o_x >= 0) & (o_x < count))[:, None] & in_c[None, :], other=0.0)
            if at < 0 and continues:
                for before in tl.static_range(at + X, X, RUN):
                    old = tl.load(p_window + before, mask=in_c, other=0.0).to(x.dtype)
                    x = tl.where((o_x == before - X)[:, None], old[None, :], x)
        inputs = inputs + (x,)  # noqa: RUF005 (Triton knows no starred tuple)
    return inputs


@triton.jit
def _head(
    p_x,  # [runs, BC]: the first token of each run
    p_window,  # [BC]
    p_taps,  # [runs, BC]
    p_y,  # [runs, BC]
    o_t,  # tokens at which runs begin
    count,
    continues,
    is_key,
    scale,
    in_c,
    stride,
    L2_EPS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    INNER: tl.constexpr,
    FULL: tl.constexpr,
):
    """Some tokens of a row under one head. All inputs are asked for before the first is used."""
    inputs = _inputs(p_x, p_window, o_t, count, continues, in_c, stride, WIDTH - 1, RUN, INNER, FULL)
    taps: tl.tuple = ()
    for tap in tl.static_range(WIDTH):
        taps = taps + (tl.load(p_taps + tap * C, mask=in_c[None, :], other=0.0),)  # noqa: RUF005
    dtype = p_y.dtype.element_ty
    for at in tl.static_range(RUN):
        summed = inputs[at].to(tl.float32) * taps[0]
        for tap in tl.static_range(1, WIDTH):
            summed += inputs[at + tap].to(tl.float32) * taps[tap]
        y = silu(rounded(summed, dtype))
        if is_key:
            y = rounded(y, dtype)
            y *= (tl.rsqrt(tl.sum(y * y, 1) + L2_EPS) * scale)[:, None]
        if INNER and FULL:
            tl.store(p_y + at * C, y.to(dtype))
        elif INNER:
            tl.store(p_y + at * C, y.to(dtype), mask=in_c[None, :])
        else:
            tl.store(p_y + at * C, y.to(dtype), mask=(o_t + at < count)[:, None] & in_c[None, :])


@triton.jit
def _conv_kernel(
    projected_ptr,  # [T, .]: q I·K | k I·K | v U·V | z U·V | b U | a U
    windows_ptr,  # [S, C, X], only read
    taps_ptr,  # fp32 [W, C]
    rate_ptr,  # fp32 [U]
    dt_bias_ptr,  # fp32 [U]
    begins_ptr,
    counts_ptr,
    starts_ptr,
    slots_ptr,
    tile_rows_ptr,
    tile_offsets_ptr,
    qkv_ptr,  # [T, C]
    g_ptr,  # fp32 [T, U]
    beta_ptr,  # fp32 [T, U]
    stride,
    windows_stride,
    L2_EPS: tl.constexpr,
    I: tl.constexpr,
    U: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BT: tl.constexpr,
    RUN: tl.constexpr,
    BC: tl.constexpr,
    BU: tl.constexpr,
    ALIGNED: tl.constexpr,  # divides K and V
    EARLY: tl.constexpr,
):
    begin(EARLY)
    head, piece = tl.program_id(0), tl.program_id(1)
    tile = piece // (TILE // BT)
    row = tl.load(tile_rows_ptr + tile)
    first = tl.load(tile_offsets_ptr + tile) + piece % (TILE // BT) * BT
    known = tl.maximum(row, 0)
    count, start = tl.load(counts_ptr + known), tl.load(begins_ptr + known)
    slot, before = tl.load(slots_ptr + known), tl.load(starts_ptr + known)
    if ((row | start | slot | before) < 0) | (first >= count):  # asks for all, so that none waits for another
        return
    C: tl.constexpr = 2 * I * K + U * V
    X: tl.constexpr = WIDTH - 1
    if head == 2 * I + U:
        o_t = first + tl.arange(0, BT)
        token = (start + o_t).to(tl.int64)
        _gates(projected_ptr, rate_ptr, dt_bias_ptr, g_ptr, beta_ptr, token, o_t < count, stride, C + U * V, U, BU)
        return

    is_key = head < 2 * I
    low = tl.multiple_of(tl.where(is_key, head * K, 2 * I * K + (head - 2 * I) * V), ALIGNED)
    o_c = tl.arange(0, BC)
    in_c = o_c < tl.where(is_key, K, V)
    o_t = first + tl.arange(0, BT // RUN) * RUN
    token = (start + o_t).to(tl.int64)
    p_x = projected_ptr + token[:, None] * stride + low + o_c[None, :]
    p_window = windows_ptr + slot.to(tl.int64) * windows_stride + (low + o_c) * X
    p_taps = taps_ptr + low + o_c[None, :] + 0 * o_t[:, None]  # in the layout of the inputs
    p_y = qkv_ptr + token[:, None] * C + low + o_c[None, :]
    continues = (first == 0) & (before != 0)
    scale = tl.where(head < I, K**-0.5, 1.0)
    FULL: tl.constexpr = (K == BC) and (V == BC)
    if (first >= X) & (first + BT <= count):  # most programs: no masks
        _head(
            p_x,
            p_window,
            p_taps,
            p_y,
            o_t,
            count,
            continues,
            is_key,
            scale,
            in_c,
            stride,
            L2_EPS,
            C,
            WIDTH,
            RUN,
            True,
            FULL,
        )
    else:
        _head(
            p_x,
            p_window,
            p_taps,
            p_y,
            o_t,
            count,
            continues,
            is_key,
            scale,
            in_c,
            stride,
            L2_EPS,
            C,
            WIDTH,
            RUN,
            False,
            FULL,
        )


@triton.jit
def _windows_kernel(
    projected_ptr,
    windows_ptr,
    begins_ptr,
    counts_ptr,
    starts_ptr,
    slots_ptr,
    tile_rows_ptr,
    tile_offsets_ptr,
    exports_ptr,
    stride,
    windows_stride,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BC: tl.constexpr,
    BX: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The window after a tile, to its checkpoint and, after the last tile of a row, to the row's slot. The old window
    reaches into the new one only where the row is shorter than it: then this is the row's only tile."""
    begin(EARLY)
    tile = tl.program_id(1)
    row = tl.load(tile_rows_ptr + tile)
    if row < 0:
        return
    count = tl.load(counts_ptr + row)
    stop = tl.load(tile_offsets_ptr + tile) + TILE
    export = tl.load(exports_ptr + tile).to(tl.int64)
    if stop < count and export == 0:
        return
    X: tl.constexpr = WIDTH - 1
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    o_x = tl.arange(0, BX)
    mask = (channel < C)[:, None] & (o_x < X)[None, :]
    source = tl.minimum(stop, count) - X + o_x
    own_x = mask & (source >= 0)[None, :]
    old_x = mask & (source < 0)[None, :]
    token = (tl.load(begins_ptr + row) + source).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    p_window = windows_ptr + slot * windows_stride + channel[:, None] * X
    p_x = projected_ptr + token[None, :] * stride + channel[:, None]
    after = tl.load(p_x, mask=own_x, other=0.0).to(windows_ptr.dtype.element_ty)
    if tl.load(starts_ptr + row) != 0:
        after += tl.load(p_window + (source + X)[None, :], mask=old_x, other=0.0)
    if export != 0:
        tl.store(windows_ptr + export * windows_stride + channel[:, None] * X + o_x[None, :], after, mask=mask)
    if stop >= count:
        tl.debug_barrier()  # a thread writes what another one has read
        tl.store(p_window + o_x[None, :], after, mask=mask)


def conv_rows(
    projected_TX: torch.Tensor,
    windows_SCX: torch.Tensor,
    taps_WC: torch.Tensor,
    rate_U: torch.Tensor,
    dt_bias_U: torch.Tensor,
    heads: tuple[int, int, int, int],
    rows: PrefillRows,
    qkv_TC: torch.Tensor,
    g_TU: torch.Tensor,
    beta_TU: torch.Tensor,
    shape: Shape | None = None,
) -> None:
    """Of every token of the rows: unit queries (scaled by K^-1/2), unit keys and values after convolution and silu
    into ``qkv_TC``, the gates into ``g_TU`` and ``beta_TU`` (fp32). The window after a row goes to its slot, the one
    after tile x to slot ``exports_X[x]``. Other tokens and slots are left alone.

    ``heads`` (I, U, K, V). ``projected_TX`` in the model dtype, as ``qkv_TC``: q, k, v, z, b, a side by side;
    ``windows_SCX`` any float dtype; ``taps_WC``, ``rate_U`` = -exp(A_log) and ``dt_bias_U`` fp32. ``shape``: of
    the launch, by default the best known for so many tiles."""
    key_heads, value_heads, key_dim, value_dim = heads
    width, channels = taps_WC.shape
    assert value_heads % key_heads == 0
    assert channels == 2 * key_heads * key_dim + value_heads * value_dim
    assert width >= 2, "a convolution of width 1 has no window"
    assert projected_TX.shape[1] >= channels + value_heads * (value_dim + 2)
    assert projected_TX.stride(1) == 1
    assert windows_SCX.shape[1:] == (channels, width - 1)
    assert windows_SCX[0].is_contiguous()
    assert taps_WC.is_contiguous()
    assert qkv_TC.shape[1] == channels
    assert g_TU.shape[1] == beta_TU.shape[1] == value_heads
    assert qkv_TC.is_contiguous()
    assert g_TU.is_contiguous()
    assert beta_TU.is_contiguous()
    assert qkv_TC.dtype == projected_TX.dtype
    for tensor in (taps_WC, rate_U, dt_bias_U, g_TU, beta_TU):
        if tensor.dtype != torch.float32:
            raise TypeError(f"taps, rate, bias and gates in fp32, got {tensor.dtype}")
    if not rows.tiles:
        return
    tokens, run, warps, early = shape or shape_for(rows.tiles)
    early = early and overlaps(projected_TX.device)
    tables = (rows.begins_R, rows.counts_R, rows.starts_R, rows.slots_R, rows.tile_rows_X, rows.tile_offsets_X)
    strides = (projected_TX.stride(0), windows_SCX.stride(0))
    _conv_kernel[(2 * key_heads + value_heads + 1, rows.tiles * (TILE // tokens))](
        projected_TX,
        windows_SCX,
        taps_WC,
        rate_U,
        dt_bias_U,
        *tables,
        qkv_TC,
        g_TU,
        beta_TU,
        *strides,
        L2_EPS=L2_EPS,
        I=key_heads,
        U=value_heads,
        K=key_dim,
        V=value_dim,
        WIDTH=width,
        TILE=TILE,
        BT=tokens,
        RUN=run,
        BC=triton.next_power_of_2(max(key_dim, value_dim)),
        BU=triton.next_power_of_2(value_heads),
        ALIGNED=math.gcd(key_dim, value_dim, 16),
        EARLY=early,
        num_warps=warps,
        launch_pdl=early,
    )
    _windows_kernel[(triton.cdiv(channels, _CHANNELS), rows.tiles)](
        projected_TX,
        windows_SCX,
        *tables,
        rows.exports_X,
        *strides,
        C=channels,
        WIDTH=width,
        TILE=TILE,
        BC=_CHANNELS,
        BX=triton.next_power_of_2(width - 1),
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )


def shape_for(tiles: int) -> Shape:
    return next(shape for most, shape in SHAPES.items() if tiles <= most)
