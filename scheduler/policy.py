"""Pure functions that decide: what is refused, what is admitted, who gives way. They change nothing."""

from __future__ import annotations

from collections.abc import Iterable

from paged.block_table import pages_for
from paged.errors import RequestError
from scheduler.request import Sequence

COMPLETION_MAX_TOKENS = 16  # vLLM's and OpenAI's default


def longest_prompt(max_model_len: int, pool_tokens: int) -> int:
    """Tokens of the longest prompt that can be computed at all."""
    return min(max_model_len, pool_tokens)


def resolve_max_tokens(
    num_prompt: int, max_tokens: int | None, chat: bool, max_model_len: int, num_pages: int, page_size: int
) -> int:
    """`max_tokens` of a request, its default filled in. Raises RequestError for what can never fit.

    num_pages: pages that can be handed out. Prompt and output together must fit max_model_len; all but the last token
    generated must fit the pool. Unset, it is 16 for a completion and as much as fits for a chat, cut to what fits.
    """
    pool_tokens = num_pages * page_size
    if num_prompt == 0:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    least = 0 if max_tokens == 0 else 1
    if num_prompt + least > max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, and max_model_len is {max_model_len}: shorten it to "
            f"{min(max_model_len - least, pool_tokens)}, or raise max_model_len if the model allows it",
            "prompt",
        )
    if num_prompt > pool_tokens:
        raise RequestError(
            f"the prompt has {num_prompt} tokens and needs {pages_for(num_prompt, page_size)} pages, the pool has "
            f"{num_pages} ({pool_tokens} tokens): shorten it, or raise kv_memory",
            "prompt",
        )
    longest = min(max_model_len, pool_tokens + 1) - num_prompt
    if max_tokens is None:
        return longest if chat else min(COMPLETION_MAX_TOKENS, longest)
    if num_prompt + max_tokens > max_model_len:
        raise RequestError(
            f"a prompt of {num_prompt} tokens and max_tokens {max_tokens} make {num_prompt + max_tokens}, and "
            f"max_model_len is {max_model_len}: lower max_tokens to {longest}",
            "max_tokens",
        )
    if max_tokens > max(longest, 0):
        wanted = pages_for(num_prompt + max_tokens - 1, page_size)
        raise RequestError(
            f"a prompt of {num_prompt} tokens with max_tokens {max_tokens} needs {wanted} pages, the pool has "
            f"{num_pages} ({pool_tokens} tokens): lower max_tokens to {longest}, or raise kv_memory",
            "max_tokens",
        )
    return max_tokens


def room_wanted(sequence: Sequence, page_size: int) -> int:
    """Tokens that a sequence should have room for to run: what is known of it and a page of growth, up to its peak."""
    return min(sequence.num_tokens + page_size, sequence.request.peak_tokens)


def spare_pages(running: Iterable[tuple[Sequence, int]], page_size: int) -> int:
    """Pages that running sequences are still to take for `room_wanted`; each comes with the pages it has."""
    return sum(
        max(0, pages_for(room_wanted(sequence, page_size), page_size) - has) for sequence, has in running
    )


def victim(running: Iterable[Sequence]) -> Sequence:
    """Who gives its pages back when they run out: the one that arrived last, so the first always gets on."""
    return max(running)
