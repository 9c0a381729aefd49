"""Sampling: a row's token depends on its own logits, parameters, seed and position, and on nothing else."""

from __future__ import annotations

import hashlib
import math
import pickle
import struct
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sampling import draw_at, state, weights_of

from paged import RequestError, SamplingParams
from worker.sampler import Draw, logprobs, sample, uniform
from worker.sampler import draw as draw_rows
from worker.step import Reset, Row, Step, StepResult

TEMPERATURES = [0.0, 1e-2, 1e-4, 1e-5, 1e-12, 1e-40, 5e-324]


def draw(logits: list[float], seed: int, **params: Any) -> int:
    return sample(np.asarray(logits, dtype=np.float32), SamplingParams(**params), uniform(seed, 0, 5))


def test_the_random_number_is_a_hash_of_seed_index_and_position() -> None:
    for seed, index, position in [(0, 0, 0), (42, 0, 7), (-1, 2, 8191), (2**64 - 1, 1, 1)]:
        digest = hashlib.blake2b(struct.pack("<QIQ", seed % 2**64, index, position), digest_size=8).digest()
        expected = (int.from_bytes(digest, "little") >> 11) / 2**53
        assert uniform(seed, index, position) == expected
        assert 0 <= expected < 1


def test_random_numbers_are_uniform_and_differ() -> None:
    values = np.array([uniform(seed, index, p) for seed in range(20) for index in range(5) for p in range(100)])
    assert len(set(values)) == len(values)
    assert np.abs(np.histogram(values, 10, (0, 1))[0] - 1000).max() < 150


def test_n01_a_row_is_the_same_alone_and_beside_any_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 200, generator=generator)
    params = [
        SamplingParams(temperature=[0.0, 0.8, 1.3, 1e-9][i % 4], top_k=[None, 5, 50][i % 3], top_p=[1.0, 0.7][i % 2])
        for i in range(16)
    ]
    together = draw_at(logits, params, range(16))
    alone = [draw_at(logits[i : i + 1], [params[i]], [i])[0] for i in range(16)]
    backwards = draw_at(logits.flip(0), params[::-1], range(16)[::-1])[::-1]
    assert together == alone == backwards


def test_n02_choices_of_flat_logits_differ_and_can_be_repeated() -> None:
    """n = 4 at seed 1 over 1,000 equally likely ids, 50 tokens each."""
    logits = torch.zeros(4, 1000)
    params = SamplingParams(temperature=1.0, seed=1, n=4)

    def choices() -> list[tuple[int, ...]]:
        states = [state(params, [7], seed=1, index=index) for index in range(4)]
        for position in range(1, 51):
            for each, token in zip(states, draw_rows(logits, [Draw(s, position) for s in states]), strict=True):
                each.append([token])
        return [tuple(each.tokens[1 : each.num_tokens].tolist()) for each in states]

    found = choices()
    assert len(set(found)) == 4
    assert all(len(set(choice)) >= 40 for choice in found)
    assert choices() == found


def test_n03_top_k_keeps_exactly_k_of_equal_logits() -> None:
    assert {draw([5, 7, 7, 1], seed, top_k=1) for seed in range(1000)} == {1}
    alone = [draw([3, 3, 3, 1], seed, top_k=2) for seed in range(1000)]
    assert set(alone) == {0, 1}
    params = [SamplingParams(top_k=2)] * 16
    for first in range(0, 992, 16):
        batch = draw_at(torch.tensor([[3.0, 3, 3, 1]] * 16), params, range(first, first + 16))
        assert batch == alone[first : first + 16]


