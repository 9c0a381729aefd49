"""Beam search: tokens and scores are those of transformers; the rules one by one on candidates made by hand."""

from __future__ import annotations

import itertools
import random
import warnings
from typing import Any

import pytest
import torch

from paged import RequestError
from scheduler.beam import Beams, BeamSearchParams, Branch, Hypothesis

VOCAB = 61
EOS = (7, 23)
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
STOPPING: tuple[Any, ...] = (False, True, "never")


# Against transformers


def llama(vocab: int, eos_bias: float = 0.0) -> Any:
    """A random Llama, float32, whose two end tokens are made likelier by so much."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(vocab)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config).eval()
    head = torch.nn.Linear(32, vocab)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[[token % vocab for token in EOS]] = eos_bias
    model.lm_head = head
    return model


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models() -> dict[float, Any]:
    return {bias: llama(VOCAB, bias) for bias in (0.0, 2.0, 4.0)}


def expected(
    model: Any, prompt: list[int], params: BeamSearchParams, eos: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], list[float] | None]:
    """Generated tokens, and the scores, which there are of a width above 1 only."""
    width = params.beam_width
    only_beams: dict[str, Any] = {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
            **(only_beams if width > 1 else {}),
        )
    sequences = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))  # what follows is padding
        sequences.append(tuple(row[:end]))
    return sequences, found.sequences_scores.tolist() if width > 1 else None


def search(
    model: Any, prompt: list[int], params: BeamSearchParams, eos: tuple[int, ...]
) -> tuple[list[Hypothesis], int]:
    """What Beams finds, with a forward over all tokens of every live beam at each step, and after how many steps."""
    beams, live = Beams(params, eos), [list(prompt)]
    for steps in itertools.count(1):
        with torch.inference_mode():
            logprobs = model(torch.tensor(live), use_cache=False).logits[:, -1].log_softmax(-1)
        top = logprobs.topk(min(beams.num_candidates, logprobs.shape[-1]))
        candidates = [
            list(zip(*pair, strict=True)) for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        branches = beams.advance(candidates)
        if not branches:
            return beams.results(), steps
        live = [[*live[branch.parent], branch.token] for branch in branches]
    raise AssertionError


def compare(
    model: Any, prompt: list[int], params: BeamSearchParams, eos: tuple[int, ...] = ()
) -> tuple[list[Hypothesis], int]:
    found, steps = search(model, prompt, params, eos)
    sequences, scores = expected(model, prompt, params, eos)
    assert [hypothesis.tokens for hypothesis in found] == sequences, (prompt, params, eos)
    if scores is not None:
        assert [hypothesis.score for hypothesis in found] == pytest.approx(scores, rel=1e-5, abs=1e-5)
    for hypothesis in found:
        length = len(hypothesis.tokens)
        assert hypothesis.score == pytest.approx(hypothesis.cumulative_logprob / length**params.length_penalty)
        assert hypothesis.finish_reason == ("stop" if hypothesis.tokens[-1] in eos else "length")
        assert hypothesis.finish_reason == "stop" or length == params.max_tokens
    return found, steps


@pytest.mark.parametrize("early_stopping", STOPPING)
@pytest.mark.parametrize("width", range(1, 7))
def test_tokens_and_scores_are_those_of_transformers(models: dict[float, Any], width: int, early_stopping: Any) -> None:
    draw = random.Random(f"{width} {early_stopping}")
    for penalty, num_eos in itertools.product(PENALTIES, range(3)):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
        params = BeamSearchParams(width, draw.randint(1, 14), False, penalty, early_stopping)
        compare(models[draw.choice([*models])], prompt, params, EOS[:num_eos])


@pytest.mark.parametrize("early_stopping", STOPPING)
def test_searches_that_end_before_max_tokens_with_results_of_many_lengths(
    models: dict[float, Any], early_stopping: Any
) -> None:
    ended, lengths = set(), set()
    for penalty, start in itertools.product(PENALTIES, range(4)):
        params = BeamSearchParams(4, 12, False, penalty, early_stopping)
        found, steps = compare(models[2.0], [start, 3 * start + 1], params, EOS)
        ended.add(steps)
        lengths |= {len(hypothesis.tokens) for hypothesis in found}
    assert min(ended) < 12  # so that the comparison is of something
    assert len(lengths) > 5


@pytest.mark.parametrize("early_stopping", STOPPING)
@pytest.mark.parametrize("vocab", [6, 9])
def test_a_vocabulary_smaller_than_the_candidates(vocab: int, early_stopping: Any) -> None:
    model = llama(vocab, 1.0)
    eos = tuple(token % vocab for token in EOS)
    for width, penalty in itertools.product((3, 4), PENALTIES):
        params = BeamSearchParams(width, 9, False, penalty, early_stopping)
        compare(model, [1, 2], params, eos)


@pytest.mark.parametrize("width", [1, 3])
def test_end_tokens_are_ignored_on_request(models: dict[float, Any], width: int) -> None:
    ignoring, plain = BeamSearchParams(width, 10, ignore_eos=True), BeamSearchParams(width, 10)
    found, _ = search(models[4.0], [5, 6], ignoring, EOS)
    assert found == search(models[4.0], [5, 6], plain, ())[0]
    assert any(token in EOS for hypothesis in found for token in hypothesis.tokens[:-1])


# By hand: END is the end token, log-probabilities are round numbers

END = 9


def beams(width: int, max_tokens: int = 10, penalty: float = 1.0, early_stopping: Any = False, end: int = END) -> Beams:
    return Beams(BeamSearchParams(width, max_tokens, False, penalty, early_stopping), [end])


def test_the_best_continuations_of_all_beams_live_on_and_all_end_at_max_tokens() -> None:
    search = beams(2, max_tokens=2, penalty=0.0)
    assert search.advance([[(4, -1.0), (5, -2.0), (6, -3.0)]]) == [Branch(0, 4), Branch(0, 5)]
    assert search.advance([[(1, -3.0), (2, -3.5)], [(3, -0.5), (2, -8.0)]]) == []
    assert search.results() == [
        Hypothesis((5, 3), -2.5, -2.5, "length"),
        Hypothesis((4, 1), -4.0, -4.0, "length"),
    ]


def test_both_live_beams_may_come_from_one() -> None:
    search = beams(2)
    search.advance([[(4, -1.0), (5, -2.0)]])
    assert search.advance([[(1, -5.0), (2, -6.0)], [(3, -0.5), (4, -0.75)]]) == [Branch(1, 3), Branch(1, 4)]
    assert search.advance([[(1, -2.0)], [(2, -1.0)]]) == [Branch(1, 2), Branch(0, 1)]


def test_an_end_token_counts_only_among_the_first_beam_width_and_does_not_live_on() -> None:
    search = beams(2)
    assert search.advance([[(4, -1.0), (5, -2.0), (END, -3.0)]]) == [Branch(0, 4), Branch(0, 5)]
    assert search.results() == []
    live = search.advance([[(1, -1.0), (END, -1.5), (2, -4.0)], [(3, -2.0), (END, -2.25), (4, -7.0)]])
    assert live == [Branch(0, 1), Branch(1, 3)]
    assert search.results() == [Hypothesis((4, END), -2.5, -1.25, "stop")]


@pytest.mark.parametrize(("penalty", "best"), [(0.0, (END,)), (0.5, (END,)), (1.0, (4, END)), (-1.0, (END,))])
def test_length_penalty_is_the_exponent_of_the_length_with_its_end_token(penalty: float, best: tuple[int, ...]) -> None:
    search = beams(2, penalty=penalty, early_stopping=True)
    search.advance([[(END, -1.0), (4, -1.1), (5, -3.0)]])
    assert search.advance([[(END, -0.5), (4, -9.0)], [(5, -9.0)]]) == []
    results = search.results()
    assert results[0].tokens == best
    assert {result.tokens: result.score for result in results} == {
        (END,): -1.0,
        (4, END): pytest.approx(-1.6 / 2**penalty),
    }


def test_a_better_hypothesis_pushes_out_the_worst_and_a_worse_one_is_not_kept() -> None:
    search = beams(2, max_tokens=3, early_stopping="never")
    search.advance([[(END, -2.0), (4, -2.1), (5, -2.2)]])
    search.advance([[(4, -0.25), (END, -3.5)], [(END, -2.5), (5, -0.5)]])
    assert [result.tokens for result in search.results()] == [(END,)]  # the others were third and fourth
    assert search.advance([[(END, -0.5), (1, -0.75)], [(END, -9.0), (1, -9.0)]]) == []
    assert search.results() == [
        Hypothesis((4, 4, END), -2.85, -2.85 / 3, "stop"),
        Hypothesis((4, 4, 1), -3.1, -3.1 / 3, "length"),
    ]


@pytest.mark.parametrize(
    ("penalty", "going_on", "over"),
    [
        # The finished ones score -1 and, second, (-1.2 - 1) / 2**penalty.
        (1.0, -0.8, {False: False, True: True, "never": False}),  # -2 / 2 beats -1.1
        (1.0, -1.0, {False: True, True: True, "never": False}),  # -2.2 / 2 equals -1.1, and -2.2 / 10 beats it
        (1.0, -1.5, {False: True, True: True, "never": False}),
        (1.0, -9.9, {False: True, True: True, "never": True}),  # -11.1 / 10
        (0.0, -0.8, {False: False, True: True, "never": False}),  # -2 beats -2.2
        (0.0, -1.5, {False: True, True: True, "never": True}),
        (-1.0, -0.8, {False: False, True: True, "never": False}),
        (-1.0, -1.5, {False: True, True: True, "never": True}),
    ],
)
@pytest.mark.parametrize("early_stopping", STOPPING)
def test_when_enough_have_finished_early_stopping_decides(
    penalty: float, going_on: float, over: dict[Any, bool], early_stopping: Any
) -> None:
    search = beams(2, penalty=penalty, early_stopping=early_stopping)
    assert len(search.advance([[(END, -1.0), (4, -1.2), (5, -11.0)]])) == 2
    live = search.advance([[(4, going_on), (END, -1.0)], [(5, -9.0), (6, -10.0)]])
    assert (live == []) == over[early_stopping]
    assert [result.tokens for result in search.results()] == [(END,), (4, END)]


def test_of_equals_the_lower_beam_comes_first_then_the_lower_token() -> None:
    search = beams(3, penalty=0.0)
    assert search.advance([[(6, -1.0), (4, -1.0), (5, -1.0)]]) == [Branch(0, 4), Branch(0, 5), Branch(0, 6)]
    assert search.advance([[(8, -2.0)], [(3, -2.0), (2, -2.0)], [(1, -2.0)]]) == [
        Branch(0, 8),
        Branch(1, 2),
        Branch(1, 3),
    ]


def test_of_equal_scores_what_finished_earlier_stays() -> None:
    search = beams(2, max_tokens=2, penalty=0.0)
    search.advance([[(4, -1.0), (END, -2.0), (5, -2.5)]])
    assert search.advance([[(6, -0.5), (7, -1.0)], [(6, -9.0)]]) == []
    assert [(result.tokens, result.score) for result in search.results()] == [((4, 6), -1.5), ((END,), -2.0)]


@pytest.mark.parametrize("early_stopping", STOPPING)
def test_a_width_of_1_is_greedy(early_stopping: Any) -> None:
    search = beams(1, early_stopping=early_stopping)
    assert search.advance([[(4, -1.0), (END, -1.5)]]) == [Branch(0, 4)]
    assert search.advance([[(END, -1.0), (5, -1.25)]]) == []
    assert search.results() == [Hypothesis((4, END), -2.0, -1.0, "stop")]


def test_a_search_may_be_given_up_at_any_moment() -> None:
    search = beams(2)
    assert search.results() == []
    search.advance([[(END, -1.0), (4, -2.0), (5, -3.0)]])
    halfway = [Hypothesis((END,), -1.0, -1.0, "stop")]
    assert search.results() == halfway
    search.results().clear()
    assert search.results() == halfway


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_tiny_vocabulary_gives_what_it_has(max_tokens: int) -> None:
    search = beams(3, max_tokens=max_tokens)
    vocabulary = [(0, -0.5), (1, -1.0)]
    assert search.advance([vocabulary]) == ([] if max_tokens == 1 else [Branch(0, 0), Branch(0, 1)])
    if max_tokens == 2:
        assert search.advance([vocabulary, vocabulary]) == []
    assert [result.tokens for result in search.results()] == (
        [(0,), (1,)] if max_tokens == 1 else [(0, 0), (0, 1), (1, 0)]
    )


def test_a_search_that_nothing_can_continue_is_over() -> None:
    search = beams(2)
    assert search.advance([[(END, 0.0)]]) == []
    assert search.results() == [Hypothesis((END,), 0.0, 0.0, "stop")]


@pytest.mark.parametrize(("ignore_eos", "number"), [(False, 6), (True, 4)])
def test_candidates_are_the_width_and_the_end_tokens(ignore_eos: bool, number: int) -> None:
    assert Beams(BeamSearchParams(4, 1, ignore_eos), (3, 5, 3)).num_candidates == number


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(("beam_width", "max_tokens"), (0, -1, 2**31 + 1, 1.0, True, None, "4")),
        *itertools.product(["ignore_eos"], (1, None, "no")),
        *itertools.product(["length_penalty"], (float("nan"), float("inf"), -10.5, 11, 10**400, True, None, "1")),
        *itertools.product(["early_stopping"], (1, 0, None, "always", "True")),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    values: dict[str, Any] = {"beam_width": 2, "max_tokens": 4, name: value}
    with pytest.raises(RequestError, match=f"^{name} must be ") as caught:
        BeamSearchParams(**values)
    assert caught.value.param == name


@pytest.mark.parametrize("penalty", [-10, 10])
def test_the_most_extreme_penalty_of_the_longest_search_can_be_computed(penalty: int) -> None:
    search = Beams(BeamSearchParams(2, 2**31, length_penalty=penalty, early_stopping="never"), [8, 9])
    live = search.advance([[(8, -1.0), (9, -1.5), (4, -2.0), (5, -3.0)]])
    assert [branch.token for branch in live] == ([4, 5] if penalty > 0 else [])
