"""What decoder layers are made of. Functions of tensors; the weights belong to the models."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, the mean in float32.

    x: [tokens, hidden]; weight: [hidden]. Returns the dtype of x. Formula: Zhang and Sennrich, 2019, equation 4.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


class Rotary:
    """Rotary position embedding: cosine and sine of every position, in float32 until they are applied.

    Formula: Su et al., "RoFormer", 2021, equation 15, with the two halves of a head as the pair of each frequency.
    """

    def __init__(
        self, head_dim: int, theta: float, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        angles = torch.arange(max_model_len).float()[:, None] * (1.0 / theta**exponents)  # [positions, head_dim / 2]
        self._cos = angles.cos().to(dtype).to(device)
        self._sin = angles.sin().to(dtype).to(device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine at `positions` [tokens], each [tokens, 1, head_dim / 2]."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] rotated by the angles of its tokens."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
