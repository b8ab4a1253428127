"""One token of each of many rows through the middle of a Gated DeltaNet layer, in one launch: convolution, unit queries
and keys, gates, the recurrence in the form of ``gated_delta.step``, gated norm.

The time goes into reading and writing matrices, so programs are small (some columns of one matrix), many share a
multiprocessor, and each asks for its part of the matrix before all else. It then convolves the channels it needs. The
last program of a key head to come that far knows that the others have read the windows and written their columns: it
moves the windows on and does the norm.

Legend: N rows, S slots, I key heads, U = I·r value heads, K key dim, V value dim, W conv width, X = W - 1, C channels
under the convolution = 2·I·K + U·V. In kernels: B = K and V, BR = r, BP = 2 + r, each rounded up to a power of two;
BV: columns of a program.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.elementwise import rounded, silu, softplus
from hybserve_kernels.gated_delta.gpu.rounding import round_to_bf16
from hybserve_kernels.gated_delta.reference import L2_EPS
from hybserve_kernels.overlap import overlaps
from hybserve_kernels.overlap.gpu import begin
from hybserve_kernels.rows import DecodeRows


class Shape(NamedTuple):
    """Columns and warps of a program."""

    columns: int
    warps: int


#: Rows of a step, at most, to the best shape for matrices of 128 x 128 on an H200, in fp32 and bf16.
SHAPES = {1: Shape(32, 2), 1 << 30: Shape(64, 2)}


@triton.jit
def _past(window_ptr, taps_ptr, channel, mask, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Of some channels the tap of the input to come, then inputs and their taps by turns, the oldest first."""
    X: tl.constexpr = WIDTH - 1
    loaded: tl.tuple = (tl.load(taps_ptr + X * CHANNELS + channel, mask=mask, other=0.0),)
    for tap in tl.static_range(X):
        past = tl.load(window_ptr + channel * X + tap, mask=mask, other=0.0)
        weight = tl.load(taps_ptr + tap * CHANNELS + channel, mask=mask, other=0.0)
        loaded = loaded + (past, weight)  # noqa: RUF005 (Triton knows no starred tuple)
    return loaded


@triton.jit
def _convolved(past, x, WIDTH: tl.constexpr):
    """The activated output in fp32."""
    summed = x.to(tl.float32) * past[0]
    for tap in tl.static_range(WIDTH - 1):
        summed += past[2 * tap + 1].to(tl.float32) * past[2 * tap + 2]
    return rounded(silu(rounded(summed, x.dtype)), x.dtype)


@triton.jit
def _finish(
    projected_ptr,
    window_ptr,
    weight_ptr,
    o_ptr,
    out_ptr,
    i,
    eps,
    I: tl.constexpr,
    U: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    B: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
):
    """Of a row and a key head: the windows forget their oldest inputs and take in the newest; the gated norm."""
    R: tl.constexpr = U // I
    X: tl.constexpr = WIDTH - 1
    part, o_c = tl.arange(0, BP * B) // B, tl.arange(0, BP * B) % B
    is_key = part < 2
    channel = tl.where(is_key, (part * I + i) * K, 2 * I * K + (i * R + part - 2) * V) + o_c
    in_c = tl.where(is_key, o_c < K, (o_c < V) & (part < 2 + R))
    newest = tl.load(projected_ptr + channel, mask=in_c, other=0.0)
    kept: tl.tuple = (newest.to(window_ptr.dtype.element_ty),)
    for tap in tl.static_range(1, X):
        kept = kept + (tl.load(window_ptr + channel * X + (X - tap), mask=in_c, other=0.0),)  # noqa: RUF005

    o_u, o_v = i * R + tl.arange(0, BR), tl.arange(0, B)
    p_head = o_u[:, None] * V + o_v[None, :]
    in_head = (tl.arange(0, BR) < R)[:, None] & (o_v < V)[None, :]
    o = tl.load(o_ptr + p_head, mask=in_head, other=0.0, cache_modifier=".cg")
    z = tl.load(projected_ptr + 2 * I * K + U * V + p_head, mask=in_head, other=0.0)
    weight = tl.load(weight_ptr + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    normed = rounded(o * tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None], z.dtype)
    gated = rounded(normed * weight[None, :], z.dtype) * silu(z.to(tl.float32))

    tl.debug_barrier()  # a thread writes what another one has read
    for tap in tl.static_range(X):
        tl.store(window_ptr + channel * X + (X - 1 - tap), kept[tap], mask=in_c)
    tl.store(out_ptr + p_head, gated, mask=in_head)


