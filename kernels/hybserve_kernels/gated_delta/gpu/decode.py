"""One token of each of many rows through the middle of a Gated DeltaNet layer, in one launch: convolution, unit
queries and keys, gates, the recurrence in the form of ``gated_delta.step``, gated norm.

A program owns a key head of a row: its channels of the window (those of the value heads that share it, too) and the
matrices of these value heads, which it takes one after the other. So nothing is read after somebody else wrote it.

Legend: N rows, S slots, I key heads, U = I·r value heads, K key dim, V value dim, W conv width, X = W - 1, C channels
under the convolution = 2·I·K + U·V. In kernels: BK, BV, BX
these sizes rounded up to powers of two.
"""

import torch
import triton
import triton.language as tl

from hybserve_kernels.gated_delta.gpu.rounding import round_to_bf16
from hybserve_kernels.gated_delta.reference import L2_EPS
from hybserve_kernels.rows import DecodeRows


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
def _convolved(
    x_ptr, window_ptr, taps_ptr, channel, mask, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BX: tl.constexpr
):
    """Of some channels the activated output in fp32 and the window after this token [channels, BX]."""
    X: tl.constexpr = WIDTH - 1
    o_x = tl.arange(0, BX)
    p_window = window_ptr + channel[:, None] * X + o_x[None, :]
    known = mask[:, None] & (o_x < X)[None, :]
    x = tl.load(x_ptr + channel, mask=mask, other=0.0)
    past = tl.load(p_window, mask=known, other=0.0).to(tl.float32)
    after = tl.load(p_window + 1, mask=known & (o_x < X - 1)[None, :], other=0.0)
    taps = tl.load(taps_ptr + o_x[None, :] * CHANNELS + channel[:, None], mask=known, other=0.0)
    tap = tl.load(taps_ptr + X * CHANNELS + channel, mask=mask, other=0.0)
    summed = (tl.sum(past * taps, 1) + x.to(tl.float32) * tap).to(x.dtype).to(tl.float32)
    after = tl.where((o_x == X - 1)[None, :], x.to(after.dtype)[:, None], after)
    return silu(summed).to(x.dtype).to(tl.float32), after


@triton.jit
def _move_on(window_ptr, after, channel, mask, WIDTH: tl.constexpr, BX: tl.constexpr):
    o_x = tl.arange(0, BX)
    known = mask[:, None] & (o_x < WIDTH - 1)[None, :]
    tl.store(window_ptr + channel[:, None] * (WIDTH - 1) + o_x[None, :], after, mask=known)


