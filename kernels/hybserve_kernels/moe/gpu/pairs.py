"""Few tokens: experts hardly repeat, so each pair of a token and a choice is a product of one row by itself, and the
sum over the choices needs no launch of its own. A shared expert of the same width may run as one more choice.

Legend: T tokens, D model dim, E experts, F expert width, X = top_k.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hybserve_kernels.moe.gpu.combine import store_total, with_shared
from hybserve_kernels.moe.gpu.route import Routes
from hybserve_kernels.overlap import overlaps_at
from hybserve_kernels.overlap.gpu import begin
from hybserve_kernels.swiglu.gpu import rounded_swiglu


class Pairs(NamedTuple):
    """Outputs of a program, and inputs at a time (powers of two)."""

    up_outputs: int
    up_depth: int
    up_warps: int
    down_outputs: int
    down_depth: int
    down_warps: int


class SharedExpert(NamedTuple):
    """The weights of the expert that every token runs; F may be another than that of the chosen ones."""

    gate_up_2FD: torch.Tensor
    down_DF: torch.Tensor


@triton.jit
def _up_kernel(
    x_ptr,  # [T, D], the last dimension contiguous
    experts_ptr,  # int32 [T, X]
    w_ptr,  # [E, 2F, D]
    shared_w_ptr,  # [2F, D], read if MORE
    hidden_ptr,  # [T, X + MORE, F]
    tokens_ptr,  # int32 [1]
    x_stride,
    D: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    MORE: tl.constexpr,  # 1: the shared expert is the last choice of every token, else 0
    BN: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    pair = tl.program_id(1)
    token, choice = pair // (X + MORE), pair % (X + MORE)
    if token >= tl.load(tokens_ptr):
        return
    EVEN: tl.constexpr = D % BK == 0
    zero: tl.constexpr = None if EVEN else 0.0
    dtype = x_ptr.dtype.element_ty
    expert = tl.load(experts_ptr + token * X + choice, mask=choice < X, other=0).to(tl.int64)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    r_n = tl.minimum(o_n, F - 1)
    p_x = x_ptr + token.to(tl.int64) * x_stride
    p_w = w_ptr + expert * 2 * F * D
    if MORE:
        p_w = tl.where(choice < X, p_w, shared_w_ptr)
    acc = tl.zeros([BN, BK], dtype=tl.float32)
    acc_up = tl.zeros([BN, BK], dtype=tl.float32)
    for first in tl.static_range(0, D, BK):
        o_k = first + tl.arange(0, BK)
        inside = None if EVEN else (o_k < D)[None, :]
        w = tl.load(p_w + r_n[:, None] * D + o_k[None, :], mask=inside, other=zero)
        w_up = tl.load(p_w + F * D + r_n[:, None] * D + o_k[None, :], mask=inside, other=zero)
        x = tl.load(p_x + r_n[:, None] * 0 + o_k[None, :], mask=inside, other=zero).to(tl.float32)
        acc += w.to(tl.float32) * x
        acc_up += w_up.to(tl.float32) * x
    hidden = rounded_swiglu(tl.sum(acc, axis=1).to(dtype), tl.sum(acc_up, axis=1).to(dtype), dtype)
    tl.store(hidden_ptr + pair.to(tl.int64) * F + o_n, hidden, mask=o_n < F)


@triton.jit
def _down_kernel(
    hidden_ptr,  # [T, X + MORE, F]
    experts_ptr,  # int32 [T, X]
    weights_ptr,  # [T, X]
    w_ptr,  # [E, D, F]
    shared_w_ptr,  # [D, F], read if MORE
    shared_ptr,  # [T, D], read if SHARED
    gate_ptr,  # [T, 1], read if SHARED or MORE
    out_ptr,  # [T, D]; read and added to if ADD
    tokens_ptr,  # int32 [1]
    shared_stride,
    gate_stride,
    out_stride,
    D: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    MORE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SHARED: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    token = tl.program_id(1)
    if token >= tl.load(tokens_ptr):
        return
    token = token.to(tl.int64)
    EVEN: tl.constexpr = F % BK == 0
    zero: tl.constexpr = None if EVEN else 0.0
    dtype = out_ptr.dtype.element_ty
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    r_n = tl.minimum(o_n, D - 1)
    total = tl.zeros([BN], dtype=tl.float32)
    for choice in tl.static_range(X + MORE):
        p_hidden = hidden_ptr + (token * (X + MORE) + choice) * F
        if choice < X:
            p_w = w_ptr + tl.load(experts_ptr + token * X + choice).to(tl.int64) * D * F
            weight = tl.load(weights_ptr + token * X + choice).to(tl.float32)
        else:
            p_w = shared_w_ptr
        acc = tl.zeros([BN, BK], dtype=tl.float32)
        for first in tl.static_range(0, F, BK):
            o_k = first + tl.arange(0, BK)
            inside = None if EVEN else (o_k < F)[None, :]
            w = tl.load(p_w + r_n[:, None] * F + o_k[None, :], mask=inside, other=zero)
            x = tl.load(p_hidden + r_n[:, None] * 0 + o_k[None, :], mask=inside, other=zero)
            acc += w.to(tl.float32) * x.to(tl.float32)
        part = tl.sum(acc, axis=1).to(dtype)
        if choice < X:
            total += (part.to(tl.float32) * weight).to(dtype).to(tl.float32)
    mask = o_n < D
    if MORE:
        total = with_shared(total, part, tl.load(gate_ptr + token * gate_stride), dtype)
    if SHARED:
        shared = tl.load(shared_ptr + token * shared_stride + o_n, mask=mask)
        total = with_shared(total, shared, tl.load(gate_ptr + token * gate_stride), dtype)
    store_total(out_ptr + token * out_stride + o_n, total, mask, ADD)


def run_pairs(
    form: Pairs,
    x_TD: torch.Tensor,
    routes: Routes,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    shared: torch.Tensor | SharedExpert | None,
    shared_gate_T1: torch.Tensor | None,
    out_TD: torch.Tensor,
    tokens_1: torch.Tensor,
    add: bool,
) -> None:
    """Writes, or with ``add`` adds, the result to ``out_TD``; two launches. ``shared``: the output [T, D] of
    the shared expert, or its weights if they are as wide as the experts."""
    tokens, top_k = routes.experts_TX.shape
    _, dim, width = down_EDF.shape
    early = overlaps_at(x_TD.device, tokens)
    own_gate_up, own_down, more = gate_up_E2FD, down_EDF, 0
    if isinstance(shared, SharedExpert):
        (own_gate_up, own_down), more = shared, 1
        shared = None
    hidden = x_TD.new_empty(tokens, top_k + more, width)
    _up_kernel[(triton.cdiv(width, form.up_outputs), tokens * (top_k + more))](
        x_TD,
        routes.experts_TX,
        gate_up_E2FD,
        own_gate_up,
        hidden,
        tokens_1,
        x_TD.stride(0),
        D=dim,
        F=width,
        X=top_k,
        MORE=more,
        BN=form.up_outputs,
        BK=form.up_depth,
        EARLY=early,
        launch_pdl=early,
        num_warps=form.up_warps,
    )
    given = hidden if shared is None else shared
    gate = hidden if shared_gate_T1 is None else shared_gate_T1
    _down_kernel[(triton.cdiv(dim, form.down_outputs), tokens)](
        hidden,
        routes.experts_TX,
        routes.weights_TX,
        down_EDF,
        own_down,
        given,
        gate,
        out_TD,
        tokens_1,
        given.stride(0),
        gate.stride(0),
        out_TD.stride(0),
        D=dim,
        F=width,
        X=top_k,
        MORE=more,
        BN=form.down_outputs,
        BK=form.down_depth,
        SHARED=shared is not None,
        ADD=add,
        EARLY=early,
        launch_pdl=early,
        num_warps=form.down_warps,
    )
