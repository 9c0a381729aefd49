"""What decoder layers are made of. Functions of tensors; the weights belong to the models."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, the mean in float32, the product in the weight's dtype.

    x: [..., n]; weight: [n]. Returns the dtype of x. Formula: Zhang and Sennrich, 2019, equation 4.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide.to(weight.dtype) * weight).to(x.dtype)


class Rotary:
    """Rotary position embedding: cosine and sine of every position, in float32 until they are applied.

    Formula: Su et al., "RoFormer", 2021, equation 15, with the two halves of a head as the pair of each frequency;
    with a factor positions are divided by it: Chen et al., "Position Interpolation", 2023, equation 4.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        factor: float = 1.0,
    ) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / theta**exponents / factor
        angles = torch.arange(max_model_len).float()[:, None] * frequencies  # [positions, head_dim / 2]
        self.cos = angles.cos().to(dtype).to(device)
        self.sin = angles.sin().to(dtype).to(device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine at `positions` [tokens], each [tokens, 1, head_dim / 2]."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] rotated by the angles of its tokens."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def take(weights: dict[str, Tensor], prefix: str, *names: str) -> Tensor:
    """The weights of these names, taken out of the dict; several become one matrix, their rows one after another."""
    parts = [weights.pop(f"{prefix}{name}.weight") for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
