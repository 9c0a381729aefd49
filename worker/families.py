"""Families of decoders: what each has of its own, and what its config.json leaves unsaid. No torch, no transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from worker.rope import Json

NormPlace = Literal["before", "around", "after"]  # of the two halves of a layer
QKNorm = Literal["head", "all"]  # each head by itself, or all of a token's together
Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """What of a family its config.json does not say. defaults: of fields that it leaves out, as in transformers."""

    model_type: str  # for a config that names no architecture
    defaults: Json = field(default_factory=dict)
    fields: frozenset[str] = frozenset()  # that it has beside those of every family
    activation_field: str = "hidden_act"
    activation: str = "silu"
    norm_place: NormPlace = "before"
    norm_offset: float = 0.0
    qk_norm: QKNorm | None = None
    qkv_bias: bool = False  # whatever attention_bias says
    fused: bool = False
    windows: Literal["none", "every", "types"] = "none"  # how layers get the field sliding_window
    ropes: Literal["one", "two"] = "one"  # two: layers with a window have their own
    theta: float | None = None  # where nobody says; None: 10000, with a warning
    rope_names: Json = field(default_factory=dict)  # old names of types
    scales: Literal["head_dim", "query", "multipliers"] = "head_dim"  # of scores and embedding: a head's width; what
    # query_pre_attn_scalar and the hidden size say; fields by name
    window_pattern: int | None = None  # every so manieth layer sees all, whatever the config says


_BIASES, _WINDOWS = frozenset({"attention_bias", "mlp_bias"}), frozenset({"sliding_window"})
_TYPES = frozenset({"sliding_window", "layer_types", "use_sliding_window", "max_window_layers"})
MULTIPLIERS = frozenset({"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"})
_GEMMA = frozenset({"query_pre_attn_scalar", "sliding_window", "layer_types"})
_GEMMA_DEFAULTS: Json = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", fields=_BIASES),
    "MistralForCausalLM": Family(
        "mistral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        _WINDOWS,
        windows="every",
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        _TYPES,
        qkv_bias=True,
        windows="types",
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        _TYPES | {"attention_bias"},
        qk_norm="head",
        windows="types",
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
        _TYPES | _BIASES | {"no_rope_layers", "no_rope_layer_interval"},
        windows="types",
        theta=2e6,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        {
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        _GEMMA | {"attn_logit_softcapping", "final_logit_softcapping", "sliding_window_pattern", "attention_bias"},
        "hidden_activation",
        "gelu_pytorch_tanh",
        "around",
        1.0,
        windows="types",
        theta=1e4,
        scales="query",
        window_pattern=2,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        {**_GEMMA_DEFAULTS, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
        _GEMMA | {"sliding_window_pattern", "attention_bias", "rope_local_base_freq", "final_logit_softcapping"},
        "hidden_activation",
        "gelu_pytorch_tanh",
        "around",
        1.0,
        "head",
        windows="types",
        ropes="two",
        theta=1e6,
        scales="query",
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        _WINDOWS | {"original_max_position_embeddings", "partial_rotary_factor"},
        fused=True,
        windows="every",
        theta=1e4,
        rope_names={"su": "longrope", "yarn": "longrope"},
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2", {"rms_norm_eps": 1e-5}, frozenset({"attention_bias"}), norm_place="after", qk_norm="all"
    ),
    "GraniteForCausalLM": Family("granite", fields=_BIASES | MULTIPLIERS, scales="multipliers"),
}
# Fields that change what a model computes, and that not every family has: where one has not, a value is refused.
REFUSED = frozenset().union(*(family.fields for family in FAMILIES.values())) | {
    "quantization_config",
    "rope_interleaved",
    "use_bidirectional_attention",
    "clip_qkv",
    "num_experts",
    "num_local_experts",
    "qk_layernorm",
    "use_qk_norm",
    "logit_scale",
    "lm_head_bias",
    "alibi",
    "parallel_residual",
    "attention_chunk_size",
    "attn_temperature_tuning",
}
HARMLESS: frozenset[str] = frozenset({"layer_types", "sliding_window", "max_window_layers"})  # where nothing slides
