"""ModelConfig: the shapes and constants of a checkpoint, read from its config.json. No torch, no transformers.

What is not understood is refused by name: a model that loads wrong is worse than one that does not load.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged.errors import CheckpointError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama architecture. head_dim is the model's own, which need not be hidden_size / num_heads."""

    vocab_size: int  # rows of the embedding
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_model_len: int  # positions that the model knows
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint

    @classmethod
    def from_hf(cls, config: Json, generation_config: Json | None = None) -> ModelConfig:
        """Read a config.json (old and new spellings) and a generation_config.json. Raises CheckpointError."""
        _refuse_unknown(config)
        hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
        if config.get("head_dim") is None and hidden % heads:
            raise CheckpointError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = _integer(config, "head_dim", hidden // heads)
        if head_dim % 2:
            raise CheckpointError(f"config.json: head_dim {head_dim} is odd, and rotary embeddings turn pairs")
        kv_heads = _integer(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} query heads do not divide into {kv_heads} key/value heads")
        return cls(
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(config),
            max_model_len=_integer(config, "max_position_embeddings", 2048),
            tie_word_embeddings=_tied(config),
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )


def _refuse_unknown(config: Json) -> None:
    architectures = config.get("architectures") or []
    architectures = architectures if isinstance(architectures, list) else [architectures]
    known = "LlamaForCausalLM" in architectures or (not architectures and config.get("model_type") == "llama")
    if not known:
        name = ", ".join(map(str, architectures)) or config.get("model_type") or "no architecture"
        code = "; its own code (auto_map) is never run" if config.get("auto_map") else ""
        raise CheckpointError(f"config.json names {name}, and only LlamaForCausalLM is supported{code}")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise CheckpointError(f"config.json: {name} is not supported")


def _rope_theta(config: Json) -> float:
    """The base of the rotary embedding, from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    sources = [config]
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"config.json: {key} must be an object, not {rope!r:.80}")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise CheckpointError(f"config.json: {key} of type {kind!r} is not supported, only 'default'")
        sources.append(rope)
    given = {_number(source, "rope_theta", 0.0) for source in sources if source.get("rope_theta") is not None}
    if len(given) > 1:
        raise CheckpointError(f"config.json gives two different values of rope_theta: {sorted(given)}")
    if not given:
        warnings.warn("config.json gives no rope_theta: 10000 is taken, as transformers does", stacklevel=3)
        return 10000.0
    return given.pop()


def _eos_token_ids(config: Json, generation_config: Json) -> tuple[int, ...]:
    """Those of both files, each an id, a list, or absent."""
    ids: dict[int, None] = {}
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        several = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(i) is int for i in several):
            raise CheckpointError(f"eos_token_id must be a token id or a list of them, not {value!r:.80}")
        ids.update(dict.fromkeys(several))
    return tuple(ids)


def _tied(config: Json) -> bool:
    value = config.get("tie_word_embeddings")
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: tie_word_embeddings must be true or false, not {value!r:.80}")
    return bool(value)  # absent is false: Llama's default


def _integer(config: Json, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a whole number of at least 1, not {value!r}")
    return value


def _number(config: Json, name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name} must be a positive number, not {value!r}")
    return float(value)
