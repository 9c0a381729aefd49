"""The decoder over pages in plain torch, of every family that worker/model_config.py knows.

Reads top to bottom: one layer's weights, the model, its forward. Query, key and value projections are one matrix, gate
and up projections another, so that a layer is four matrix products. What a family does not have is None, or 0, or 1.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from paged.attention import AttentionMetadata, PagedAttention
from paged.pool import KVPool
from worker.layers import Rotary, rms_norm, rotate
from worker.model_config import ModelConfig
from worker.tensors import EMBEDDING, HEAD, NORM, NORMS, layer_parts
from worker.weights import take


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; matrices are [out, in], norms have their offset added."""

    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    out: Tensor  # [hidden, heads * head_dim]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]
    input_norm: Tensor | None = None  # [hidden]
    attention_norm: Tensor | None = None  # [hidden], behind the attention
    mlp_norm: Tensor | None = None  # [hidden], before the second half
    down_norm: Tensor | None = None  # [hidden], behind it
    q_norm: Tensor | None = None  # [head_dim], or [heads * head_dim]
    k_norm: Tensor | None = None  # [head_dim], or [kv_heads * head_dim]
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Decoder:
    """A decoder over pages; layers with different windows have pages of their own.

    weights: tensors by their Hugging Face names, as `load_weights` returns them; they are taken out of the dict one by
    one, so that a matrix and what it is made of are not held at once for more than one layer. positions: that a
    sequence can reach, None is max_model_len. total: where this is one shard of several, gives the sum of what all of
    them computed, [tokens, hidden]; config and weights are the shard's, and only rank 0 has a head.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        positions: int | None = None,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config, self._total = config, total
        embedding, head = weights.pop(EMBEDDING), weights.pop(HEAD, None)
        self.embedding = embedding.to(device, dtype)  # [vocab, hidden]
        self.head = self.embedding if head is embedding else None if head is None else head.to(device, dtype)

        def taken(part: str, *names: str) -> Tensor:
            tensor = take(weights, *names).to(device, dtype)
            # An offset is added in float32, in which such norms are applied.
            return tensor.float() + config.norm_offset if part in NORMS and config.norm_offset else tensor

        self.norm = taken("input_norm", NORM)
        self.layers = [
            Layer(
                **{
                    part: taken(part, *(f"model.layers.{i}.{name}" for name in names))
                    for part, names in layer_parts(config).items()
                }
            )
            for i in range(config.num_layers)
        ]
        assert not weights, f"weights that nothing uses: {sorted(weights)}"
        self.embedding_scale = torch.tensor(config.embedding_scale).to(self.embedding)  # rounded, as in training
        self.rotaries = {
            rope: Rotary(rope, max_model_len, dtype, device, positions)
            for rope in config.layer_ropes
            if rope is not None
        }

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metas: SequenceOf[AttentionMetadata],
        pool: KVPool,
        attention: PagedAttention,
    ) -> Tensor:
        """Hidden states after the last norm, [tokens, hidden]; writes K and V of every token to its slots.

        token_ids, positions: [tokens] int64; metas: one for each group of the pool's layout.
        """
        config = self.config
        heads, kv_heads, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        scale, soft_cap = config.attention_scale, config.attention_soft_cap
        angles = {rope: rotary.tables(positions) for rope, rotary in self.rotaries.items()}
        x = self.embedding[token_ids] * self.embedding_scale  # [tokens, hidden]
        layers = zip(self.layers, config.layer_windows, config.layer_ropes, pool.layout.places, strict=True)
        for layer, window, rope, (group, pair) in layers:
            qkv = linear(_norm(x, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
            q, k, v = torch.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
            q, k = self._by_heads(q, layer.q_norm), self._by_heads(k, layer.k_norm)  # [tokens, heads, dim]
            if rope is not None:
                q, k = rotate(q, *angles[rope]), rotate(k, *angles[rope])
            pool.write(pair, k, v.view(-1, kv_heads, dim), metas[group].slots)
            attended = attention(q, pool.k[pair], pool.v[pair], metas[group], scale, window, soft_cap=soft_cap)
            y = self._summed(linear(attended.flatten(1), layer.out, layer.out_bias))
            x = x + _norm(y, layer.attention_norm, eps) * config.residual_scale
            gate, up = linear(_norm(x, layer.mlp_norm, eps), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            gate = silu(gate) if config.activation == "silu" else gelu(gate, approximate="tanh")
            y = self._summed(linear(gate * up, layer.down, layer.down_bias))
            x = x + _norm(y, layer.down_norm, eps) * config.residual_scale
        return rms_norm(x, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab]; without a head [rows, 0]."""
        if self.head is None:
            return torch.empty(len(hidden), 0)
        logits, divisor, cap = (
            linear(hidden, self.head).float(),
            self.config.logits_divisor,
            self.config.logits_soft_cap,
        )
        logits = logits if divisor == 1 else logits / divisor
        return cap * torch.tanh(logits / cap) if cap else logits

    @property
    def layer_bytes(self) -> int:
        """What the weights of the layers take."""
        tensors = (getattr(layer, part) for layer in self.layers for part in Layer.__slots__)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _summed(self, x: Tensor) -> Tensor:
        return x if self._total is None else self._total(x)

    def _by_heads(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """x [tokens, n * head_dim], normed if it is to be, as [tokens, n, head_dim]."""
        config = self.config
        if norm is not None and config.qk_norm == "all":
            return rms_norm(x, norm, config.rms_norm_eps).view(len(x), -1, config.head_dim)
        return _norm(x.view(len(x), -1, config.head_dim), norm, config.rms_norm_eps)


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else rms_norm(x, weight, eps)
