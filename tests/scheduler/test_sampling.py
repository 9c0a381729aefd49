"""Sampling parameters through the engine: bans of tokens, words and phrases, penalties; what is refused before."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from fakes import Rig, fake_engine, request
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from paged import LLM, RequestError, SamplingParams
from scheduler.engine import Engine
from scheduler.policy import Limits, check_tokens
from scheduler.text import TextStream, Tokenizer
from worker.checkpoints import Checkpoint

PROMPT = "Once upon a time, in a small village by the sea, there lived a"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Checkpoint) -> Tokenizer:
    return Tokenizer.from_dir(smollm2.path)


@pytest.fixture(scope="module")
def llm(smollm2: Checkpoint) -> LLM:
    return LLM("smollm2", dtype="float32", kv_memory="64MiB", max_num_batched_tokens=64)


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def theirs(model: Any, tokens: list[int], **settings: Any) -> list[int]:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        found = model.generate(
            torch.tensor([tokens]), do_sample=False, max_new_tokens=12, min_new_tokens=12, **settings
        )
    return list(found[0, len(tokens) :].tolist())


# Against transformers


def test_greedy_answers_under_penalties_and_bans_are_those_of_transformers(
    llm: LLM, tokenizer: Tokenizer, transformers_smollm2: Any
) -> None:
    """All in one batch, with a request that asks for nothing."""
    prompt = tokenizer.encode(PROMPT).tolist()
    free = theirs(transformers_smollm2, prompt)
    words = [tokenizer.decode(free[2:5]), tokenizer.decode(free[7:8])]
    assert {tuple(free[2:5]), tuple(free[7:8])} <= set(tokenizer.phrases(words))
    cases: list[tuple[SamplingParams, dict[str, Any]]] = [
        (greedy(), {}),
        (greedy(repetition_penalty=1.3), {"repetition_penalty": 1.3}),
        (
            greedy(logit_bias={free[0]: -math.inf, free[3]: -4.0}),
            {"sequence_bias": {(free[0],): -math.inf, (free[3],): -4.0}},
        ),
        (greedy(bad_words=words), {"bad_words_ids": [list(ids) for ids in tokenizer.phrases(words)]}),
    ]
    outputs = llm.generate([prompt] * len(cases), [params for params, _ in cases])
    for output, (params, settings) in zip(outputs, cases, strict=True):
        expected = free if not settings else theirs(transformers_smollm2, prompt, **settings)
        assert output.outputs[0].token_ids == expected, params
        assert not settings or expected != free


def test_penalties_after_a_preemption_are_those_without_one(llm: LLM) -> None:
    """What was generated before counts as output, not as prompt."""
    params = greedy(24, frequency_penalty=1.0, presence_penalty=1.5, bad_words=["the"], min_tokens=10)
    expected = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    assert expected != llm.generate(PROMPT, greedy(24))[0].outputs[0].token_ids
    tokens: list[int] = []
    preempted = 0
    for output in llm.stream(PROMPT, params):
        tokens += output.outputs[0].token_ids
        if len(tokens) in {3, 9} and not output.finished:
            llm.engine.scheduler._preempt(llm.engine.scheduler.running[0])
            preempted += 1
    assert preempted == 2
    assert tokens == expected


# Words and phrases


def test_a_bad_word_is_banned_with_and_without_a_space_before_it(tokenizer: Tokenizer) -> None:
    for word in ("fox", " fox", "  fox"):
        assert {tokenizer.decode(ids) for ids in tokenizer.phrases([word])} == {"fox", " fox"}
    assert {tokenizer.decode(ids) for ids in tokenizer.phrases(["\n"])} == {"\n", " \n"}
    assert tokenizer.phrases(["  "]) == tokenizer.phrases(["  ", "  "])
    assert tokenizer.phrases([]) == ()


def test_bad_words_do_not_come_about(llm: LLM, tokenizer: Tokenizer) -> None:
    text = llm.generate(PROMPT, greedy())[0].outputs[0].text
    banned = text.split()[:3]
    for params in (greedy(bad_words=banned), SamplingParams(seed=5, max_tokens=12, bad_words=banned, n=3)):
        for output in llm.generate(PROMPT, params)[0].outputs:
            for phrase in tokenizer.phrases(banned):
                ids = output.token_ids
                assert all(tuple(ids[i : i + len(phrase)]) != phrase for i in range(len(ids)))


def test_a_word_without_tokens_is_refused() -> None:
    words = FastTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.normalizer = normalizers.Replace("x", "")
    with pytest.raises(RequestError, match="'x' has no tokens") as caught:
        Tokenizer(words, None, {}).phrases(["x"])
    assert caught.value.param == "bad_words"


def test_bad_words_without_a_tokenizer_are_refused() -> None:
    engine, _ = fake_engine(16, 4)
    with pytest.raises(RequestError, match="bad_words need a tokenizer") as caught:
        engine.add("r", [1, 2], SamplingParams(bad_words=["a"]))
    assert caught.value.param == "bad_words"
    assert not engine.has_work


def test_a_bad_word_that_the_model_has_no_token_for_is_no_matter() -> None:
    """A tokenizer may know more tokens than the model: the worker, which has no logit for them, is not told."""
    words = FastTokenizer(models.WordLevel({"a": 0, "b": 5, "c": 1000}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    executor = fake_engine(16, 4)[1]
    engine = Engine(executor, Tokenizer(words, None, {}), Limits(64, 16, 4), vocab_size=1000)
    assert engine.resolve("r", [1, 2], SamplingParams(bad_words=["b", "c", "b c", "b b"])).bad_phrases == ((5,), (5, 5))


# What is refused


@pytest.mark.parametrize(
    ("params", "param", "text"),
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias", "token id 10 is not one of the model's, 0 to 9"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "token id -1"),
        ({"allowed_token_ids": [3, 10]}, "allowed_token_ids", "token id 10 is not one of the model's, 0 to 9"),
        (
            {"allowed_token_ids": [3, 4], "logit_bias": {3: -math.inf, 4: -math.inf}},
            "allowed_token_ids",
            "none of the 2",
        ),
        ({"allowed_token_ids": [1, 1]}, "allowed_token_ids", "none of the 1 allowed"),
        ({"allowed_token_ids": [1, 2], "min_tokens": 1}, "allowed_token_ids", "none of the 2"),
        ({"allowed_token_ids": [5], "min_tokens": 1, "stop_token_ids": [5]}, "allowed_token_ids", "none of the 1"),
        ({"logit_bias": dict.fromkeys([0, *range(2, 10)], -math.inf)}, "logit_bias", "none of the 10"),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(params: dict[str, Any], param: str, text: str) -> None:
    """Of ten tokens, 2 is an end token, 1 a bad word, and 4 5 a bad phrase."""
    with pytest.raises(RequestError, match=text) as caught:
        check_tokens(SamplingParams(**params), [(1,), (4, 5)], [2], 10)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {0: -math.inf, 9: 100.0}},
        {"allowed_token_ids": [2]},
        {"allowed_token_ids": [1, 9], "min_tokens": 3},
        {"logit_bias": dict.fromkeys(range(9), -math.inf)},
        {"stop_token_ids": [10**6, -5], "min_tokens": 2},
    ],
)
def test_what_leaves_a_token_is_taken(params: dict[str, Any]) -> None:
    check_tokens(SamplingParams(**params), [(1,), (4, 5)], [2], 10)


def test_the_engine_refuses_before_any_step() -> None:
    engine, _ = fake_engine(16, 4, eos=[3])
    for params in ({"logit_bias": {1000: 1}}, {"allowed_token_ids": [3], "min_tokens": 1}, {"min_tokens": 17}):
        with pytest.raises(RequestError):
            engine.add("r", [1, 2], SamplingParams(**params))
    assert not engine.has_work


# What the worker is told


@pytest.mark.parametrize(("min_tokens", "ends"), [(0, ()), (2, (3, 9, 11))])
def test_a_reset_names_end_tokens_only_where_they_are_held_back(min_tokens: int, ends: tuple[int, ...]) -> None:
    rig = Rig.of(20, 4)
    params = SamplingParams(temperature=0, stop_token_ids=[11, 9], min_tokens=min_tokens)
    rig.add(request("r", [1, 2], 4, params=params, eos=[3]))
    step = rig.step()
    assert step is not None
    assert step.rows[0].reset is not None
    assert tuple(sorted(step.rows[0].reset.end_token_ids)) == ends


# Stop strings before min_tokens (S11)


def texts(tokenizer: Tokenizer, ids: list[int], **params: Any) -> tuple[str, int]:
    """The text, and after how many tokens it ended."""
    stream, count = TextStream(tokenizer, SamplingParams(**params)), 0
    for count, token in enumerate(ids, 1):  # noqa: B007
        if stream.push(token):
            break
    stream.finish()
    return stream.text, count


def test_s11_text_of_the_first_tokens_cannot_end_an_answer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b c a b c a b c").tolist()
    assert len(ids) == 9
    assert texts(tokenizer, ids, stop=" b") == ("a", 2)
    assert texts(tokenizer, ids, stop=" b", min_tokens=2) == ("a b c a", 5)
    assert texts(tokenizer, ids, stop=" b", min_tokens=4) == ("a b c a", 5)
    assert texts(tokenizer, ids, stop=" b", min_tokens=9) == ("a b c a b c a b c", 9)
    assert texts(tokenizer, ids, stop=[" b", "c a b c a"], min_tokens=6) == ("a b ", 7), "it may begin before"
    assert texts(tokenizer, ids, stop=[" b", "zzzzzzzzzzzz"], min_tokens=2) == ("a b c a", 5), "no match of old text"


def test_s11_special_tokens_count_though_they_have_no_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a b").tolist(), 1, *tokenizer.encode(" b").tolist()]
    assert texts(tokenizer, ids, stop=" b", min_tokens=3) == ("a b", 4)
    assert texts(tokenizer, ids, stop=" b", min_tokens=4) == ("a b b", 4)
