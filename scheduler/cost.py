"""What a step takes, without running it: a sum of a few terms, fitted to steps of the real model or given as numbers.

    seconds = step + token * tokens + more * max(0, tokens - few)
              + sample * sampled + read * read tokens + pair * pairs

    step         whatever is in it: weights are read once, the engine does its part
    tokens       of all rows: multiplied with the weights, which for the first `few` hides behind reading them
    sampled      rows that sample: the head, the draw, and the engine's part for a sequence
    read tokens  K and V that attention reads: the tokens before each row (its context), but what is shared only once
    pairs        a query and a key that it sees: a chunk of n tokens after c others has n * c + n * (n + 1) / 2

In layers with a window a row sees no more than that of its context; read tokens and pairs are averaged over the groups
of layers. Terms are never negative, so more work never takes less time.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged.block_table import Windows
from paged.errors import ConfigError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds for each unit of each term. error: of the fit, the median of |said - measured| / measured."""

    step: float
    token: float = 0.0
    more: float = 0.0
    sample: float = 0.0
    read: float = 0.0
    pair: float = 0.0
    few: int = 0
    error: float | None = None
    measured: str = ""  # what it was fitted to, in words

    def __post_init__(self) -> None:
        for name in TERMS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
                raise ConfigError(f"{name} of a cost model must be seconds, a number of at least 0, not {value!r:.40}")
        if self.few < 0 or self.few != int(self.few):
            raise ConfigError(
                f"few of a cost model must be a whole number of tokens of at least 0, not {self.few!r:.40}"
            )
        if self.step + self.token == 0:
            raise ConfigError("a cost model in which a step takes no time answers nothing: give step, or token")

    def seconds(self, tokens: float, sampled: float, read: float, pairs: float) -> float:
        """Of one step."""
        attention = self.read * read + self.pair * pairs
        return (
            self.step + self.token * tokens + self.more * max(0, tokens - self.few) + self.sample * sampled + attention
        )

    def __str__(self) -> str:
        called = dict(zip(TERMS, TERMS, strict=True)) | {"more": f"token after {self.few:g}"}
        parts = (f"{getattr(self, name) * 1e6:.4g} us * {called[name]}" for name in TERMS[1:] if getattr(self, name))
        return " + ".join((f"{self.step * 1e3:.4g} ms", *parts))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


FEWS = (8, 16, 32, 64, 128, 256)
TERMS = tuple(field.name for field in fields(CostModel))[:6]


def parse_cost(text: str) -> CostModel:
    """A file that `save` wrote, or numbers: step=0.006,token=0.0004. Raises ConfigError."""
    if "=" in text:
        parts = [part.split("=", 1) for part in text.split(",")]
        try:
            given: dict[str, Any] = {part[0].strip(): float(part[1]) for part in parts}
        except (ValueError, IndexError):
            raise ConfigError(
                f"cost {text!r:.80} is not understood: give numbers as step=0.006,token=0.0004, or a file"
            ) from None
    else:
        try:
            given = json.loads(Path(text).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cost {text} cannot be read as JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError(f'cost {text} must hold {{"step": seconds, ...}}')
    known = {field.name for field in fields(CostModel)}
    if "step" not in given or not given.keys() <= known:
        raise ConfigError(f"a cost model has step, and may have {', '.join(TERMS[1:])}: found {', '.join(given)}")
    return CostModel(**given)


def attended(num_tokens: int, context: int, windows: Windows = (None,)) -> tuple[float, float]:
    """Read tokens and pairs of one row that computes so many tokens after `context` others."""
    read = pairs = 0
    for window in windows:
        # Every query sees its own key and of those before it at most window - 1.
        seen = context if window is None else min(context, window - 1)
        growing = num_tokens if window is None else min(num_tokens, window - 1 - seen)  # that see one more each
        read += seen
        pairs += growing * seen + growing * (growing + 1) // 2 + (num_tokens - growing) * (window or 0)
    return read / len(windows), pairs / len(windows)


def fit(works: SequenceOf[SequenceOf[float]], seconds: SequenceOf[float]) -> CostModel:
    """The model, no term negative, whose squared relative errors are least.

    works: of each measured step what `CostModel.seconds` takes, as seconds: what it took.
    The least squares under that constraint are the plain ones of some subset of the terms, so every subset is tried
    (with `step`, which every step has), and for `few` some powers of two.
    """
    measured, given = np.array(seconds), np.array(works)
    best, least, error, few = np.zeros(len(TERMS)), np.inf, 0.0, 0
    for some in FEWS:
        more = np.maximum(0, given[:, 0] - some)
        a = np.column_stack((np.ones(len(given)), given[:, 0], more, given[:, 1:])) / measured[:, None]
        for size in range(len(TERMS)):
            for others in itertools.combinations(range(1, len(TERMS)), size):
                chosen = (0, *others)
                found = np.linalg.lstsq(a[:, chosen], np.ones(len(a)), rcond=None)[0]
                rest = float(((a[:, chosen] @ found - 1) ** 2).sum())
                if rest < least * (1 - 1e-9) and (found >= 0).all():
                    best, least, few = np.zeros(len(TERMS)), rest, some
                    best[[*chosen]] = found
                    error = float(np.median(np.abs(a @ best - 1)))
    step, token, more_s, sample, read, pair = best.tolist()
    return CostModel(step, token, more_s, sample, read, pair, few if more_s else 0, error=error)
