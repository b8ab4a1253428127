"""Mixture of experts. On a GPU ``moe_rows`` is all of it; for CPU tensors: routing, the chosen experts only, or every
expert over the whole tile (deterministic).

Legend: T tokens, D model dim, E experts, F expert width, X = top_k.
"""

import torch
import torch.nn.functional as F

from hybserve_kernels.device import require_cpu
from hybserve_kernels.linear import linear, linear_swiglu
from hybserve_kernels.moe.gpu import blocks, groups
from hybserve_kernels.moe.gpu.blocks import Blocks
from hybserve_kernels.moe.gpu.combine import combine
from hybserve_kernels.moe.gpu.groups import Groups
from hybserve_kernels.moe.gpu.pairs import Pairs, SharedExpert, run_pairs
from hybserve_kernels.moe.gpu.route import route_blocks, route_pairs
from hybserve_kernels.moe.gpu.table import choose
from hybserve_kernels.swiglu import swiglu

__all__ = ["SharedExpert", "experts", "experts_whole", "moe_rows", "route"]

#: Tokens up to which the shared expert runs in the launches of the chosen ones, which read it again for each token.
_FEW = 4


def route(scores_TE: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Router scores to the weights [T, X] (in their dtype) and ids [T, X] of the chosen experts, best first."""
    require_cpu("moe.route", scores_TE)
    weights, chosen = torch.topk(F.softmax(scores_TE, dim=-1, dtype=torch.float32), top_k, dim=-1)
    if normalise:
        weights.div_(weights.sum(-1, keepdim=True))
    return weights.to(scores_TE.dtype), chosen


def experts(
    x_TD: torch.Tensor,
    weights_TX: torch.Tensor,
    experts_TX: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of the chosen experts. Each expert that some token chose runs once, over those tokens."""
    require_cpu("moe.experts", x_TD, gate_up_E2FD, down_EDF)
    out = torch.zeros_like(x_TD)
    top_k = experts_TX.shape[1]
    order = experts_TX.flatten().argsort(stable=True)
    tokens = order // top_k
    weights = weights_TX.flatten()[order, None]
    counts = experts_TX.flatten().bincount(minlength=gate_up_E2FD.shape[0]).tolist()
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            own = tokens[begin : begin + count]
            hidden = swiglu(F.linear(x_TD.index_select(0, own), gate_up_E2FD[expert]))
            part = F.linear(hidden, down_EDF[expert]).mul_(weights[begin : begin + count])
            out.index_add_(0, own, part)
            begin += count
    return out


def experts_whole(
    x_TD: torch.Tensor,
    weights_TX: torch.Tensor,
    experts_TX: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
) -> torch.Tensor:
    """The same sum with every expert over all tokens, added in order of the experts' ids: a token's bits depend on
    its own row and on T alone, never on what the other tokens chose."""
    require_cpu("moe.experts_whole", x_TD, gate_up_E2FD, down_EDF)
    count = gate_up_E2FD.shape[0]
    spread_TE = torch.zeros(x_TD.shape[0], count, dtype=weights_TX.dtype).scatter_(1, experts_TX, weights_TX)
    out = torch.zeros_like(x_TD)
    for expert in range(count):
        hidden = swiglu(F.linear(x_TD, gate_up_E2FD[expert]))
        out.addcmul_(F.linear(hidden, down_EDF[expert]), spread_TE[:, expert, None])
    return out


def moe_rows(
    x_TD: torch.Tensor,
    scores_TE: torch.Tensor,
    top_k: int,
    normalise: bool,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    tokens_1: torch.Tensor,
    shared: torch.Tensor | SharedExpert | None = None,
    shared_gate_T1: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    form: Pairs | Groups | Blocks | None = None,
    add: bool = False,
) -> torch.Tensor:
    """Routing, the weighted sum of the chosen experts and, if given, + shared · sigmoid(shared_gate); [T, D].
    ``shared`` is the output [T, D] of the shared expert, or its contiguous weights.
    It is written to ``out`` if given, or with ``add`` added to what stands there, rounded before.

    T is an upper bound that sizes the launches: the first ``tokens_1`` (int32, on the device) rows are real, the rows
    after them are neither read nor written. Rows may be strided; weights are contiguous. Products are summed in fp32
    and rounded where the reference rounds, the weighted parts are added in fp32 in order of the choices. The bits of a
    row depend on that row, and on T through the form alone. ``form`` overrides the choice by shape. Raises ValueError
    for shapes and dtypes that do not belong together."""
    tokens, dim = x_TD.shape
    count, _, width = down_EDF.shape
    _check(x_TD, scores_TE, top_k, gate_up_E2FD, down_EDF)
    assert tokens_1.dtype == torch.int32
    assert (shared is None) == (shared_gate_T1 is None)
    assert x_TD.stride(1) == scores_TE.stride(1) == 1
    assert gate_up_E2FD.is_contiguous()
    assert down_EDF.is_contiguous()
    assert out is not None or not add
    if out is None:
        out = torch.empty(tokens, dim, dtype=x_TD.dtype, device=x_TD.device)
    if form is None:
        form = choose(x_TD.dtype, tokens, count, top_k, dim, width)
    if isinstance(shared, SharedExpert):
        assert shared.gate_up_2FD.is_contiguous()
        assert shared.down_DF.is_contiguous()
        if not isinstance(form, Pairs) or tokens > _FEW or shared.down_DF.shape != (dim, width):
            shared = linear(linear_swiglu(x_TD, shared.gate_up_2FD), shared.down_DF)
    if isinstance(form, Pairs):
        routes = route_pairs(scores_TE, top_k, normalise, tokens_1)
        run_pairs(form, x_TD, routes, gate_up_E2FD, down_EDF, shared, shared_gate_T1, out, tokens_1, add)
    else:
        more = form.more if isinstance(form, Blocks) else 0
        routes, work = route_blocks(scores_TE, top_k, normalise, tokens_1, form.rows, more)
        assert not isinstance(shared, SharedExpert)
        hidden_RF = x_TD.new_empty(tokens * top_k, width)
        parts_TXD = x_TD.new_empty(tokens, top_k, dim)
        if isinstance(form, Groups):
            groups.launch_up(form, x_TD, gate_up_E2FD, routes, work, hidden_RF)
            groups.launch_down(form, hidden_RF, down_EDF, routes, work, parts_TXD)
        else:
            blocks.launch_up(form, x_TD, gate_up_E2FD, routes, work, hidden_RF)
            blocks.launch_down(form, hidden_RF, down_EDF, routes, work, parts_TXD)
        combine(parts_TXD, shared, shared_gate_T1, out, tokens_1, add)
    return out


def _check(
    x_TD: torch.Tensor, scores_TE: torch.Tensor, top_k: int, gate_up_E2FD: torch.Tensor, down_EDF: torch.Tensor
) -> None:
    (tokens, dim), (count, _, width) = x_TD.shape, down_EDF.shape
    if not 1 <= top_k <= count:
        raise ValueError(f"moe_rows: top_k {top_k} of {count} experts")
    if down_EDF.shape[1] != dim or gate_up_E2FD.shape != (count, 2 * width, dim) or scores_TE.shape != (tokens, count):
        shapes = (*map(tuple, (x_TD.shape, scores_TE.shape, gate_up_E2FD.shape, down_EDF.shape)),)
        raise ValueError(f"moe_rows: x, scores, gate_up and down of shapes {shapes} do not belong together")
    if not x_TD.dtype == gate_up_E2FD.dtype == down_EDF.dtype:
        raise ValueError(f"moe_rows: x and weights of dtype {x_TD.dtype}, {gate_up_E2FD.dtype}, {down_EDF.dtype}")
