"""What a request forbids or weighs (case N07), against transformers where transformers has it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling import state
from transformers.generation import logits_process as theirs

from paged import SamplingParams
from worker.inputs import SequenceState
from worker.logits import Floats, processed
from worker.sampler import Draw, draw, logprobs

INF = math.inf
VOCAB = 12
LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB)
TOKEN = st.integers(0, VOCAB - 1)
HISTORY = st.lists(TOKEN, min_size=5, max_size=20)


def row_of(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float32)


def after(one: SequenceState, row: Floats, mask: bytes | None = None) -> Floats:
    """The logits of the sequence's next token."""
    return processed(row, one.tokens[: one.num_tokens], one.rules, mask)


def mask_of(*tokens: int, size: int = 1) -> bytes:
    words = np.zeros(size, dtype="<u4")
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.tobytes()


def banned(row: Floats) -> list[int]:
    return np.flatnonzero(row == -INF).tolist()


# Case N07


@pytest.mark.parametrize("behind", [0, 7])
@pytest.mark.parametrize("company", ["alone", "first", "last"])
def test_n07_penalties_are_of_ones_own_tokens_whoever_runs_beside(company: str, behind: int) -> None:
    """What lies behind a sequence's tokens in memory, as a pad would, counts for nothing."""
    row = [1.0, 1, 1, 1, 1, 1, -1, 1]
    params = SamplingParams(temperature=0, repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25)
    one = state(params, [3, 6], [5, 5])
    one.tokens[one.num_tokens :] = behind
    expected = row_of([1, 1, 1, 0.5, 1, -0.75, -2, 1])
    assert np.array_equal(after(one, row_of(row)), expected)
    long = state(params, [i % 8 for i in range(40)])
    free = state(SamplingParams(temperature=0), [3, 6], [5, 5])
    draws = [Draw(each, each.num_tokens) for each in (long, free)]
    draws.insert({"first": 0, "last": 2, "alone": 0}[company], Draw(one, one.num_tokens))
    if company == "alone":
        draws = draws[:1]
    logits = torch.tensor([row] * len(draws))
    tokens = draw(logits, draws)
    assert tokens[draws.index(Draw(one, 4))] == 0
    assert torch.equal(logits, torch.tensor([row] * len(draws))), "nobody's row is changed in place"
    assert after(free, raw := row_of(row)) is raw


def test_penalties_count_tokens_of_the_output_only_and_as_often_as_they_are_there() -> None:
    params = SamplingParams(frequency_penalty=1.5, presence_penalty=-0.5)
    row = after(state(params, [1, 1, 2], [2, 3, 3]), row_of(np.zeros(5)))
    assert row.tolist() == [0, 0, -1, -2.5, 0]


# Against transformers


@given(row=LOGITS, prompt=HISTORY, output=HISTORY, penalty=st.floats(0.05, 20))
def test_the_repetition_penalty_is_that_of_transformers(
    row: list[float], prompt: list[int], output: list[int], penalty: float
) -> None:
    ours = after(state(SamplingParams(repetition_penalty=penalty), prompt, output), row_of(row))
    expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), torch.tensor([row]))
    np.testing.assert_allclose(ours, expected[0].numpy(), rtol=3e-7)


@given(
    row=LOGITS, prompt=HISTORY, output=HISTORY, phrases=st.lists(st.lists(TOKEN, min_size=1, max_size=4), max_size=6)
)
def test_bad_phrases_are_those_of_transformers(
    row: list[float], prompt: list[int], output: list[int], phrases: list[list[int]]
) -> None:
    ends = [[*prompt[-3:], output[0]], [*output[-3:], 3], [output[-1], 4]]  # some that match
    phrases = [*phrases, *ends]
    one = state(SamplingParams(), prompt, output, bad_phrases=tuple(map(tuple, phrases)))
    their = theirs.NoBadWordsLogitsProcessor(phrases)
    expected = their(torch.tensor([prompt + output]), torch.tensor([row]))[0].numpy()
    if expected.max() > -INF:
        assert np.array_equal(after(one, row_of(row)), expected)


