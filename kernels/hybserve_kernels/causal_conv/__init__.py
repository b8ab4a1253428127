"""Causal depthwise convolution with silu: whole rows (``causal_conv``) and one token of many rows (``conv_update``).
On a GPU ``conv_rows`` takes all prefill rows of a step at once; decode rows are convolved in ``gated_delta``.

Legend: T tokens, N rows, C channels, W conv width, X = W - 1, S slots. ``windows_SCX`` is a view of the slot-major
pool: every slot's window may lie anywhere, but inside a slot it is contiguous. ``taps_WC`` is the weight turned around
once, in fp32 (``conv_taps``).
"""

import torch
import torch.nn.functional as F

from hybserve_kernels.causal_conv.gpu import conv_rows
from hybserve_kernels.device import require_cpu

__all__ = ["causal_conv", "conv_rows", "conv_taps", "conv_update"]


def conv_taps(weight_CW: torch.Tensor) -> torch.Tensor:
    """The weight as ``causal_conv`` and ``conv_update`` read it: [W, C], fp32."""
    return weight_CW.T.float().contiguous()


def causal_conv(
    x_TC: torch.Tensor, windows_SCX: torch.Tensor, slot: int, taps_WC: torch.Tensor, fresh: bool
) -> torch.Tensor:
    """One row of at least one token. Reads the slot's window unless ``fresh`` (then it counts as zeros, whatever it
    holds) and leaves the window after the row in it."""
    require_cpu("causal_conv", x_TC, windows_SCX, taps_WC)
    tokens, channels = x_TC.shape
    past = taps_WC.shape[0] - 1
    window_CX = windows_SCX[slot]
    joined = torch.empty(past + tokens, channels, dtype=torch.float32)
    if fresh:
        joined[:past].zero_()
    else:
        joined[:past].copy_(window_CX.T)
    joined[past:].copy_(x_TC)
    window_CX.copy_(joined[tokens:].T)
    summed = joined[:tokens] * taps_WC[0]
    for tap in range(1, past + 1):
        summed.addcmul_(joined[tap : tap + tokens], taps_WC[tap])
    return F.silu(summed.to(x_TC.dtype), inplace=True)


def conv_update(
    x_NC: torch.Tensor, windows_SCX: torch.Tensor, slots_N: torch.Tensor, taps_WC: torch.Tensor
) -> torch.Tensor:
    """One token of each of N rows that have distinct slots; their windows move on by one input."""
    require_cpu("conv_update", x_NC, windows_SCX, slots_N, taps_WC)
    windows_NCX = windows_SCX.index_select(0, slots_N)
    summed = x_NC * taps_WC[-1]
    for past_NC, tap_C in zip(windows_NCX.unbind(2), taps_WC, strict=False):
        summed.addcmul_(past_NC, tap_C)
    if windows_NCX.shape[2]:
        newest_NC1 = x_NC[:, :, None].to(windows_NCX.dtype)
        windows_SCX.index_copy_(0, slots_N, torch.cat((windows_NCX[:, :, 1:], newest_NC1), dim=2))
    return F.silu(summed.to(x_NC.dtype), inplace=True)
