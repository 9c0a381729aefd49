"""temperature, top_k, top_p and min_p against their plain definition: a stable sort of everything, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import weights_of

from paged import SamplingParams
from worker.sampler import sample, uniform

Weights = npt.NDArray[np.float64]


def plain(logits: npt.NDArray[np.float32], params: SamplingParams) -> Weights:
    """What is left, float64 [vocab], 0 where nothing."""
    scaled = (logits.astype(np.float64) - np.float64(logits.max())) / params.temperature
    weights = np.exp(scaled)
    order = np.argsort(-logits, kind="stable")
    if params.top_k is not None:
        weights[order[params.top_k :]] = 0.0
    if params.top_p < 1.0:
        ordered = weights[order]
        drop = ordered.cumsum() - ordered >= params.top_p * ordered.sum()
        drop[0] = False
        weights[order[drop]] = 0.0
    weights[weights < params.min_p] = 0.0
    return weights


FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.3, 1e-4, 2.5, 1e30]) | st.floats(0.1, 5),
        "top_k": st.none() | st.integers(1, 60) | st.integers(1, 5000),
        "top_p": st.just(1.0) | st.floats(1e-6, 1.0),
        "min_p": st.just(0.0) | st.floats(0.0, 1.0),
    }
)


@settings(max_examples=300)
@given(
    params=FILTERS,
    size=st.sampled_from([1, 2, 5, 255, 256, 257, 1024, 3000, 5000]),
    step=st.sampled_from([0.0, 0.5, 0.0625]),  # to which logits are rounded: many are equal
    spread=st.floats(0.1, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_left_is_what_the_definition_leaves(
    params: dict[str, Any], size: int, step: float, spread: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal(size) * spread).astype(np.float32)
    if step:
        logits = np.round(logits / np.float32(step)) * np.float32(step)
    logits[generator.random(size) < 0.05] = -np.inf
    logits[generator.integers(size)] = 3.0
    if params["temperature"] == 1e30:  # all weigh the same to the last bit: which of them, only ids say
        logits[np.isfinite(logits)] = 3.0
    expected = plain(logits, SamplingParams(**params))
    found = weights_of(logits, **params)
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    ends = expected.cumsum()
    for number in (0.0, *generator.random(20), 1 - 2**-53):
        token = sample(logits, SamplingParams(**params), number)
        assert expected[token] > 0
        slack = 1e-12 * ends[-1]
        assert ends[token] - expected[token] - slack <= number * ends[-1] <= ends[token] + slack


@pytest.mark.parametrize("size", [1000, 49152, 50001])
def test_every_token_of_a_flat_vocabulary_can_come(size: int) -> None:
    """Number i / size is the border between tokens i - 1 and i; a half more lies in the middle of token i."""
    flat = np.zeros(size, dtype=np.float32)
    for token in (0, 1, 255, 256, 257, 511, 512, size // 2, size - 257, size - 2, size - 1):
        assert sample(flat, SamplingParams(), (token + 0.5) / size) == token
    assert sample(flat, SamplingParams(), 1.0) == size - 1, "rounded up to the sum"


def test_tokens_of_a_large_vocabulary_come_as_often_as_they_weigh() -> None:
    logits = np.full(49152, -30.0, dtype=np.float32)
    likely = {7: 0.5, 255: 0.2, 256: 0.2, 49151: 0.1}
    for token, share in likely.items():
        logits[token] = np.log(share)
    drawn = [sample(logits, SamplingParams(), uniform(0, 0, i)) for i in range(2000)]
    assert set(drawn) == set(likely)
    for token, share in likely.items():
        assert abs(drawn.count(token) / 2000 - share) < 0.05