@given(row=LOGITS, history=HISTORY, biases=st.dictionaries(TOKEN, st.floats(-100, 100) | st.just(-INF), max_size=8))
def test_biases_are_those_of_transformers(row: list[float], history: list[int], biases: dict[int, float]) -> None:
    ours = after(state(SamplingParams(logit_bias=biases), history), row_of(row))
    if not biases:
        return
    their = theirs.SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})
    expected = their(torch.tensor([history]), torch.tensor([row]))[0].numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-5)
    assert banned(ours) == sorted(token for token, bias in biases.items() if bias == -INF)


@given(row=LOGITS, prompt=HISTORY, output=HISTORY, least=st.integers(0, 25))
def test_the_least_length_is_that_of_transformers(
    row: list[float], prompt: list[int], output: list[int], least: int
) -> None:
    one = state(SamplingParams(min_tokens=least), prompt, output, end_token_ids=(2, 7))
    their = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), least, [2, 7])
    expected = their(torch.tensor([prompt + output]), torch.tensor([row]))[0].numpy()
    assert np.array_equal(after(one, row_of(row)), expected)


@given(row=LOGITS, history=HISTORY, allowed=st.sets(TOKEN, min_size=1))
def test_only_what_is_allowed_stays_and_as_it_is(row: list[float], history: list[int], allowed: set[int]) -> None:
    ours = after(state(SamplingParams(allowed_token_ids=sorted(allowed)), history), row_of(row))
    their = theirs.SuppressTokensLogitsProcessor(sorted(set(range(VOCAB)) - allowed))
    assert np.array_equal(ours, their(torch.tensor([history]), torch.tensor([row]))[0].numpy())


@given(row=LOGITS, history=HISTORY, tokens=st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_a_mask_allows_the_tokens_of_its_bits(row: list[float], history: list[int], tokens: set[int]) -> None:
    one = state(SamplingParams(), history)
    for size in (1, 4):  # shorter than a vocabulary of 40, and longer than it
        wide = row_of([*row, *range(40 - VOCAB)])
        ours = after(one, wide, mask_of(*tokens, size=size))
        assert np.flatnonzero(ours > -INF).tolist() == sorted(tokens)
        assert np.array_equal(ours[sorted(tokens)], wide[sorted(tokens)])


def test_a_mask_is_little_endian_words() -> None:
    row = row_of(np.zeros(70))
    one = state(SamplingParams())
    assert np.flatnonzero(after(one, row, (1 << 8).to_bytes(4, "little")) == 0).tolist() == [8]
    assert np.flatnonzero(after(one, row, mask_of(0, 31, 32, 69, size=3)) == 0).tolist() == [0, 31, 32, 69]
    assert np.flatnonzero(after(one, row, mask_of(5, size=1)) == 0).tolist() == [5], "ids beyond it are not allowed"


# Order, and what is left


def test_biases_come_before_penalties() -> None:
    """A bias of 3 makes -1 a positive 2, which the penalty then halves."""
    params = SamplingParams(logit_bias={1: 3.0}, repetition_penalty=2.0, presence_penalty=0.25)
    assert after(state(params, [1], [1]), row_of([0, -1, 4])).tolist() == [0, 0.75, 4]


def test_what_is_forbidden_stays_so_whatever_it_weighs() -> None:
    params = SamplingParams(
        allowed_token_ids=[0, 1, 2], logit_bias={1: -INF, 3: 100.0}, frequency_penalty=-2.0, repetition_penalty=0.5
    )
    one = state(params, [1, 3], [2, 3, 1], bad_phrases=((3, 1, 2),))
    assert banned(after(one, row_of([1, 2, 3, 4]))) == [1, 2, 3]


@pytest.mark.parametrize(
    ("mask", "more", "left"),
    [
        (mask_of(1, 2), {"allowed_token_ids": [3]}, [1, 2]),
        (mask_of(1, 2), {"allowed_token_ids": [2, 3], "logit_bias": {2: -INF}}, [2]),
        (None, {"allowed_token_ids": [4, 5], "logit_bias": {5: -INF}}, [5]),  # 4 is bad, and 5 binds less
        (None, {"allowed_token_ids": [4]}, [4]),
        (None, {"allowed_token_ids": [6], "min_tokens": 9}, [6]),
    ],
)
def test_a_ban_that_would_leave_nothing_is_passed_over(
    mask: bytes | None, more: dict[str, Any], left: list[int]
) -> None:
    """The mask binds most, then what is allowed, bad phrases, end tokens, and single bans."""
    one = state(SamplingParams(**more), [0], [1], bad_phrases=((4,), (1, 4)), end_token_ids=(6,))
    row = after(one, row_of(np.arange(8)), mask)
    assert np.flatnonzero(row > -INF).tolist() == left


def test_end_tokens_that_the_model_does_not_have_ban_nothing() -> None:
    one = state(SamplingParams(min_tokens=3), [0], end_token_ids=(-1, 2, 10**6))
    assert banned(after(one, row_of(np.zeros(5)))) == [2]


def test_a_phrase_longer_than_the_history_waits() -> None:
    one = state(SamplingParams(), [3], bad_phrases=((3, 3, 3), (1, 3, 2)))
    assert banned(after(one, row_of(np.zeros(5)))) == []
    one.append([3])
    assert banned(after(one, row_of(np.zeros(5)))) == [3]


# Through draw


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, max_tokens=3, stop_token_ids=[3]),
        SamplingParams(repetition_penalty=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, bad_words=[]),
    ],
)
def test_a_row_that_asks_for_nothing_is_not_even_copied(params: SamplingParams) -> None:
    one = state(params, end_token_ids=(3,))
    assert one.rules is None
    assert after(one, row := row_of([1, 2])) is row


