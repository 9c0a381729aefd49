"""Several sequences of one request, and requests that begin alike: forks, beams, waiting for a prefix."""

from __future__ import annotations

import itertools

import pytest
from fakes import GREEDY, VOCAB, Rig, fake_engine, next_token, output, request, solo, with_tokens_at

from paged import InvariantError, Move, RequestError, SamplingParams
from scheduler.beam import BeamSearchParams
from scheduler.policy import Limits, resolve_max_tokens
from scheduler.request import State

PAGE_SIZE = 4
SAMPLED = SamplingParams(temperature=1.0)
PROMPT = list(range(1, 11))  # case A10: ten tokens


def sampled(n: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, n=n)


# Case A10


def test_a10_two_requests_share_full_pages_and_never_a_tail() -> None:
    rig = Rig.of(20, PAGE_SIZE)
    first = rig.add(request("r1", PROMPT, 9, params=SAMPLED, seed=1))
    rig.step()
    second = rig.add(request("r2", PROMPT, 9, params=SAMPLED, seed=2))
    rig.schedule()
    tables = [rig.scheduler.manager.table(sequence.seq_id).pages for sequence in (first, second)]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2], "tails differ before any write"
    rig.finish(rig.scheduler._under_way or pytest.fail("no step"))
    rig.run()
    assert [output(s) for s in (first, second)] == [solo(PROMPT, 9, params=SAMPLED, seed=seed) for seed in (1, 2)]


def test_a10_branches_of_one_prompt_copy_its_tail_once_and_go_their_own_ways() -> None:
    rig = Rig.of(20, PAGE_SIZE)
    family = rig.add_family(request("r", PROMPT, 9, params=sampled(2), seed=1))
    rig.step()  # all of the prompt but its last token
    step = rig.step()
    assert step is not None
    moves = [move for move in step.moves if isinstance(move, Move)]
    manager = rig.scheduler.manager
    tables = [manager.table(sequence.seq_id).pages for sequence in family.sequences]
    assert tables[0][:2] == tables[1][:2]
    assert [manager.allocator.ref_count(page) for page in tables[0]] == [2, 2, 1]
    assert [manager.allocator.ref_count(page) for page in tables[1]] == [2, 2, 1]
    assert len(moves) == 1
    assert {moves[0].source, moves[0].target} == {tables[0][2], tables[1][2]}
    rig.run()  # the worker compares every slot with its branch's own tokens; at the end all pages are free
    assert rig.scheduler.stats.computed_tokens == 9 + 2 * 9, "the prompt is computed once"
    for sequence in family.sequences:
        assert output(sequence) == solo(PROMPT, 9, params=sampled(2), seed=1, index=sequence.index)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n", [2, 5])
def test_every_branch_is_what_its_index_gives_alone(n: int, caching: bool, length: int) -> None:
    rig = Rig.of(60, PAGE_SIZE, caching=caching)
    for round_number in range(2):  # the second time the prompt is cached
        family = rig.add_family(request(f"r{round_number}", PROMPT[:length], 6, params=sampled(n), seed=3))
        rig.run()
        answers = [output(sequence) for sequence in family.sequences]
        assert answers == [solo(PROMPT[:length], 6, params=sampled(n), seed=3, index=i) for i in range(n)]
    assert len(set(map(tuple, answers))) == n


def test_branches_are_preempted_and_resume_together() -> None:
    rig = Rig.of(14, PAGE_SIZE, max_num_seqs=8, caching=False)
    old = rig.add(request("old", [500], 30))
    family = rig.add_family(request("young", PROMPT, 12, params=sampled(3), seed=7))
    gave_way = 0
    while rig.step() is not None:
        holding = [sequence.seq_id in rig.scheduler.manager for sequence in family.live]
        assert all(holding) or not any(holding[1:]), "some of a family run on"
        gave_way += family.state is State.PREEMPTED
    assert gave_way
    assert output(old) == solo([500], 30)
    assert [output(s) for s in family.sequences] == [
        solo(PROMPT, 12, params=sampled(3), seed=7, index=i) for i in range(3)
    ]


