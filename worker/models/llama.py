"""The Llama architecture: Llama, SmolLM2 and others of its shape, over pages.

Reads top to bottom: one layer's weights, the model, its forward. Query, key and value projections are one matrix, gate
and up projections another, so that a layer is four matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from paged.attention import AttentionMetadata, PagedAttention
from paged.pool import KVPool
from worker.layers import Rotary, rms_norm, rotate, take
from worker.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; matrices are [out, in]."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    out: Tensor  # [hidden, heads * head_dim]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


class Llama:
    """A decoder over pages.

    weights: tensors by their Hugging Face names, as `load_weights` returns them; they are taken out of the dict one by
    one, so that a fused matrix and its parts are not held at once for more than one layer.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], max_model_len: int) -> None:
        self.config = config
        self.embedding = weights.pop("model.embed_tokens.weight")  # [vocab, hidden]
        self.head = weights.pop("lm_head.weight")  # [vocab, hidden]; the same tensor when tied
        self.norm = weights.pop("model.norm.weight")
        self.layers = [_take_layer(weights, f"model.layers.{i}.") for i in range(config.num_layers)]
        assert not weights, f"weights that nothing uses: {sorted(weights)}"
        dtype, device = self.embedding.dtype, self.embedding.device
        self.rotary = Rotary(config.head_dim, config.rope_theta, max_model_len, dtype, device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metas: SequenceOf[AttentionMetadata],
        pool: KVPool,
        attention: PagedAttention,
    ) -> Tensor:
        """Hidden states after the last norm, [tokens, hidden]; writes K and V of every token to its slot.

        token_ids, positions: [tokens] int64; metas: one, as all layers are of one group.
        """
        config = self.config
        (meta,) = metas
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        scale, eps = config.attention_scale, config.rms_norm_eps
        cos, sin = self.rotary.tables(positions)
        x = self.embedding[token_ids]  # [tokens, hidden]
        for i, layer in enumerate(self.layers):
            qkv = linear(rms_norm(x, layer.input_norm, eps), layer.qkv).view(-1, heads + 2 * kv_heads, dim)
            q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)  # [tokens, heads or kv_heads, dim]
            pool.write(i, rotate(k, cos, sin), v, meta.slots)
            attended = attention(rotate(q, cos, sin), pool.k[i], pool.v[i], meta, scale, None)
            x = x + linear(attended.flatten(1), layer.out)
            gate, up = linear(rms_norm(x, layer.post_norm, eps), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        return rms_norm(x, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab]."""
        return linear(hidden, self.head).float()


def _take_layer(weights: dict[str, Tensor], prefix: str) -> Layer:
    return Layer(
        input_norm=take(weights, prefix, "input_layernorm"),
        qkv=take(weights, prefix, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=take(weights, prefix, "self_attn.o_proj"),
        post_norm=take(weights, prefix, "post_attention_layernorm"),
        gate_up=take(weights, prefix, "mlp.gate_proj", "mlp.up_proj"),
        down=take(weights, prefix, "mlp.down_proj"),
    )
