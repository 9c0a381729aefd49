"""A step of a model as a list of operations on float32 buffers, run natively or one by one in plain torch.

Buffers are [rows, n] with room for the most tokens of a step; an operation works on the first rows, one for each token,
or with `few` for each row that samples. A model says which operations it consists of (worker/models), `native.run`
hands them to the team of threads, `reference.run` defines what is right.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from paged.attention import AttentionMetadata

Function = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Frame:
    """What changes from step to step."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    metas: SequenceOf[AttentionMetadata]  # of each group of layers
    sampled: Tensor  # [sampled] int64: rows of the flat axis


@dataclass(frozen=True, slots=True)
class Matrix:
    """W [n, k] as a linear layer takes it; `packed` bytes in a format of `paged.kernels.FORMATS` (linear.inc)."""

    packed: Tensor  # uint8
    format: str
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class KV:
    """K and V of one layer, [pages, page_size, kv_heads, head_dim], and the group whose block tables lead there."""

    k: Tensor
    v: Tensor
    group: int


@dataclass(frozen=True, slots=True)
class Embed:
    """out = table[token] * scale"""

    table: Tensor  # [vocab, n] float32, bfloat16 or float16
    out: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Norm:
    """out += x / sqrt(mean(x^2) + eps) * weight"""

    x: Tensor
    weight: Tensor  # [n] float32
    out: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """out = (x W^T + bias) * scale; with `add`, out += that. x is taken as it is; or with `norm` normed, as `Norm`
    does; or with `gated` as f(gate) * up, gate and up being the halves of each row."""

    x: Tensor  # [tokens, k]; with `gated` [tokens, 2 * k]
    matrix: Matrix
    out: Tensor
    add: bool = False
    few: bool = False
    norm: Tensor | None = None  # [k] float32
    eps: float = 0.0
    gated: Function | None = None
    bias: Tensor | None = None  # [n] float32
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Rotary:
    """Norms (where there are any) and rotates queries in place; norms and rotates keys, writes them and values away."""

    qkv: Tensor  # [tokens, (heads + 2 * kv_heads) * head_dim]
    cos: Tensor | None  # [positions, pairs of a head that are rotated] float32; None: none are
    sin: Tensor | None
    heads: int
    kv: KV
    q_norm: Tensor | None = None  # [head_dim] float32; with norm_all [heads * head_dim], all heads together
    k_norm: Tensor | None = None
    eps: float = 0.0
    norm_all: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """out = attention of the queries at the beginning of each row of qkv"""

    qkv: Tensor
    out: Tensor  # [tokens, heads * head_dim]
    heads: int
    kv: KV
    scale: float
    window: int | None = None
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Gather:
    """The rows that sample."""

    x: Tensor
    out: Tensor  # [sampled, n]


@dataclass(frozen=True, slots=True)
class Argmax:
    """The place of the greatest of each sampled row, of equals the first."""

    x: Tensor  # [sampled, n]
    out: Tensor  # [sampled] int64


@dataclass(frozen=True, slots=True)
class SoftCap:
    """x = cap * tanh(x / cap), of each sampled row"""

    x: Tensor  # [sampled, n]
    cap: float


Operation = Embed | Norm | Linear | Rotary | Attention | Gather | Argmax | SoftCap
