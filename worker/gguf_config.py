"""What a GGUF file says of its model, as the config.json that transformers would have for it.

One table of architectures, by llama.cpp's names; facts are from llama.cpp's conversion scripts and model code. What
llama.cpp would compute is what counts: a value that a file leaves out is what llama.cpp then takes. A field of the
architecture that nothing here asks for is not understood, and refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paged.errors import CheckpointError
from worker.model_config import ModelConfig
from worker.tensors import expected_tensors

Shape = tuple[int, ...]
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_FOUR_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"} | _POST_NORMS
_LLAMA = _ATTENTION | _MLP | _NORMS
_PHI3 = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_ORIGINAL = "rope.scaling.original_context_length"
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SCALINGS = {"phi3": (), "gemma2": ("linear",), "gemma3": ("linear",)}  # elsewhere these and yarn
# Metadata of the architecture that changes nothing; a value other than those given may.
_NO_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "vocab_size": None,  # the embedding's rows say it
    "tensor_data_layout": None,
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scaling.finetuned": (True,),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
}


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores a family, and what transformers calls it."""

    name: str  # of transformers' class
    model_type: str
    parts: Mapping[str, str]  # of a layer: by GGUF name, the Hugging Face name
    permuted: bool = False  # rows of q and k have the halves of each head interleaved
    norms_plus_one: bool = False
    optional_biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by the field of config.json


_ATTENTION_BIAS = {"attention_bias": tuple(_ATTENTION)}
_BOTH_BIASES = _ATTENTION_BIAS | {"mlp_bias": tuple(_MLP)}
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", _LLAMA, permuted=True, optional_biases=_BOTH_BIASES),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _LLAMA),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _LLAMA | _QK_NORMS, optional_biases=_ATTENTION_BIAS),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", _LLAMA, permuted=True, optional_biases=_BOTH_BIASES),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _ATTENTION | _MLP | _FOUR_NORMS, norms_plus_one=True),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", _ATTENTION | _MLP | _FOUR_NORMS | _QK_NORMS, norms_plus_one=True
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _PHI3 | _NORMS),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", _ATTENTION | _MLP | _POST_NORMS | _QK_NORMS),
    "granite": Architecture("GraniteForCausalLM", "granite", _LLAMA, permuted=True, optional_biases=_BOTH_BIASES),
}


class Metadata:
    """The fields of a file, and which of the architecture's were asked for."""

    def __init__(self, path: Path, names: list[str], read: Callable[[str], Any]) -> None:
        """`read` gives the value of a field, None where there is none."""
        self.path = path
        self.architecture = str(read("general.architecture"))
        self._read = read
        self._others = {name for name in names if name.startswith(f"{self.architecture}.")}

    def get(self, name: str, default: Any = None) -> Any:
        """The field `name` of the architecture."""
        name = f"{self.architecture}.{name}"
        self._others.discard(name)
        value = self._read(name)
        return default if value is None else value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refused(name, f"must be a positive number, not {value!r:.80}")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refused(name, f"must be a whole number of at least 1, not {value!r:.80}")
        return value

    def optional_number(self, name: str) -> float | None:
        """None where the file says nothing, or 0, which is llama.cpp's way of saying nothing."""
        return self.number(name) if self.get(name) else None

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name) if self.get(name) else None

    def token(self, *names: str) -> int | list[int] | None:
        """The ids that the tokenizer has under these names: none, one or several."""
        given = [self._read(f"tokenizer.ggml.{name}_token_id") for name in names]
        ids = list(dict.fromkeys(i for i in given if i is not None))
        return ids if len(ids) > 1 else next(iter(ids), None)

    def refused(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.architecture}.{name} {why}")

    def refuse_others(self) -> None:
        for name in sorted(self._others):
            value, short = self._read(name), name.removeprefix(f"{self.architecture}.")
            harmless = _NO_EFFECT.get(short, ())
            if harmless is not None and value not in harmless:
                raise self.refused(short, f"{value!r:.80} is not understood")


