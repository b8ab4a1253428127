"""Linear maps with what may stand before and after them, the specification.

Every step rounds to the model dtype as it would in a kernel of its own: the normed rows before the product, the product
before the activation or the sum. Products are accumulated in fp32.

Legend: M rows, N outputs, K inputs, F half of the outputs of a merged projection [gate | up].
"""

import torch

from hybserve_kernels.rms_norm import reference as norms
from hybserve_kernels.swiglu import reference as activations


def linear(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """x · weight^T (+ bias), [M, N]."""
    wide_MN = x_MK.float() @ weight_NK.float().T
    if bias_N is not None:
        wide_MN = wide_MN + bias_N.float()
    return wide_MN.to(x_MK.dtype)


def linear_swiglu(x_MK: torch.Tensor, gate_up_2FK: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of the product with a merged projection, [M, F]."""
    return activations.swiglu(linear(x_MK, gate_up_2FK))


def linear_add(
    hidden_MN: torch.Tensor, x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """hidden + linear(x), [M, N]."""
    return hidden_MN + linear(x_MK, weight_NK, bias_N)


def norm_linear(
    hidden_MK: torch.Tensor,
    scale_K: torch.Tensor,
    eps: float,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """linear(rms_norm(hidden)), [M, N]."""
    return linear(norms.rms_norm(hidden_MK, scale_K, eps), weight_NK, bias_N)


def norm_linear_swiglu(
    hidden_MK: torch.Tensor, scale_K: torch.Tensor, eps: float, gate_up_2FK: torch.Tensor
) -> torch.Tensor:
    """linear_swiglu(rms_norm(hidden)), [M, F]."""
    return linear_swiglu(norms.rms_norm(hidden_MK, scale_K, eps), gate_up_2FK)
