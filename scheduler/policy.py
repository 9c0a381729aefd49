"""Pure functions that decide: what is refused, what is admitted, who gives way. They change nothing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from paged.block_table import Windows, peak_pages
from paged.errors import RequestError
from scheduler.request import Family
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


def victim(running: Iterable[Family]) -> Family:
    """Who gives its pages back when they run out: the one that arrived last, so the first always gets on."""
    return max(running)