def hf_config(meta: Metadata, shapes: Mapping[str, Shape], factors: Callable[[str], list[float]]) -> dict[str, Any]:
    """config.json. `shapes` are those of the file's tensors, by GGUF name; `factors` reads a small one of them."""
    kind = ARCHITECTURES[meta.architecture]
    hidden, heads, layers = (meta.integer(name) for name in ("embedding_length", "attention.head_count", "block_count"))
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{meta.path} has no token_embd.weight")
    rotated = None if meta.architecture == "phi3" else meta.get("rope.dimension_count")  # there it may be a part
    head_dim = meta.integer("attention.key_length", rotated or hidden // heads)
    if (values := meta.integer("attention.value_length", head_dim)) != head_dim:
        raise meta.refused("attention.value_length", f"{values}, where keys have {head_dim}, is not supported")
    config: dict[str, Any] = {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(meta, head_dim, shapes, factors),
        "max_position_embeddings": meta.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": meta.token("bos"),
        "eos_token_id": meta.token("eos", "eot", "eom"),
        "dtype": "float32",
    }
    if kind.model_type != "llama":  # others have one by default, which may lie outside of the vocabulary
        config["pad_token_id"] = meta.token("padding")
    for flag, parts in kind.optional_biases.items():
        if f"blk.0.{parts[0]}.bias" in shapes:
            config[flag] = True
    special = {"gemma2": _gemma2, "gemma3": _gemma3, "phi3": _phi3, "granite": _granite, "smollm3": _smollm3}
    if meta.architecture in special:
        special[meta.architecture](meta, config)
    if meta.architecture.startswith("qwen"):
        config["use_sliding_window"] = False  # llama.cpp never has it
    meta.refuse_others()
    return config


def tensor_names(architecture: str, config: Mapping[str, Any]) -> dict[str, tuple[str, Shape]]:
    """Every tensor that a model of this config has: by GGUF name its Hugging Face name and shape."""
    shapes = expected_tensors(ModelConfig.from_hf(config))
    names = {f"{part}.weight": f"{name}.weight" for part, name in OUTER.items()}
    for layer in range(config["num_hidden_layers"]):
        for part, name in ARCHITECTURES[architecture].parts.items():
            for kind in ("weight", "bias"):
                names[f"blk.{layer}.{part}.{kind}"] = f"model.layers.{layer}.{name}.{kind}"
    return {gguf: (name, shapes[name]) for gguf, name in names.items() if name in shapes}


def _rope(
    meta: Metadata, head_dim: int, shapes: Mapping[str, Shape], factors: Callable[[str], list[float]]
) -> dict[str, Any]:
    """rope_parameters; of a Gemma 3 those of full attention."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": meta.number("rope.freq_base", 10000.0)}
    kind = meta.get("rope.scaling.type", "linear")  # of a factor without a type
    factor = meta.get("rope.scaling.factor", 0) or 1.0
    original = meta.optional_integer(_ORIGINAL)
    rotated = meta.integer("rope.dimension_count", head_dim)
    if meta.architecture == "phi3":
        rope["partial_rotary_factor"] = rotated / head_dim
        if kind == "longrope" or "rope_factors_long.weight" in shapes:
            rope |= {
                "rope_type": "longrope",
                "factor": max(1.0, meta.integer("context_length") / (original or meta.integer(_ORIGINAL))),
                "original_max_position_embeddings": original,
                "attention_factor": meta.number("rope.scaling.attn_factor", 1.0),
                "short_factor": factors("rope_factors_short.weight"),
                "long_factor": factors("rope_factors_long.weight"),
            }
            kind = "none"
    if rotated > head_dim or int(head_dim * rope.get("partial_rotary_factor", 1.0)) != rotated:
        raise CheckpointError(f"{meta.path} rotates {rotated} of {head_dim} dimensions, which is not supported")
    if kind == "none" or (kind == "linear" and factor == 1):
        if meta.architecture == "llama" and "rope_freqs.weight" in shapes:
            rope |= _llama3(meta, rope["rope_theta"], head_dim, factors("rope_freqs.weight"))
        return rope
    if kind not in _SCALINGS.get(meta.architecture, ("linear", "yarn")):
        raise meta.refused("rope.scaling.type", f"{kind}: scaling this rotary embedding so is not supported")
    rope |= {"rope_type": kind, "factor": meta.number("rope.scaling.factor")}
    if kind == "yarn":
        rope |= {
            "original_max_position_embeddings": original or meta.integer(_ORIGINAL),
            "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    return rope


def _llama3(meta: Metadata, theta: float, head_dim: int, divisors: list[float]) -> dict[str, Any]:
    """The parameters that reproduce the divisors of each pair's frequency, which are all that a file has of them."""
    factor, original, low, high = divisors[-1], 8192, 1.0, 4.0  # the slowest pair is divided by the whole factor
    if all(divisor == 1 for divisor in divisors):
        return {}
    computed = []
    for pair in range(head_dim // 2):
        turns = original * theta ** (-2 * pair / head_dim) / (2 * math.pi)  # in the context of training
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        computed.append(1 / ((1 - smooth) / factor + smooth))
    if len(divisors) != len(computed) or not all(
        math.isclose(ours, theirs, rel_tol=1e-4) for ours, theirs in zip(computed, divisors, strict=True)
    ):
        raise CheckpointError(
            f"{meta.path}: tensor rope_freqs.weight is not what scaling of type llama3 by {factor:g}, with frequency "
            f"factors {low:g} and {high:g} and {original} positions, gives, and nothing else is supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _windows(meta: Metadata, config: dict[str, Any], window: int | None, period: int) -> None:
    """sliding_window and layer_types: every so manieth layer sees everything, or as an array says."""
    layers = config["num_hidden_layers"]
    pattern = meta.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 1:
        pattern = [bool((layer + 1) % pattern) for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise meta.refused("attention.sliding_window_pattern", f"{pattern!r:.80} is not understood")
    config["layer_types"] = ["sliding_attention" if window and slides else "full_attention" for slides in pattern]
    if window:
        config["sliding_window"] = window


def _query_scale(config: dict[str, Any], layers_of_27b: int) -> None:
    """Only the largest of a generation scales by another size than a head's, and nothing else in the file says so."""
    largest = config["num_hidden_layers"] == layers_of_27b
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    )
    config["hidden_activation"] = "gelu_pytorch_tanh"


def _gemma2(meta: Metadata, config: dict[str, Any]) -> None:
    _query_scale(config, 46)
    _windows(meta, config, meta.integer("attention.sliding_window", 4096), 2)
    config["attn_logit_softcapping"] = meta.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = meta.number("final_logit_softcapping", 30.0)


def _gemma3(meta: Metadata, config: dict[str, Any]) -> None:
    _query_scale(config, 62)
    _windows(meta, config, meta.optional_integer("attention.sliding_window"), 6)
    if cap := meta.optional_number("final_logit_softcapping"):
        config["final_logit_softcapping"] = cap
    local = {"rope_type": "default", "rope_theta": meta.number("rope.freq_base_swa", 10000.0)}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}


def _phi3(meta: Metadata, config: dict[str, Any]) -> None:
    # 0 is none. llama.cpp itself leaves the window out, and says that results suffer.
    config["sliding_window"] = meta.optional_integer("attention.sliding_window")
    if original := meta.optional_integer(_ORIGINAL):
        config["original_max_position_embeddings"] = original


def _granite(meta: Metadata, config: dict[str, Any]) -> None:
    config["embedding_multiplier"] = meta.optional_number("embedding_scale") or 1.0
    config["residual_multiplier"] = meta.optional_number("residual_scale") or 1.0
    config["attention_multiplier"] = meta.optional_number("attention.scale") or config["head_dim"] ** -0.5
    config["logits_scaling"] = meta.number("logit_scale")


def _smollm3(meta: Metadata, config: dict[str, Any]) -> None:
    # Every fourth layer, in llama.cpp's code too
    config["no_rope_layer_interval"] = 4
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
