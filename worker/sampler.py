"""Logits to token ids and log-probabilities. A row's token depends on its own logits, parameters, seed and position.

Random numbers come from a counter-based generator: one uniform number a token, a hash of (seed, index of the sequence
in its request, position), so nothing is consumed and nothing depends on neighbours, order, or an earlier preemption.
The token is where that number falls in the cumulated probabilities, in order of id, in float64.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from worker.inputs import SequenceState
from worker.logits import Floats, processed
from worker.step import Logprobs, SamplingParams

Ids: TypeAlias = npt.NDArray[np.int64]
Weights: TypeAlias = npt.NDArray[np.float64]
_BLOCK = 256  # weights that are summed together


def uniform(seed: int, index: int, position: int) -> float:
    """The random number in [0, 1) of the token at `position` of the sequence `index` of a request with `seed`."""
    counter = struct.pack("<QIQ", seed % 2**64, index, position)
    return (int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little") >> 11) * 2.0**-53


class Draw(NamedTuple):
    """What one row of logits is sampled for: the token at `position` of a sequence, after tokens[:position]."""

    state: SequenceState
    position: int
    mask: bytes | None = None  # see Row

    @property
    def uniform(self) -> float:
        reset = self.state.reset
        return uniform(reset.seed, reset.index, self.position)


def draw(logits: Tensor, draws: SequenceOf[Draw], best: Tensor | None = None) -> list[int]:
    """The token of each row of `logits`, float [rows, vocab], which are taken as float32 and left as they are.

    best: int64 [rows], the likeliest token of each, where it is known.
    """
    if not draws:
        return []
    tokens: list[int] = (logits.argmax(dim=-1) if best is None else best).tolist()
    rows: npt.NDArray[np.float32] | None = None
    for i, one in enumerate(draws):
        params, rules = one.state.reset.params, one.state.rules
        ruled = rules is not None or one.mask is not None
        if params.greedy and not ruled:
            continue
        if rows is None:
            rows = logits.float().cpu().numpy()
        row = processed(rows[i], one.state.tokens[: one.position], rules, one.mask) if ruled else rows[i]
        tokens[i] = int(row.argmax()) if params.greedy else sample(row, params, one.uniform)
    return tokens


def sample(logits: Floats, params: SamplingParams, number: float) -> int:
    """The token of float32 logits [vocab] by temperature, top_k, top_p and min_p, where `number` in [0, 1) falls.

    Where the greatest of them is no finite number, it is that one: no other row may notice.
    """
    with np.errstate(all="ignore"):  # what overflows or vanishes does so on purpose
        if not np.isfinite(logits.max()):
            return int(logits.argmax())
        ids, weights = filtered(logits, params)
        place = _place(weights, number)
        return place if ids is None else int(ids[place])


def filtered(logits: Floats, params: SamplingParams) -> tuple[Ids | None, Weights]:
    """What temperature, top_k, top_p and min_p, in this order, leave of float32 logits [vocab], the greatest finite.

    Ids, int64 [n], ascending (None: all), and weights, float64 [n], exp((logit - greatest) / temperature). The
    likeliest always stays. Of equally likely tokens the lower id is kept first, so top_k keeps exactly k.
    """
    top, temperature, ids = logits.max(), params.temperature, None
    if params.top_k is not None and params.top_k < len(logits):
        ids = _greatest(logits, params.top_k)
    elif params.top_p == 1.0 and params.min_p > 0.0:  # about; what is rounded must not lose any
        least = float(top) + temperature * math.log(params.min_p)
        ids = np.flatnonzero(logits >= np.float32(least - 1e-6 * (abs(least) + abs(float(top)))))
    weights = (logits if ids is None else logits[ids]).astype(np.float64)
    weights -= np.float64(top)
    if temperature != 1.0:
        weights /= temperature
    np.exp(weights, out=weights)
    for keep in (_nucleus, _likely):
        if (places := keep(weights, params)) is not None:
            ids, weights = places if ids is None else ids[places], weights[places]
    return ids, weights


def _place(weights: Weights, number: float) -> int:
    """The place of the share of the cumulated weights in which `number` falls; what has no weight has none."""
    ends = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)).cumsum()  # one by one they take 4 times as long
    target = number * ends[-1]
    # `right` skips what has no weight at the start; a target may be rounded up to the sum.
    block = min(int(np.searchsorted(ends, target, side="right")), len(ends) - 1)
    first = block * _BLOCK
    borders = weights[first : first + _BLOCK].cumsum()
    if block:
        borders += ends[block - 1]
    place = int(np.searchsorted(borders, target, side="right"))
    return first + place if place < len(borders) else int(weights[: first + place].nonzero()[0][-1])


def _greatest(values: Floats, count: int) -> Ids:
    """Places of the `count` greatest, of equals the first; values float32 [n], n > count."""
    candidates: Ids | None = None
    columns = max(4 * count, 1024)
    if rows := len(values) // columns:
        # Of the greatest of each column, `count` bound the least that is wanted from below.
        tops = values[: rows * columns].reshape(rows, columns).max(axis=0)
        candidates = np.flatnonzero(values >= np.partition(tops, columns - count)[columns - count])
        values = values[candidates]
    places = _first(values, np.partition(values, len(values) - count)[len(values) - count], count)
    return places if candidates is None else candidates[places]


def _nucleus(weights: Weights, params: SamplingParams) -> Ids | None:
    """Places of the greatest weights until they reach top_p of all, of equals the first; None: all."""
    if params.top_p == 1.0:
        return None
    total = weights.sum()
    # All that are less than this are together less than what may be missing: only the others need sorting.
    candidates = np.flatnonzero(weights >= 0.999 * (1.0 - params.top_p) * total / len(weights))
    greatest = np.sort(weights[candidates])[::-1]
    before = greatest.cumsum() - greatest  # what is likelier than each
    count = max(int(np.searchsorted(before, params.top_p * total)), 1)
    return candidates[_first(weights[candidates], greatest[count - 1], count)]


def _likely(weights: Weights, params: SamplingParams) -> Ids | None:
    """Places of weights of at least min_p; None: all."""
    return None if params.min_p == 0.0 else np.flatnonzero(weights >= params.min_p)


def _first(values: Floats | Weights, least: np.floating, count: int) -> Ids:
    """Places of the `count` greatest values, the last of which is `least`; of equals the first."""
    keep = values > least
    keep[np.flatnonzero(values == least)[: count - np.count_nonzero(keep)]] = True
    return np.flatnonzero(keep)


def logprobs(logits: Tensor, token_ids: SequenceOf[int], counts: SequenceOf[int | None]) -> list[Logprobs | None]:
    """Log-probabilities of the raw distribution (log-softmax of float32 logits [rows, vocab]) of the chosen tokens.

    counts: of each row, how many of the likeliest to add; None gives None.
    """
    result: list[Logprobs | None] = []
    for row, token, count in zip(logits, token_ids, counts, strict=True):
        if count is None:
            result.append(None)
            continue
        values = row.float().log_softmax(dim=-1)
        chosen = values[token]
        top = values.topk(min(count, len(values)))
        rank = int((values > chosen).sum()) + 1
        result.append(Logprobs(float(chosen), rank, tuple(top.indices.tolist()), tuple(top.values.tolist())))
    return result
