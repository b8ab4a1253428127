"""Depthwise causal convolution followed by silu, over one row of tokens, with the window of earlier inputs.

y[t, c] = silu(sum over w of weight[c, w] · x[t - W + 1 + w, c]), where inputs before the row come from the window:
``window_CX`` holds the last W - 1 inputs of every channel, oldest first. The sum is taken in fp32 and rounded to the
model dtype before the activation, as a convolution in that dtype does.

Legend: T tokens, C channels, W conv width, X = W - 1.
"""

import torch


def causal_conv(
    x_TC: torch.Tensor, window_CX: torch.Tensor, weight_CW: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [T, C] and the window after the row, in the dtype of the given window."""
    tokens, width = x_TC.shape[0], weight_CW.shape[1]
    joined_CT = torch.cat((window_CX.float(), x_TC.float().T), dim=1)
    columns = [(joined_CT[:, t : t + width] * weight_CW.float()).sum(-1) for t in range(tokens)]
    summed = torch.stack(columns).to(x_TC.dtype).float()
    after = joined_CT[:, joined_CT.shape[1] - (width - 1) :]
    return (summed * torch.sigmoid(summed)).to(x_TC.dtype), after.to(window_CX.dtype)
