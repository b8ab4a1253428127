"""Sparse mixture of experts with softmax routing (Shazeer et al., arXiv 1701.06538; Qwen3-MoE's form): specification.

Routing: softmax over all experts in fp32, the ``top_k`` largest, renormalised to sum 1 if ``normalise``. The output is
the sum of the chosen experts' SwiGLU, each weighted by its probability.

Legend: T tokens, D model dim, E experts, F expert width, X = top_k.
"""

import torch

from hybserve_kernels.swiglu.reference import swiglu


def route(scores_TE: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights [T, X] in the dtype of the scores, and the experts [T, X]."""
    weights, experts = torch.topk(torch.softmax(scores_TE.float(), dim=-1), top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(scores_TE.dtype), experts


def experts(
    x_TD: torch.Tensor,
    weights_TX: torch.Tensor,
    experts_TX: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
) -> torch.Tensor:
    out = torch.zeros_like(x_TD)
    for t in range(x_TD.shape[0]):
        for weight, expert in zip(weights_TX[t], experts_TX[t].tolist(), strict=True):
            hidden = swiglu(x_TD[t] @ gate_up_E2FD[expert].T)
            out[t] += (hidden @ down_EDF[expert].T) * weight
    return out