def test_greedy_and_sampled_rows_obey_and_log_probabilities_stay_raw() -> None:
    logits = torch.tensor([[0.0, 9, 1, 2]] * 3)
    states = [
        state(SamplingParams(temperature=0, logit_bias={1: -INF})),
        state(SamplingParams(temperature=0.01, logit_bias={1: -INF})),
        state(SamplingParams(temperature=0)),
    ]
    tokens = draw(logits, [Draw(one, 1) for one in states], logits.argmax(-1))
    assert tokens == [3, 3, 1]
    entry = logprobs(logits, tokens, [1, None, None])[0]
    assert entry is not None
    assert entry.logprob == pytest.approx(float(logits[0].log_softmax(-1)[3]))
    assert (entry.rank, entry.top_ids) == (2, (1,))


def test_each_draft_is_history_for_what_comes_after_it() -> None:
    """Penalties, phrases and min_tokens see as many tokens as stand before the place."""
    params = SamplingParams(temperature=0, min_tokens=2, presence_penalty=2.0)
    one = state(params, [0], [1], end_token_ids=(5,), bad_phrases=((1, 2, 4),))
    one.guess([2, 3])
    row = [0.0, 7.5, 6.5, 1, 8, 9]
    # 5 is not yet allowed; then 1 and 2 are penalised, and 4 completes a phrase; then all that is over
    assert draw(torch.tensor([row] * 3), [Draw(one, 2 + i) for i in range(3)]) == [4, 5, 5]
    row[5] = 0.0
    assert draw(torch.tensor([row] * 3), [Draw(one, 2 + i) for i in range(3)]) == [4, 1, 4]
    row[4] = 0.0
    assert draw(torch.tensor([row] * 3), [Draw(one, 2 + i) for i in range(3)]) == [2, 1, 1]


def test_a_mask_rules_one_draw_and_no_other() -> None:
    one = state(SamplingParams(temperature=0))
    draws = [Draw(one, 1, mask_of(0, 2)), Draw(one, 1), Draw(one, 1, mask_of(0))]
    assert draw(torch.tensor([[0.0, 5, 4]] * 3), draws) == [2, 1, 0]
