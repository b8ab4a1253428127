"""One token of each of many rows through the middle of a Gated DeltaNet layer: convolution, unit queries and keys,
gates, the recurrence in the form of ``gated_delta.step``, gated norm.

The recurrence is all reading and writing of matrices, so its programs are small (some columns of one matrix) and many
share a multiprocessor. What stands around it runs in one of two forms, see ``Shape``:

    prepared    prepare (convolution, gates; windows move on), recurrence, finish (norm), or the norm in the recurrence
                if its programs own whole matrices
    else        recurrence, each program convolves what it needs; finish (norm; windows move on, now that all have
                been read)

Legend: N rows, S slots, I key heads, U = I·r value heads, K key dim, V value dim, W conv width, X = W - 1, C channels
under the convolution = 2·I·K + U·V. In kernels: BK, BC, BX: sizes rounded up to powers of two; BV: columns of a
program; scratch fp32 [N, o U·V | q I·K | k I·K | v U·V | decay U | beta U], the latter five only if prepared.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.gated_delta.gpu.rounding import round_to_bf16
from hybserve_kernels.gated_delta.reference import L2_EPS
from hybserve_kernels.overlap import overlaps
from hybserve_kernels.overlap.gpu import begin
from hybserve_kernels.rows import DecodeRows


class Shape(NamedTuple):
    """How a call is launched: columns, warps and most registers of a thread of the recurrence, the form, early launches
    or not."""

    columns: int
    warps: int
    registers: int | None
    prepared: bool
    early: bool


#: Rows of a step, at most, to the best shape for matrices of 128 x 128 on an H200.
SHAPES = {
    torch.float32: {
        1: Shape(16, 4, None, True, True),
        8: Shape(64, 2, None, False, False),
        64: Shape(64, 4, None, False, True),
        1 << 30: Shape(64, 2, None, False, False),
    },
    torch.bfloat16: {
        1: Shape(32, 4, None, False, True),
        8: Shape(32, 4, None, True, True),
        1 << 30: Shape(32, 2, None, True, False),
    },
}
#: Warps of a program of the kernels around the recurrence.
_WARPS = 2


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def unit(x, EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


@triton.jit
def _inputs(x_ptr, window_ptr, taps_ptr, channel, mask, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """What ``_convolved`` needs of some channels: inputs and taps by turns, the newest first, then from the oldest."""
    X: tl.constexpr = WIDTH - 1
    x = tl.load(x_ptr + channel, mask=mask, other=0.0)
    loaded: tl.tuple = (x, tl.load(taps_ptr + X * CHANNELS + channel, mask=mask, other=0.0))
    for tap in tl.static_range(X):
        past = tl.load(window_ptr + channel * X + tap, mask=mask, other=0.0)
        weight = tl.load(taps_ptr + tap * CHANNELS + channel, mask=mask, other=0.0)
        loaded = loaded + (past, weight)  # noqa: RUF005 (Triton knows no starred tuple)
    return loaded


@triton.jit
def _convolved(inputs, WIDTH: tl.constexpr):
    """The activated output in fp32."""
    summed = inputs[0].to(tl.float32) * inputs[1]
    for tap in tl.static_range(1, WIDTH):
        summed += inputs[2 * tap].to(tl.float32) * inputs[2 * tap + 1]
    return silu(summed.to(inputs[0].dtype).to(tl.float32)).to(inputs[0].dtype).to(tl.float32)


@triton.jit
def _move_on(x_ptr, window_ptr, channel, mask, WIDTH: tl.constexpr, BX: tl.constexpr):
    """The windows of some channels forget their oldest input and take in the newest."""
    X: tl.constexpr = WIDTH - 1
    o_x = tl.arange(0, BX)
    p_window = window_ptr + channel[:, None] * X + o_x[None, :]
    kept = tl.load(p_window + 1, mask=mask[:, None] & (o_x < X - 1)[None, :], other=0.0)
    newest = tl.load(x_ptr + channel[:, None] + 0 * o_x[None, :], mask=mask[:, None] & (o_x == X - 1)[None, :], other=0)
    after = tl.where((o_x == X - 1)[None, :], newest.to(kept.dtype), kept)
    tl.debug_barrier()  # a thread writes what another one has read
    tl.store(p_window, after, mask=mask[:, None] & (o_x < X)[None, :])


@triton.jit
def _gates(x_ptr, rate_ptr, dt_bias_ptr, u, FIRST: tl.constexpr, U: tl.constexpr):
    """Decay and beta of a value head; ``FIRST``: the column where b begins."""
    b = tl.load(x_ptr + FIRST + u)
    a = tl.load(x_ptr + FIRST + U + u).to(tl.float32)
    beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)
    return tl.exp(tl.load(rate_ptr + u) * softplus(a + tl.load(dt_bias_ptr + u))), beta


@triton.jit
def _normed(o, z_ptr, weight_ptr, o_v, eps, V: tl.constexpr):
    """Of all columns of a head the gated norm in fp32; ``o`` is 0 beyond the last."""
    z = tl.load(z_ptr + o_v, mask=o_v < V, other=0.0)
    weight = tl.load(weight_ptr + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    normed = (o * tl.rsqrt(tl.sum(o * o, 0) / V + eps)).to(z.dtype).to(tl.float32)
    return (normed * weight).to(z.dtype).to(tl.float32) * silu(z.to(tl.float32))


@triton.jit
def _prepare_kernel(
    projected_ptr,  # [T, .]: q I·K | k I·K | v U·V | z U·V | b U | a U
    windows_ptr,  # [S, C, X]
    taps_ptr,  # fp32 [W, C]
    rate_ptr,  # fp32 [U]
    dt_bias_ptr,  # fp32 [U]
    lengths_ptr,
    slots_ptr,
    scratch_ptr,
    projected_stride,
    windows_stride,
    L2_EPS: tl.constexpr,
    I: tl.constexpr,
    U: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BC: tl.constexpr,
    BX: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (length <= 0) | (slot <= 0):  # asks for both, so that neither waits for the other
        return
    C: tl.constexpr = 2 * I * K + U * V
    projected_ptr += row.to(tl.int64) * projected_stride
    windows_ptr += slot * windows_stride
    scratch_ptr += row.to(tl.int64) * (U * V + C + 2 * U) + U * V
    is_key = head < 2 * I
    size = tl.where(is_key, K, V)
    o_c = tl.arange(0, BC)
    channel = tl.where(is_key, head * K, 2 * I * K + (head - 2 * I) * V) + o_c
    y = _convolved(_inputs(projected_ptr, windows_ptr, taps_ptr, channel, o_c < size, C, WIDTH), WIDTH)
    if is_key:
        y = unit(y, L2_EPS) * tl.where(head < I, K**-0.5, 1.0)
    else:
        u = head - 2 * I
        decay, beta = _gates(projected_ptr, rate_ptr, dt_bias_ptr, u, C + U * V, U)
        tl.store(scratch_ptr + C + u, decay)
        tl.store(scratch_ptr + C + U + u, beta)
    tl.store(scratch_ptr + channel, y, mask=o_c < size)
    _move_on(projected_ptr, windows_ptr, channel, o_c < size, WIDTH, BX)


@triton.jit
def _recurrence_kernel(
    projected_ptr,
    windows_ptr,
    matrices_ptr,  # [S, U, K, V], fp32 or bf16
    taps_ptr,
    rate_ptr,
    dt_bias_ptr,
    weight_ptr,  # [V]
    lengths_ptr,
    slots_ptr,
    scratch_ptr,
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
    BK: tl.constexpr,
    BV: tl.constexpr,
    PREPARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    u, row = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (length <= 0) | (slot <= 0):  # asks for both, so that neither waits for the other
        return
    C: tl.constexpr = 2 * I * K + U * V
    o_k, o_v = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_k, in_v = o_k < K, o_v < V
    p_state = matrices_ptr + slot * matrices_stride + u * K * V + o_k[:, None] * V + o_v[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    state = tl.load(p_state, mask=in_state, other=0.0, eviction_policy="evict_first")
    tl.debug_barrier()  # only for the compiler, which would begin this long load after what needs the short ones

    projected_ptr += row.to(tl.int64) * projected_stride
    scratch_ptr += row.to(tl.int64) * (U * V + PREPARED * (C + 2 * U))
    i = u // (U // I)
    q_channel, k_channel, v_channel = i * K + o_k, (I + i) * K + o_k, 2 * I * K + u * V + o_v
    if PREPARED:
        q = tl.load(scratch_ptr + U * V + q_channel, mask=in_k, other=0.0)
        k = tl.load(scratch_ptr + U * V + k_channel, mask=in_k, other=0.0)
        v = tl.load(scratch_ptr + U * V + v_channel, mask=in_v, other=0.0)
        decay = tl.load(scratch_ptr + U * V + C + u)
        beta = tl.load(scratch_ptr + U * V + C + U + u)
    else:
        windows_ptr += slot * windows_stride
        of_q = _inputs(projected_ptr, windows_ptr, taps_ptr, q_channel, in_k, C, WIDTH)
        of_k = _inputs(projected_ptr, windows_ptr, taps_ptr, k_channel, in_k, C, WIDTH)
        of_v = _inputs(projected_ptr, windows_ptr, taps_ptr, v_channel, in_v, C, WIDTH)
        decay, beta = _gates(projected_ptr, rate_ptr, dt_bias_ptr, u, C + U * V, U)
        tl.debug_barrier()
        q, k, v = _convolved(of_q, WIDTH), _convolved(of_k, WIDTH), _convolved(of_v, WIDTH)
        q = unit(q, L2_EPS) * (K**-0.5)
        k = unit(k, L2_EPS)

    state = state.to(tl.float32)
    change = beta * (v - decay * tl.sum(state * k[:, None], 0))
    o = decay * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * change
    state = decay * state + k[:, None] * change[None, :]
    if matrices_ptr.dtype.element_ty == tl.bfloat16:
        state = round_to_bf16(state, length - 1, u * K + o_k, o_v)
    tl.store(p_state, state, mask=in_state, eviction_policy="evict_first")

    if PREPARED and BV >= V:
        gated = _normed(tl.where(in_v, o, 0.0), projected_ptr + C + u * V, weight_ptr, o_v, eps, V)
        tl.store(out_ptr + row.to(tl.int64) * out_stride + u * V + o_v, gated, mask=in_v)
    else:
        tl.store(scratch_ptr + u * V + o_v, o, mask=in_v)


@triton.jit
def _finish_kernel(
    projected_ptr,
    windows_ptr,
    weight_ptr,
    lengths_ptr,
    slots_ptr,
    scratch_ptr,
    out_ptr,
    projected_stride,
    windows_stride,
    out_stride,
    eps,
    I: tl.constexpr,
    U: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BC: tl.constexpr,
    BX: tl.constexpr,
    PREPARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    u, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (length <= 0) | (slot <= 0):  # asks for both, so that neither waits for the other
        return
    C: tl.constexpr = 2 * I * K + U * V
    projected_ptr += row.to(tl.int64) * projected_stride
    scratch_ptr += row.to(tl.int64) * (U * V + PREPARED * (C + 2 * U))
    o_c = tl.arange(0, BC)
    if u < U:
        o = tl.load(scratch_ptr + u * V + o_c, mask=o_c < V, other=0.0)
        gated = _normed(o, projected_ptr + C + u * V, weight_ptr, o_c, eps, V)
        tl.store(out_ptr + row.to(tl.int64) * out_stride + u * V + o_c, gated, mask=o_c < V)
    if not PREPARED:
        is_value = u < U
        channel = tl.where(is_value, 2 * I * K + u * V, (u - U) * K) + o_c
        _move_on(projected_ptr, windows_ptr + slot * windows_stride, channel, o_c < tl.where(is_value, V, K), WIDTH, BX)


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
    of the launches, by default the best known for so many rows."""
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
    if matrices_SUKV.dtype not in SHAPES:
        raise TypeError(f"matrices of the gated delta rule are kept in fp32 or bf16, got {matrices_SUKV.dtype}")
    if taps_WC.dtype != torch.float32 or rate_U.dtype != torch.float32 or dt_bias_U.dtype != torch.float32:
        raise TypeError(f"taps, rate and bias in fp32, got {taps_WC.dtype}, {rate_U.dtype}, {dt_bias_U.dtype}")
    if not rows.rows:
        return
    columns, warps, registers, prepared, early = shape or shape_for(rows.rows, matrices_SUKV.dtype)
    early = early and overlaps(projected_TX.device)
    block_k, block_v = triton.next_power_of_2(key_dim), min(columns, triton.next_power_of_2(value_dim))
    scratch = torch.empty(
        rows.rows,
        value_heads * value_dim + prepared * (channels + 2 * value_heads),
        dtype=torch.float32,
        device=projected_TX.device,
    )
    all_heads = 2 * key_heads + value_heads
    sizes = {"I": key_heads, "U": value_heads, "K": key_dim, "V": value_dim, "WIDTH": width}
    blocks = {"BC": triton.next_power_of_2(max(key_dim, value_dim)), "BX": triton.next_power_of_2(width - 1)}
    if prepared:
        _prepare_kernel[(all_heads, rows.rows)](
            projected_TX,
            windows_SCX,
            taps_WC,
            rate_U,
            dt_bias_U,
            rows.lengths_N,
            rows.slots_N,
            scratch,
            projected_TX.stride(0),
            windows_SCX.stride(0),
            L2_EPS=L2_EPS,
            **sizes,
            **blocks,
            EARLY=early,
            num_warps=_WARPS,
            launch_pdl=early,
        )
    _recurrence_kernel[(triton.cdiv(value_dim, block_v), value_heads, rows.rows)](
        projected_TX,
        windows_SCX,
        matrices_SUKV,
        taps_WC,
        rate_U,
        dt_bias_U,
        norm_weight_V,
        rows.lengths_N,
        rows.slots_N,
        scratch,
        out_TX,
        projected_TX.stride(0),
        windows_SCX.stride(0),
        matrices_SUKV.stride(0),
        out_TX.stride(0),
        eps,
        L2_EPS=L2_EPS,
        **sizes,
        BK=block_k,
        BV=block_v,
        PREPARED=prepared,
        EARLY=early,
        num_warps=min(warps, max(1, block_k * block_v // 512)),
        maxnreg=registers,
        launch_pdl=early,
    )
    if prepared and block_v >= value_dim:
        return
    _finish_kernel[(value_heads if prepared else all_heads, rows.rows)](
        projected_TX,
        windows_SCX,
        norm_weight_V,
        rows.lengths_N,
        rows.slots_N,
        scratch,
        out_TX,
        projected_TX.stride(0),
        windows_SCX.stride(0),
        out_TX.stride(0),
        eps,
        **sizes,
        **blocks,
        PREPARED=prepared,
        EARLY=early,
        num_warps=_WARPS,
        launch_pdl=early,
    )


def shape_for(rows: int, dtype: torch.dtype) -> Shape:
    return next(shape for most, shape in SHAPES[dtype].items() if rows <= most)
