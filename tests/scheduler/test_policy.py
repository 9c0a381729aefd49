"""Policy: what is refused, with which numbers; defaults; room and victims."""

from __future__ import annotations

import pytest
from fakes import request

from paged import KVCacheManager, RequestError, SamplingParams
from scheduler import policy
from scheduler.policy import Limits
from scheduler.request import Family, Sequence


def resolve(prompt: int, max_tokens: int | None, chat: bool = False, context: int = 32, pages: int = 100) -> int:
    return policy.resolve_max_tokens(prompt, max_tokens, chat, Limits(context, pages, 16))


@pytest.mark.parametrize("chat", [False, True])
def test_h07_a_prompt_one_short_of_the_context_gets_one_token(chat: bool) -> None:
    assert resolve(31, None, chat) == 1


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("prompt", [32, 33])
def test_h07_a_prompt_that_fills_the_context_is_refused_with_both_numbers(prompt: int, chat: bool) -> None:
    with pytest.raises(RequestError, match=rf"has {prompt} tokens.*max_model_len is 32: shorten it to 31") as caught:
        resolve(prompt, None, chat)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("chat", [False, True])
def test_h07_prompt_and_output_may_fill_the_context(chat: bool) -> None:
    assert resolve(20, 12, chat) == 12


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("max_tokens", [13, 100])
def test_h07_an_output_too_long_is_refused_naming_what_fits(max_tokens: int, chat: bool) -> None:
    with pytest.raises(RequestError, match=rf"max_tokens {max_tokens} make {20 + max_tokens}.*to 12") as caught:
        resolve(20, max_tokens, chat)
    assert caught.value.param == "max_tokens"


def test_h07_without_output_the_prompt_may_fill_the_context() -> None:
    assert resolve(32, 0) == 0
    with pytest.raises(RequestError, match=r"has 33 tokens.*shorten it to 32"):
        resolve(33, 0)


def test_unset_max_tokens_is_16_for_a_completion_and_the_context_for_a_chat() -> None:
    assert resolve(20, None, chat=False, context=1000) == 16
    assert resolve(20, None, chat=True, context=1000) == 980


def test_unset_max_tokens_is_cut_to_the_pool() -> None:
    assert resolve(20, None, chat=True, context=1000, pages=2) == 13  # 32 stored, and one that is not
    assert resolve(32, None, chat=False, context=1000, pages=2) == 1


def test_s01_a_prompt_longer_than_the_pool_is_refused_with_pages_and_tokens() -> None:
    with pytest.raises(RequestError, match=r"200 tokens and needs 13 pages, the pool has 8 \(128 tokens\)") as caught:
        resolve(200, 4, context=1024, pages=8)
    assert caught.value.param == "prompt"


def test_s01_the_pool_need_not_hold_the_last_token() -> None:
    assert resolve(120, 9, context=1024, pages=8) == 9
    with pytest.raises(RequestError, match=r"needs 9 pages, the pool has 8 \(128 tokens\): lower max_tokens to 9"):
        resolve(120, 10, context=1024, pages=8)
    assert resolve(128, 0, context=1024, pages=8) == 0
    assert resolve(128, 1, context=1024, pages=8) == 1


def test_s08_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt is empty") as caught:
        resolve(0, 4)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(("pages", "context"), [(2, 35), (2, 33), (2, 32), (2, 20), (1, 1000)])
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 19, 20, 21, 31, 32, 33, 34, 35, 36, 40])
@pytest.mark.parametrize("chat", [False, True])
def test_what_is_refused_names_a_number_that_is_accepted(prompt: int, chat: bool, pages: int, context: int) -> None:
    """The way out in the message works, and one more would not."""
    for max_tokens in (None, 0, 1, 5, 50):
        try:
            resolved = resolve(prompt, max_tokens, chat, context, pages)
        except RequestError as error:
            if error.param == "max_tokens":
                fits = int(str(error).split("lower max_tokens to ")[1].split(",")[0])
                assert resolve(prompt, fits, chat, context, pages) == fits
                with pytest.raises(RequestError):
                    resolve(prompt, fits + 1, chat, context, pages)
            elif "shorten it to" in str(error):
                fits = int(str(error).split("shorten it to ")[1].split(",")[0])
                assert resolve(fits, 0 if max_tokens == 0 else 1, chat, context, pages) <= 1
        else:
            assert prompt + resolved <= context
            assert request("r", [1] * prompt, resolved).peak_tokens <= pages * 16
            assert max_tokens is None or resolved == max_tokens


def test_the_longest_prompt_is_bounded_by_context_and_pool() -> None:
    assert Limits(100, 4, 16).longest_prompt == 64
    assert Limits(100, 8, 16).longest_prompt == 100


def running(number: int, prompt: int, max_tokens: int, n: int = 1) -> Family:
    wanted = request(str(number), [1] * prompt, max_tokens, params=SamplingParams(n=n))
    family = Family(number, wanted)
    family.sequences = [Sequence(10 * number + i, wanted, None, i) for i in range(n)]
    return family


@pytest.mark.parametrize(("max_tokens", "tokens"), [(100, 26), (5, 14), (0, 10)])
def test_room_wanted_is_a_page_of_growth_up_to_the_peak(max_tokens: int, tokens: int) -> None:
    for page_size in (16, 1):
        growth = tokens if page_size == 16 else min(tokens, 11)
        pages = -(-growth // page_size)
        assert policy.room_wanted(running(0, 10, max_tokens), Limits(1000, 100, page_size)) == pages


@pytest.mark.parametrize(("prompt", "n", "pages"), [(10, 1, 4), (10, 3, 8), (9, 3, 8), (8, 3, 7), (1, 3, 6)])
def test_branches_share_the_full_pages_of_the_prompt(prompt: int, n: int, pages: int) -> None:
    """Pages of 4, room for prompt and 4 tokens: shared are those without the prompt's last token."""
    assert policy.room_wanted(running(0, prompt, 100, n), Limits(1000, 100, 4)) == pages


def test_a_window_bounds_what_a_sequence_wants() -> None:
    limits = Limits(1_000_000, 10_000, 16, (512, None), 1, 256)
    assert limits.pages(16_000) == 1000 + (511 + 256 + 15) // 16 + 1
    assert limits.longest_prompt == (10_000 - 49) * 16


def test_the_victim_is_the_one_that_arrived_last() -> None:
    manager = KVCacheManager(2, 1)
    families = [policy.Candidate(running(number, 1, 1), manager) for number in (4, 9, 7)]
    assert policy.youngest(families).number == 9
