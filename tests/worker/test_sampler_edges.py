"""Sampling at its edges: interval borders, precision, logits that are no numbers, small vocabularies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sampling import draw_at, weights_of

from paged import SamplingParams
from worker.sampler import logprobs, sample

NAN, INF = math.nan, math.inf


def one(logits: list[float], number: float, **params: Any) -> int:
    return sample(np.asarray(logits, dtype=np.float32), SamplingParams(**params), number)


@pytest.mark.parametrize(("number", "expected"), [(0.0, 1), (0.4999999, 1), (0.5, 3), (1 - 2**-53, 3), (1.0, 3)])
def test_each_token_owns_a_half_open_interval(number: float, expected: int) -> None:
    """Two equal tokens among some without weight: [0, 1/2) and [1/2, 1)."""
    assert one([-INF, 2.0, -INF, 2.0, -INF], number) == expected


def test_the_order_of_the_intervals_is_that_of_the_ids_whatever_is_filtered() -> None:
    logits = [0.0, 3.0, 1.0, 3.0, 2.0]
    for params in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.2}):
        kept = weights_of(logits, **params).nonzero()[0].tolist()
        drawn = [one(logits, i / 1000, **params) for i in range(1000)]
        assert drawn == sorted(drawn)
        assert sorted(set(drawn)) == kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_float64_of_the_logits_as_they_are(dtype: torch.dtype) -> None:
    logits = (torch.randn(100, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    weights = torch.from_numpy(weights_of(logits.float(), temperature=0.7))
    exact = logits.double() / 0.7
    assert torch.allclose(weights / weights.sum(), exact.softmax(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logprobs_are_float32_of_the_logits_as_they_are(dtype: torch.dtype) -> None:
    logits = (torch.randn(1, 100, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    (found,) = logprobs(logits, [7], [100])
    exact = logits[0].double().log_softmax(-1)
    assert found is not None
    assert found.logprob == pytest.approx(float(exact[7]), abs=1e-5)
    assert sorted(found.top_ids) == list(range(100))
    assert all(abs(v - float(exact[i])) < 1e-5 for i, v in zip(found.top_ids, found.top_logprobs, strict=True))


def test_filters_apply_in_order_each_to_what_is_left() -> None:
    """top_p is of the probabilities after top_k, min_p relative to the likeliest."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    kept = weights_of(logits, top_k=2, top_p=0.5).nonzero()[0].tolist()
    assert kept == [0]  # 4/7 of what top_k left; of all it would be 0.4, so two
    kept = weights_of(logits, top_k=3, min_p=0.6).nonzero()[0].tolist()
    assert kept == [0, 1]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-9}])
def test_the_tightest_filters_are_argmax(params: dict[str, Any]) -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(2))
    drawn = [one(row, 0.999, **params) for row in logits.tolist()]
    assert drawn == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_k", [4, 5, 2**31])
def test_a_top_k_past_the_vocabulary_keeps_all(top_k: int) -> None:
    assert weights_of([0.0] * 4, top_k=top_k).tolist() == [1.0] * 4


@pytest.mark.parametrize("row", [[NAN, 1, 2], [INF, 1, 2], [INF, INF, 1], [-INF] * 3, [NAN] * 3])
@pytest.mark.parametrize("params", [{}, {"top_k": 1}, {"top_k": 2, "top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0}])
def test_logits_that_are_no_numbers_disturb_no_other_row(row: list[float], params: dict[str, Any]) -> None:
    """The row gets some token of the vocabulary, and its neighbour the one it gets alone."""
    logits = torch.tensor([row, [0.1, 0.7, 0.3]])
    first, second = draw_at(logits, [SamplingParams(**params), SamplingParams()], [4, 5])
    assert 0 <= first < 3
    assert second == draw_at(logits[1:], [SamplingParams()], [5])[0]


def test_more_logprobs_than_tokens_are_all_of_them() -> None:
    (found,) = logprobs(torch.tensor([[0.0, 2.0, 1.0]]), [0], [20])
    assert found is not None
    assert (found.top_ids, found.rank) == ((1, 2, 0), 3)


def test_the_rank_of_equals_is_that_of_the_first() -> None:
    ranks = [entry.rank for entry in logprobs(torch.tensor([[5.0, 7, 7, 1]] * 4), range(4), [0] * 4) if entry]
    assert ranks == [3, 1, 1, 4]


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    params = [
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.3),
        SamplingParams(min_p=0.3, temperature=0.9),
        SamplingParams(logit_bias={3: 5.0, 4: -INF}, repetition_penalty=1.5, presence_penalty=1.0),
        SamplingParams(temperature=0, allowed_token_ids=[2], frequency_penalty=-1.0),
    ]
    assert draw_at(logits, params, range(5))[4] == 2
    logprobs(logits, [0, 1, 2, 3, 4], [3] * 5)
    assert torch.equal(logits, before)