@triton.jit
def _recurrence_kernel(
    projected_ptr,  # [T, .]: q I·K | k I·K | v U·V | z U·V | b U | a U
    windows_ptr,  # [S, C, X]
    matrices_ptr,  # [S, U, K, V], fp32 or bf16
    taps_ptr,  # fp32 [W, C]
    rate_ptr,  # fp32 [U]
    dt_bias_ptr,  # fp32 [U]
    weight_ptr,  # [V]
    lengths_ptr,
    slots_ptr,
    o_ptr,  # fp32 [N, U·V], scratch
    counts_ptr,  # int32 [N, I]
    out_ptr,  # [T, U·V]
    projected_stride,
    windows_stride,
    matrices_stride,
    out_stride,
    eps,
    L2_EPS: tl.constexpr,
    I: tl.constexpr,
    U: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    B: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    BV: tl.constexpr,
    EARLY: tl.constexpr,
):
    SLICES: tl.constexpr = (V + BV - 1) // BV
    C: tl.constexpr = 2 * I * K + U * V
    u, row = tl.program_id(0) // SLICES, tl.program_id(1)
    i = u // (U // I)
    length = tl.load(lengths_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (length <= 0) | (slot <= 0):  # asks for both, so that neither waits for the other
        begin(EARLY)
        return
    o_k, o_v = tl.arange(0, B), tl.program_id(0) % SLICES * BV + tl.arange(0, BV)
    in_k, in_v = o_k < K, o_v < V
    p_state = matrices_ptr + slot * matrices_stride + u * K * V + o_k[:, None] * V + o_v[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    state = tl.load(p_state, mask=in_state, other=0.0)
    tl.debug_barrier()  # only for the compiler, which would begin this long load after what needs the short ones

    projected_ptr += row.to(tl.int64) * projected_stride
    windows_ptr += slot * windows_stride
    o_ptr += row.to(tl.int64) * (U * V)
    # Gathered after the convolution: else the compiler loads its inputs in the layout of the matrix, many times over.
    o_c = tl.arange(0, 2 * B) % B
    channel, in_c = (tl.arange(0, 2 * B) // B * I + i) * K + o_c, o_c < K
    v_channel = 2 * I * K + u * V + o_v
    past = _past(windows_ptr, taps_ptr, channel, in_c, C, WIDTH)
    v_past = _past(windows_ptr, taps_ptr, v_channel, in_v, C, WIDTH)
    rate, dt_bias = tl.load(rate_ptr + u), tl.load(dt_bias_ptr + u)
    begin(EARLY)
    x = tl.load(projected_ptr + channel, mask=in_c, other=0.0)
    v_x = tl.load(projected_ptr + v_channel, mask=in_v, other=0.0)
    b = tl.load(projected_ptr + C + U * V + u)
    a = tl.load(projected_ptr + C + U * V + U + u).to(tl.float32)
    beta = rounded(1.0 / (1.0 + tl.exp(-b.to(tl.float32))), b.dtype)
    decay = tl.exp(rate * softplus(a + dt_bias))
    qk = tl.reshape(_convolved(past, x, WIDTH), [2, B])
    scale = tl.where(tl.arange(0, 2) == 0, K**-0.5, 1.0)
    qk = tl.reshape(qk * (tl.rsqrt(tl.sum(qk * qk, 1) + L2_EPS) * scale)[:, None], [2 * B])
    q, k = tl.gather(qk, o_k, 0), tl.gather(qk, B + o_k, 0)
    v = tl.gather(_convolved(v_past, v_x, WIDTH), tl.arange(0, BV), 0)

    state = state.to(tl.float32)
    change = beta * (v - decay * tl.sum(state * k[:, None], 0))
    if matrices_ptr.dtype.element_ty == tl.bfloat16:
        length = tl.load(lengths_ptr + row)  # again: else the compiler makes all noise early and keeps it in registers
    o = decay * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * change
    state = decay * state + k[:, None] * change[None, :]
    if matrices_ptr.dtype.element_ty == tl.bfloat16:
        state = round_to_bf16(state, length - 1, u * K + o_k, o_v)
    tl.store(p_state, state, mask=in_state)
    tl.store(o_ptr + u * V + o_v, o, mask=in_v, cache_modifier=".cg")

    tl.debug_barrier()  # what all threads have read and written comes before the count
    p_count = counts_ptr + row * I + i
    if tl.atomic_add(p_count, 1, sem="acq_rel") == U // I * SLICES - 1:
        tl.store(p_count, 0)
        out_ptr += row.to(tl.int64) * out_stride
        _finish(projected_ptr, windows_ptr, weight_ptr, o_ptr, out_ptr, i, eps, I, U, K, V, WIDTH, B, BR, BP)


@functools.cache
def _counts(device: torch.device, size: int) -> torch.Tensor:
    """Zeros to count in, zero again when a launch has ended. A graph must not be the first to ask for them, so whoever
    captures launches once before."""
    return torch.zeros(size, dtype=torch.int32, device=device)


def decode_rows(
    projected_TX: torch.Tensor,
    windows_SCX: torch.Tensor,
    matrices_SUKV: torch.Tensor,
    taps_WC: torch.Tensor,
    rate_U: torch.Tensor,
    dt_bias_U: torch.Tensor,
    norm_weight_V: torch.Tensor,
    eps: float,
    heads: tuple[int, int, int, int],
    rows: DecodeRows,
    out_TX: torch.Tensor,
    shape: Shape | None = None,
) -> None:
    """Row n is token n: window and matrices of its slot move on by one token in place, and ``out_TX[n]`` becomes the
    gated normed output [U·V]. Rows of length 0 touch nothing.

    ``heads`` (I, U, K, V). ``projected_TX`` in the model dtype: q, k, v, z, b, a side by side; ``windows_SCX`` any
    float dtype; ``matrices_SUKV`` fp32 or bf16 (rounded up or down by chance, see ``rounding``); ``taps_WC``,
    ``rate_U`` = -exp(A_log) and ``dt_bias_U`` fp32; ``norm_weight_V`` and ``out_TX`` in the model dtype. ``shape``:
    of the launch, by default the best known for so many rows.

    Of what earlier kernels write only ``projected_TX`` may come from the ones just before: lengths, slots, windows and
    matrices are read while those still run, so between their writers and this call there is a kernel that is not
    launched early (see ``overlap``), as there is between two steps. One stream at a time."""
    key_heads, value_heads, key_dim, value_dim = heads
    width, channels = taps_WC.shape
    assert value_heads % key_heads == 0
    assert channels == 2 * key_heads * key_dim + value_heads * value_dim
    assert width >= 2, "a convolution of width 1 has no window"
    assert projected_TX.shape[1] >= channels + value_heads * (value_dim + 2)
    assert projected_TX.stride(1) == out_TX.stride(1) == 1
    assert windows_SCX.shape[1:] == (channels, width - 1)
    assert windows_SCX[0].is_contiguous()
    assert matrices_SUKV.shape[1:] == (value_heads, key_dim, value_dim)
    assert matrices_SUKV[0].is_contiguous()
    assert taps_WC.is_contiguous()
    if matrices_SUKV.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"matrices of the gated delta rule are kept in fp32 or bf16, got {matrices_SUKV.dtype}")
    if taps_WC.dtype != torch.float32 or rate_U.dtype != torch.float32 or dt_bias_U.dtype != torch.float32:
        raise TypeError(f"taps, rate and bias in fp32, got {taps_WC.dtype}, {rate_U.dtype}, {dt_bias_U.dtype}")
    if not rows.rows:
        return
    device = projected_TX.device
    columns, warps = shape or shape_for(rows.rows)
    columns, each, early = min(columns, triton.next_power_of_2(value_dim)), value_heads // key_heads, overlaps(device)
    _recurrence_kernel[(value_heads * triton.cdiv(value_dim, columns), rows.rows)](
        projected_TX,
        windows_SCX,
        matrices_SUKV,
        taps_WC,
        rate_U,
        dt_bias_U,
        norm_weight_V,
        rows.lengths_N,
        rows.slots_N,
        torch.empty(rows.rows, value_heads * value_dim, dtype=torch.float32, device=device),
        _counts(device, rows.rows * key_heads),
        out_TX,
        projected_TX.stride(0),
        windows_SCX.stride(0),
        matrices_SUKV.stride(0),
        out_TX.stride(0),
        eps,
        L2_EPS=L2_EPS,
        I=key_heads,
        U=value_heads,
        K=key_dim,
        V=value_dim,
        WIDTH=width,
        B=triton.next_power_of_2(max(key_dim, value_dim)),
        BR=triton.next_power_of_2(each),
        BP=triton.next_power_of_2(2 + each),
        BV=columns,
        EARLY=early,
        num_warps=warps,
        launch_pdl=early,
    )


def shape_for(rows: int) -> Shape:
    return next(shape for most, shape in SHAPES.items() if rows <= most)
