"""The sum over a token's choices, and the shared expert behind its gate.

Legend: T tokens, D model dim, X = top_k.
"""

import torch
import triton
import triton.language as tl

from hybserve_kernels.overlap import overlaps_at
from hybserve_kernels.overlap.gpu import begin

_BLOCK, _WARPS = 1024, 4


@triton.jit
def with_shared(total, shared, gate, dtype: tl.constexpr):
    """``total`` in fp32 + shared · sigmoid(gate) in ``dtype``: the total, the sigmoid and the product are rounded as
    separate operations would."""
    opened = tl.sigmoid(gate.to(tl.float32)).to(dtype).to(tl.float32)
    added = (shared.to(tl.float32) * opened).to(dtype)
    return (total.to(dtype).to(tl.float32) + added.to(tl.float32)).to(dtype)


@triton.jit
def store_total(p_out, total, mask, ADD: tl.constexpr):
    """Stores ``total`` in the dtype of the output, or with ADD adds it, rounded before, to what stands there."""
    dtype = p_out.dtype.element_ty
    total = total.to(dtype)
    if ADD:
        total = (tl.load(p_out, mask=mask, other=0.0).to(tl.float32) + total.to(tl.float32)).to(dtype)
    tl.store(p_out, total, mask=mask)


@triton.jit
def _combine_kernel(
    parts_ptr,  # [T, X, D]
    shared_ptr,  # [T, D], read if SHARED
    gate_ptr,  # [T, 1], read if SHARED
    out_ptr,  # [T, D]; read and added to if ADD
    tokens_ptr,  # int32 [1]
    D,
    shared_stride,
    gate_stride,
    out_stride,
    X: tl.constexpr,
    BD: tl.constexpr,
    SHARED: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    token = tl.program_id(0)
    if token >= tl.load(tokens_ptr):
        return
    token = token.to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = o_d < D
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros([BD], dtype=tl.float32)
    for choice in tl.static_range(X):
        total += tl.load(parts_ptr + (token * X + choice) * D + o_d, mask=mask).to(tl.float32)
    if SHARED:
        shared = tl.load(shared_ptr + token * shared_stride + o_d, mask=mask)
        total = with_shared(total, shared, tl.load(gate_ptr + token * gate_stride), dtype)
    store_total(out_ptr + token * out_stride + o_d, total, mask, ADD)


def combine(
    parts_TXD: torch.Tensor,
    shared_TD: torch.Tensor | None,
    shared_gate_T1: torch.Tensor | None,
    out_TD: torch.Tensor,
    tokens_1: torch.Tensor,
    add: bool,
) -> None:
    """Writes, or with ``add`` adds, the sums to ``out_TD``; they are made in order of the choices."""
    tokens, top_k, dim = parts_TXD.shape
    shared = parts_TXD if shared_TD is None else shared_TD
    gate = parts_TXD if shared_gate_T1 is None else shared_gate_T1
    early = overlaps_at(parts_TXD.device, tokens)
    _combine_kernel[(tokens, triton.cdiv(dim, _BLOCK))](
        parts_TXD,
        shared,
        gate,
        out_TD,
        tokens_1,
        dim,
        shared.stride(0),
        gate.stride(0),
        out_TD.stride(0),
        X=top_k,
        BD=_BLOCK,
        SHARED=shared_TD is not None,
        ADD=add,
        EARLY=early,
        launch_pdl=early,
        num_warps=_WARPS,
    )
