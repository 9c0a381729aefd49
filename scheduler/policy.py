"""Pure functions that decide: what is refused, who is admitted, in what order, who gives way. They change nothing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paged.block_table import Windows, pages_for, peak_pages
from paged.errors import ConfigError, RequestError
from paged.manager import KVCacheManager
from scheduler.request import Family, Request
from worker.step import SamplingParams

COMPLETION_MAX_TOKENS = 16  # vLLM's and OpenAI's default


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a request: lengths in tokens, pages that can be handed out, and what a step takes."""

    max_model_len: int
    num_pages: int
    page_size: int
    windows: Windows = (None,)
    max_num_seqs: int = 1
    max_num_batched_tokens: int = 1

    def pages(self, num_tokens: int, num_prompt: int = 0, num_sequences: int = 1) -> int:
        """Most pages that so many sequences of `num_tokens` tokens hold at once.

        They share the prompt's full pages but that of its last token, in groups of full attention; in windowed groups
        each is counted by itself.
        """
        alone = peak_pages(num_tokens, self.page_size, self.windows, self.max_num_batched_tokens)
        shared = max(num_prompt - 1, 0) // self.page_size * self.windows.count(None)
        return alone + (num_sequences - 1) * (alone - shared)

    def pages_each(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`pages` of single sequences of these lengths, int64 [...]."""
        total = -(-num_tokens // self.page_size)
        result = total * self.windows.count(None)
        for window in self.windows:
            if window is not None:
                most = 1 + pages_for(window - 2 + self.max_num_batched_tokens, self.page_size)
                result = result + np.minimum(total, most)
        return result

    def longest(self, num_prompt: int = 0, num_sequences: int = 1) -> int:
        """Most tokens, the last sampled one included, that each of so many sequences can come to."""
        # bisect finds the first length that does not fit
        fits = range(num_prompt, self.max_model_len)  # tokens whose K and V are stored
        stored = (
            num_prompt
            - 1
            + bisect_right(fits, self.num_pages, key=lambda tokens: self.pages(tokens, num_prompt, num_sequences))
        )
        return min(stored + 1, self.max_model_len)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that can be computed at all."""
        return bisect_right(range(1, self.max_model_len + 1), self.num_pages, key=self.pages)


def resolve_max_tokens(num_prompt: int, max_tokens: int | None, chat: bool, limits: Limits, n: int = 1) -> int:
    """`max_tokens` of a request of `n` sequences, its default filled in. Raises RequestError for what can never fit.

    Prompt and output together must fit max_model_len; all but the last token generated must fit the pool. Unset, it is
    16 for a completion and as much as fits for a chat, cut to what fits.
    """
    if num_prompt == 0:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if n > (most := getattr(limits, name)):
            raise RequestError(f"{n} sequences wanted, and {name} is {most}: ask for fewer, or raise {name}", "n")
    max_model_len, pool = limits.max_model_len, f"the pool has {limits.num_pages}"
    if limits.windows == (None,):
        pool += f" ({limits.num_pages * limits.page_size} tokens)"
    least = 0 if max_tokens == 0 else 1
    if num_prompt + least > max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, and max_model_len is {max_model_len}: shorten it to "
            f"{min(max_model_len - least, limits.longest_prompt)}, or raise max_model_len if the model allows it",
            "prompt",
        )
    if (wanted := limits.pages(num_prompt, num_prompt, n)) > limits.num_pages:
        raise RequestError(
            f"the prompt has {num_prompt} tokens and needs {wanted} pages{_for(n)}, {pool}: shorten it, or raise "
            "kv_memory",
            "prompt",
        )
    longest = limits.longest(num_prompt, n) - num_prompt
    if max_tokens is None:
        return longest if chat else min(COMPLETION_MAX_TOKENS, longest)
    if num_prompt + max_tokens > max_model_len:
        raise RequestError(
            f"a prompt of {num_prompt} tokens and max_tokens {max_tokens} make {num_prompt + max_tokens}, and "
            f"max_model_len is {max_model_len}: lower max_tokens to {longest}",
            "max_tokens",
        )
    if max_tokens > max(longest, 0):
        wanted = limits.pages(num_prompt + max_tokens - 1, num_prompt, n)
        raise RequestError(
            f"a prompt of {num_prompt} tokens with max_tokens {max_tokens} needs {wanted} pages{_for(n)}, {pool}: "
            f"lower max_tokens to {longest}, or raise kv_memory",
            "max_tokens",
        )
    return max_tokens


