"""Log-probabilities of prompts: every token's once, whatever is cached, chunked, preempted or aborted."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import Rig, fake_engine, output, request, score, solo

from paged import RequestError, SamplingParams
from scheduler import policy
from scheduler.policy import Rules
from scheduler.request import Family, State

PROMPT = [(3 + 41 * i) % 900 for i in range(23)]


def scored(n: int = 1, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, n=n, prompt_logprobs=0)


def check(family: Family) -> None:
    wanted = family.request
    prompt = wanted.prompt_token_ids.tolist()
    assert family.scores == [score(token) for token in prompt[1:]]
    for sequence in family.sequences:
        alone = solo(prompt, wanted.max_tokens, params=wanted.params, seed=wanted.seed, index=sequence.index)
        assert output(sequence) == alone


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("budget", [3, 7, 64])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 23])
def test_all_come_cold_and_warm_in_chunks_and_for_several_sequences(
    length: int, warm: bool, budget: int, n: int, max_tokens: int
) -> None:
    rig = Rig.of(60, 4, budget=budget)
    prompt = PROMPT[:length]
    if warm:
        rig.add(request("warm", prompt + PROMPT, 2))
        rig.run()
    family = rig.add_family(request("r", prompt, max_tokens, params=scored(n), seed=5))
    rig.run()
    check(family)
    assert family.num_cached == 0 or length == 1, "what is cached has no logits"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("warm", [False, True])
def test_a_preemption_at_any_moment_asks_for_none_twice(warm: bool, at: int, caching: bool, n: int) -> None:
    rig = Rig.of(60, 4, budget=3, caching=caching)
    if warm:
        rig.add(request("warm", PROMPT, 1))
        rig.run()
    family = rig.add_family(request("r", PROMPT, 6, params=scored(n), seed=2))
    for _ in range(at):
        rig.step()
    had = len(family.scores)
    rig.scheduler._preempt(family) if family.state is State.RUNNING else None
    step = rig.step()
    assert step is not None
    if caching and family.scored > 8 and step.rows[0].reset is not None:
        assert step.rows[0].reset.num_computed > 0, "those that are known need no logits again"
    rig.run()
    check(family)
    wanted = [row.scores for step in rig.executor.steps for row in step.rows if row.scores]
    assert [position for first, stop in wanted for position in range(first, stop)] == list(range(1, len(PROMPT)))
    assert had <= len(family.scores)


def test_a_step_that_fails_gives_none_and_the_next_one_all() -> None:
    rig = Rig.of(60, 4, budget=5)
    family = rig.add_family(request("r", PROMPT, 3, params=scored()))
    rig.executor.raise_at = {1: RuntimeError("planned"), 4: RuntimeError("planned")}
    failed = 0
    while rig.scheduler.has_work:
        try:
            rig.step()
        except RuntimeError:
            failed += 1
    assert failed == 2
    check(family)


def test_the_prefix_of_one_that_was_scored_is_found_by_others() -> None:
    rig = Rig.of(60, 4)
    rig.add(request("r", PROMPT, 1, params=scored()))
    rig.run()
    again = rig.add_family(request("again", PROMPT, 1))
    rig.run()
    assert again.num_cached == 20


@pytest.mark.parametrize("several", [1, 3])
def test_a_step_scores_no_more_than_it_may(several: int) -> None:
    """Though its budget has room for more; others have what is left."""
    rig = Rig.of(200, 16, budget=2000, max_num_seqs=8)
    prompts = [[(number + 7 * i) % 900 for i in range(300)] for number in range(several)]
    families = [rig.add_family(request(f"r{i}", prompt, 2, params=scored())) for i, prompt in enumerate(prompts)]
    rig.step()
    other = rig.add_family(request("other", list(range(300)), 1))
    rig.step()
    assert other.state is State.FINISHED, "it had the rest of the budget, all of its prompt at once"
    rig.run()
    for family in families:
        check(family)
    for step in rig.executor.steps:
        count = sum(row.scores[1] - row.scores[0] for row in step.rows if row.scores)
        tokens = sum(row.num_tokens for row in step.rows if row.scores)
        assert max(count, tokens) <= policy.MOST_SCORED
    assert sum(any(row.scores for row in step.rows) for step in rig.executor.steps) == -(-300 * several // 128)


def test_scores_and_drafts_go_together() -> None:
    rig = Rig.of(60, 4, budget=6, model=lambda last, position: position % 5, rules=Rules(num_speculative_tokens=4))
    family = rig.add_family(request("r", PROMPT, 30, params=scored()))
    rig.run()
    assert family.scores == [score(token) for token in PROMPT[1:]]
    assert output(family.sequences[0]) == solo(PROMPT, 30, lambda last, position: position % 5)


# Through the engine


def run(engine: Any) -> list[Any]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_they_arrive_with_the_end_of_a_stream() -> None:
    engine, _ = fake_engine(60, 4, budget=8)
    engine.add("r", PROMPT, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1), stream=True)
    *before, last = run(engine)
    assert [out.prompt_logprobs for out in before] == [None] * 3
    assert last.finished
    assert last.prompt_logprobs is not None
    assert len(last.prompt_logprobs) == len(PROMPT)
    assert last.prompt_logprobs[0] is None
    for token, entry in zip(PROMPT[1:], last.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert entry[token].logprob == score(token).logprob


def test_who_does_not_ask_gets_none() -> None:
    engine, _ = fake_engine(60, 4)
    engine.add("r", PROMPT, SamplingParams(temperature=0, max_tokens=1))
    assert run(engine)[0].prompt_logprobs is None


def test_an_abort_before_all_are_there_gives_an_output_all_the_same() -> None:
    engine, _ = fake_engine(60, 4, budget=4)
    engine.add("r", PROMPT, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0))
    engine.step()
    aborted = engine.abort("r")
    assert aborted is not None
    assert aborted.finished
    assert aborted.prompt_logprobs is None or len(aborted.prompt_logprobs) <= len(PROMPT)


@pytest.mark.parametrize("bad", [-11, 11, 100, 1.0, True, "0", None])
def test_a_priority_out_of_range_is_refused_by_name(bad: Any) -> None:
    engine, fake = fake_engine(60, 4)
    with pytest.raises(RequestError, match="priority must be a whole number from -10 to 10") as caught:
        engine.add("r", PROMPT, SamplingParams(max_tokens=1), priority=bad)
    assert caught.value.param == "priority"
    assert not engine.has_work
    assert fake.steps == []


@pytest.mark.parametrize("priority", [-10, 0, 10])
def test_every_class_is_accepted(priority: int) -> None:
    engine, _ = fake_engine(60, 4)
    engine.add("r", PROMPT, SamplingParams(temperature=0, max_tokens=2), priority=priority)
    assert run(engine)[0].outputs[0].token_ids == solo(PROMPT, 2)
