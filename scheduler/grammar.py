"""Constrained output: what a sequence may go on with, as masks of tokens. Torch-free, by the library llguidance.

A constraint is compiled once (`Grammars.get`, when the request comes) and copied for each sequence (`Grammar.matcher`).
A matcher takes the tokens that were sampled, and has the mask of those that may come next, for Row.mask.

JSON comes without white space between its parts, so that blanks cannot use up the tokens; white space in strings stays
as it is. Text that is certain, such as the name of a property, comes as the tokenizer would write it. Special tokens
are never part of the text. The end belongs to us, not to the library: it is told of a special token of our own making,
which stands for it and is no token of the model; where the text may end the mask allows the request's end tokens.

Constraints that cost too much are refused, or end their own request only, by the limits below and the library's own.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken

from paged.errors import RequestError, RequestFailed
from worker.step import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from scheduler.text import Tokenizer

PARAM = "structured_outputs"
MAX_CHARACTERS = 2**20  # of a constraint; one so long compiles in about a second
MAX_MULTIPLE = 10_000  # the library makes a state of every remainder, and has no limit of its own for them
_KEPT = 64  # compiled constraints
_SIZE = 20_000  # symbols of a grammar: some 2,000 properties; the time to compile grows with their square
_STATES = 50_000  # of a lexer, 1 to 2 kB each
_CERTAIN = 2**16  # bytes of certain text, which the library works out whole before each token, 0.5 us a byte
_NO_TOKEN = "no token of the model can write what must come next"
_END = "<|paged: end of a constrained text|>"

Bits = npt.NDArray[np.uint8]  # bit i % 8 of the i // 8th byte is token i


class Matcher:
    """Where one sequence stands in its grammar.

    mask: of the tokens that may come next, as Row has it. complete: the text may end here. ended: it is complete,
    nothing can come behind it, and there is no token that would end it.
    """

    def __init__(self, grammar: Grammar, ends: Collection[int]) -> None:
        self._grammar = grammar
        self._ends = grammar.bits_of(ends)
        self._matcher = grammar.first.deep_copy()
        self._look(grammar.first_bits)

    def take(self, token_id: int) -> None:
        """The next token is this one. Raises RequestFailed where it may not be, or where the library gives up."""
        if not _has(self.mask, token_id):
            raise RequestFailed(f"token {token_id} was sampled, which the constraint does not allow there")
        if _has(self._ends, token_id):
            return  # the end
        self._matcher.consume_token(token_id)
        self._look(self._grammar.bits(self._matcher))

    def _look(self, bits: Bits) -> None:
        self.complete = _has(bits, self._grammar.end)
        # An end token that is no special one might be allowed as text, too, and would end it too early.
        allowed = bits[: len(self._ends)] & self._grammar.own & ~self._ends
        has_more = bool(allowed.any())
        if self.complete:
            allowed |= self._ends
        elif not has_more:
            raise RequestFailed(f"the constraint cannot be followed: {_NO_TOKEN}")
        self.ended = self.complete and not allowed.any()
        self.mask = allowed.tobytes()


class Grammar:
    """One compiled constraint. end: the token that stands for its end. own: which tokens are the model's."""

    def __init__(self, first: LLMatcher, end: int, own: Bits) -> None:
        self.first = first  # to be copied; it takes no token
        self.end = end
        self.own = own
        self.first_bits = self.bits(first)

    def matcher(self, ends: Collection[int]) -> Matcher:
        """For one sequence, at its beginning, that these tokens end. Raises RequestFailed where none can begin it."""
        return Matcher(self, ends)

    def bits(self, matcher: LLMatcher) -> Bits:
        """What may come next. Raises RequestFailed where the library gives up."""
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise RequestFailed(f"the constraint cannot be followed: {_reason(matcher)}")
        return bits

    def bits_of(self, token_ids: Iterable[int]) -> Bits:
        """The bits of these tokens, as far as they are the model's."""
        return _packed(token_ids, len(self.own)) & self.own


