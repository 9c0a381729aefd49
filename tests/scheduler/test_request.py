"""Families and their transitions, every allowed one, every forbidden one; where the end of a sequence is detected."""

from __future__ import annotations

import pytest
from fakes import FakeText, request

from paged import SamplingParams
from scheduler.request import Family, Sequence, State

ALLOWED = {
    (State.WAITING, State.RUNNING),
    (State.WAITING, State.FINISHED),
    (State.RUNNING, State.PREEMPTED),
    (State.RUNNING, State.FINISHED),
    (State.PREEMPTED, State.RUNNING),
    (State.PREEMPTED, State.FINISHED),
}


def sequence(max_tokens: int = 4, params: SamplingParams | None = None, eos: tuple[int, ...] = ()) -> Sequence:
    params = params or SamplingParams(temperature=0)
    return Sequence(3, request("r", [5, 6, 7], max_tokens, params=params, eos=eos), FakeText())


@pytest.mark.parametrize("after", State)
@pytest.mark.parametrize("before", State)
def test_a_transition_is_taken_or_refused(before: State, after: State) -> None:
    one = Family(0, request("r", [5, 6, 7], 4))
    one.state = before
    if (before, after) in ALLOWED:
        one.move_to(after)
        assert one.state is after
    else:
        with pytest.raises(AssertionError, match=f"cannot become {after.value}"):
            one.move_to(after)
        assert one.state is before


def test_the_last_token_generated_is_never_stored() -> None:
    assert request("r", [1, 2, 3], 5).peak_tokens == 7
    assert request("r", [1, 2, 3], 1).peak_tokens == 3
    assert request("r", [1, 2, 3], 0).peak_tokens == 3


def test_append_ends_by_length_with_the_last_token_allowed() -> None:
    one = sequence(max_tokens=2)
    assert one.append(8) is None
    assert one.append(9) == "length"
    assert one.output_token_ids.tolist() == [8, 9]
    assert one.tokens.tolist() == [5, 6, 7, 8, 9]


def test_an_end_token_has_no_stop_reason_and_no_text() -> None:
    one = sequence(eos=(8, 9))
    assert one.append(9) == "stop"
    assert one.stop_reason is None
    assert isinstance(one.text, FakeText)
    assert one.text.tokens == []


def test_a_stop_token_is_the_stop_reason_even_where_it_is_an_end_token_too() -> None:
    one = sequence(params=SamplingParams(temperature=0, stop_token_ids=[9]), eos=(9,))
    assert one.append(9) == "stop"
    assert one.stop_reason == 9


def test_a_stop_on_the_last_token_allowed_is_a_stop() -> None:
    assert sequence(max_tokens=1, eos=(9,)).append(9) == "stop"


def test_the_ending_token_is_text_only_where_it_is_asked_for() -> None:
    params = SamplingParams(temperature=0, stop_token_ids=[9], include_stop_str_in_output=True)
    one = sequence(params=params)
    one.append(9)
    one.finish_text()
    assert isinstance(one.text, FakeText)
    assert one.text.tokens == [9]


def test_a_stop_string_found_by_the_text_is_the_stop_reason() -> None:
    class Stops(FakeText):
        def push(self, token_id: int) -> bool:
            self.stop_reason = "END"
            return token_id == 8

    one = Sequence(0, request("r", [5], 4), Stops(eager=True))
    assert one.append(7) is None
    assert one.append(8) == "stop"
    assert one.stop_reason == "END"


def test_families_compare_by_arrival() -> None:
    first, second = Family(1, request("b", [1], 1)), Family(2, request("a", [1], 1))
    assert first < second
    assert max([first, second]) is second
