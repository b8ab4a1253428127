"""Many tokens: the rows of an expert are multiplied together, in blocks. The weights are the left operand, so that few
rows fill the matrix units.

Legend: T tokens, D model dim, E experts, F expert width, X = top_k, R = T · X rows in order of the experts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.attention.gpu.dot import dot
from hybserve_kernels.moe.gpu.route import Routes, Work
from hybserve_kernels.overlap import overlaps_at
from hybserve_kernels.overlap.gpu import begin
from hybserve_kernels.swiglu.gpu import rounded_swiglu


class Tile(NamedTuple):
    """Outputs of a program and inputs at a time (powers of two)."""

    outputs: int
    depth: int
    warps: int
    stages: int


class Groups(NamedTuple):
    """``rows`` of one expert in a program, a power of two."""

    rows: int
    up: Tile
    down: Tile


@triton.jit(do_not_specialize=["blocks"])
def _grouped_kernel(
    x_ptr,  # UP: [T, K], the last dimension contiguous; else [R, K]
    w_ptr,  # UP: [E, 2N, K]; else [E, N, K]
    pairs_ptr,  # int32 [R]
    blocks_ptr,  # int32 [3, blocks]
    weights_ptr,  # [T, X], read unless UP
    out_ptr,  # UP: [R, N]; else [T, X, N]
    blocks,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    X: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    UP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """UP: silu(gate) · up of the tokens of a block; else the product of its rows times their weights, for each pair."""
    EVEN: tl.constexpr = K % BK == 0
    HALVES: tl.constexpr = 2 if UP else 1
    TILES: tl.constexpr = (N + BN - 1) // BN
    zero: tl.constexpr = None if EVEN else 0.0
    begin(EARLY)
    block = tl.program_id(0) // TILES
    rows = tl.load(blocks_ptr + 2 * blocks + block)
    if rows == 0:
        return
    expert = tl.load(blocks_ptr + block).to(tl.int64)
    first = tl.load(blocks_ptr + blocks + block)
    o_n = (tl.program_id(0) % TILES) * BN + tl.arange(0, BN)
    o_m = tl.arange(0, BM)
    r_n = tl.minimum(o_n, N - 1)
    r_m = first + tl.minimum(o_m, rows - 1)
    pair = tl.load(pairs_ptr + r_m).to(tl.int64)
    source = pair // X if UP else r_m.to(tl.int64)
    o_k = tl.arange(0, BK)
    p_x = x_ptr + source[None, :] * x_stride + o_k[:, None]
    p_w = w_ptr + expert * HALVES * N * K + (r_n[:, None] * K + o_k[None, :])
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    acc_up = tl.zeros([BN, BM], dtype=tl.float32)
    for done in tl.range(0, K, BK, num_stages=STAGES):
        inside = o_k < K - done
        w = tl.load(p_w, mask=None if EVEN else inside[None, :], other=zero)
        x = tl.load(p_x, mask=None if EVEN else inside[:, None], other=zero)
        acc = dot(w, x, acc)
        if UP:
            w_up = tl.load(p_w + N * K, mask=None if EVEN else inside[None, :], other=zero)
            acc_up = dot(w_up, x, acc_up)
        p_w += BK
        p_x += BK
    dtype = out_ptr.dtype.element_ty
    if UP:
        result = rounded_swiglu(acc.to(dtype), acc_up.to(dtype), dtype)
        target = r_m.to(tl.int64)
    else:
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        result = (acc.to(dtype).to(tl.float32) * weight[None, :]).to(dtype)
        target = pair
    p_out = out_ptr + target[None, :] * N + o_n[:, None]
    tl.store(p_out, result, mask=(o_n < N)[:, None] & (o_m < rows)[None, :])


def launch_up(
    form: Groups,
    x_TD: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    routes: Routes,
    work: Work,
    hidden_RF: torch.Tensor,
) -> None:
    """``work`` is cut into blocks of ``form.rows``."""
    _launch(form.up, form.rows, x_TD, gate_up_E2FD, routes, work, hidden_RF, True)


def launch_down(
    form: Groups,
    hidden_RF: torch.Tensor,
    down_EDF: torch.Tensor,
    routes: Routes,
    work: Work,
    parts_TXD: torch.Tensor,
) -> None:
    """The parts of the sums, one for each choice of a token."""
    _launch(form.down, form.rows, hidden_RF, down_EDF, routes, work, parts_TXD, False)


def _launch(
    tile: Tile,
    rows: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    routes: Routes,
    work: Work,
    out: torch.Tensor,
    up: bool,
) -> None:
    outputs = out.shape[-1]
    early = overlaps_at(x.device, routes.experts_TX.shape[0])
    _grouped_kernel[(work.blocks * triton.cdiv(outputs, tile.outputs),)](
        x,
        weight,
        work.pairs,
        work.blocks_3B,
        routes.weights_TX,
        out,
        work.blocks,
        x.stride(0),
        N=outputs,
        K=x.shape[1],
        X=routes.experts_TX.shape[1],
        BM=rows,
        BN=tile.outputs,
        BK=tile.depth,
        STAGES=tile.stages,
        UP=up,
        EARLY=early,
        launch_pdl=early,
        num_warps=tile.warps,
    )
