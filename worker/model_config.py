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
LLAMA, GEMMA3 = "LlamaForCausalLM", "Gemma3ForCausalLM"
_MODEL_TYPES = {"llama": LLAMA, "gemma3_text": GEMMA3}  # for a config that names no architecture
_ACTIVATIONS = {LLAMA: ("hidden_act", "silu"), GEMMA3: ("hidden_activation", "gelu_pytorch_tanh")}
_REFUSED = (
    "attention_bias",
    "mlp_bias",
    "use_bidirectional_attention",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
_SLIDING, _FULL = "sliding_attention", "full_attention"
# What a Gemma 3 has where its config says nothing, as in transformers; the defaults beside the fields are Llama's.
_GEMMA3_DEFAULTS: Json = {
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder. head_dim is the model's own, which need not be hidden_size / num_heads."""

    architecture: str  # LLAMA or GEMMA3
    vocab_size: int  # rows of the embedding
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float  # base of the rotary embedding
    rope_factor: float  # positions are divided by it, but for layers with a window
    local_rope_theta: float  # base in layers with a window
    attention_scale: float  # of q k^T
    layer_windows: tuple[int | None, ...]  # for each layer the tokens that a query sees, its own included; None is all
    max_model_len: int  # positions that the model knows
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint

    @classmethod
    def from_hf(cls, config: Json, generation_config: Json | None = None) -> ModelConfig:
        """Read a config.json (old and new spellings) and a generation_config.json. Raises CheckpointError."""
        architecture = _architecture(config)
        gemma3 = architecture == GEMMA3
        if gemma3:
            config = {**_GEMMA3_DEFAULTS, **config}
        hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
        if config.get("head_dim") is None and hidden % heads:
            raise CheckpointError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = _integer(config, "head_dim", hidden // heads)
        if head_dim % 2:
            raise CheckpointError(f"config.json: head_dim {head_dim} is odd, and rotary embeddings turn pairs")
        kv_heads = _integer(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} query heads do not divide into {kv_heads} key/value heads")
        num_layers = _integer(config, "num_hidden_layers")
        rope_theta, rope_factor, local_rope_theta = _gemma3_ropes(config) if gemma3 else _llama_ropes(config)
        return cls(
            architecture=architecture,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_factor=rope_factor,
            local_rope_theta=local_rope_theta,
            attention_scale=(_number(config, "query_pre_attn_scalar") if gemma3 else head_dim) ** -0.5,
            layer_windows=_layer_windows(config, num_layers) if gemma3 else (None,) * num_layers,
            max_model_len=_integer(config, "max_position_embeddings", 2048),
            tie_word_embeddings=_tied(config),
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )

    @property
    def num_parameters(self) -> int:
        """Numbers in all weights, to know their bytes before torch is imported; tied ones count once."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        norms = 4 * self.hidden_size + 2 * self.head_dim if self.architecture == GEMMA3 else 2 * self.hidden_size
        layer = attention + 3 * self.intermediate_size * self.hidden_size + norms
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + self.num_layers * layer + self.hidden_size


def _architecture(config: Json) -> str:
    """The one of those that we know. Refuses what none of them does here."""
    named = config.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    by_type = [name for model_type, name in _MODEL_TYPES.items() if config.get("model_type") == model_type]
    known = [name for name in _ACTIVATIONS if name in (named or by_type)]
    if not known:
        name = ", ".join(map(str, named)) or config.get("model_type") or "no architecture"
        code = "; its own code (auto_map) is never run" if config.get("auto_map") else ""
        raise CheckpointError(f"config.json names {name}, and only {' and '.join(_ACTIVATIONS)} are supported{code}")
    key, activation = _ACTIVATIONS[known[0]]
    if (given := config.get(key, activation)) != activation:
        raise CheckpointError(f"config.json: {key} {given!r} is not supported, only {activation!r}")
    for name in _REFUSED:
        if config.get(name) is not None and config[name] is not False:
            raise CheckpointError(f"config.json: {name} is not supported")
    return known[0]


def _layer_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    """Of a Gemma 3, from `layer_types` (new) or `sliding_window_pattern` (old), every so manieth layer seeing all."""
    kinds = config.get("layer_types")
    if kinds is None:
        pattern = _integer(config, "sliding_window_pattern")
        kinds = [_SLIDING if i % pattern else _FULL for i in range(1, num_layers + 1)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types must list {num_layers} layers, not {kinds!r:.80}")
    for kind in kinds:
        if kind not in (_SLIDING, _FULL):
            raise CheckpointError(f"config.json: layer type {kind!r} is not supported, only {_SLIDING!r} and {_FULL!r}")
    window = _integer(config, "sliding_window") if _SLIDING in kinds else None
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _llama_ropes(config: Json) -> tuple[float, float, float]:
    """rope_theta, rope_factor, local_rope_theta."""
    theta, _ = _rope(config, "rope_theta", {name: config.get(name) for name in ("rope_parameters", "rope_scaling")})
    if theta is None:
        warnings.warn("config.json gives no rope_theta: 10000 is taken, as transformers does", stacklevel=3)
        theta = 10000.0
    return theta, 1.0, theta


def _gemma3_ropes(config: Json) -> tuple[float, float, float]:
    """rope_theta, rope_factor, local_rope_theta; the new spelling has an object for each type of layer."""
    new = config.get("rope_parameters") or {}
    if not isinstance(new, Mapping) or not new.keys() <= {_FULL, _SLIDING}:
        raise CheckpointError(f"config.json: rope_parameters must be of {_FULL} and {_SLIDING}, not {new!r:.80}")
    full = {f"rope_parameters.{_FULL}": new.get(_FULL), "rope_scaling": config.get("rope_scaling")}
    sliding = {f"rope_parameters.{_SLIDING}": new.get(_SLIDING)}
    theta, factor = _rope(config, "rope_theta", full, ("default", "linear"))
    local_theta, _ = _rope(config, "rope_local_base_freq", sliding)
    return theta or 1e6, factor, local_theta or 1e4  # as transformers does where nothing is given


def _rope(config: Json, old: str, objects: Json, types: tuple[str, ...] = ("default",)) -> tuple[float | None, float]:
    """Base, if there is one, and factor of a rotary embedding, from the field `old` and `objects` by name."""
    thetas = {_number(config, old)} if config.get(old) is not None else set[float]()
    factors = set[float]()
    for name, rope in objects.items():
        if not rope:
            continue
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"config.json: {name} must be an object, not {rope!r:.80}")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in types:
            only = " and ".join(map(repr, types))
            raise CheckpointError(f"config.json: {name} of type {kind!r} is not supported, only {only}")
        factors.add(_number(rope, "factor") if kind == "linear" else 1.0)
        if rope.get("rope_theta") is not None:
            thetas.add(_number(rope, "rope_theta"))
    for what, given in ((old, thetas), ("the factor of positions", factors)):
        if len(given) > 1:
            raise CheckpointError(f"config.json gives two different values of {what}: {sorted(given)}")
    return next(iter(thetas), None), next(iter(factors), 1.0)


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
    return bool(value)


def _integer(config: Json, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a whole number of at least 1, not {value!r}")
    return value


def _number(config: Json, name: str, default: float | None = None) -> float:
    value = config.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name} must be a positive number, not {value!r}")
    return float(value)
