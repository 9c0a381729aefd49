"""Rope: the rotary embedding of a kind of layer, as config.json says it in its old and new spelling. No torch.

    default    theta^(-2i/dims)
    linear     that, divided by a factor: Chen et al., "Position Interpolation", 2023
    llama3     long waves are divided by it, short ones are not, those between are mixed: Llama 3.1, 2024
    yarn       the same over a ramp of pairs, and scores grow with its logarithm: Peng et al., "YaRN", 2023
    longrope   each pair has a factor of its own, of two lists: Ding et al., "LongRoPE", 2024

`dynamic` is refused: its frequencies depend on the longest sequence so far, so what a request gets would depend on
what ran before it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged.errors import CheckpointError

Json = Mapping[str, Any]
MOST = 1e30  # beyond which no number of a config has a meaning
KINDS = ("default", "linear", "llama3", "yarn", "longrope")
# What each kind reads besides rope_type and rope_theta; anything else of it is refused.
_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        }
    ),
    "longrope": frozenset(
        {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"}
    ),
}
_EVERY_KIND = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True)
class Rope:
    """A kind of rotary embedding and its numbers; worker/layers.py computes with them."""

    kind: str  # of KINDS
    dims: int  # of a head that are turned, the first ones
    theta: float
    scale: float = 1.0  # of cosine and sine
    factor: float = 1.0
    trained: int = 0  # tokens that the model was trained with before its positions were scaled
    between: tuple[float, float] = (0.0, 0.0)  # llama3: low_freq_factor, high_freq_factor; yarn: beta_fast, beta_slow
    truncate: bool = True  # yarn: the ramp begins and ends at whole pairs
    short_factors: tuple[float, ...] = ()  # longrope: where max_model_len is at most `trained`
    long_factors: tuple[float, ...] = ()  # longrope: where sequences may be longer


def read_rope(
    objects: Json,
    *,
    theta_field: str,
    theta_value: object,
    default_theta: float | None,
    head_dim: int,
    partial: object,
    max_positions: int,
    original_max: object,
    partly: bool,
    renamed: Json,
) -> Rope:
    """The rotary embedding that `objects` (by their name in config.json, any of them None) and the fields beside say.

    theta_field, theta_value: the old spelling of the base. default_theta: where nobody says; None warns, and is 10000.
    partial: share of a head that is turned, None is all. original_max: from beside the objects, where it comes first.
    partly: whether the family can turn less. renamed: old names of types. Raises CheckpointError with the field's name.
    """
    given = [(name, _object(name, value)) for name, value in objects.items() if value]
    if len(given) == 2:
        (first, a), (second, b) = given
        a, b = {**a, "rope_type": _kind(first, a, renamed)}, {**b, "rope_type": _kind(second, b, renamed)}
        for field in sorted((a.keys() | b.keys()) - {"type"}):
            if a.get(field, a) != b.get(field, b):  # one that only one of them has counts too: which would hold?
                raise CheckpointError(f"config.json: {first} and {second} give two different values of {field}")
    name, rope = given[0] if given else ("rope_parameters", {})
    kind = _kind(name, rope, renamed)
    if unknown := sorted(rope.keys() - _EVERY_KIND - _FIELDS[kind]):
        raise CheckpointError(
            f"config.json: {name}.{unknown[0]} is not supported for a rotary embedding of type {kind}"
        )
    theta = _same(theta_field, theta_value, rope.get("rope_theta"))
    if theta is None:
        if default_theta is None:
            warnings.warn(f"config.json gives no {theta_field}: 10000 is taken, as transformers does", stacklevel=4)
        theta = default_theta or 10000.0
    if theta <= 1:
        raise CheckpointError(f"config.json: {theta_field} must be more than 1, not {theta}")
    share = _same("partial_rotary_factor", partial, rope.get("partial_rotary_factor"))
    if share not in (None, 1.0) and not partly:
        raise CheckpointError("config.json: partial_rotary_factor is not supported for this family")
    if share is not None and share > 1:
        raise CheckpointError(f"config.json: partial_rotary_factor must be at most 1, not {share}")
    dims = head_dim if share is None else int(head_dim * share)
    if dims % 2 or dims < 2:
        raise CheckpointError(f"config.json: {dims} of {head_dim} dimensions of a head turn, which is no pairs")
    trained = original_max if original_max is not None else rope.get("original_max_position_embeddings")
    trained = max_positions if trained is None else _whole(f"{name}.original_max_position_embeddings", trained)
    if kind == "longrope" and trained < 2:
        raise CheckpointError(f"config.json: {name}.original_max_position_embeddings must be more than {trained}")
    return _of_kind(kind, dims, theta, _Fields(name, rope), trained, max_positions)


def _of_kind(kind: str, dims: int, theta: float, number: _Fields, trained: int, max_positions: int) -> Rope:
    if kind == "default":
        return Rope(kind, dims, theta)
    factor = number("factor", None if kind in ("linear", "llama3") else max_positions / trained)
    if kind == "linear":
        return Rope(kind, dims, theta, factor=factor)
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise CheckpointError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
        return Rope(kind, dims, theta, factor=factor, trained=trained, between=(low, high))
    if kind == "yarn":
        between = number.optional("beta_fast") or 32.0, number.optional("beta_slow") or 1.0
        return Rope(
            kind, dims, theta, _yarn_scale(factor, number), factor, trained, between, number.flag("truncate", True)
        )
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    short, long = number.list("short_factor", dims // 2), number.list("long_factor", dims // 2)
    return Rope(
        kind, dims, theta, number("attention_factor", scale), factor, trained, short_factors=short, long_factors=long
    )


class _Fields:
    """Numbers of one object of config.json."""

    def __init__(self, name: str, rope: Json) -> None:
        self._name, self._rope = name, rope

    def __call__(self, field: str, default: float | None = None) -> float:
        value = self._rope.get(field)
        return _positive(f"{self._name}.{field}", default if value is None else value)

    def optional(self, field: str) -> float | None:
        """None also for 0, as in transformers."""
        return self(field) if self._rope.get(field) else None

    def list(self, field: str, count: int) -> tuple[float, ...]:
        values = self._rope.get(field)
        if not isinstance(values, list) or len(values) != count:
            found = f"{len(values)}" if isinstance(values, list) else repr(values)[:80]
            raise CheckpointError(f"config.json: {self._name}.{field} must be a list of {count} numbers, not {found}")
        return tuple(_positive(f"{self._name}.{field}", value) for value in values)

    def flag(self, field: str, default: bool) -> bool:
        """False for null, as in transformers."""
        value = self._rope.get(field, default)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"config.json: {self._name}.{field} must be true or false, not {value!r:.80}")
        return bool(value)


def _yarn_scale(factor: float, number: _Fields) -> float:
    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    mscale, all_dims = number.optional("mscale"), number.optional("mscale_all_dim")
    scale = grown(mscale) / grown(all_dims) if mscale and all_dims else grown(1.0)
    return number("attention_factor", scale)


def _object(name: str, value: object) -> Json:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {name} must be an object, not {value!r:.80}")
    return value


def _kind(name: str, rope: Json, renamed: Json) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = renamed.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "dynamic":
        raise CheckpointError(
            f"config.json: {name} of type 'dynamic' is not supported: what a request gets would depend on the longest "
            "sequence that ran before it"
        )
    if kind not in KINDS:
        raise CheckpointError(f"config.json: {name} of type {kind!r} is not supported, only {', '.join(KINDS)}")
    return str(kind)


def _same(what: str, *values: object) -> float | None:
    """The one value that is given, if any."""
    found = {_positive(what, value) for value in values if value is not None}
    if len(found) > 1:
        raise CheckpointError(f"config.json gives two different values of {what}: {sorted(found)}")
    return next(iter(found), None)


def _positive(what: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < MOST:
        raise CheckpointError(f"config.json: {what} must be a positive number, not {value!r:.80}")
    return float(value)


def _whole(what: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise CheckpointError(f"config.json: {what} must be a whole number from 1 to 2^31, not {value!r:.80}")
    return value
