"""Drafts in the scheduler: they change how many steps a request takes, and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fakes import NextToken, Rig, fake_engine, output, request, solo, with_tokens_at

from paged import SamplingParams
from scheduler import policy
from scheduler.policy import Rules
from scheduler.request import Family, State

PROMPT = [900, 901]


def rhyme(last: int, position: int) -> int:
    return position % 5


def slips(last: int, position: int) -> int:
    """Rhymes, and differs now and then where a draft is sure to be brought."""
    return position % 5 + 100 * (position % 7 == 0)


def rig_of(most: int, usable: int = 60, model: NextToken = rhyme, **more: object) -> Rig:
    rules = Rules(num_speculative_tokens=most, **more.pop("rules", {}))  # type: ignore[arg-type]
    return Rig.of(usable, 4, model=model, rules=rules, **more)  # type: ignore[arg-type]


def check(families: list[Family], model: NextToken) -> None:
    for family in families:
        wanted = family.request
        prompt = wanted.prompt_token_ids.tolist()
        for sequence in family.sequences:
            alone = solo(prompt, wanted.max_tokens, model, wanted.params, wanted.seed, sequence.index)
            assert output(sequence) == alone


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    steps = []
    for most in (0, 1, 4):
        rig = rig_of(most)
        rig.add(request("r", PROMPT, 60))
        steps.append(rig.run())
        check(rig.families, rhyme)
        stats = rig.scheduler.stats
        assert stats.output_tokens == 60
        assert stats.computed_tokens == 2 + 59, "an accepted draft is a token computed, a wrong one is none"
        assert stats.accepted_tokens <= stats.draft_tokens
        assert (stats.draft_tokens > 0) == (most > 0)
    assert steps[0] == 60
    assert steps[1] < 36
    assert steps[2] < 26


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("most", [1, 3, 8])
def test_right_and_wrong_drafts_change_no_token(most: int, n: int, temperature: float) -> None:
    rig = rig_of(most, model=slips)
    params = SamplingParams(temperature=temperature, n=n)
    for i in range(2):
        rig.add(request(f"r{i}", [*PROMPT, i, *PROMPT, i], 40, params=params, seed=i))
    rig.run()
    check(rig.families, slips)
    stats = rig.scheduler.stats
    if temperature == 0:
        assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("max_tokens", range(12, 24))
def test_drafts_never_go_past_max_tokens(max_tokens: int) -> None:
    rig = rig_of(8)
    sequence = rig.add(request("r", PROMPT, max_tokens))
    while True:
        step = rig.schedule()
        if step is None:
            break
        (row,) = step.rows
        assert sequence.num_tokens + len(row.drafts) < len(PROMPT) + max_tokens, "the last token is never a draft"
        rig.finish(step)
    assert (output(sequence), sequence.finish_reason) == (solo(PROMPT, max_tokens, rhyme), "length")


@pytest.mark.parametrize("at", range(16, 26))
def test_an_end_token_among_accepted_drafts_ends_there(at: int) -> None:
    """Token 3 is an end only the n-th time: before that the model says 8 in its place."""
    prompt = [3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]

    def model(last: int, position: int) -> int:
        return (position + 2) % 5

    free = solo(prompt, 40, model)
    position = next(i for i in range(at, 40) if free[i] == 3)
    changed = with_tokens_at(model, {len(prompt) + i: 8 for i in range(position) if free[i] == 3})
    rig = rig_of(6, model=changed)
    sequence = rig.add(request("r", prompt, 40, eos=[3]))
    rig.run()
    assert output(sequence) == solo(prompt, 40, changed)[: position + 1]
    assert sequence.finish_reason == "stop"


def test_an_end_token_that_is_a_draft_is_the_last_token() -> None:
    """Drafts behind it were right too, and are no output."""
    prompt = [9, 0, 1, 2, 3, 4, 0, 1, 2, 3]  # a rhyme of five that goes on behind the end token 4

    def model(last: int, position: int) -> int:
        return position % 5

    rig = rig_of(4, model=model)
    sequence = rig.add(request("r", prompt, 30, eos=[2]))
    sequence.draft_len = 4
    accepted = []
    while rig.step() is not None:
        accepted.append(rig.scheduler.stats.accepted_tokens)
    assert output(sequence) == solo(prompt, 30, model)[: output(sequence).index(2) + 1]
    assert sequence.finish_reason == "stop"
    assert max(accepted) > 0
    assert rig.scheduler.stats.output_tokens == len(output(sequence))


def test_p4_a_page_of_rejected_drafts_is_not_found() -> None:
    """In every step, all that can be found are full pages of tokens that are final."""
    rig = rig_of(8, model=slips)
    sequence = rig.add(request("r", [0, 1, 2, 3, 4] * 3, 60))
    rejected = 0
    while (step := rig.step()) is not None:
        drafts = step.rows[0].drafts
        guess = np.array([*sequence.tokens.tolist()[: sequence.num_computed], *drafts, 0, 0, 0, 0], dtype=np.int32)
        final = sequence.num_computed // 4 * 4
        assert rig.scheduler.manager.match(guess) <= final
        rejected += bool(drafts) and sequence.num_computed % 4 + len(drafts) >= 4
    assert rejected, "else no draft ever filled a page"
    cache = rig.scheduler.manager.prefix_cache
    text = sequence.tokens.tolist()
    for entry in cache._by_page.values():
        page = np.frombuffer(entry.tokens, dtype=np.int32).tolist()
        assert any(page == text[i : i + 4] for i in range(0, len(text), 4))


def test_drafts_are_given_up_before_anybody_gives_way() -> None:
    """A pool in which all fit to their ends, but for their drafts."""
    rig = rig_of(8, usable=6, rules={"admission": "optimistic"})
    families = [rig.add_family(request(f"r{i}", [0, 1, 2, 3, 4, i], 7)) for i in range(2)]  # 12 tokens at their ends
    rig.run()
    assert rig.scheduler.stats.preemptions == 0
    check(families, rhyme)
    # One page more is wanted for drafts than there is, and the row goes without.
    rig = rig_of(8, usable=4)
    sequence = rig.add(request("r", [4, 0, 1, 2, 3, 4, 0, 1], 8))
    sequence.draft_len = 8
    rig.step()
    rig.scheduler.manager.allocate(99, np.array([7], dtype=np.int32), 1)  # a stranger's
    step = rig.scheduler.schedule()
    assert step is not None
    assert (step.rows[0].drafts, step.rows[0].num_tokens, rig.scheduler.stats.preemptions) == ((), 1, 0)


@pytest.mark.parametrize("victim", policy.VICTIMS)
@pytest.mark.parametrize("order", policy.ORDERS)
def test_what_was_planned_with_drafts_may_still_give_way(order: str, victim: str) -> None:
    """Its drafts go with its row: when it comes back it computes its tokens first."""
    rules = Rules(order=policy.ORDERS[order], victim=policy.VICTIMS[victim], num_speculative_tokens=4)
    preemptions = 0
    for usable, turn in itertools.product(range(6, 15, 2), range(4)):
        rig = Rig.of(usable, 4, budget=32, model=rhyme, rules=rules)
        families = [
            rig.add_family(request(f"r{i}", [10 * i + 1, 2], 18, priority=(i * 7 + turn * 3) % 21 - 10))
            for i in range(4)
        ]
        rig.run()
        check(families, rhyme)
        preemptions += rig.scheduler.stats.preemptions
    assert preemptions > 0


@pytest.mark.parametrize("budget", [8, 12, 20])
def test_drafts_take_no_token_from_others_who_decode(budget: int) -> None:
    """Eight decode and draft: each has its token in every step, whatever the others could still guess."""
    rig = rig_of(8, usable=200, budget=budget)
    families = [rig.add_family(request(f"r{i}", [i, 0, 1, 2, 3, 4, 0, 1, 2], 40)) for i in range(8)]
    while any(family.sequences[0].num_output < 1 for family in families):
        rig.step()
    while all(family.state is State.RUNNING for family in families):
        step = rig.step()
        assert step is not None
        assert len(step.rows) == 8
    rig.run()
    check(families, rhyme)
    assert (rig.scheduler.stats.draft_tokens > 0) == (budget > 8 or rig.scheduler.stats.accepted_tokens > 0)


def test_drafts_leave_a_prompt_that_comes_the_least_chunk() -> None:
    rig = rig_of(16, usable=200, budget=12)
    first = [rig.add_family(request(f"r{i}", [0, 1, 2, 3, 4, 0, 1, 2, 3], 120)) for i in range(2)]
    for _ in range(12):
        step = rig.step()
    assert step is not None
    assert step.num_tokens == 12, "they fill the step"
    new = rig.add_family(request("new", [500 + i for i in range(20)], 2))
    step = rig.step()
    assert step is not None
    assert new.state is State.RUNNING
    assert step.rows[-1].num_tokens >= 3
    rig.run()
    check([*first, new], rhyme)


def test_log_probabilities_of_accepted_drafts_come_with_their_tokens() -> None:
    engine, fake = fake_engine(60, 4)
    engine.scheduler.rules = Rules(num_speculative_tokens=4)
    fake.model = rhyme
    engine.add("r", PROMPT, SamplingParams(temperature=0, max_tokens=30, logprobs=1), stream=True)
    given = []
    while engine.has_work:
        for out in engine.step():
            completion = out.outputs[0]
            assert completion.logprobs is not None
            assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
            given.append(completion.token_ids)
    assert [token for ids in given for token in ids] == solo(PROMPT, 30, rhyme)
    assert max(map(len, given)) > 1, "several tokens of a step come together"
    assert engine.stats.accepted_tokens > 0