def check_tokens(
    params: SamplingParams, phrases: Iterable[SequenceOf[int]], eos_token_ids: Iterable[int], vocab_size: int
) -> None:
    """Raises RequestError for biases and allowed tokens that the model does not have, and where no token is left.

    phrases: bad_words in tokens; those of one token are banned everywhere. What phrases of several ban depends on the
    tokens before, and is for the worker.
    """
    allowed = params.allowed_token_ids
    for name, ids in (("logit_bias", [token for token, _ in params.biases]), ("allowed_token_ids", allowed or ())):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(f"{name}: token id {token} is not one of the model's, 0 to {vocab_size - 1}", name)
    banned = {token for token, bias in params.biases if bias == -math.inf} | {p[0] for p in phrases if len(p) == 1}
    if params.min_tokens:
        banned.update(eos_token_ids, params.stop_token_ids or ())
    if not banned or (allowed is None and len(banned) < vocab_size):
        return
    left = set(range(vocab_size) if allowed is None else allowed) - banned
    if not left:
        raise RequestError(
            f"none of the {vocab_size if allowed is None else len(set(allowed))} allowed tokens is left: logit_bias, "
            "bad_words, and before min_tokens the end tokens, ban them all",
            "logit_bias" if allowed is None else "allowed_token_ids",
        )


def _for(n: int) -> str:
    return f" for {n} sequences" if n > 1 else ""


def room_wanted(family: Family, limits: Limits) -> int:
    """Pages that a family should have room for to run: for what is known of it and a page of growth, up to its peak."""
    request = family.request
    known = max(sequence.num_tokens for sequence in family.live) + limits.page_size
    return limits.pages(min(known, request.peak_tokens), len(request.prompt_token_ids), family.seats)


PATIENCE = 256  # steps
PRIORITIES = 10  # classes on each side of 0
MOST_SCORED = 128  # known tokens whose logits a step computes: of a large vocabulary they are 128 MiB

Order = Callable[[Family, Limits], float]
Victim = Callable[[SequenceOf["Candidate"]], Family]


def first_come(family: Family, limits: Limits) -> float:
    """In order of arrival."""
    return 0.0


def by_priority(family: Family, limits: Limits) -> float:
    """Lower classes first; a class more weighs as much as a tenth of half the patience."""
    return (family.request.priority + PRIORITIES) / (2 * PRIORITIES)


def shortest(family: Family, limits: Limits) -> float:
    """The one that needs fewest steps first, as far as max_tokens tells."""
    request = family.request
    steps = request.max_tokens + len(request.prompt_token_ids) / limits.max_num_batched_tokens
    return min(steps / PATIENCE, 1.0)