def test_a_branch_that_ends_gives_its_pages_back_and_the_others_go_on() -> None:
    """Branch 1 meets its end token first; the request ends with its last branch."""
    rig = Rig.of(20, PAGE_SIZE)
    params = sampled(3)
    answers = [solo(PROMPT, 8, params=params, seed=5, index=i) for i in range(3)]
    end = answers[1][2]
    assert end not in answers[0] + answers[2]
    family = rig.add_family(request("r", PROMPT, 8, params=params, seed=5, eos=[end]))
    held = []
    while rig.step() is not None:
        held.append(len(rig.scheduler.manager))
        assert (family.state is State.FINISHED) == (not family.live)
    assert [output(s) for s in family.sequences] == [answers[0], answers[1][:3], answers[2]]
    assert [s.finish_reason for s in family.sequences] == ["length", "stop", "length"]
    assert held == [1, 3, 3, 2, 2, 2, 2, 2, 0]


def test_aborting_a_request_ends_all_its_branches() -> None:
    rig = Rig.of(20, PAGE_SIZE)
    family = rig.add_family(request("r", PROMPT, 30, params=sampled(3)))
    for _ in range(4):
        rig.step()
    rig.abort("r")
    assert [s.finish_reason for s in family.sequences] == ["abort"] * 3
    rig.run()


# Case N02: streams of several choices


def test_n02_a_choice_that_ends_early_does_not_end_the_others() -> None:
    """n = 3 and at most 6 tokens; branch 0 emits its end token as the second one."""
    params = SamplingParams(temperature=1.0, n=3, max_tokens=6, seed=11)
    answers = [solo(PROMPT, 6, params=params, seed=11, index=i) for i in range(3)]
    end = answers[0][1]
    assert end not in answers[1] + answers[2]
    engine, _ = fake_engine(30, PAGE_SIZE, eos=[end])
    engine.add("r", PROMPT, params, stream=True)
    parts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    reasons: dict[int, list[str]] = {0: [], 1: [], 2: []}
    last = None
    while engine.has_work:
        for out in engine.step():
            last = out
            for choice in out.outputs:
                assert choice.token_ids or choice.finish_reason, "nothing new"
                parts[choice.index] += choice.token_ids
                reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert parts == {0: answers[0][:2], 1: answers[1], 2: answers[2]}
    assert reasons == {0: ["stop"], 1: ["length"], 2: ["length"]}
    assert last is not None
    assert last.finished
    assert (last.num_output_tokens, len(last.prompt_token_ids)) == (2 + 6 + 6, len(PROMPT))
    assert engine.stats.prompt_tokens == len(PROMPT)


def test_n02_without_a_stream_all_choices_come_at_the_end_in_order() -> None:
    engine, _ = fake_engine(30, PAGE_SIZE)
    engine.add("r", PROMPT, SamplingParams(temperature=1.0, n=4, max_tokens=5, seed=2))
    outputs = list(itertools.chain.from_iterable(engine.step() for _ in range(10)))
    assert [len(out.outputs) for out in outputs] == [4]
    assert [choice.index for choice in outputs[0].outputs] == [0, 1, 2, 3]


# What can never fit