def test_n03_top_p_and_min_p_of_equal_logits() -> None:
    assert weights_of([2.0] * 4, top_p=0.5).tolist() == [1, 1, 0, 0]
    assert weights_of([2.0] * 4, min_p=1.0).tolist() == [1, 1, 1, 1]
    assert {draw([2.0] * 4, seed, top_p=0.5) for seed in range(200)} == {0, 1}
    assert {draw([2.0] * 4, seed, min_p=1.0) for seed in range(200)} == {0, 1, 2, 3}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_n04_a_tiny_temperature_is_argmax(dtype: torch.dtype, temperature: float) -> None:
    """And the ordinary row beside it keeps its own stream."""
    logits = torch.tensor([[10, 12, 11], [0, 0.5, 0.2]], dtype=dtype)
    params = [SamplingParams(temperature=temperature), SamplingParams(temperature=1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(100):
            first, second = draw_at(logits, params, [seed, seed + 1000])
            assert first == 1
            assert second == draw_at(logits[1:], params[1:], [seed + 1000])[0]
            assert math.isfinite(logprobs(logits, [first, second], [0, None])[0].logprob)  # type: ignore[union-attr]


def test_draws_follow_the_distribution() -> None:
    logits = np.asarray([1.0, 0.0, 2.0, -1.0, 0.5], dtype=np.float32)
    expected = (torch.from_numpy(logits) / 0.7).softmax(-1).double().numpy() * 20_000
    params = SamplingParams(temperature=0.7)
    drawn = [sample(logits, params, uniform(1, 0, i)) for i in range(20_000)]
    counts = np.bincount(drawn, minlength=5)
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, None, 1.0, 0.0), (1.3, 7, 1.0, 0.0), (1.0, None, 0.6, 0.0), (0.9, None, 1.0, 0.1), (1.2, 40, 0.8, 0.05)],
)
def test_filters_are_those_of_transformers(temperature: float, top_k: int | None, top_p: float, min_p: float) -> None:
    from transformers.generation import logits_process as theirs

    logits = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 3
    warped = theirs.TemperatureLogitsWarper(temperature)(None, logits[None].double())
    if top_k is not None:
        warped = theirs.TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = theirs.TopPLogitsWarper(top_p)(None, warped)
    if min_p > 0:
        warped = theirs.MinPLogitsWarper(min_p)(None, warped)
    ours = torch.from_numpy(weights_of(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(ours > 0, warped[0].softmax(-1) > 0)
    assert torch.allclose(ours / ours.sum(), warped[0].softmax(-1), atol=1e-12)


def test_a_token_without_weight_is_never_drawn() -> None:
    logits = np.asarray([-np.inf, 1.0, -np.inf, 0.0, -np.inf], dtype=np.float32)
    for value in (0.0, 0.5, 1 - 2**-53):
        assert sample(logits, SamplingParams(), value) in {1, 3}


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(4))
    first, second = logprobs(logits, [3, 9], [2, None])
    values = logits[0].log_softmax(-1)
    assert second is None
    assert first is not None
    assert first.logprob == pytest.approx(float(values[3]), abs=1e-6)
    assert first.rank == 1 + int((values > values[3]).sum())
    assert list(first.top_ids) == values.topk(2).indices.tolist()


BAD: dict[str, list[Any]] = {
    "temperature": [-1, math.nan, math.inf, "hot", None, True],
    "top_p": [0, -0.1, 1.1, math.nan],
    "min_p": [-0.1, 1.1, "a"],
    "top_k": [-2, 1.5, "a", True],
    "seed": [1.5, "a", 2**64],
    "max_tokens": [-1, 1.5, "a", True, 2**40],
    "logprobs": [-1, 21, 1.5],
    "stop": ["", ["a", ""], [1], 5, ["x"] * 17],
    "stop_token_ids": [["a"], "a", [True], 1.5],
    "ignore_eos": [1, None, "yes"],
    "skip_special_tokens": [0],
    "include_stop_str_in_output": ["no"],
    "repetition_penalty": [0, -1, 101, math.nan, math.inf, None, "a", True],
    "presence_penalty": [-2.1, 2.1, math.nan, math.inf, "a", None],
    "frequency_penalty": [-2.1, 2.1, math.nan, -math.inf, "a", None],
    "logit_bias": [
        *([1], "a", 5, {"5": 1.0}, {1.0: 1.0}, {True: 1.0}, {None: 1.0}, [(1, 2, 3)], [[1, 2.0]]),
        *({5: "a"}, {5: None}, {5: True}, {5: math.nan}, {5: math.inf}, {5: 100.1}, {5: -101}, {5: 10**400}),
    ],
    "allowed_token_ids": [[], (), set(), ["a"], "a", [1.5], [True], [None]],
    "bad_words": ["", ["a", ""], [1], 5, b"a"],
    "min_tokens": [-1, 1.5, "a", True, None, 2**40],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_parameter_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_absent_is_none() -> None:
    assert SamplingParams(top_k=-1).top_k is SamplingParams(top_k=0).top_k is None
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=None, stop_token_ids=None).stop_strings == ()


def test_messages_survive_pickling() -> None:
    reset = Reset(np.arange(3, dtype=np.int32), ((1,),), 0, SamplingParams(stop=["a"], seed=3), 3, 0, 3)
    step = Step(4, (Row(1, 3, reset=reset), Row(2, 1, ((0, 1, 5),))), finished=(7,))
    again = pickle.loads(pickle.dumps(step))
    assert again.rows[1] == step.rows[1]
    assert again.rows[0].reset.params == reset.params
    assert again.rows[0].reset.tokens.tolist() == [0, 1, 2]
    result = StepResult(4, (1,), (9,))
    assert pickle.loads(pickle.dumps(result)) == result