def longest_prefix(family: Family, limits: Limits) -> float:
    """The one first of which the greatest share is cached."""
    return 1.0 - family.cached_guess / len(family.common)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running family that may give way."""

    family: Family
    manager: KVCacheManager

    @property
    def num_computed(self) -> int:
        """Tokens that it would have to compute again if nothing of it stayed cached."""
        return sum(sequence.num_computed for sequence in self.family.live)

    @property
    def num_freed(self) -> int:
        """Pages that nobody else holds."""
        return self.manager.num_freed([sequence.seq_id for sequence in self.family.holders])


def youngest(candidates: SequenceOf[Candidate]) -> Family:
    """The one that arrived last."""
    return max(candidates, key=lambda one: one.family.number).family


def cheapest(candidates: SequenceOf[Candidate]) -> Family:
    """The one with the fewest tokens to compute again; of equals the youngest."""
    return min(candidates, key=lambda one: (one.num_computed, -one.family.number)).family


def largest(candidates: SequenceOf[Candidate]) -> Family:
    """The one whose end frees most pages; of equals the youngest."""
    return max(candidates, key=lambda one: (one.num_freed, one.family.number)).family


ADMISSIONS = ("optimistic", "guaranteed")
ORDERS: dict[str, Order] = {
    "fcfs": first_come,
    "priority": by_priority,
    "longest_prefix": longest_prefix,
    "shortest": shortest,
}
VICTIMS: dict[str, Victim] = {"youngest": youngest, "cheapest": cheapest, "largest": largest}


@dataclass(frozen=True, slots=True)
class Rules:
    """Who is admitted, in what order, and who gives way. Own functions may stand in place of those of ORDERS, VICTIMS.

    admission: optimistic (what is known and a page of growth must fit beside those running) or guaranteed (so must the
        most that all will hold at once: `running_peak`).
    order: of a waiting family, from 0 to 1, the share of the patience by which later ones may come before it.
    victim: of those that may give way, the one that does.
    patience: steps after which a family is overdue: it comes before all that arrived later, nobody passes it, and it
        gives way only to the senior and to older ones.
    max_step_ms: milliseconds that a step with decoding sequences should take; chunks of prompts adapt. None: no limit.
    num_speculative_tokens: most drafts a sequence brings to a step; 0 switches speculation off.
    """

    admission: str = "optimistic"
    order: Order = first_come
    victim: Victim = youngest
    patience: int = PATIENCE
    max_step_ms: float | None = None
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        if self.admission not in ADMISSIONS:
            raise ConfigError(f"admission must be one of {', '.join(ADMISSIONS)}, not {self.admission!r}")


def least_chunk(limits: Limits, rules: Rules) -> int:
    """Tokens that a step always has for prompts, if there are any to compute.

    A quarter of the budget; where chunks adapt to a time, no more than 32.
    """
    quarter = max(1, limits.max_num_batched_tokens // 4)
    return quarter if rules.max_step_ms is None else min(quarter, 32)


def steps_alone(request: Request, limits: Limits, rules: Rules) -> int:
    """Most steps from when a request is the senior to its end: the chunks of all its sequences, and one for each token.

    With several sequences, a step lies between the prompt and the first tokens.
    """
    chunk = least_chunk(limits, rules)
    if request.params.prompt_logprobs is not None:
        chunk = min(chunk, MOST_SCORED)
    several = request.num_sequences > 1
    tokens = len(request.prompt_token_ids) + request.num_sequences * max(request.max_tokens - 1, 0)
    return -(-tokens // chunk) + request.max_tokens + several


def running_peak(
    known: npt.NDArray[np.int64],
    peak: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    pages: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
    growth: int = 1,
) -> int:
    """Most pages that requests hold at once if all of them run to their ends, and nobody else comes.

    known, peak: int64 [n], tokens of each now and at its end. ends: int64 [n], steps after which each has ended at the
    latest. growth: tokens by which one grows in a step, at most. pages: of lengths int64 [..., n] the pages.

        max over i of  sum of pages(min(known[j] + growth * ends[i], peak[j]))  over all j with ends[j] >= ends[i]

    What is held grows until somebody ends, so its maximum lies at an end; whoever ends before that holds nothing.
    Sorted by remaining output this is the running maximum that Gong et al. compute for their Past-Future scheduler
    (arXiv 2507.10150), here in pages, and with ends that are only known to lie before some step. What requests share
    counts for each of them.
    """
    if not len(ends):
        return 0
    lengths = np.minimum(known + growth * ends[:, None], peak)
    return int((pages(lengths) * (ends >= ends[:, None])).sum(axis=1).max())
