"""Tiny random checkpoints, made with transformers, which is also the oracle for them."""

from __future__ import annotations

import json
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

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


def write_gguf(file: Path, model: Any, kind: str = "F32", **overrides: Any) -> dict[str, Any]:
    """Write a Llama of transformers as llama.cpp would: its names, q and k rows in its order, a tiny BPE tokenizer.

    Matrices get the GGUF type `kind`. Returns what each tensor holds after quantising, by its GGUF name.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, overrides.get("architecture", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(overrides.get("rotated", config.head_dim))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(overrides.get("theta", 10000.0))
    if "scaling" in overrides:
        writer.add_string("llama.rope.scaling.type", overrides["scaling"])
    if "factor" in overrides:
        writer.add_rope_scaling_factor(overrides["factor"])
    if overrides.get("tokenizer", True):
        _add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    wanted = gguf.GGMLQuantizationType[kind]
    held = {}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        short = names.get_name(name, try_suffixes=(".weight",))
        for part, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            if part in short:
                halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else wanted
        if short == overrides.get("integers"):  # a type that the gguf library does not dequantise
            writer.add_tensor(short, values.astype(np.int32))
            continue
        data = gguf.quants.quantize(values, stored)
        held[short] = gguf.quants.dequantize(data, stored).reshape(values.shape)
        writer.add_tensor(short, data, raw_dtype=stored)
    if "extra" in overrides:
        writer.add_tensor(overrides["extra"], np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add_tokenizer(writer: Any, vocab_size: int) -> None:
    letters = ["<s>", "</s>", "<unk>", *map(chr, range(ord("a"), ord("z") + 1)), "Ġ", "ab", "abc"]
    tokens = letters + [f"<extra_{i}>" for i in range(vocab_size - len(letters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") else 1 for token in tokens])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
