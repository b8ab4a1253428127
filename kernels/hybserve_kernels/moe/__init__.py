"""Mixture of experts: routing, the chosen experts only, or every expert over the whole tile (deterministic).

Legend: T tokens, D model dim, E experts, F expert width, X = top_k.
"""

import torch
import torch.nn.functional as F

from hybserve_kernels.device import require_cpu
from hybserve_kernels.swiglu import swiglu

__all__ = ["experts", "experts_whole", "route"]


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
