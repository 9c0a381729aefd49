"""ChunkLimit: what it learns of machines whose steps take what it assumes, and of others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.chunks import ChunkLimit

seconds = st.floats(0, 1e6)
tokens = st.integers(0, 100_000)


def learn(limit: ChunkLimit, decode: float, token: float, steps: int = 60) -> list[int]:
    """Steps of a machine that takes `decode` and `token` for each token of a prompt; the chunks that it was given."""
    given_out = []
    for step in range(steps):
        chunk = 0 if step % 3 == 0 else limit.tokens()
        given_out.append(limit.tokens())
        limit.observe(decode + token * chunk, 8, chunk)
    return given_out


def test_without_both_kinds_of_steps_it_gives_the_least() -> None:
    limit = ChunkLimit(0.1, 32)
    assert limit.tokens() == 32
    limit.observe(0.01, 4, 0)
    assert limit.tokens() == 32
    other = ChunkLimit(0.1, 32)
    other.observe(0.01, 0, 100)
    assert other.tokens() == 32


def test_a_mixed_step_before_any_plain_one_teaches_nothing() -> None:
    limit = ChunkLimit(0.1, 32)
    limit.observe(5.0, 4, 100)
    limit.observe(0.01, 4, 0)
    assert limit.tokens() == 32


@given(st.floats(1e-4, 0.04), st.floats(1e-6, 1e-3), st.integers(1, 200))
def test_a_linear_machine_is_learnt(decode: float, token: float, least: int) -> None:
    limit = ChunkLimit(0.05, least)
    learn(limit, decode, token)
    right = (0.05 - decode) / token
    assert limit.tokens() == pytest.approx(max(least, right), rel=1e-3, abs=1)


@given(st.floats(0.05, 10), st.floats(0, 1e-3))
def test_where_decoding_alone_is_too_slow_the_least_is_left(decode: float, token: float) -> None:
    limit = ChunkLimit(0.05, 16)
    learn(limit, decode, token)
    assert limit.tokens() == 16


def test_it_follows_a_machine_that_becomes_slow_and_quick_again() -> None:
    limit = ChunkLimit(0.05, 16)
    quick = learn(limit, 0.01, 1e-4)[-1]
    slow = learn(limit, 0.02, 1e-3)[-1]
    assert quick == pytest.approx(400, rel=0.01)
    assert slow == pytest.approx(30, rel=0.05)
    assert learn(limit, 0.01, 1e-4)[-1] == pytest.approx(quick, rel=0.01)


@given(
    st.floats(1e-6, 1e3),
    st.integers(1, 100),
    st.lists(st.tuples(seconds, st.sampled_from([0, 0, 1, 50]), tokens), max_size=20),
)
def test_whatever_it_hears_it_gives_at_least_the_least(
    target: float, least: int, heard: list[tuple[float, int, int]]
) -> None:
    """Steps of no time and of none of a kind too."""
    limit = ChunkLimit(target, least)
    for took, num_decodes, num_prompt in heard:
        limit.observe(took, num_decodes, num_prompt)
        assert limit.tokens() >= least


def test_prompts_that_take_no_time_are_not_bounded() -> None:
    limit = ChunkLimit(0.05, 16)
    limit.observe(0.01, 1, 0)
    limit.observe(0.0, 1, 100)
    assert limit.tokens() > 10**6