@pytest.mark.parametrize(("name", "limits"), [("max_num_seqs", (2, 64)), ("max_num_batched_tokens", (8, 2))])
def test_more_sequences_than_a_step_takes_are_refused(name: str, limits: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match=f"3 sequences wanted, and {name} is 2") as caught:
        resolve_max_tokens(5, 4, False, Limits(100, 50, PAGE_SIZE, (None,), *limits), n=3)
    assert caught.value.param == "n"


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("usable", [6, 9, 14])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_the_longest_that_is_let_in_runs_to_its_end(usable: int, n: int, windows: tuple[int | None, ...]) -> None:
    """Alone in the pool, preempted at random, without a cache that could help: the bound on pages must be one."""
    usable *= len(windows)
    rig = Rig.of(usable, PAGE_SIZE, budget=8, caching=False, windows=windows)
    limits = rig.scheduler.limits
    longest = limits.longest(len(PROMPT), n) - len(PROMPT)
    if longest < 1:
        with pytest.raises(RequestError, match="pages"):
            resolve_max_tokens(len(PROMPT), 1, False, limits, n)
        return
    assert resolve_max_tokens(len(PROMPT), min(longest, 200), False, limits, n) == min(longest, 200)
    family = rig.add_family(request("r", PROMPT, min(longest, 200), params=sampled(n), seed=1))
    while family.sequences[-1].num_output < (min(longest, 200) + 1) // 2:
        rig.step()
    if family.state is State.RUNNING:
        rig.scheduler._preempt(family)
    rig.run()
    assert [len(output(s)) for s in family.sequences] == [min(longest, 200)] * n


# Waiting for a prefix


def test_requests_with_one_beginning_compute_it_once_though_they_come_together() -> None:
    rig = Rig.of(60, PAGE_SIZE, budget=16)
    prompts = [[*range(100, 140), i] for i in range(6)]
    families = [rig.add_family(request(f"r{i}", prompt, 3)) for i, prompt in enumerate(prompts)]
    rig.run()
    assert [family.num_cached for family in families] == [0] + [40] * 5
    stats = rig.scheduler.stats
    assert stats.computed_tokens == 41 + 5 * 1 + 6 * 2
    assert stats.hit_rate == 5 * 40 / (6 * 41)
    assert [output(f.sequences[0]) for f in families] == [solo(prompt, 3) for prompt in prompts]


def test_who_waits_lets_others_pass_where_tokens_are_left() -> None:
    rig = Rig.of(60, PAGE_SIZE, budget=16)
    families = [
        rig.add_family(request("first", [*range(100, 140)], 3)),
        rig.add_family(request("waits", [*range(100, 140), 1], 3)),
        rig.add_family(request("other", [7, 8, 9], 3)),
    ]
    for running in ["first"], ["first"], ["first", "other"], ["first", "waits", "other"]:  # 16, 16 and 8 of the first
        rig.step()
        assert [f.request.request_id for f in families if f.state is State.RUNNING] == running
    rig.run()


@pytest.mark.parametrize("how", ["abort", "preempt", "fail"])
def test_who_waits_does_not_wait_for_one_that_is_gone(how: str) -> None:
    rig = Rig.of(60, PAGE_SIZE, budget=8)
    first = rig.add_family(request("first", [*range(100, 140)], 3))
    waits = rig.add_family(request("waits", [*range(100, 140), 1], 3))
    rig.step()
    if how == "abort":
        rig.abort("first")
    elif how == "preempt":
        rig.scheduler._preempt(first)
    else:
        rig.executor.raise_at[1] = RuntimeError("lost")
        with pytest.raises(RuntimeError, match="lost"):
            rig.step()
    rig.run()
    assert output(waits.sequences[0]) == solo([*range(100, 140), 1], 3)


def test_nobody_waits_for_one_that_came_later() -> None:
    """A preempted old request meets a young one that computes the same prompt."""
    rig = Rig.of(60, PAGE_SIZE, budget=8)
    old = rig.add_family(request("old", [*range(100, 140)], 3))
    rig.step()
    rig.scheduler._preempt(old)
    rig.scheduler.manager.reset()
    young = rig.add_family(request("young", [*range(100, 140)], 3))
    rig.step()
    assert (old.state, young.state) == (State.RUNNING, State.WAITING)
    rig.run()


def test_requests_of_another_salt_share_nothing() -> None:
    rig = Rig.of(60, PAGE_SIZE)
    families = [
        rig.add_family(request(f"r{i}", PROMPT, 3, cache_salt=salt)) for i, salt in enumerate([None, "a", "b", "a"])
    ]
    rig.run()
    assert [family.num_cached for family in families] == [0, 0, 0, 8]


# Beams


