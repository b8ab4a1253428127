"""Rotary position embedding (Su et al., arXiv 2104.09864), NeoX halves over the first ``rotary_dim`` of the head.

Element i of the first half and element i + rotary_dim/2 turn together by the angle position · theta^(-2i/rotary_dim);
the elements from rotary_dim on pass unchanged. Angles are computed in fp32.
"""

import torch


def rotary(x_THd: torch.Tensor, positions_T: torch.Tensor, rotary_dim: int, theta: float) -> torch.Tensor:
    half = rotary_dim // 2
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=x_THd.device) / rotary_dim
    angles = positions_T[:, None].float() * (1.0 / theta**exponents)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    wide = x_THd.float()
    first, second = wide[..., :half], wide[..., half:rotary_dim]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, wide[..., rotary_dim:]), dim=-1)
    return turned.to(x_THd.dtype)
