"""What decoder layers are made of. Functions of tensors; the weights belong to the models."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.rope import Rope


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, the mean in float32, the product in the weight's dtype.

    x: [..., n]; weight: [n]. Returns the dtype of x. Formula: Zhang and Sennrich, 2019, equation 4.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide.to(weight.dtype) * weight).to(x.dtype)


class Rotary:
    """Rotary position embedding: cosine and sine of every position, in float32 until they are applied.

    Formula: Su et al., "RoFormer", 2021, equation 15, with the two halves of what turns of a head as the pairs.
    """

    def __init__(
        self, rope: Rope, max_model_len: int, dtype: torch.dtype, device: torch.device, positions: int | None = None
    ) -> None:
        """positions: how many there are tables for; None is max_model_len."""
        count = max_model_len if positions is None else positions
        turns = frequencies(rope, max_model_len)
        angles = torch.arange(count).float()[:, None] * turns  # [positions, dims / 2]
        self.cos = (angles.cos() * rope.scale).to(dtype).to(device)
        self.sin = (angles.sin() * rope.scale).to(dtype).to(device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine at `positions` [tokens], each [tokens, 1, dims / 2]."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def frequencies(rope: Rope, max_model_len: int) -> Tensor:
    """Radians a position of each pair, float32 [dims / 2], for sequences of up to so many tokens.

    Formulas: worker/rope.py names them; in float32 throughout, as the models were trained.
    """
    dims, factor = rope.dims, rope.factor
    waves = rope.theta ** (torch.arange(0, dims, 2, dtype=torch.int64).float() / dims)  # lengths over 2 pi
    match rope.kind:
        case "linear":
            return 1.0 / waves / factor
        case "llama3":
            plain, (low, high) = 1.0 / waves, rope.between
            lengths = 2 * math.pi / plain
            mixed = (rope.trained / lengths - low) / (high - low)  # 0: all is scaled, 1: nothing
            between = (1 - mixed) * plain / factor + mixed * plain
            scaled = torch.where(lengths > rope.trained / low, plain / factor, between)
            return torch.where(lengths < rope.trained / high, plain, scaled)
        case "yarn":
            ends = [
                dims * math.log(rope.trained / (n * 2 * math.pi)) / (2 * math.log(rope.theta)) for n in rope.between
            ]
            first, last = (math.floor(ends[0]), math.ceil(ends[1])) if rope.truncate else ends
            first, last = max(first, 0), min(last, dims - 1)
            last += 0.001 if first == last else 0.0
            scaled = ((torch.arange(dims // 2).float() - first) / (last - first)).clamp(0, 1)
            return 1.0 / (factor * waves) * scaled + 1.0 / waves * (1 - scaled)
        case "longrope":
            factors = rope.short_factors if max_model_len <= rope.trained else rope.long_factors
            return 1.0 / (torch.tensor(factors) * waves)
    return 1.0 / waves


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim], its first dimensions rotated by the angles of its tokens."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
