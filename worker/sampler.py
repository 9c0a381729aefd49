"""Logits to token ids and log-probabilities. A row's token depends on its own logits, parameters, seed and position.

Random numbers come from a counter-based generator: one uniform number a token, a hash of (seed, index of the sequence
in its request, position), so nothing is consumed and nothing depends on neighbours, order, or an earlier preemption.
The token is where that number falls in the cumulated probabilities, in order of id, in float64.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from worker.inputs import SequenceState
from worker.step import Logprobs, SamplingParams


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
    """The token of each row of `logits`, float [rows, vocab].

    best: int64 [rows], the likeliest token of each, where it is known.
    """
    if not draws:
        return []
    params = [one.state.reset.params for one in draws]
    uniforms = [0.0 if one.greedy else each.uniform for one, each in zip(params, draws, strict=True)]
    return sample(logits, params, uniforms, best)


def sample(
    logits: Tensor,
    params: SequenceOf[SamplingParams],
    uniforms: SequenceOf[float],
    best: Tensor | None = None,
) -> list[int]:
    """One token id for each row of `logits`, float [rows, vocab], by temperature, top_k, top_p and min_p.

    `uniforms` are used where a row is not greedy. best: int64 [rows], the likeliest token of each, where it is known.
    """
    tokens: list[int] = (logits.argmax(dim=-1) if best is None else best).tolist()
    for i, param in enumerate(params):
        if not param.greedy:
            weights = filtered(logits[i], param)
            total = weights.cumsum(0)
            if not total[-1] > 0:
                continue  # infinite logits, or none that is a number: no other row may notice
            target = torch.tensor(uniforms[i], dtype=torch.float64, device=total.device) * total[-1]
            # `right` skips tokens of no weight at the start; the clamp is for a product that rounds up to the total.
            token = int(torch.searchsorted(total, target, right=True).clamp(max=len(total) - 1))
            tokens[i] = token if weights[token] > 0 else int(weights.nonzero()[-1])
    return tokens


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """What temperature, top_k, top_p and min_p, in this order, leave of one row: float64 [vocab], not normalised.

    Of equally likely tokens the lower id is kept first, so top_k keeps exactly k. The likeliest token always stays.
    """
    scaled = logits.double()
    scaled = (scaled - scaled.max()) / params.temperature
    if params.top_k is not None and params.top_k < len(scaled):
        scaled = scaled.masked_fill(~_top_k(scaled, params.top_k), float("-inf"))
    weights = scaled.exp()  # the likeliest has weight 1
    if params.top_p < 1.0:
        ordered, ids = weights.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered  # what is likelier than each
        drop = before >= params.top_p * ordered.sum()
        drop[0] = False
        weights[ids[drop]] = 0.0
    if params.min_p > 0.0:
        weights = weights.masked_fill(weights < params.min_p, 0.0)
    return weights


def _top_k(values: Tensor, k: int) -> Tensor:
    """bool [vocab]: the k greatest, of equals the lowest ids."""
    least = values.topk(k).values[-1]
    above = values > least
    ties = values == least
    return above | (ties & (ties.cumsum(0) <= k - above.sum()))


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
