"""Digests: prompts share those of the blocks that they share. And what is no prompt has none, and raises nothing."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.errors import RequestError
from scheduler.desk import LineRequest, PromptRequest, Response
from scheduler.openai import CHAT, COMPLETIONS
from scheduler.outputs import CompletionOutput, RequestOutput
from scheduler.routing import ANSWER, BLOCKS, ENDS, TOKEN_BYTES, Usage, digests, outline, usage
from worker.step import SamplingParams

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
BLOCK = BLOCKS[0] * TOKEN_BYTES  # characters


def text(blocks: float, letter: str = "a") -> str:
    return letter * round(blocks * BLOCK)


# Digests


def test_there_is_one_for_each_full_block_of_a_text() -> None:
    assert [len(digests(text(blocks))) for blocks in (0, 0.9, 1, 1.9, 2, 16)] == [0, 0, 1, 1, 2, 16]
    assert len(set(digests(text(16)))) == 16  # each of all up to there, though every block is equal


def test_blocks_grow_and_their_number_is_bounded() -> None:
    assert len(digests(text(18))) == 17
    assert ENDS[64] == 15_360
    assert len(digests("x" * 10_000_000)) == len(digests(list(range(100_000)))) == 64


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 300), st.booleans())
def test_prompts_share_the_digests_of_the_blocks_that_they_share(
    letters: list[int], common: int, as_text: bool
) -> None:
    one = [letter for letter in letters for _ in range(16)]
    other = [*one[:common], 7, *one[common + 1 :]]
    same = min(common, len(one))
    if as_text:
        found = (
            digests("".join("abcd"[i] * TOKEN_BYTES for i in one)),
            digests("".join("abcdefgh"[i] * TOKEN_BYTES for i in other)),
        )
    else:
        found = digests(one), digests(other)
    shared = sum(end <= same for end in ENDS[1:])
    assert found[0][:shared] == found[1][:shared]
    assert not set(found[0][shared:]) & set(found[1][shared:])
    assert len(found[0]) == sum(end <= len(one) for end in ENDS[1:])


def test_token_ids_text_and_conversations_with_the_same_bytes_are_told_apart() -> None:
    content = text(3)
    kinds = [
        digests(content),
        digests([97] * 3 * BLOCKS[0]),
        digests([{"role": "user", "content": content}], chat=True),
        digests({"prompt": content, "cache_salt": "x"}),
        digests({"prompt": content, "cache_salt": "y"}),
    ]
    assert [len(kind) for kind in kinds] == [3] * 5
    assert len({digest for kind in kinds for digest in kind}) == 15


def test_what_stands_for_the_same_prompt_has_the_same_digests() -> None:
    content, ids = text(3), list(range(200))
    parts = [{"type": "text", "text": content[:10]}, {"type": "text", "text": content[10:]}]
    assert digests({"prompt": content}) == digests(content)
    assert digests({"prompt_token_ids": ids}) == digests(tuple(ids)) == digests(ids)
    whole, split = ([{"role": "user", "content": one}] for one in (content, parts))
    assert digests(whole, chat=True) == digests(split, chat=True) != ()


def test_a_conversation_that_goes_on_begins_as_it_did() -> None:
    first = [{"role": "system", "content": text(2)}, {"role": "user", "content": text(3, "b")}]
    later = [*first, {"role": "assistant", "content": text(2, "c")}, {"role": "user", "content": "and now?"}]
    one, other = digests(first, chat=True), digests(later, chat=True)
    assert len(other) > len(one) == 5
    assert other[:5] == one


@given(JSON, JSON, st.booleans())
@settings(max_examples=300)
def test_what_is_no_prompt_raises_nothing(url: Any, body: Any, chat: bool) -> None:
    for one in (url, COMPLETIONS, CHAT):
        for whole in (body, {"prompt": body}, {"messages": body, "max_tokens": url}, {"messages": [body]}):
            found, size = outline(LineRequest("POST", one, whole))
            assert size >= 1
            assert isinstance(found, tuple)
    assert isinstance(outline(PromptRequest(body, chat=chat))[0], tuple)


@pytest.mark.parametrize(
    "prompt",
    [None, 5, b"x" * 9999, [1.5] * 99, [2**70] * 99, object(), {}, {"prompt": None}, count(), {"cache_salt": 3}],
    ids=repr,
)
@pytest.mark.parametrize("chat", [False, True])
def test_what_is_no_prompt_has_no_digests(prompt: Any, chat: bool) -> None:
    assert digests(prompt, chat) == ()


def test_half_a_surrogate_pair_does_no_harm() -> None:
    assert len(digests("\ud800" * BLOCK)) == 3


def test_lines_and_prompts_agree() -> None:
    content, messages = text(4), [{"role": "user", "content": text(4)}]
    completion = LineRequest("POST", COMPLETIONS, {"prompt": content, "max_tokens": 100})
    listed = LineRequest("POST", COMPLETIONS, {"prompt": [content], "max_tokens": 100})
    prompt = PromptRequest(content, SamplingParams(max_tokens=100))
    assert outline(completion) == outline(listed) == outline(prompt) == (digests(content), 4 * 64 + 100)
    chat = LineRequest("POST", CHAT, {"messages": messages})
    assert outline(chat) == outline(PromptRequest(messages, chat=True)) != ((), 1)
    assert outline(chat)[1] == (len(content) + 6) // TOKEN_BYTES + ANSWER


def test_who_computes_the_whole_prompt_anyway_goes_anywhere() -> None:
    """Prompt log-probabilities are not in a cache, and that nothing was found says nothing about it."""
    line = LineRequest("POST", COMPLETIONS, {"prompt": text(4), "max_tokens": 9, "prompt_logprobs": 0})
    assert (
        outline(line) == outline(PromptRequest(text(4), SamplingParams(max_tokens=9, prompt_logprobs=0))) == ((), 265)
    )


# What answers say


def test_usage_is_read_from_outputs_and_from_bodies() -> None:
    output = RequestOutput("0", None, [1, 2, 3], [CompletionOutput(0, "", [4])], True, 2, 1)
    assert usage(output) == Usage(3, 2, 1)
    said = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    assert usage(Response(200, json.loads(json.dumps({"usage": said})))) == Usage(3, 2, 1)
    for nothing in (Response(400, {"error": {}}), Response("cluster_lost", None), RequestError("no")):
        assert usage(nothing) is None
