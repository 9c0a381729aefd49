"""GGUF files of tiny models, written as llama.cpp's conversion scripts would; names are the gguf library's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_PERMUTED = ("llama", "smollm3", "granite")  # rows of q and k: the halves of each head interleaved
# For types that the gguf library cannot make: where the half-precision scales lie in a block
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def write_gguf(
    file: Path,
    model: Any,
    kind: str = "F32",
    *,
    fields: dict[str, Any] | None = None,
    theta: float | None = None,
    tokenizer: str | None = "gpt2",
    pre: str = "smollm",
    extra: dict[str, npt.NDArray[Any]] | None = None,
) -> dict[str, npt.NDArray[np.float32]]:
    """Write a model of transformers. Matrices get the GGUF type `kind`, where they are not in `extra`.

    `fields` are metadata in place of those of the model, None for none. Returns what each tensor holds after
    quantising, by its GGUF name.
    """
    import gguf

    config = model.config
    architecture = config.model_type.removesuffix("_text")
    metadata = {f"{architecture}.{name}": value for name, value in _metadata(config, architecture).items()}
    if theta is not None:
        metadata[f"{architecture}.rope.freq_base"] = theta
    if tokenizer:
        metadata |= _tokenizer(tokenizer, pre, config.vocab_size, architecture)
    metadata |= fields or {}
    writer = gguf.GGUFWriter(file, metadata.pop("general.architecture", architecture))
    for name, value in metadata.items():
        _add_field(writer, name, value)
    names = gguf.get_tensor_name_map(_arch(architecture), config.num_hidden_layers)
    held, extra = {}, dict(extra or {})
    for name, tensor in model.state_dict().items():
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if short in extra or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = _as_llama_cpp(tensor.numpy(), short, config, architecture)
        stored = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind]
        data = _random_blocks(values.shape, stored) if kind in _SCALES and values.ndim > 1 else None
        if data is None:
            data = gguf.quants.quantize(values, stored)
        held[short] = gguf.quants.dequantize(data, stored).reshape(values.shape)
        writer.add_tensor(short, data, raw_dtype=stored)
    for name, values in (_rope_tensors(config, architecture) | extra).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _arch(name: str) -> Any:
    import gguf

    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = config.head_dim
    metadata = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if architecture not in ("phi3", "granite", "olmo2"):
        metadata |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if architecture != "gemma2":
        metadata["rope.freq_base"] = float(rope["rope_theta"])
    if architecture in _PERMUTED:
        metadata |= {"vocab_size": config.vocab_size, "rope.dimension_count": head_dim}
    if rope["rope_type"] in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        metadata |= {f"rope.scaling.yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow")}
    if architecture == "gemma2":
        metadata |= {
            f"{name}_logit_softcapping": getattr(config, f"{name}_logit_softcapping") for name in ("attn", "final")
        }
    if architecture == "gemma3":
        metadata["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
    if architecture in ("gemma2", "gemma3"):
        metadata["attention.sliding_window"] = config.sliding_window
    if architecture == "phi3":
        metadata["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        metadata["rope.scaling.original_context_length"] = config.original_max_position_embeddings
        metadata["attention.sliding_window"] = config.sliding_window or 0
        if rope["rope_type"] == "longrope":
            metadata["rope.scaling.attn_factor"] = rope["attention_factor"]
    if architecture == "granite":
        metadata["attention.scale"] = config.attention_multiplier
        metadata["embedding_scale"] = config.embedding_multiplier
        metadata["residual_scale"] = config.residual_multiplier
        metadata["logit_scale"] = config.logits_scaling
    return metadata


def _rope_tensors(config: Any, architecture: str) -> dict[str, npt.NDArray[np.float32]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32) for name in ("long", "short")
        }
    if rope.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = rope["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        return {"rope_freqs.weight": (plain / scaled.numpy()).astype(np.float32)}
    return {}


def _as_llama_cpp(values: Any, short: str, config: Any, architecture: str) -> npt.NDArray[np.float32]:
    part = short.split(".")[-2]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
    if heads and architecture in _PERMUTED:
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    plus_one = architecture in ("gemma2", "gemma3") and part.endswith("norm")
    result: npt.NDArray[np.float32] = values + np.float32(plus_one)
    return result


def _random_blocks(shape: tuple[int, ...], kind: Any) -> npt.NDArray[np.uint8]:
    """Any bits are a block, as long as its scales are numbers."""
    import gguf

    size, length = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // size, length), dtype=np.uint8)
    for at in _SCALES[kind.name]:
        blocks[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    return blocks.reshape(shape[0], -1)


def _tokenizer(kind: str, pre: str, vocab_size: int, architecture: str) -> dict[str, Any]:
    """Ids 0, 1 and 2 are <s>, </s> and <unk>; then a few letters and merges; then, as far as there is room, bytes."""
    letters = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    tokens, types = ["<s>", "</s>", "<unk>"], [3, 3, 2 if kind == "llama" else 3]
    if kind == "gpt2":
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        tokens += [*letters, "Ġ", "ab", "abc", "ĠĠ", "zzz"]
        types += [1] * (len(tokens) - len(types))
        others = [letter for letter in bytes_to_unicode().values() if letter not in tokens]
        tokens, types = tokens + others, types + [1] * len(others)
    else:
        tokens += ["▁", "ab", "▁ab", "▁a", "a", "b", "é", "  "]
        types += [1] * (len(tokens) - len(types))
        tokens, types = tokens + [f"<0x{byte:02X}>" for byte in range(256)], types + [6] * 256
    tokens = (tokens + [f"<extra_{i}>" for i in range(vocab_size)])[:vocab_size]
    types = (types + [3] * vocab_size)[:vocab_size]
    metadata = {
        "model": kind,
        "pre": pre if kind == "gpt2" else "default",
        "tokens": tokens,
        "token_type": types,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "unknown_token_id": 2,
    }
    if kind == "gpt2":
        metadata["merges"] = ["a b", "ab c", "Ġ Ġ"]
    else:
        metadata["scores"] = [float(-i) for i in range(vocab_size)]
    if architecture.startswith("gemma"):
        metadata |= {"add_bos_token": True, "add_space_prefix": False}
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}


def _add_field(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif value is not None:
        writer.add_array(name, value)
