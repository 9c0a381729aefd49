"""What a request forbids or weighs, applied to one row of logits before a token is sampled from it.

The order is vLLM's. First what must not come, by minus infinity:

    1. tokens outside the row's mask (constrained output)
    2. tokens outside allowed_token_ids
    3. the last token of a bad phrase whose other tokens end the history
    4. end tokens, before min_tokens are there
    5. tokens whose logit_bias is minus infinity

Then what changes logits: 6. logit_bias is added; 7. repetition_penalty, by which logits above zero of tokens in prompt
or output are divided and others multiplied; 8. frequency_penalty times how often a token is in the output is taken
away; 9. presence_penalty is, once for each token of the output. Temperature, top_k, top_p and min_p come after, in
worker.sampler. Log-probabilities are of the logits before all this.

One of 1 to 5 that would leave no token at all is passed over, so a row always has one. Most such requests are refused
before; what is left are phrases that forbid every token allowed at some place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from worker.step import Reset

Floats: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.integer]  # token ids
Ban: TypeAlias = Ids | npt.NDArray[np.bool_]  # token ids, or true at each of them


class Rules:
    """What one sequence's parameters demand of its logits."""

    def __init__(self, reset: Reset) -> None:
        params = reset.params
        self._num_prompt = reset.num_prompt
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency, self._presence = params.frequency_penalty, params.presence_penalty
        self._min_tokens, self._end_ids = params.min_tokens, reset.end_token_ids
        self._allowed = None if params.allowed_token_ids is None else np.asarray(params.allowed_token_ids)
        self._outside: Ban | None = None  # of those allowed, once the size of the vocabulary is known
        biases = params.biases
        self._banned = np.asarray([token for token, bias in biases if bias == -math.inf], dtype=np.int64)
        self._biased = np.asarray([token for token, bias in biases if bias != -math.inf], dtype=np.int64)
        self._biases = np.asarray([bias for _, bias in biases if bias != -math.inf], dtype=np.float32)
        self._bad_tokens = [phrase[0] for phrase in reset.bad_phrases if len(phrase) == 1]
        self._bad_ends = defaultdict[int, list[tuple[list[int], int]]](list)  # by the token before the last
        for phrase in reset.bad_phrases:
            if len(phrase) > 1:
                self._bad_ends[phrase[-2]].append((list(phrase[:-1]), phrase[-1]))
        self.weighs = (  # whether `weigh` does anything
            len(self._biased) > 0 or self._repetition != 1.0 or self._frequency != 0.0 or self._presence != 0.0
        )

    @classmethod
    def of(cls, reset: Reset) -> Rules | None:
        """The rules of a sequence; None where it has none."""
        params = reset.params
        plain = params.repetition_penalty == 1.0 and params.frequency_penalty == params.presence_penalty == 0.0
        ends = reset.end_token_ids and params.min_tokens
        if plain and not (params.biases or params.allowed_token_ids or ends or reset.bad_phrases):
            return None
        return cls(reset)

    def bans(self, tokens: Ids, size: int) -> list[Ban]:
        """What must not follow `tokens`, int [n], of `size` tokens; what binds most comes first."""
        result: list[Ban] = []
        if self._allowed is not None:
            if self._outside is None:
                self._outside = np.ones(size, dtype=np.bool_)
                self._outside[self._allowed] = False
            result.append(self._outside)
        bad = [
            last
            for before, last in self._bad_ends.get(int(tokens[-1]), ())
            if tokens[-len(before) :].tolist() == before
        ]
        if bad or self._bad_tokens:
            result.append(np.asarray(self._bad_tokens + bad))
        if len(tokens) - self._num_prompt < self._min_tokens and self._end_ids:
            # A user may name end tokens that the model does not have.
            result.append(np.asarray([token for token in self._end_ids if 0 <= token < size], dtype=np.int64))
        if len(self._banned):
            result.append(self._banned)
        return result

    def weigh(self, row: Floats, tokens: Ids) -> None:
        """Add and multiply in place what biases and penalties say of `row`, after `tokens`, int [n]."""
        if len(self._biased):
            row[self._biased] += self._biases
        if self._repetition != 1.0:
            values = row[tokens]  # of a token that comes again the same again
            row[tokens] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._frequency != 0.0 or self._presence != 0.0:
            seen, counts = np.unique(tokens[self._num_prompt :], return_counts=True)
            row[seen] -= (self._frequency * counts).astype(np.float32)
            row[seen] -= np.float32(self._presence)


def processed(row: Floats, tokens: Ids, rules: Rules | None, mask: bytes | None) -> Floats:
    """The logits float32 [vocab] of what follows `tokens`, int [n], by the rules and a mask (see Row).

    `row` itself stays as it is; it is given back where nothing applies.
    """
    bans: list[Ban] = [] if mask is None else [_outside(mask, len(row))]
    if rules is not None:
        bans += rules.bans(tokens, len(row))
    weighs = rules is not None and rules.weighs
    if not bans and not weighs:
        return row
    result = row.copy()
    for ban in bans:
        result[ban] = -math.inf
    if bans and result.max() == -math.inf:
        result = _as_far_as_possible(row, bans)
    if rules is not None and weighs:
        rules.weigh(result, tokens)
    return result


def _as_far_as_possible(row: Floats, bans: list[Ban]) -> Floats:
    """`row` under each ban that leaves a token."""
    result = row.copy()
    for ban in bans:
        less = result.copy()
        less[ban] = -math.inf
        if less.max() > -math.inf:
            result = less
    return result


def _outside(mask: bytes, size: int) -> npt.NDArray[np.bool_]:
    """bool [size]: true for tokens whose bit is not set; those beyond the mask have none."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=size, bitorder="little")
    return ~bits.view(np.bool_)