def scores(tokens: list[int]) -> list[tuple[int, float]]:
    """The fake's three likeliest next tokens: what FakeExecutor answers with."""
    token = next_token(tokens[-1], len(tokens) - 1)
    return [((token + i) % VOCAB, -1.0 - i) for i in range(3)]


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("preempted_at", [None, 1, 2, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_beams_share_pages_and_find_the_likeliest(width: int, preempted_at: int | None, caching: bool) -> None:
    """Preempted in between, the search resumes as it was."""
    rig = Rig.of(12, PAGE_SIZE, caching=caching, budget=5)
    beams = BeamSearchParams(beam_width=width, max_tokens=5)
    family = rig.add_family(request("r", PROMPT, 5, beams=beams))
    while preempted_at is not None and family.sequences[0].num_output < preempted_at:
        rig.step()
    if preempted_at is not None:
        rig.scheduler._preempt(family)
    rig.run()
    best = sorted((-sum(logprob for _, logprob in path), path) for path in paths(PROMPT, 5, width))[:width]
    assert len(family.sequences) == width
    found = [-(sequence.cumulative_logprob or 0.0) for sequence in family.sequences]
    assert found == [score for score, _ in best]
    assert output(family.sequences[0]) == [token for token, _ in best[0][1]]


def paths(prompt: list[int], length: int, width: int) -> list[list[tuple[int, float]]]:
    """All continuations by the `width` likeliest tokens."""
    found: list[list[tuple[int, float]]] = [[]]
    for _ in range(length):
        found = [[*path, step] for path in found for step in scores(prompt + [token for token, _ in path])[:width]]
    return found


def test_a_beam_search_cannot_be_streamed() -> None:
    engine, _ = fake_engine(30, PAGE_SIZE)
    with pytest.raises(RequestError, match="cannot be streamed"):
        engine.add("r", PROMPT, BeamSearchParams(2, 5), stream=True)


def test_aborting_a_search_gives_its_beams_back() -> None:
    rig = Rig.of(60, PAGE_SIZE)
    family = rig.add_family(request("r", PROMPT, 30, beams=BeamSearchParams(3, 30)))
    for _ in range(5):
        rig.step()
    assert len(family.live) == 3
    rig.abort("r")
    rig.run()


# New weights


def test_a07_new_weights_use_nothing_that_the_old_ones_computed() -> None:
    rig = Rig.of(60, PAGE_SIZE)
    running = rig.add_family(request("running", PROMPT, 8))
    rig.step()
    rig.step()
    before = output(running.sequences[0])
    rig.scheduler.new_weights()
    rig.executor.model = with_tokens_at(next_token, {14: 77})
    again = rig.add_family(request("again", PROMPT, 8))
    rig.run()
    assert again.num_cached == 0 or again.num_cached == 8, "only what was computed anew"
    assert rig.scheduler.stats.recomputed_tokens > 0
    assert output(running.sequences[0])[: len(before)] == before, "its tokens are kept"
    assert output(running.sequences[0])[14 - 10] == 77
    assert output(again.sequences[0]) == solo(PROMPT, 8, model=rig.executor.model)


# Leaks


def test_a_leak_report_names_the_request() -> None:
    rig = Rig.of(20, PAGE_SIZE)
    rig.add(request("careless", PROMPT, 8))
    rig.step()
    rig.scheduler.running.clear()  # a scheduler that forgets one
    with pytest.raises(InvariantError, match=r"at idle nothing is referenced, but careless \(sequence 0\) holds pages"):
        rig.scheduler.check()
    assert list(rig.scheduler.manager.explain().held_by()) == ["careless (sequence 0)"]


def test_greedy_is_not_what_n_is_for_but_works() -> None:
    rig = Rig.of(20, PAGE_SIZE)
    family = rig.add_family(request("r", PROMPT, 5, params=SamplingParams(temperature=0, n=2)))
    rig.run()
    assert [output(s) for s in family.sequences] == [solo(PROMPT, 5, params=GREEDY)] * 2
