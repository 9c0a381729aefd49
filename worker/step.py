"""Step and StepResult: the messages between a scheduler and a worker. Frozen, torch-free, picklable.

A step carries deltas: a row whose sequence the worker knows brings only what has changed in its block tables; its next
token is the last one that the worker itself sampled for it, unless the row brings another. A sequence that is new to
the worker, or comes back after a preemption, brings a `Reset` with its whole state. Steps are numbered; a worker
refuses a gap.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from paged.errors import RequestError, shown
from paged.manager import TableChange
from paged.pages import Mark, Move

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 10_000
_MAX_FLOAT = sys.float_info.max
MAX_BIAS = 100.0  # OpenAI's
GREEDY_BELOW = 1e-5  # a temperature under this is argmax: dividing by it could only overflow


def _as_tuple(value: object, item: type, name: str) -> tuple[object, ...]:
    """`value` (absent, one item, or several) as a tuple of `item`; anything else is refused by name."""
    items = () if value is None else (value,) if isinstance(value, item) else value
    if not isinstance(items, (list, tuple, set, frozenset)) or not all(type(i) is item for i in items):
        raise RequestError(f"{name} must be {item.__name__} or a list of them, not {shown(value)}", name)
    return tuple(items)


def _as_biases(value: object) -> tuple[tuple[int, float], ...]:
    """A mapping of token ids to biases, or its pairs, as pairs by id; anything else is refused."""
    given = () if value is None else tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(given, (list, tuple)) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
        raise RequestError(f"logit_bias must map token ids to numbers, not {shown(value)}", "logit_bias")
    pairs = dict[int, float]()
    for token, bias in given:
        if type(token) is not int:
            raise RequestError(f"logit_bias must map token ids, whole numbers, not {shown(token)}", "logit_bias")
        number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not number or not (-MAX_BIAS <= bias <= MAX_BIAS or bias == -math.inf):
            raise RequestError(
                f"logit_bias of token {token} must be a number [{-MAX_BIAS:g}, {MAX_BIAS:g}], or -inf to ban it, not "
                f"{shown(bias)}",
                "logit_bias",
            )
        pairs[token] = float(bias)
    return tuple(sorted(pairs.items()))


def check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    """Raises RequestError if a sequence would have to be longer than it may."""
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {min_tokens} is more than max_tokens {max_tokens}: lower it, or raise max_tokens", "min_tokens"
        )


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What the text must be; exactly one is given. Field names are those of vLLM's class of this name.

    json: a JSON schema that the text follows: an object, or its text. Kept as text, in its order, which is that of the
        properties in the answer. No white space comes between the parts of the answer.
    regex: a regular expression that the whole text matches, in the syntax of Rust's crate regex.
    choice: strings, one of which the text is.
    json_object: any JSON object.

    Raises RequestError, which names the field, for a value of another kind. Whether a schema or an expression can be
    followed shows when the request is added.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: SequenceOf[str] | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        name = "structured_outputs"
        if not isinstance(self.json_object, bool):
            raise RequestError(f"{name}.json_object must be true or false, not {shown(self.json_object)}", name)
        given = [
            field for field in ("json", "regex", "choice", "json_object") if getattr(self, field) not in (None, False)
        ]
        if len(given) != 1:
            raise RequestError(
                f"{name} must have exactly one of json, regex, choice, json_object, not {', '.join(given) or 'none'}",
                name,
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.regex is not None and not isinstance(self.regex, str):
            raise RequestError(f"{name}.regex must be a string, not {shown(self.regex)}", name)
        if self.choice is not None:
            choices = self.choice
            if not isinstance(choices, (list, tuple)) or not choices or not all(type(one) is str for one in choices):
                raise RequestError(f"{name}.choice must be a list of strings, at least one, not {shown(choices)}", name)
            object.__setattr__(self, "choice", tuple(choices))

    @property
    def constraint(self) -> tuple[str, str]:
        """The name of the field that is given, and its value as text: of json_object a schema, of choice JSON."""
        if self.json is not None:
            return "json", cast("str", self.json)
        if self.regex is not None:
            return "regex", self.regex
        return ("choice", json.dumps(self.choice)) if self.choice is not None else ("json_object", '{"type":"object"}')


def _schema_text(schema: object) -> str:
    """A JSON schema as compact text, in its own order."""
    name = "structured_outputs"
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(found, Mapping):
            return json.dumps(dict(found), separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{name}.json is no JSON: {error}", name) from None
    raise RequestError(f"{name}.json must be a schema, which is an object, not {shown(found)}", name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue one prompt. Field names are those of vLLM's class of this name.

    temperature: 0 is greedy; a tiny one (under 1e-5) is treated as 0. Logits are divided by it.
    top_k: keep the k likeliest tokens, of equals the lowest ids; None (also 0 or -1) keeps all.
    top_p: keep the likeliest tokens until their probabilities reach this sum; in (0, 1].
    min_p: keep tokens at least this fraction as likely as the likeliest; in [0, 1].
    The three apply in this order, each to what the one before left, as in transformers.
    seed: equal seeds give equal tokens whatever else runs; None draws one when the request is added.
    max_tokens: most tokens to generate; None means 16 for a completion, up to the context for a chat; 0 computes the
        prompt and ends.
    stop: strings that end the text before them (after them with include_stop_str_in_output).
    stop_token_ids: token ids that end it, besides the model's own end tokens.
    ignore_eos: go on past the model's own end tokens (not past stop_token_ids).
    logprobs: give the log-probability of each token and of this many alternatives, of the raw (unscaled,
        unfiltered) distribution; None gives none.
    skip_special_tokens: leave special tokens out of the text.
    n: continuations of the prompt; each draws its own random numbers, of the seed and its index.
    prompt_logprobs: what `logprobs` gives, of the prompt's tokens, each after those before it.
    repetition_penalty: positive logits of tokens that the prompt or the output holds are divided by it, others
        multiplied; in [0.01, 100], 1 changes nothing.
    presence_penalty, frequency_penalty: taken from the logit of each token of the output, once and for each time that
        it is there; in [-2, 2].
    logit_bias: token id to what is added to its logit, in [-100, 100], or -inf, which bans it. Kept as pairs by id.
    allowed_token_ids: the only ones that may be sampled; None allows all.
    bad_words: words and phrases that must not come about, with or without a space before them: the token that would
        complete one is banned. A phrase counts as the tokenizer writes it by itself; one that lies in prompt and output
        counts too.
    min_tokens: end tokens and stop_token_ids cannot be sampled before so many tokens are there, and stop strings do not
        count that are complete by then.
    structured_outputs: what the text must be. It binds more than all bans; where the text is complete and nothing can
        come behind it only end tokens are left, and with ignore_eos it ends there by itself.

    The order in which these apply stands in worker.logits. Greedy rows obey them too.

    Raises RequestError, which names the field, for a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | SequenceOf[str] | None = None
    stop_token_ids: SequenceOf[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    n: int = 1
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | SequenceOf[tuple[int, float]] | None = None
    allowed_token_ids: SequenceOf[int] | None = None
    bad_words: str | SequenceOf[str] | None = None
    min_tokens: int = 0
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, _MAX_FLOAT)
        self._number("top_p", 0.0, 1.0, low_open=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.01, 100.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._integer("top_k", -1, 2**31)
        if self.top_k in (0, -1):
            object.__setattr__(self, "top_k", None)
        self._integer("seed", -(2**63), 2**64 - 1)
        for name, least in (("n", 1), ("min_tokens", 0)):
            if getattr(self, name) is None:
                raise RequestError(f"{name} must be a whole number of at least {least}, not None", name)
            self._integer(name, least, 2**31)
        self._integer("max_tokens", 0, 2**31)
        check_min_tokens(self.min_tokens, self.max_tokens)
        self._integer("logprobs", 0, MAX_LOGPROBS)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {shown(getattr(self, name))}", name)
        stop = _as_tuple(self.stop, str, "stop")
        if "" in stop:
            raise RequestError("stop must not hold an empty string: it would match at once", "stop")
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop holds {len(stop)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids, int, "stop_token_ids"))
        bad_words = _as_tuple(self.bad_words, str, "bad_words")
        if "" in bad_words:
            raise RequestError("bad_words must not hold an empty string: it is in every text", "bad_words")
        if len(bad_words) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words holds {len(bad_words)} texts, at most {MAX_BAD_WORDS} are allowed", "bad_words"
            )
        object.__setattr__(self, "bad_words", bad_words)
        object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _as_tuple(self.allowed_token_ids, int, "allowed_token_ids")
            if not allowed:
                raise RequestError("allowed_token_ids is empty: leave it out to allow all tokens", "allowed_token_ids")
            object.__setattr__(self, "allowed_token_ids", allowed)
        wanted = self.structured_outputs
        if wanted is not None and not isinstance(wanted, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, not {shown(wanted)}", "structured_outputs"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as what it was made into: a tuple."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as what it was made into: pairs of token id and bias, by id."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    def _number(self, name: str, low: float, high: float, low_open: bool = False) -> None:
        value = getattr(self, name)
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        if not fits or (low_open and value == low):
            bounds = f"{'(' if low_open else '['}{low:g}, {high:g}]" if high < _MAX_FLOAT else f"at least {low:g}"
            raise RequestError(f"{name} must be a number {bounds}, not {shown(value)}", name)
        object.__setattr__(self, name, float(value))  # torch takes no whole number of more than 64 bits

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise RequestError(f"{name} must be a whole number from {low} to {high}, not {shown(value)}", name)


@dataclass(frozen=True, slots=True)
class Reset:
    """The whole state of a sequence that the worker does not know (any more)."""

    tokens: npt.NDArray[np.int32]  # [n]: prompt, and what was generated so far
    tables: tuple[tuple[int, ...], ...]  # the whole block table of every group, the pages of a cached prefix included
    num_computed: int  # tokens whose K and V lie in those pages already
    params: SamplingParams
    seed: int
    index: int  # of the sequence in its request
    num_prompt: int  # of the tokens, how many are the prompt's
    num_logprobs: int | None = None  # give the log-probability of each token and of so many alternatives
    end_token_ids: tuple[int, ...] = ()  # that may not be sampled before params.min_tokens are there
    bad_phrases: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that must not come about


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: compute `num_tokens` tokens after those computed before.

    Where it samples, it may bring drafts: guesses of the tokens that come next. They are counted in `num_tokens`, and
    computed like known ones. A token is sampled at each place, and they count up to the first that is not its draft.
    """

    seq_id: int
    num_tokens: int
    changes: tuple[TableChange, ...] = ()  # of its block tables, in order; empty with a reset
    samples: bool = True  # the next token is sampled; only where this row reaches the sequence's last token
    reset: Reset | None = None
    token: int | None = None  # stands in place of the last one sampled; None keeps that
    drafts: tuple[int, ...] = ()
    mask: bytes | None = None  # of the tokens that may be sampled: bit i % 32 of the i // 32nd uint32, little-endian
    scores: tuple[int, int] | None = None  # the first and after the last known token whose log-probability is wanted


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over many sequences.

    After a step that failed, or on a new worker, the next one is a restart: the worker forgets every sequence and
    counts from this number on.
    """

    number: int
    rows: tuple[Row, ...]
    moves: tuple[Move | Mark, ...] = ()  # applied in order, before the forward
    finished: tuple[int, ...] = ()  # sequences that the worker forgets, before it looks at the rows
    restart: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one generated token: its own log-probability and rank (1 is best), and the best alternatives, best first."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, in the order of the rows with `samples`: one token for each, with drafts one or more."""

    number: int
    seq_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # of all rows, packed
    logprobs: tuple[Logprobs | None, ...] = ()  # of each token, if anybody asked for any
    counts: tuple[int, ...] = ()  # tokens of each row; empty: one each
    scores: tuple[tuple[int, tuple[Logprobs, ...]], ...] = ()  # sequence, and what its row asked for
