"""Which tensors a checkpoint has, and what part of a model each is. No torch.

A part is what a model works with: one matrix for queries, keys and values, one for gate and up, a norm, a bias.
"""

from __future__ import annotations

import math

from worker.model_config import ModelConfig

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
MATRICES = ("qkv", "out", "gate_up", "down")
NORMS = ("input_norm", "attention_norm", "mlp_norm", "down_norm", "q_norm", "k_norm")
_MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_FUSED = {**_MATRICES, "qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}
# input_norm and mlp_norm stand before the halves of a layer, attention_norm and down_norm behind them.
_NORMS = {
    "before": {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "around": {
        "input_norm": "input_layernorm",
        "attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "down_norm": "post_feedforward_layernorm",
    },
    "after": {"attention_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"},
}


def layer_parts(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The parts of a layer, and the tensors, without the prefix of the layer, whose rows one after another are each."""
    matrices = _FUSED if config.fused else _MATRICES
    parts = {part: tuple(f"{name}.weight" for name in names) for part, names in matrices.items()}
    for part in MATRICES:
        if {"qkv": config.qkv_bias, "out": config.out_bias}.get(part, config.mlp_bias):
            parts[f"{part}_bias"] = tuple(f"{name}.bias" for name in matrices[part])
    parts |= {part: (f"{name}.weight",) for part, name in _NORMS[config.norm_place].items()}
    if config.qk_norm is not None:
        parts |= {"q_norm": ("self_attn.q_norm.weight",), "k_norm": ("self_attn.k_norm.weight",)}
    return parts


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[out, in] of MATRICES."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv": (query + 2 * key, hidden),
        "out": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape, matrices [out, in], of every tensor that a checkpoint of this config has."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"qkv": (query, key, key), "gate_up": (config.intermediate_size,) * 2}
    shapes, layer = matrix_shapes(config), dict[str, tuple[int, ...]]()
    for part, names in layer_parts(config).items():
        matrix = part.removesuffix("_bias")
        for i, name in enumerate(names):
            if matrix in shapes:
                out = shapes[matrix][0] if len(names) == 1 else rows[matrix][i]
                layer[name] = (out,) if part != matrix else (out, shapes[matrix][1])
            elif config.qk_norm == "all" and part in ("q_norm", "k_norm"):
                layer[name] = (query if part == "q_norm" else key,)
            else:
                layer[name] = (config.head_dim if part in ("q_norm", "k_norm") else config.hidden_size,)
    tensors: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        NORM: (config.hidden_size,),
    }
    for i in range(config.num_layers):
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config.tie_word_embeddings:
        tensors[HEAD] = (config.vocab_size, config.hidden_size)
    return tensors


def num_parameters(config: ModelConfig) -> int:
    """Numbers in all weights, to know their bytes before torch is imported; tied ones count once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())
