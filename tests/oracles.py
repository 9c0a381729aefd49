"""Tiny random checkpoints, made with transformers, which is also the oracle for them."""

from __future__ import annotations

import json
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

# head_dim is not hidden / heads, and sizes are odd where they may be
TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 84,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
# the same, with two kinds of layers, of which KVLayout makes six groups of two
TINY_GEMMA3: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 45,
    "intermediate_size": 77,
    "num_hidden_layers": 12,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "query_pre_attn_scalar": 13,
    "sliding_window": 7,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "eos_token_id": [1, 106],
}


# Every family, with what is its own; at least two layers of each kind.
_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_SLIDES = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 4}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "LlamaConfig", TINY),
    "llama3": (
        "Llama",
        "LlamaConfig",
        TINY
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 40,
            },
        },
    ),
    "llama-linear": (
        "Llama",
        "LlamaConfig",
        TINY | {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
    ),
    "mistral": ("Mistral", "MistralConfig", TINY | {"sliding_window": 7, "rope_parameters": _ROPE}),
    "qwen2": (
        "Qwen2",
        "Qwen2Config",
        TINY
        | _SLIDES
        | {
            "max_window_layers": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3": (
        "Qwen3",
        "Qwen3Config",
        TINY | {"rope_parameters": _ROPE, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "smollm3": (
        "SmolLM3",
        "SmolLM3Config",
        TINY | _SLIDES | {"no_rope_layers": [1, 0, 0, 1], "pad_token_id": 0, "rope_parameters": _ROPE},
    ),
    "gemma2": (
        "Gemma2",
        "Gemma2Config",
        {name: value for name, value in TINY_GEMMA3.items() if name not in ("layer_types", "rope_parameters")}
        | {
            "num_hidden_layers": 4,
            "rope_parameters": _ROPE,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": ("Gemma3", "Gemma3TextConfig", TINY_GEMMA3),
    "phi3": (
        "Phi3",
        "Phi3Config",
        TINY
        | {
            "hidden_size": 80,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
                "long_factor": [1.5, 2.0, 3.0, 5.0, 6.0, 8.0],
            },
        },
    ),
    "phi3-window": (
        "Phi3",
        "Phi3Config",
        TINY | {"sliding_window": 7, "pad_token_id": 0, "partial_rotary_factor": 0.5, "rope_parameters": _ROPE},
    ),
    "olmo2": ("Olmo2", "Olmo2Config", TINY | {"attention_bias": True, "rope_parameters": _ROPE}),
    "granite": (
        "Granite",
        "GraniteConfig",
        TINY
        | {
            "rope_parameters": _ROPE,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.9,
            "mlp_bias": True,
        },
    ),
}


def tiny(family: str, folder: Path, **overrides: Any) -> Any:
    """Make a seeded random model of FAMILIES, save it to `folder`, and return the transformers model, float32."""
    name, config, settings = FAMILIES[family]
    return _tiny(name, config, settings | overrides, folder)


def tiny_llama(folder: Path, shard_size: str = "1GB", **overrides: Any) -> Any:
    """Make a seeded random Llama, save it to `folder`, and return the transformers model, float32."""
    return _tiny("Llama", "LlamaConfig", TINY | overrides, folder, shard_size)


def tiny_gemma3(folder: Path, **overrides: Any) -> Any:
    """As tiny_llama, a Gemma 3 with two kinds of layers."""
    return _tiny("Gemma3", "Gemma3TextConfig", TINY_GEMMA3 | overrides, folder)


def _tiny(family: str, config: str, settings: dict[str, Any], folder: Path, shard_size: str = "1GB") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(0)
        made = getattr(transformers, config)(**deepcopy(settings))
        model = getattr(transformers, f"{family}ForCausalLM")(made).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # norms too, which begin as ones, or zeros
                parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def save_words(folder: Path) -> None:
    """A tokenizer for a tiny model: a word for each id."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TINY["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def oracle_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits of every position, float32 [n, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits
