"""ModelConfig: the shapes and constants of a checkpoint, read from its config.json. No torch, no transformers.

Every family is one decoder with other parameters: where its norms stand, which matrices have a bias, what its layers
see and how they turn. What is not understood is refused by name: a model that loads wrong is worse than one that does
not load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paged.errors import CheckpointError
from worker.families import ACTIVATIONS, FAMILIES, HARMLESS, MULTIPLIERS, REFUSED, Activation, Family, NormPlace, QKNorm
from worker.rope import MOST, Json, Rope, read_rope

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder. head_dim is the model's own, which need not be hidden_size / num_heads."""

    vocab_size: int  # rows of the embedding
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_scale: float  # of q k^T
    layer_windows: tuple[int | None, ...]  # for each layer the tokens that a query sees, its own included; None is all
    layer_ropes: tuple[Rope | None, ...]  # for each layer how queries and keys turn; None: they do not
    max_model_len: int  # positions that the model knows
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint
    norm_place: NormPlace = "before"
    norm_offset: float = 0.0  # added to the stored weights of norms
    qk_norm: QKNorm | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False  # q, k and v are one tensor, gate and up another
    activation: Activation = "silu"
    embedding_scale: float = 1.0  # rounded to the dtype, as Gemma's is; published multipliers of Granite are exact
    residual_scale: float = 1.0  # of what each half of a layer adds
    logits_divisor: float = 1.0
    attention_soft_cap: float = 0.0  # 0 is none
    logits_soft_cap: float = 0.0

    @classmethod
    def from_hf(cls, config: Json, generation_config: Json | None = None) -> ModelConfig:
        """Read a config.json (old and new spellings) and a generation_config.json. Raises CheckpointError."""
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        _refuse(config, architecture, family)
        config = {**family.defaults, **config}
        hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
        if config.get("head_dim") is None and hidden % heads:
            raise CheckpointError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = _integer(config, "head_dim", hidden // heads)
        if head_dim % 2:
            raise CheckpointError(f"config.json: head_dim {head_dim} is odd, and rotary embeddings turn pairs")
        kv_heads = _integer(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} query heads do not divide into {kv_heads} key/value heads")
        num_layers = _integer(config, "num_hidden_layers", most=10_000)
        windows = _layer_windows(config, family, num_layers)
        positions = _integer(config, "max_position_embeddings", 2048)
        ropes = _layer_ropes(config, family, windows, head_dim, positions)
        attention_scale, embedding_scale = head_dim**-0.5, 1.0
        if family.scales == "query":
            attention_scale, embedding_scale = _number(config, "query_pre_attn_scalar") ** -0.5, hidden**0.5
        elif family.scales == "multipliers":
            attention_scale = _number(config, "attention_multiplier", 1.0)
            embedding_scale = _number(config, "embedding_multiplier", 1.0)
        attention_bias = "attention_bias" in family.fields and _flag(config, "attention_bias")
        return cls(
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            attention_scale=attention_scale,
            layer_windows=windows,
            layer_ropes=ropes,
            max_model_len=_longest(config, positions, ropes),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            norm_place=family.norm_place,
            norm_offset=family.norm_offset,
            qk_norm=family.qk_norm,
            qkv_bias=family.qkv_bias or attention_bias,
            out_bias=attention_bias,
            mlp_bias="mlp_bias" in family.fields and _flag(config, "mlp_bias"),
            fused=family.fused,
            activation=_activation(config, family),
            embedding_scale=embedding_scale,
            residual_scale=_number(config, "residual_multiplier", 1.0),
            logits_divisor=_number(config, "logits_scaling", 1.0),
            attention_soft_cap=_soft_cap(config, "attn_logit_softcapping"),
            logits_soft_cap=_soft_cap(config, "final_logit_softcapping"),
        )

    @property
    def default_max_model_len(self) -> int:
        """Positions that an engine takes where nobody says: of longrope those up to which short factors count."""
        short = [rope.trained for rope in self.layer_ropes if rope is not None and rope.short_factors]
        return min([self.max_model_len, *short])


def _architecture(config: Json) -> str:
    """The one of those that we know."""
    named = config.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    by_type = next((name for name, it in FAMILIES.items() if it.model_type == config.get("model_type")), None)
    known = [name for name in FAMILIES if name in (named or [by_type])]
    if not known:
        name = ", ".join(map(str, named)) or config.get("model_type") or "no architecture"
        code = "; its own code (auto_map) is never run" if config.get("auto_map") else ""
        raise CheckpointError(f"config.json names {name}, and only {', '.join(FAMILIES)} are supported{code}")
    if by_type not in (None, known[0]):
        raise CheckpointError(f"config.json names {known[0]}, and its model_type {config['model_type']} is {by_type}")
    return known[0]


def _refuse(config: Json, architecture: str, family: Family) -> None:
    """Refuse what changes the computation, and what this family does not have here."""
    for name in sorted(REFUSED - family.fields - HARMLESS):
        value = config.get(name)
        no_scaling = value == 1 and name in (*MULTIPLIERS, "partial_rotary_factor")
        if value and not no_scaling:
            raise CheckpointError(f"config.json: {name} is not supported for {architecture}")
    kinds = config.get("layer_types")
    if family.windows != "types" and isinstance(kinds, list) and set(kinds) - {_FULL}:
        raise CheckpointError(f"config.json: layer_types other than {_FULL} are not supported for {architecture}")


def _activation(config: Json, family: Family) -> Activation:
    name, wanted = family.activation_field, family.activation
    given = config.get(name) or wanted
    if (given := "silu" if given == "swish" else given) != wanted:
        raise CheckpointError(f"config.json: {name} {given!r} is not supported, only {wanted!r}")
    return ACTIVATIONS[wanted]


def _layer_windows(config: Json, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """From `sliding_window` for all layers, or for those that `layer_types` (or what older configs have) names."""
    window = config.get("sliding_window")
    if family.windows == "none" or (family.windows == "every" and window is None):
        return (None,) * num_layers
    if family.windows == "every":
        return (_integer(config, "sliding_window"),) * num_layers
    kinds = config.get("layer_types")
    if "use_sliding_window" in family.fields and not _flag(config, "use_sliding_window"):
        if isinstance(kinds, list) and _SLIDING in kinds:
            raise CheckpointError(f"config.json: layer_types has {_SLIDING}, and use_sliding_window is not true")
        return (None,) * num_layers
    if kinds is None:
        kinds = [_SLIDING if slides else _FULL for slides in _sliding_layers(config, family, num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types must list {num_layers} layers, not {kinds!r:.80}")
    for kind in kinds:
        if kind not in (_SLIDING, _FULL):
            raise CheckpointError(f"config.json: layer type {kind!r} is not supported, only {_SLIDING!r} and {_FULL!r}")
    size = _integer(config, "sliding_window") if _SLIDING in kinds else None
    return tuple(size if kind == _SLIDING else None for kind in kinds)


def _sliding_layers(config: Json, family: Family, num_layers: int) -> list[bool]:
    """Which layers slide where `layer_types` is not there."""
    pattern = config.get("sliding_window_pattern", family.window_pattern)
    if family.window_pattern and pattern != family.window_pattern:
        raise CheckpointError(
            f"config.json: sliding_window_pattern must be {family.window_pattern}, as in transformers"
        )
    if pattern is not None:  # every so manieth layer sees all
        pattern = _integer({"sliding_window_pattern": pattern}, "sliding_window_pattern")
        return [i % pattern > 0 for i in range(1, num_layers + 1)]
    if config.get("sliding_window") is None:
        return [False] * num_layers
    if "no_rope_layers" in family.fields:
        return [not turns for turns in _turning_layers(config, num_layers)]
    first = config.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise CheckpointError(f"config.json: max_window_layers must be a whole number, not {first!r:.80}")
    return [i >= first for i in range(num_layers)]


def _turning_layers(config: Json, num_layers: int) -> list[bool]:
    """Which layers of a SmolLM3 have a rotary embedding; `no_rope_layers` has, in spite of its name, a 1 for those."""
    given = config.get("no_rope_layers")
    if given is None:
        interval = _integer(config, "no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or not all(one in (0, 1) for one in given):
        raise CheckpointError(f"config.json: no_rope_layers must list {num_layers} times 0 or 1, not {given!r:.80}")
    return [bool(one) for one in given[:num_layers]]


def _layer_ropes(
    config: Json, family: Family, windows: tuple[int | None, ...], head_dim: int, positions: int
) -> tuple[Rope | None, ...]:
    new = config.get("rope_parameters") or {}
    by_kind = isinstance(new, Mapping) and bool(new.keys() & {_FULL, _SLIDING})
    if by_kind and (family.ropes != "two" or new.keys() - {_FULL, _SLIDING}):
        wanted = "one object for all layers" if family.ropes == "one" else f"of {_FULL} and {_SLIDING}"
        raise CheckpointError(f"config.json: rope_parameters must be {wanted}, not {new!r:.80}")
    original = config.get("original_max_position_embeddings")

    def read(objects: Json, field_name: str, default: float | None) -> Rope:
        return read_rope(
            objects,
            theta_field=field_name,
            theta_value=config.get(field_name),
            default_theta=default,
            head_dim=head_dim,
            partial=config.get("partial_rotary_factor"),
            max_positions=positions,
            original_max=original,
            partly="partial_rotary_factor" in family.fields,
            renamed=family.rope_names,
        )

    scaling = {"rope_scaling": config.get("rope_scaling")}
    if family.ropes == "one":
        rope = read({"rope_parameters": new, **scaling}, "rope_theta", family.theta)
        turning = _turning_layers(config, len(windows)) if "no_rope_layers" in family.fields else [True] * len(windows)
        return tuple(rope if turns else None for turns in turning)
    if new and not by_kind:
        raise CheckpointError(f"config.json: rope_parameters must be of {_FULL} and {_SLIDING}, not {new!r:.80}")
    everywhere = read({f"rope_parameters.{_FULL}": new.get(_FULL), **scaling}, "rope_theta", family.theta)
    local = read({f"rope_parameters.{_SLIDING}": new.get(_SLIDING)}, "rope_local_base_freq", 1e4)
    return tuple(everywhere if window is None else local for window in windows)


def _longest(config: Json, positions: int, ropes: tuple[Rope | None, ...]) -> int:
    """Positions that the model knows: those of the config, but where they are the ones that yarn still extends."""
    says_original = any(
        isinstance(it, Mapping) and it.get("original_max_position_embeddings")
        for it in (config.get("rope_parameters"), config.get("rope_scaling"))
    )
    extended = [int(rope.trained * rope.factor) for rope in ropes if rope is not None and rope.kind == "yarn"]
    return max([positions, *extended]) if says_original else positions


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


def _flag(config: Json, name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} must be true or false, not {value!r:.80}")
    return bool(value)


def _integer(config: Json, name: str, default: int | None = None, most: int = 2**31 - 1) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise CheckpointError(f"config.json: {name} must be a whole number from 1 to {most:,}, not {value!r:.80}")
    return value


def _number(config: Json, name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < MOST:
        raise CheckpointError(f"config.json: {name} must be a positive number, not {value!r:.80}")
    return float(value)


def _soft_cap(config: Json, name: str) -> float:
    return 0.0 if config.get(name) is None else _number(config, name)
