"""Beam search: which continuations live on, which are kept as finished, and when it is over. Pure Python.

The semantics are those of transformers 5.24 (`GenerationMixin._beam_search`). At every step all continuations of all
live beams are ranked by cumulative log-probability. Of those that end (in an end token, or at max_tokens) only the
ones among the first beam_width are kept, and of all kept so far the beam_width with the best scores; the best
beam_width of the others live on. The score is

    cumulative_logprob / len(tokens) ** length_penalty

where tokens are the generated ones, the end token included. Log-probabilities are natural, of the raw softmax.

Two things are ours. Sums are Python floats, not float32. Of equals the lower beam comes first, then the lower token id,
and what finished earlier; torch.topk leaves that open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paged.errors import RequestError, shown

_MOST = 2**31  # of whole numbers, as in SamplingParams
_MAX_PENALTY = 10.0  # a power of a length must stay a float, and not become 0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search for the likeliest continuations of one prompt. Field names are vLLM's where it has them.

    beam_width: beams that live at once, and results; 1 is greedy.
    max_tokens: most tokens to generate, the end token included.
    ignore_eos: go on past the model's own end tokens.
    length_penalty: exponent of the length by which the cumulative log-probability is divided; above 0 favours long
        results, below 0 short ones; in [-10, 10].
    early_stopping: when to end before max_tokens, once there are beam_width finished hypotheses. True: at once. False:
        when the best live beam, scored at its present length, does not beat the worst of them. "never": the same, but
        scored at max_tokens where length_penalty is above 0, so that nothing better can be missed.

    Raises RequestError, which names the field, for a value out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
                raise RequestError(f"{name} must be a whole number from 1 to {_MOST}, not {shown(value)}", name)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, not {shown(self.ignore_eos)}", "ignore_eos")
        penalty = self.length_penalty
        is_number = isinstance(penalty, (int, float)) and not isinstance(penalty, bool)
        if not is_number or not -_MAX_PENALTY <= penalty <= _MAX_PENALTY:
            raise RequestError(
                f"length_penalty must be a number [-{_MAX_PENALTY:g}, {_MAX_PENALTY:g}], not {shown(penalty)}",
                "length_penalty",
            )
        object.__setattr__(self, "length_penalty", float(penalty))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f'early_stopping must be true, false or "never", not {shown(self.early_stopping)}', "early_stopping"
            )


@dataclass(frozen=True, slots=True)
class Branch:
    """A beam that lives on: `parent` is the index of the one it continues, among those before the step."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished continuation: its tokens without the prompt, and with the end token that it may end in."""

    tokens: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


class Beams:
    """The search for one prompt."""

    def __init__(self, params: BeamSearchParams, eos_token_ids: Iterable[int] = ()) -> None:
        self.params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        # transformers ranks max(2, 1 + end tokens) * beam_width of all beams together. Of one beam no more can matter
        # than beam_width that go on, and the end tokens among them.
        self.num_candidates = params.beam_width + len(self._eos)
        self._length = 0  # tokens of every live beam
        self._live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]  # tokens, cumulative log-probability; best first
        self._finished: list[Hypothesis] = []  # best first

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Branch]:
        """One step. Returns the beams that live on, best first; none when the search is over.

        candidates[i]: the `num_candidates` likeliest next tokens of live beam i (all, if the vocabulary has fewer) and
        their log-probabilities. At the first step one beam lives, the prompt; then those that the last call returned.
        """
        width, self._length = self.params.beam_width, self._length + 1
        ranked = sorted(
            (-(before + logprob), parent, token)
            for parent, ((_, before), likeliest) in enumerate(zip(self._live, candidates, strict=True))
            for token, logprob in likeliest
        )
        branches: list[Branch] = []
        live: list[tuple[tuple[int, ...], float]] = []
        for rank, (negative, parent, token) in enumerate(ranked):
            stops = token in self._eos
            ends = stops or self._length == self.params.max_tokens
            if ends and rank < width:
                tokens, score = (*self._live[parent][0], token), self._score(-negative, self._length)
                self._finished.append(Hypothesis(tokens, -negative, score, "stop" if stops else "length"))
            elif not ends and len(live) < width:
                live.append(((*self._live[parent][0], token), -negative))
                branches.append(Branch(parent, token))
        self._finished.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self._finished[width:]
        self._live = live
        if self._settled():
            self._live, branches = [], []
        return branches

    def results(self) -> list[Hypothesis]:
        """The finished hypotheses, best first.

        There are beam_width of them once the search is over (fewer only if the vocabulary has not that many
        continuations), and before that those found so far, which may be none.
        """
        return list(self._finished)

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self.params.length_penalty)

    def _settled(self) -> bool:
        """Whether going on is taken to be of no use."""
        params = self.params
        if not self._live:
            return True
        if len(self._finished) < params.beam_width:
            return False
        if params.early_stopping is True or params.beam_width == 1:  # transformers has no search of width 1: greedy
            return True
        longest = params.early_stopping == "never" and params.length_penalty > 0
        best = self._score(self._live[0][1], params.max_tokens if longest else self._length)
        return best <= self._finished[-1].score
