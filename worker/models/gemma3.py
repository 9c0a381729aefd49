"""The Gemma 3 architecture, its text part, over pages: most layers see a window, and some see everything.

Reads top to bottom as llama.py does, which it differs from in its norms (four a layer, and one of every query and key
head), its scaled embedding, its activation, and a rotary embedding of its own for layers with a window.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from paged.attention import AttentionMetadata, PagedAttention
from paged.pool import KVPool
from worker.layers import Rotary, rms_norm, rotate, take
from worker.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; matrices are [out, in]. Norms are float32, as they are applied, and have the 1 added."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]
    out: Tensor  # [hidden, heads * head_dim]
    post_attention_norm: Tensor  # [hidden]
    pre_mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]
    post_mlp_norm: Tensor  # [hidden]


class Gemma3:
    """A decoder over pages, of which layers with different windows have their own. Weights are taken as by Llama."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], max_model_len: int) -> None:
        self.config = config
        self.embedding = weights.pop("model.embed_tokens.weight")  # [vocab, hidden]
        self.head = weights.pop("lm_head.weight")  # [vocab, hidden]; the same tensor when tied
        self.norm = _take_norm(weights, "model.", "norm")
        self.layers = [_take_layer(weights, f"model.layers.{i}.") for i in range(config.num_layers)]
        assert not weights, f"weights that nothing uses: {sorted(weights)}"
        dtype, device = self.embedding.dtype, self.embedding.device
        self.embedding_scale = torch.tensor(config.hidden_size**0.5).to(self.embedding)  # rounded, as in training
        self.rotary = Rotary(config.head_dim, config.rope_theta, max_model_len, dtype, device, config.rope_factor)
        self.local_rotary = Rotary(config.head_dim, config.local_rope_theta, max_model_len, dtype, device)

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
        everywhere, local = self.rotary.tables(positions), self.local_rotary.tables(positions)
        x = self.embedding[token_ids] * self.embedding_scale  # [tokens, hidden]
        for layer, window, (group, pair) in zip(self.layers, config.layer_windows, pool.layout.places, strict=True):
            qkv = linear(rms_norm(x, layer.input_norm, eps), layer.qkv).view(-1, heads + 2 * kv_heads, dim)
            q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)  # [tokens, heads or kv_heads, dim]
            cos, sin = everywhere if window is None else local
            q = rotate(rms_norm(q, layer.q_norm, eps), cos, sin)
            k = rotate(rms_norm(k, layer.k_norm, eps), cos, sin)
            pool.write(pair, k, v, metas[group].slots)
            attended = attention(q, pool.k[pair], pool.v[pair], metas[group], config.attention_scale, window)
            x = x + rms_norm(linear(attended.flatten(1), layer.out), layer.post_attention_norm, eps)
            gate, up = linear(rms_norm(x, layer.pre_mlp_norm, eps), layer.gate_up).chunk(2, dim=-1)
            x = x + rms_norm(linear(gelu(gate, approximate="tanh") * up, layer.down), layer.post_mlp_norm, eps)
        return rms_norm(x, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab]."""
        return linear(hidden, self.head).float()


def _take_layer(weights: dict[str, Tensor], prefix: str) -> Layer:
    return Layer(
        input_norm=_take_norm(weights, prefix, "input_layernorm"),
        qkv=take(weights, prefix, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=_take_norm(weights, prefix, "self_attn.q_norm"),
        k_norm=_take_norm(weights, prefix, "self_attn.k_norm"),
        out=take(weights, prefix, "self_attn.o_proj"),
        post_attention_norm=_take_norm(weights, prefix, "post_attention_layernorm"),
        pre_mlp_norm=_take_norm(weights, prefix, "pre_feedforward_layernorm"),
        gate_up=take(weights, prefix, "mlp.gate_proj", "mlp.up_proj"),
        down=take(weights, prefix, "mlp.down_proj"),
        post_mlp_norm=_take_norm(weights, prefix, "post_feedforward_layernorm"),
    )


def _take_norm(weights: dict[str, Tensor], prefix: str, name: str) -> Tensor:
    """1 + the stored weight, in float32."""
    return 1.0 + take(weights, prefix, name).float()
