"""WaitingQueue against a plain list that is sorted anew for every question."""

from __future__ import annotations

import pytest
from fakes import request
from hypothesis import given
from hypothesis import strategies as st

from scheduler.request import Family
from scheduler.waiting import WaitingQueue

# Ranks repeat, so that the number often decides; a large one may go back behind a small one.
RANKS = st.lists(st.sampled_from([0.0, 1.5, 3.0, 7.0, 256.0]), min_size=1, max_size=30)


def families(ranks: list[float]) -> list[Family]:
    result = []
    for number, rank in enumerate(ranks):
        family = Family(number, request(str(number), [1], 1))
        family.key = (rank, number)
        result.append(family)
    return result


@given(RANKS, st.data())
def test_it_is_a_list_sorted_by_key_and_by_age(ranks: list[float], data: st.DataObject) -> None:
    queue, plain, outside = WaitingQueue(), list[Family](), families(ranks)
    for _ in range(3 * len(ranks)):
        if outside and (not plain or data.draw(st.booleans(), label="add")):
            family = outside.pop(data.draw(st.integers(0, len(outside) - 1)))
            queue.add(family)
            plain.append(family)
        else:
            family = plain.pop(data.draw(st.integers(0, len(plain) - 1)))
            queue.remove(family)
            outside.append(family)
        by_key = sorted(plain, key=lambda one: one.key)
        assert len(queue) == len(plain)
        for count in (0, 1, 2, len(plain), len(plain) + 5):
            assert queue.first(count) == by_key[:count]
        if plain:
            assert queue.oldest is min(plain, key=lambda one: one.number)


def test_an_empty_one_has_no_oldest() -> None:
    assert WaitingQueue().first(3) == []
    with pytest.raises(IndexError):
        _ = WaitingQueue().oldest


def test_one_that_is_not_there_cannot_be_taken_out() -> None:
    queue, (one, other) = WaitingQueue(), families([0.0, 1.0])
    queue.add(other)
    with pytest.raises(AssertionError):
        queue.remove(one)
