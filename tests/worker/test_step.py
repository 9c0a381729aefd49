"""SamplingParams, Step and StepResult: normalised, frozen, picklable, without torch."""

from __future__ import annotations

import dataclasses
import math
import pickle
import sys
from typing import Any

import numpy as np
import pytest

from paged import Move, RequestError, SamplingParams
from worker.sampler import sample
from worker.step import MAX_STOP_STRINGS, Logprobs, Reset, Row, Step, StepResult


@pytest.mark.parametrize("value", [10**400, -(10**400), "0.5", b"1", [1.0], 1 + 0j])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_what_is_no_number_in_range_is_refused_by_name(name: str, value: Any) -> None:
    """Whole numbers past the largest float too, which JSON can hold."""
    with pytest.raises(RequestError, match=f"{name} must be a number") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("temperature", [1, 10**30, 2**64, sys.float_info.max])
def test_a_temperature_may_be_any_whole_number_that_is_a_float(temperature: float) -> None:
    """torch cannot divide by a Python int of more than 64 bits: one such request must not fail everyone's step."""
    params = SamplingParams(temperature=temperature, top_p=1, min_p=0)
    assert [type(v) for v in (params.temperature, params.top_p, params.min_p)] == [float] * 3
    assert sample(np.zeros(4, dtype=np.float32), params, 0.6) == 2


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [0, 0.0, -0.0, 2, 1e-320]),
        ("top_k", [1, 2**31]),
        ("top_p", [1, 1e-9]),
        ("min_p", [0, 1]),
        ("seed", [0, -(2**63), 2**64 - 1, None]),
        ("max_tokens", [0, 1, None]),
        ("logprobs", [0, 20, None]),
        ("stop", [None, [], "a", ("a", "b"), ["x"] * MAX_STOP_STRINGS]),
        ("stop_token_ids", [None, [], [0], (1, 2), {3}]),
        ("repetition_penalty", [0.01, 1, 100]),
        ("presence_penalty", [-2, 0, 2.0]),
        ("frequency_penalty", [-2, 0, 2.0]),
        ("logit_bias", [None, {}, {5: -100, 6: 100.0, 7: -math.inf}, ((5, 1.0),), [(5, 1)]]),
        ("allowed_token_ids", [None, [0], (1, 2), {3}, 7]),
        ("bad_words", [None, [], "a", ("a", " b c")]),
        ("min_tokens", [0, 1, 2**31]),
    ],
)
def test_values_at_the_edges_are_taken(name: str, values: list[Any]) -> None:
    for value in values:
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 2**31 + 1),
        ("top_k", -2),
        ("seed", -(2**63) - 1),
        ("seed", True),
        ("logprobs", True),
        ("max_tokens", np.int64(3)),
        ("stop", b"x"),
        ("stop", {"a": 1}),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", True),
        ("stop_token_ids", [None]),
    ],
)
def test_a_near_miss_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_a_refusal_quotes_at_most_80_characters_of_the_value() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=[1] * 100_000)  # type: ignore[list-item]
    assert len(str(caught.value)) < 200


def test_one_item_and_a_list_of_it_are_the_same() -> None:
    assert SamplingParams(stop="a", stop_token_ids=[3]) == SamplingParams(stop=["a"], stop_token_ids=(3,))


def test_a_list_given_may_change_afterwards() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params.stop_strings == ("a",)


def test_biases_are_kept_as_pairs_by_id_and_can_be_given_so() -> None:
    params = SamplingParams(logit_bias={7: 1, 3: -2.5})
    assert params.biases == ((3, -2.5), (7, 1.0))
    assert dataclasses.replace(params, seed=3).biases == params.biases
    assert SamplingParams().biases == SamplingParams(logit_bias={}).biases == ()


def test_allowed_tokens_that_are_absent_are_none() -> None:
    assert SamplingParams().allowed_token_ids is None
    assert SamplingParams(allowed_token_ids=[2, 1]).allowed_token_ids == (2, 1)


def test_s11_more_tokens_than_there_may_be_are_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match="min_tokens 6 is more than max_tokens 5") as caught:
        SamplingParams(min_tokens=6, max_tokens=5)
    assert caught.value.param == "min_tokens"
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=6).max_tokens is None, "its default is not known here"


def test_params_are_frozen_and_hashable() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    assert hash(SamplingParams(logit_bias={1: 2}, allowed_token_ids=[1], bad_words=["a"])) == hash(
        SamplingParams(logit_bias=[(1, 2.0)], allowed_token_ids=(1,), bad_words="a")
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(stop=["a"], stop_token_ids=[1]))


def test_params_survive_pickling() -> None:
    rest = {"logit_bias": {3: -math.inf, 1: 2.0}, "allowed_token_ids": [1, 3], "bad_words": ["a"], "min_tokens": 3}
    params = SamplingParams(0.5, 3, 0.9, 0.1, -4, 7, ["a", "b"], [1], True, True, 2, False, **rest)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(params)) == params


def test_a_temperature_under_1e_5_is_greedy() -> None:
    assert SamplingParams(temperature=0.99e-5).greedy
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert not SamplingParams().greedy


def test_a_step_with_everything_survives_pickling() -> None:
    reset = Reset(np.asarray([1, 2, 3], dtype=np.int32), ((4, 5),), 2, SamplingParams(seed=1), 1, 0, 3)
    step = Step(7, (Row(1, 1, ((0, 3, 6),), token=5), Row(2, 1, samples=False)), (Move(1, 2),), (9,), restart=True)
    assert pickle.loads(pickle.dumps(step)) == step
    assert step.num_tokens == 2
    copy = pickle.loads(pickle.dumps(reset))
    assert copy.tokens.dtype == np.int32
    assert copy.tokens.tolist() == [1, 2, 3]
    assert (copy.tables, copy.num_computed, copy.params) == (((4, 5),), 2, reset.params)


def test_a_result_survives_pickling() -> None:
    result = StepResult(3, (1, 2), (5, 6), (Logprobs(-0.5, 1, (5,), (-0.5,)), None))
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize("message", [Step(0, ()), Row(0, 1), StepResult(0, (), ()), Logprobs(0.0, 1)])
def test_messages_are_frozen(message: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(message, dataclasses.fields(message)[0].name, 1)
