"""Many tokens: the rows of an expert are multiplied together, in blocks, the rows as the left operand. Weights, and the
hidden rows of a block, which lie side by side, come as boxes; the tokens of a block are gathered.

An expert hardly ever has a whole number of blocks of rows. A few rows beyond its last block are multiplied with it, as
the right operand of a second product with the same weights; a last block of few rows is multiplied as a small one.

Legend: T tokens, D model dim, E experts, F expert width, X = top_k, R = T · X rows in order of the experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hybserve_kernels.attention.gpu.dot import dot
from hybserve_kernels.moe.gpu.groups import Tile
from hybserve_kernels.moe.gpu.route import Routes, Work
from hybserve_kernels.overlap import overlaps_at
from hybserve_kernels.overlap.gpu import begin
from hybserve_kernels.swiglu.gpu import rounded_swiglu


class Blocks(NamedTuple):
    """``rows`` of one expert in a program, the last of an expert ``more`` besides (0 = none), or ``last`` of them where
    that is enough. Powers of two, ``more`` < ``rows``, ``last`` <= ``rows``."""

    rows: int
    more: int
    last: int
    up: Tile
    down: Tile


@triton.jit
def _store(
    acc,
    acc_up,
    pair,
    weights_ptr,
    out_ptr,
    o_r,
    first,
    rows,
    o_n,
    N: tl.constexpr,
    UP: tl.constexpr,
):
    """Stores the outputs of the rows ``o_r`` of a block."""
    dtype = out_ptr.dtype.element_ty
    if UP:
        result = rounded_swiglu(acc.to(dtype), acc_up.to(dtype), dtype)
        target = (first + o_r).to(tl.int64)
    else:
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        result = (acc.to(dtype).to(tl.float32) * weight[:, None]).to(dtype)
        target = pair
    p_out = out_ptr + target[:, None] * N + o_n[None, :]
    tl.store(p_out, result, mask=(o_n < N)[None, :] & (o_r < rows)[:, None])


@triton.jit
def _block(
    x_ptr,
    x_box,
    more_box,
    w_box,
    part_box,
    pairs_ptr,
    weights_ptr,
    out_ptr,
    expert,
    first,
    rows,
    tile,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    X: tl.constexpr,
    BM: tl.constexpr,
    MORE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    UP: tl.constexpr,
):
    """BM + MORE rows of a block."""
    EVEN: tl.constexpr = K % BK == 0
    HALVES: tl.constexpr = 2 if UP else 1
    MOST: tl.constexpr = MORE if MORE else 16
    o_n = tile * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    o_r = tl.arange(0, BM)
    pair = tl.load(pairs_ptr + first + tl.minimum(o_r, rows - 1)).to(tl.int64)
    p_x = x_ptr + (pair // X)[:, None] * x_stride + o_k[None, :]
    acc = tl.zeros([BM, BN if MORE else HALVES * BN], dtype=tl.float32)
    acc_up = tl.zeros([BM, BN], dtype=tl.float32)
    o_more = BM + tl.arange(0, MOST)
    more_pair = tl.load(pairs_ptr + first + tl.minimum(o_more, rows - 1)).to(tl.int64)
    p_more = x_ptr + (more_pair // X)[:, None] * x_stride + o_k[None, :]
    more_acc = tl.zeros([BN, MOST], dtype=tl.float32)
    more_up = tl.zeros([BN, MOST], dtype=tl.float32)
    for done in tl.range(0, K, BK, num_stages=STAGES):
        mask = None if EVEN else (o_k < K - done)[None, :]
        other: tl.constexpr = None if EVEN else 0.0
        x = tl.load(p_x, mask=mask, other=other) if UP else x_box.load([first, done])
        if MORE:
            more = tl.load(p_more, mask=mask, other=other) if UP else more_box.load([first + BM, done])
            w = part_box.load([expert * HALVES * N + tile * BN, done])
            acc = dot(x, w.T, acc)
            more_acc = dot(w, more.T, more_acc)
            if UP:
                w_up = part_box.load([(expert * HALVES + 1) * N + tile * BN, done])
                acc_up = dot(x, w_up.T, acc_up)
                more_up = dot(w_up, more.T, more_up)
        else:
            w = w_box.load([expert * HALVES, tile * BN, done]).reshape(HALVES * BN, BK)
            acc = dot(x, w.T, acc)
        p_x += BK
        p_more += BK
    if MORE:
        _store(acc, acc_up, pair, weights_ptr, out_ptr, o_r, first, rows, o_n, N, UP)
        _store(more_acc.T, more_up.T, more_pair, weights_ptr, out_ptr, o_more, first, rows, o_n, N, UP)
    elif UP:
        gate, up = acc.reshape(BM, 2, BN).permute(0, 2, 1).split()
        _store(gate, up, pair, weights_ptr, out_ptr, o_r, first, rows, o_n, N, UP)
    else:
        _store(acc, acc, pair, weights_ptr, out_ptr, o_r, first, rows, o_n, N, UP)


@triton.jit(do_not_specialize=["blocks"])
def _blocks_kernel(
    x_ptr,  # UP: [T, K], the last dimension contiguous
    x_box,  # unless UP: boxes [BM, BK] of [R, K]
    more_box,  # unless UP, read if MORE: boxes [MORE, BK] of it
    last_box,  # unless UP, read if LAST < BM: boxes [LAST, BK] of it
    w_box,  # UP: boxes [2, BN, BK] of [2E, N, K]; else [1, BN, BK] of [E, N, K]
    part_box,  # read if MORE: boxes [BN, BK] of the same as a matrix
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
    MORE: tl.constexpr,
    LAST: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    UP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """UP: silu(gate) · up of the tokens of a block; else the product of its rows times their weights, for each pair."""
    TILES: tl.constexpr = (N + BN - 1) // BN
    begin(EARLY)
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    rows = tl.load(blocks_ptr + 2 * blocks + block)
    if rows == 0:
        return
    expert = tl.load(blocks_ptr + block)
    first = tl.load(blocks_ptr + blocks + block)
    if LAST < BM:  # noqa: SIM102 (a constant)
        if rows <= LAST:
            _block(
                x_ptr, last_box, more_box, w_box, part_box, pairs_ptr, weights_ptr, out_ptr, expert, first, rows, tile,
                x_stride, N, K, X, LAST, 0, BN, BK, STAGES, UP,
            )  # fmt: skip
            return
    if MORE:  # noqa: SIM102
        if rows > BM:
            _block(
                x_ptr, x_box, more_box, w_box, part_box, pairs_ptr, weights_ptr, out_ptr, expert, first, rows, tile,
                x_stride, N, K, X, BM, MORE, BN, BK, STAGES, UP,
            )  # fmt: skip
            return
    _block(
        x_ptr, x_box, more_box, w_box, part_box, pairs_ptr, weights_ptr, out_ptr, expert, first, rows, tile,
        x_stride, N, K, X, BM, 0, BN, BK, STAGES, UP,
    )  # fmt: skip


def launch_up(
    form: Blocks,
    x_TD: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    routes: Routes,
    work: Work,
    hidden_RF: torch.Tensor,
) -> None:
    """``work`` is cut into blocks of ``form.rows`` and ``form.more``; D and F are multiples of 16 bytes."""
    count, outputs, dim = gate_up_E2FD.shape
    halves = gate_up_E2FD.view(2 * count, outputs // 2, dim)
    weights = _weights(halves, 2, form.up)
    _launch(form, form.up, x_TD, [None] * 3, weights, routes, work, hidden_RF, True)


def launch_down(
    form: Blocks,
    hidden_RF: torch.Tensor,
    down_EDF: torch.Tensor,
    routes: Routes,
    work: Work,
    parts_TXD: torch.Tensor,
) -> None:
    """The parts of the sums, one for each choice of a token."""
    tile = form.down
    sizes = (form.rows, form.more or form.rows, form.last)
    boxes = [TensorDescriptor.from_tensor(hidden_RF, [rows, tile.depth]) for rows in sizes]
    weights = _weights(down_EDF, 1, tile)
    _launch(form, tile, hidden_RF, boxes, weights, routes, work, parts_TXD, False)


def _weights(weights: torch.Tensor, halves: int, tile: Tile) -> list[TensorDescriptor]:
    boxes = (weights, [halves, tile.outputs, tile.depth]), (weights.flatten(0, 1), [tile.outputs, tile.depth])
    return [TensorDescriptor.from_tensor(*box) for box in boxes]


def _launch(
    form: Blocks,
    tile: Tile,
    x: torch.Tensor,
    boxes: Sequence[TensorDescriptor | None],
    weights: Sequence[TensorDescriptor],
    routes: Routes,
    work: Work,
    out: torch.Tensor,
    up: bool,
) -> None:
    outputs = out.shape[-1]
    tokens, top_k = routes.experts_TX.shape
    early = overlaps_at(x.device, tokens)
    _blocks_kernel[(work.blocks * triton.cdiv(outputs, tile.outputs),)](
        x,
        *boxes,
        *weights,
        work.pairs,
        work.blocks_3B,
        routes.weights_TX,
        out,
        work.blocks,
        x.stride(0),
        N=outputs,
        K=x.shape[1],
        X=top_k,
        BM=form.rows,
        MORE=form.more,
        LAST=form.last,
        BN=tile.outputs,
        BK=tile.depth,
        STAGES=tile.stages,
        UP=up,
        EARLY=early,
        launch_pdl=early,
        num_warps=tile.warps,
    )