class Grammars:
    """Compiles constraints for one tokenizer, and keeps the latest. It may be used by several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._own = _packed(range(vocab_size), -(-vocab_size // 32) * 4)
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._end = 0

    def get(self, constraint: StructuredOutputsParams) -> Grammar:
        """The compiled constraint. Raises RequestError, which names the field, for one that cannot be followed."""
        with self._lock:
            if (found := self._kept.get(constraint)) is not None:
                self._kept.move_to_end(constraint)
                return found
            grammar = self._compile(constraint)
            self._kept[constraint] = grammar
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return grammar

    def _compile(self, constraint: StructuredOutputsParams) -> Grammar:
        library = _library()
        field, text = constraint.constraint
        where = f"{PARAM}.{field}"
        if len(text) > MAX_CHARACTERS:
            raise RequestError(f"{where} has {len(text)} characters, at most {MAX_CHARACTERS} are allowed", PARAM)
        tokenizer = self._made(library)
        try:
            if field == "json":
                _check_multiples(text)
            source = _unforced(library, field, text) if _is_much(text) else _SOURCES[field](library.LLMatcher, text)
            limits = library.LLParserLimits(max_lexer_states=_STATES, max_grammar_size=_SIZE, verbose_errors=False)
            matcher = library.LLMatcher(tokenizer, source, log_level=0, limits=limits)
            return Grammar(matcher, self._end, self._own)
        except (ValueError, RecursionError, RequestFailed) as error:  # also UnicodeEncodeError, of half a character
            raise RequestError(f"{where}: {error}", PARAM) from None

    def _made(self, library: Any) -> LLTokenizer:
        """The library's tokenizer. A second for a large vocabulary, so it is made when the first request asks."""
        if self._tokenizer is None:
            tokenizer = self._source.copy()
            taken = set(tokenizer.get_vocab().values())
            tokenizer.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
            end = tokenizer.token_to_id(_END)
            if end is None or end in taken:
                raise RequestError("this model's tokenizer cannot be constrained: its token ids have gaps", PARAM)
            most = max(self._vocab_size, tokenizer.get_vocab_size())
            try:
                self._tokenizer = library.LLTokenizer(tokenizer.to_str(), n_vocab=most, eos_token=end)
            except ValueError as error:
                raise RequestError(f"this model's tokenizer cannot be constrained: {error}", PARAM) from None
            self._end = end
            self._own &= ~_packed((end,), len(self._own))  # whose row of the model, if there is one, is no text
        return self._tokenizer


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "constrained output needs the package llguidance: pip install 'paged-kv[structured]'", PARAM
        ) from None
    return llguidance


def _json(matcher: Any, schema: str) -> Any:
    return matcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


def _choice(matcher: Any, choices: str) -> Any:
    return matcher.grammar_from_regex("|".join(re.escape(choice) for choice in json.loads(choices)))


# Of each field of StructuredOutputsParams: what its text is to the library.
_SOURCES: dict[str, Callable[[Any, str], Any]] = {
    "json": _json,
    "json_object": _json,
    "regex": lambda matcher, regex: matcher.grammar_from_regex(regex),
    "choice": _choice,
}


def _is_much(text: str) -> bool:
    """Whether there may be very much certain text: by its length, and the least numbers of repetitions in it."""
    least = re.findall(r'(?:\{|"min(?:Items|Length|Properties)": ?)(\d+)', text)
    return len(text) * math.prod(max(1, int(number[:9])) for number in least) > _CERTAIN


def _unforced(library: Any, field: str, text: str) -> str:
    """The same, but how certain text is cut into tokens is left to the model."""
    if field == "regex":
        rule = f"/{library.regex_to_lark(text, use_ascii='')}/"
    elif field == "choice":
        rule = " | ".join(map(json.dumps, json.loads(text)))
    else:
        rule = f"%json {json.dumps({'x-guidance': {'whitespace_flexible': False}} | json.loads(text))}"
    return f'%llguidance {{"no_forcing": true}}\nstart: {rule}'


def _check_multiples(text: str) -> None:
    """Raises ValueError where numbers must be multiples of what makes too many states."""
    steps = list[int]()

    def look(schema: Any) -> None:
        inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
        step = schema.get("multipleOf") if isinstance(schema, dict) else None
        if isinstance(step, (int, Decimal)) and step > 0:
            steps.append(int("".join(map(str, Decimal(step).normalize().as_tuple().digits))))
        for one in inner:
            look(one)

    look(json.loads(text, parse_float=Decimal))
    if (multiple := math.lcm(*steps)) > MAX_MULTIPLE:
        raise ValueError(f"numbers must be multiples of {multiple:,} together, and {MAX_MULTIPLE:,} is the most")


def _reason(matcher: LLMatcher) -> str:
    """The library's, on one line."""
    reason: str = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
    return _NO_TOKEN if reason == "NoExtensionBias" else reason[:300]


def _packed(token_ids: Iterable[int], num_bytes: int) -> Bits:
    """The bits of token ids; those that have no place are left out."""
    flags = np.zeros(num_bytes * 8, dtype=np.uint8)
    flags[[token for token in token_ids if 0 <= token < len(flags)]] = 1
    return np.packbits(flags, bitorder="little")


def _has(bits: Bits | bytes, token_id: int) -> bool:
    return 0 <= token_id < 8 * len(bits) and bool(bits[token_id // 8] >> token_id % 8 & 1)