@triton.jit
def _decode_kernel(
    projected_ptr,  # [T, .]: q I·K | k I·K | v U·V | z U·V | b U | a U
    windows_ptr,  # [S, C, X]
    matrices_ptr,  # [S, U, K, V], fp32 or bf16
    taps_ptr,  # fp32 [W, C]
    rate_ptr,  # fp32 [U]
    dt_bias_ptr,  # fp32 [U]
    weight_ptr,  # [V]
    lengths_ptr,
    slots_ptr,
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
    BX: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    if length <= 0:
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    projected_ptr += row.to(tl.int64) * projected_stride
    windows_ptr += slot * windows_stride
    matrices_ptr += slot * matrices_stride
    out_ptr += row.to(tl.int64) * out_stride

    GROUP: tl.constexpr = U // I
    C: tl.constexpr = 2 * I * K + U * V
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = o_k < K, o_v < V
    q_channel, k_channel = head * K + o_k, (I + head) * K + o_k
    q, q_after = _convolved(projected_ptr, windows_ptr, taps_ptr, q_channel, in_k, C, WIDTH, BX)
    k, k_after = _convolved(projected_ptr, windows_ptr, taps_ptr, k_channel, in_k, C, WIDTH, BX)
    tl.debug_barrier()  # a thread writes what another one has read
    _move_on(windows_ptr, q_after, q_channel, in_k, WIDTH, BX)
    _move_on(windows_ptr, k_after, k_channel, in_k, WIDTH, BX)
    q = unit(q, L2_EPS) * (K**-0.5)
    k = unit(k, L2_EPS)
    qk = tl.sum(q * k, 0)
    weight = tl.load(weight_ptr + o_v, mask=in_v, other=0.0)

    for one in tl.range(GROUP):
        u = head * GROUP + one
        p_state = matrices_ptr + u * K * V + o_k[:, None] * V + o_v[None, :]
        in_state = in_k[:, None] & in_v[None, :]
        state = tl.load(p_state, mask=in_state, other=0.0, eviction_policy="evict_first").to(tl.float32)
        channel = 2 * I * K + u * V + o_v
        v, v_after = _convolved(projected_ptr, windows_ptr, taps_ptr, channel, in_v, C, WIDTH, BX)
        z = tl.load(projected_ptr + U * V + channel, mask=in_v, other=0.0)
        b = tl.load(projected_ptr + C + U * V + u)
        a = tl.load(projected_ptr + C + U * V + U + u).to(tl.float32)
        beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)
        decay = tl.exp(tl.load(rate_ptr + u) * softplus(a + tl.load(dt_bias_ptr + u)))
        tl.debug_barrier()
        _move_on(windows_ptr, v_after, channel, in_v, WIDTH, BX)

        change = beta * (v - decay * tl.sum(state * k[:, None], 0))
        o = decay * tl.sum(state * q[:, None], 0) + qk * change
        state = decay * state + k[:, None] * change[None, :]
        if matrices_ptr.dtype.element_ty == tl.bfloat16:
            state = round_to_bf16(state, length - 1, u * K + o_k, o_v)
        tl.store(p_state, state, mask=in_state, eviction_policy="evict_first")

        normed = (o * tl.rsqrt(tl.sum(tl.where(in_v, o * o, 0.0), 0) / V + eps)).to(z.dtype).to(tl.float32)
        gated = (normed * weight.to(tl.float32)).to(z.dtype).to(tl.float32) * silu(z.to(tl.float32))
        tl.store(out_ptr + u * V + o_v, gated, mask=in_v)


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
) -> None:
    """Row n is token n: window and matrices of its slot move on by one token in place, and ``out_TX[n]`` becomes the
    gated normed output [U·V]. Rows of length 0 touch nothing.

    ``heads`` (I, U, K, V). ``projected_TX`` in the model dtype: q, k, v, z, b, a side by side; ``windows_SCX`` any
    float dtype; ``matrices_SUKV`` fp32 or bf16 (rounded up or down by chance, see ``rounding``); ``taps_WC``,
    ``rate_U`` = -exp(A_log) and ``dt_bias_U`` fp32; ``norm_weight_V`` and ``out_TX`` in the model dtype."""
    launch(
        projected_TX, windows_SCX, matrices_SUKV, taps_WC, rate_U, dt_bias_U, norm_weight_V, eps, heads, rows, out_TX
    )


def launch(
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
    shape: tuple[int, int | None] | None = None,
) -> None:
    """``decode_rows`` with given warps per program and most registers per thread (default: by the size of a matrix)."""
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
    block_k, block_v = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    warps, registers = shape or _shape(block_k * block_v, matrices_SUKV.dtype)
    _decode_kernel[(key_heads, rows.rows)](
        projected_TX,
        windows_SCX,
        matrices_SUKV,
        taps_WC,
        rate_U,
        dt_bias_U,
        norm_weight_V,
        rows.lengths_N,
        rows.slots_N,
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
        BK=block_k,
        BV=block_v,
        BX=triton.next_power_of_2(width - 1),
        num_warps=warps,
        maxnreg=registers,
    )


def _shape(elements: int, dtype: torch.dtype) -> tuple[int, int | None]:
    """Warps of a program, and the registers of a thread that let two programs of 128 x 128 share a multiprocessor."""
    if elements < 128 * 128:
        return max(1, elements // 2048), None
    return 8, 128 if dtype == torch.float32 else None
