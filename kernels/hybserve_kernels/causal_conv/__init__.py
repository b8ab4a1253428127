"""Causal depthwise convolution with silu: whole rows (``causal_conv``) and one token of many rows (``conv_update``).

Legend: T tokens, N rows, C channels, W conv width, X = W - 1, S slots. ``windows_SCX`` is a view of the slot-major
pool: every slot's window may lie anywhere, but inside a slot it is contiguous.
"""

import torch
import torch.nn.functional as F

from hybserve_kernels.device import require_cpu
from hybserve_kernels.slots import gather, scatter_

__all__ = ["causal_conv", "conv_update"]


def causal_conv(
    x_TC: torch.Tensor, windows_SCX: torch.Tensor, slot: int, weight_CW: torch.Tensor, fresh: bool
) -> torch.Tensor:
    """One row of at least one token. Reads the slot's window unless ``fresh`` (then it counts as zeros, whatever it
    holds) and leaves the window after the row in it."""
    require_cpu("causal_conv", x_TC, windows_SCX, weight_CW)
    tokens, channels = x_TC.shape
    past = weight_CW.shape[1] - 1
    window_CX = windows_SCX[slot]
    joined = torch.empty(past + tokens, channels, dtype=torch.float32)
    if fresh:
        joined[:past].zero_()
    else:
        joined[:past].copy_(window_CX.T)
    joined[past:].copy_(x_TC)
    window_CX.copy_(joined[tokens:].T)
    taps_WC = weight_CW.T.float()
    summed = joined[:tokens] * taps_WC[0]
    for tap in range(1, past + 1):
        summed.addcmul_(joined[tap : tap + tokens], taps_WC[tap])
    return F.silu(summed.to(x_TC.dtype), inplace=True)


def conv_update(
    x_NC: torch.Tensor, windows_SCX: torch.Tensor, slots: torch.Tensor, weight_CW: torch.Tensor
) -> torch.Tensor:
    """One token of each of N rows that have distinct slots; their windows move on by one input."""
    require_cpu("conv_update", x_NC, windows_SCX, slots, weight_CW)
    windows_NCX = gather(windows_SCX, slots)
    joined_NCW = torch.cat((windows_NCX.to(x_NC.dtype), x_NC.unsqueeze(-1)), dim=-1)
    scatter_(windows_SCX, slots, joined_NCW[..., 1:])
    summed = (joined_NCW.float() * weight_CW.float()).sum(-1)
    return F.silu(summed.to(x_NC.dtype), inplace=True)
