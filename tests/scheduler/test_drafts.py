"""Drafts by look-up, against a search that looks at every place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.drafts import LONGEST, SHORTEST, next_length, propose


def found_by_hand(tokens: list[int], most: int) -> list[int]:
    """The definition: the longest end first, of its places the last one, what came after it."""
    n = len(tokens)
    for length in range(LONGEST, SHORTEST - 1, -1):
        for start in range(n - length - 1, -1, -1):
            if length < n and tokens[start : start + length] == tokens[n - length :]:
                return tokens[start + length :][:most]
    return []


def proposed(tokens: list[int], most: int) -> list[int]:
    return propose(np.array(tokens, dtype=np.int32), most)


# Of 0x01010101 and the like every byte is equal, so bytes match at every offset; of 1 and 256 they match at some.
BYTES = [0, 1, 0x100, 0x10000, 0x1000000, 0x01010101, 0x00010001, 0x01000100]


@pytest.mark.parametrize("values", [[1, 2], [1, 2, 3, 4], [1, 0x01010101], BYTES])
@given(st.data())
def test_it_is_what_a_plain_search_finds(values: list[int], data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.sampled_from(values), max_size=40))
    most = data.draw(st.integers(1, 8))
    assert proposed(tokens, most) == found_by_hand(tokens, most)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=6), st.lists(st.integers(0, 255), max_size=8))
@example([0x01000000, 1], [1])
def test_bytes_that_match_between_tokens_are_no_place(tokens: list[int], raw: list[int]) -> None:
    """The end of the text stands before, moved by one, two or three bytes."""
    end = np.array([*tokens, 7, 8, 9], dtype=np.int32).tobytes()[-4 * LONGEST :]
    for shift in (1, 2, 3):
        moved = bytes(raw[:shift]).ljust(shift, b"\0") + end
        padded = moved + bytes(-len(moved) % 4)
        before = [int(token) & 0x7FFFFFFF for token in np.frombuffer(padded, dtype=np.int32)]
        text = [*before, 5, *tokens, 7, 8, 9]
        assert proposed(text, 4) == found_by_hand(text, 4)


def test_a_shifted_copy_hides_no_true_one() -> None:
    """The last match of bytes lies between tokens; the true one before it is found."""
    end = [0x01010101, 0x01010101, 0x01010102]
    shifted = np.frombuffer(b"\1" + np.array(end, dtype=np.int32).tobytes() + b"\1\1\1", dtype=np.int32).tolist()
    text = [*end, 42, 43, *shifted, *end]
    raw = np.array(text, dtype=np.int32).tobytes()
    assert raw.rfind(raw[-12:], 0, -4) % 4, "else nothing is tested here"
    assert proposed(text, 2) == [42, 43]


def test_a_match_between_tokens_hides_no_true_one_that_it_overlaps() -> None:
    same = 0x01010101
    assert proposed([9, same, same, 1, 7, same, same], 2) == [1, 7]


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4, 5, 6]])
def test_nothing_is_proposed_without_a_place(tokens: list[int]) -> None:
    assert proposed(tokens, 4) == []


def test_places_may_overlap_the_end_itself() -> None:
    assert proposed([7, 7, 7], 4) == [7]
    assert proposed([7, 7, 7, 7], 4) == [7]
    assert proposed([1, 2, 1, 2, 1, 2], 9) == [1, 2]


def test_a_longer_end_counts_more_than_a_later_place() -> None:
    assert proposed([1, 2, 3, 10, 9, 2, 3, 20, 1, 2, 3], 1) == [10]


@given(st.integers(1, 64), st.data())
def test_the_next_length_is_never_none_and_never_too_many(most: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, most))
    proposals = data.draw(st.integers(1, length))
    accepted = data.draw(st.integers(0, proposals))
    after = next_length(length, proposals, accepted, most)
    assert 1 <= after <= most
    if accepted == proposals:
        assert after >= length
    elif accepted == 0:
        assert after == max(1, length // 2)


def test_lengths_follow_how_right_the_drafts_were() -> None:
    assert [next_length(length, length, length, 8) for length in (1, 2, 4, 8)] == [2, 4, 8, 8]
    assert [next_length(8, 8, accepted, 8) for accepted in (0, 1, 3, 4, 7)] == [4, 4, 4, 8, 8]
    assert next_length(1, 1, 0, 8) == 1
