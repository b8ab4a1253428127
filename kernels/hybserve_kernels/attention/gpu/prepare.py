"""Heads of an attention layer made ready: q and k normed and turned, q put together, k and v stored in the pool.

A program takes some or all of the heads of one token: first the queries, then keys, then values, as the projection
has them.

Legend: T packed tokens, H query heads, J kv heads, d head dim, P pages of the pool, G tokens per page.
"""

import torch
import triton
import triton.language as tl

from hybserve_kernels.attention.gpu.lanes import lanes_inside

_HALF_PI = tl.constexpr(1.5707963267948966)
#: Elements of a program where tokens are few, and where there are so many that the angles of a token, which every
#: program of it computes, cost more than the room of larger programs.
_ELEMENTS, _MORE_ELEMENTS, _MANY_TOKENS = 2048, 8192, 512


def prepare_rows(
    projected_TX: torch.Tensor,
    q_scale_d: torch.Tensor | None,
    k_scale_d: torch.Tensor | None,
    eps: float,
    frequencies: torch.Tensor,
    positions_T: torch.Tensor,
    locations_T: torch.Tensor,
    pool_P2JGd: torch.Tensor,
    heads: tuple[int, int, int],
    gated: bool,
) -> torch.Tensor:
    """q [T, H, d], contiguous, of the dtype of ``projected_TX``; keys and values go to the pool, of the same dtype.

    ``projected_TX``: [of every query head: q d, then gate d if ``gated`` | k J·d | v J·d], rows with any stride.
    ``heads`` (H, J, d). Scales fp32 [d], the factor itself (1 + w); both None = no norms. ``frequencies`` fp32
    [rotary_dim] as ``hybserve_kernels.rotary.inverse_frequencies`` gives them. ``locations_T``: page · G + offset,
    -1 = k and v of the token are not stored; read where there are kv heads. H or J may be 0. Norm and turn in fp32,
    rounded once."""
    q_heads, kv_heads, dim = heads
    tokens, rotary_dim = projected_TX.shape[0], frequencies.shape[0]
    assert projected_TX.shape[1] == (q_heads * (2 if gated else 1) + 2 * kv_heads) * dim
    assert projected_TX.stride(1) == 1
    assert pool_P2JGd[0].is_contiguous()
    assert pool_P2JGd.shape[2:5:2] == (kv_heads or pool_P2JGd.shape[2], dim)
    assert projected_TX.dtype == pool_P2JGd.dtype
    assert (q_scale_d is None) == (k_scale_d is None)
    assert rotary_dim <= dim
    assert frequencies.dtype == torch.float32
    q_THd = torch.empty((tokens, q_heads, dim), dtype=projected_TX.dtype, device=projected_TX.device)
    if not tokens:
        return q_THd
    all_heads = q_heads + 2 * kv_heads
    elements = _MORE_ELEMENTS if tokens >= _MANY_TOKENS else _ELEMENTS
    lanes = triton.next_power_of_2(dim)
    together = min(max(1, elements // lanes), triton.next_power_of_2(all_heads))
    normed = q_scale_d is not None
    _prepare[(tokens, triton.cdiv(all_heads, together))](
        projected_TX,
        q_scale_d if normed else frequencies,
        k_scale_d if normed else frequencies,
        frequencies,
        positions_T,
        locations_T,
        q_THd,
        pool_P2JGd,
        projected_TX.stride(0),
        pool_P2JGd.stride(0),
        eps,
        HEADS=q_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        LANES=lanes,
        ROTARY_DIM=rotary_dim,
        PAGE=pool_P2JGd.shape[3],
        GATED=gated,
        NORMED=normed,
        TOGETHER=together,
        num_warps=4,
    )
    return q_THd


@triton.jit
def _sine_cosine(angle):
    """Of fp32 angles of any size: reduced to a quarter turn in fp64, then series that err by less than fp32 rounds."""
    wide = angle.to(tl.float64)
    quarters = tl.floor(wide * (1.0 / _HALF_PI) + 0.5)
    rest = (wide - quarters * _HALF_PI).to(tl.float32)
    quadrant = quarters.to(tl.int64) & 3
    square = rest * rest
    sine = rest + rest * square * (
        -1.6666666667e-1 + square * (8.3333333333e-3 + square * (-1.9841269841e-4 + square * 2.7557319224e-6))
    )
    cosine = 1.0 + square * (
        -0.5
        + square
        * (4.1666666667e-2 + square * (-1.3888888889e-3 + square * (2.4801587302e-5 + square * -2.7557319224e-7)))
    )
    odd = (quadrant & 1) == 1
    sine_out = tl.where(odd, cosine, sine)
    cosine_out = tl.where(odd, sine, cosine)
    return tl.where(quadrant >= 2, -sine_out, sine_out), tl.where(
        (quadrant == 1) | (quadrant == 2), -cosine_out, cosine_out
    )


@triton.jit(do_not_specialize_on_alignment=["positions", "locations"])
def _prepare(
    projected,
    q_scale,
    k_scale,
    frequencies,
    positions,
    locations,
    q,
    pool,
    projected_stride,
    page_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    dims = tl.arange(0, LANES)
    inside = lanes_inside(DIM, LANES)[None, :]
    is_query = heads < HEADS
    is_value = heads >= HEADS + KV_HEADS
    real = (heads < HEADS + 2 * KV_HEADS)[:, None]
    SPACING: tl.constexpr = 2 if GATED else 1
    columns = tl.where(is_query, heads * SPACING, heads + HEADS * (SPACING - 1)) * DIM
    source = projected + token * projected_stride + columns[:, None]
    plain = tl.load(source + dims[None, :], mask=real & inside, other=0.0)
    wide = plain.to(tl.float32)

    # The element that turns with each: the other half of the rotary dims; elements beyond them turn by no angle.
    HALF: tl.constexpr = ROTARY_DIM // 2
    turning = dims < ROTARY_DIM
    partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
    other = tl.load(source + partner[None, :], mask=real & turning[None, :], other=0.0).to(tl.float32)
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + dims, mask=turning, other=0.0)
    sine, cosine = _sine_cosine(angle)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        # Loaded for each head again, from the cache, in the layout of the heads: nothing to exchange.
        scales = tl.where(is_query, q_scale, k_scale)[:, None]
        wide *= inverse * tl.load(scales + dims[None, :], mask=inside, other=0.0)
        other *= inverse * tl.load(scales + partner[None, :], mask=turning[None, :], other=0.0)
    turned = (wide * cosine[None, :] + other * sine[None, :]).to(plain.dtype)

    tl.store(q + (token * HEADS + heads)[:, None] * DIM + dims[None, :], turned, mask=is_query[:, None] & inside)
    if KV_HEADS:
        location = tl.load(locations + token).to(tl.int64)
        if location >= 0:
            part = heads - HEADS  # keys of all kv heads, then values: as a page has them
            place = location // PAGE * page_stride + location % PAGE * DIM
            target = pool + place + part[:, None] * (PAGE * DIM) + dims[None, :]
            tl.store(target, tl.where(is_value[:, None], plain, turned), mask=real & (part >= 0)[:, None] & inside)
