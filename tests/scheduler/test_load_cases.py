"""The cases of the field about full pools, page edges, ids and aborts, under every rule of the scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FakeExecutor, Rig, idle, output, request, solo

from paged import RequestError, RequestOutput, SamplingParams
from scheduler import policy
from scheduler.engine import Engine
from scheduler.policy import Limits, Rules
from scheduler.request import State

RULES = [
    Rules(admission, policy.ORDERS[order], policy.VICTIMS[victim], patience, num_speculative_tokens=drafts)
    for admission, order, victim, patience, drafts in (
        ("optimistic", "fcfs", "youngest", 256, 0),
        ("guaranteed", "fcfs", "youngest", 256, 0),
        ("optimistic", "priority", "cheapest", 256, 0),
        ("optimistic", "shortest", "largest", 0, 0),
        ("optimistic", "longest_prefix", "largest", 256, 3),
        ("guaranteed", "priority", "cheapest", 5, 4),
    )
]


def prompt(number: int, length: int) -> list[int]:
    return [(number * 37 + i * 11) % 900 for i in range(length)]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def engine_of(usable: int, page_size: int, rules: Rules, budget: int = 64) -> tuple[Engine, FakeExecutor]:
    fake = FakeExecutor(usable + 1, page_size)
    limits = Limits(1024, usable, page_size, (None,), 8, budget)
    return Engine(fake, None, limits, vocab_size=1000, rules=rules), fake


@pytest.mark.parametrize("rules", RULES)
def test_s01_what_can_never_fit_is_refused_before_any_step(rules: Rules) -> None:
    engine, fake = engine_of(8, 16, rules)
    with pytest.raises(RequestError, match="128 tokens"):
        engine.add("r1", prompt(0, 200), greedy(4))
    assert not engine.has_work
    engine.add("r2", prompt(1, 10), greedy(4))
    outputs = list[RequestOutput]()
    while engine.has_work:
        outputs += engine.step()
    assert [out.outputs[0].token_ids for out in outputs] == [solo(prompt(1, 10), 4)]
    assert len(fake.steps) <= 6


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("rules", RULES)
def test_s03_a_full_pool_is_no_ping_pong_under_any_rule(rules: Rules, caching: bool) -> None:
    """Equal requests, whose order is that of their arrival under every policy."""
    rig = Rig.of(5, 4, caching=caching, rules=rules)
    prompts = [[100 * i + j for j in range(8)] for i in range(4)]
    for i, ids in enumerate(prompts):
        rig.add(request(f"r{i}", ids, 8))
    steps = rig.run()
    assert steps <= 60
    assert all(step.num_tokens > 0 for step in rig.executor.steps)
    assert [family.request.request_id for family in rig.families] == ["r0", "r1", "r2", "r3"]
    assert [output(family.sequences[0]) for family in rig.families] == [solo(ids, 8) for ids in prompts]
    manager = rig.scheduler.manager
    assert (manager.num_used, manager.num_available) == (0, 5)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("usable", [6, 5, 4])
def test_m04_without_swap_the_victim_recomputes(usable: int, rules: Rules) -> None:
    rig = Rig.of(usable, 4, rules=rules)
    prompts = [[100 * i + j for j in range(8)] for i in range(4)]
    for i, ids in enumerate(prompts):
        rig.add(request(f"r{i}", ids, 8))
    rig.run()
    assert [output(family.sequences[0]) for family in sorted(rig.families)] == [solo(ids, 8) for ids in prompts]


def test_m04_a_victim_is_there_to_recompute() -> None:
    """With a page the rest of which the first token needs: two are let in, and there is no room for both to end."""
    rig = Rig.of(6, 4, caching=False)
    prompts = [[100 * i + j for j in range(8)] for i in range(4)]
    for i, ids in enumerate(prompts):
        rig.add(request(f"r{i}", ids, 8))
    rig.run()
    stats = rig.scheduler.stats
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    assert [output(family.sequences[0]) for family in rig.families] == [solo(ids, 8) for ids in prompts]


@pytest.mark.parametrize("length", [10, 16, 32])
@pytest.mark.parametrize("at", [{15}, {16}, {17}, {31}, {32}, {33}, {15, 16, 17, 31, 32, 33}])
@pytest.mark.parametrize("rules", [RULES[0], RULES[5]])
def test_s06_a_stream_that_is_preempted_at_a_page_edge_gives_each_token_once(
    rules: Rules, length: int, at: set[int]
) -> None:
    engine, _ = engine_of(20, 16, rules)
    wanted = {n for n in at if n > length}
    engine.add("r", prompt(0, length), greedy(30, logprobs=0), stream=True)
    given, last = list[int](), None
    expected = len(wanted)
    while engine.has_work:
        for family in tuple(engine.scheduler.running):
            if (n := family.sequences[0].num_tokens) in wanted:
                wanted.discard(n)
                engine.scheduler._preempt(family)
        for last in engine.step():
            given += last.outputs[0].token_ids
    assert engine.stats.preemptions == expected
    assert given == solo(prompt(0, length), 30)
    assert last is not None
    assert (last.finished, last.num_output_tokens) == (True, 30)


@pytest.mark.parametrize("rules", RULES)
def test_s07_two_prompts_share_a_budget_under_every_rule(rules: Rules) -> None:
    rig = Rig.of(8, 16, budget=16, rules=rules)
    for i in range(2):
        rig.add(request(f"r{i}", prompt(i, 9), 1))
    rig.run()
    assert [[row.num_tokens for row in step.rows] for step in rig.executor.steps] == [[9, 7], [2]]
    assert [[row.samples for row in step.rows] for step in rig.executor.steps] == [[True, False], [True]]


@pytest.mark.parametrize("rules", RULES)
def test_s09_an_id_in_use_leaves_the_first_request_alone(rules: Rules) -> None:
    engine, _ = engine_of(16, 4, rules)
    engine.add("x", prompt(0, 5), greedy(8))
    engine.step()
    for _ in range(2):
        with pytest.raises(RequestError, match="'x' is in use"):
            engine.add("x", prompt(1, 5), greedy(8))
    outputs = list[RequestOutput]()
    while engine.has_work:
        outputs += engine.step()
    assert [out.outputs[0].token_ids for out in outputs] == [solo(prompt(0, 5), 8)]
    engine.add("x", prompt(1, 5), greedy(8))
    engine.step()
    assert engine.abort("x") is not None
    assert idle(engine.scheduler.manager)
    engine.add("x", prompt(1, 5), greedy(3))
    while engine.has_work:
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == solo(prompt(1, 5), 3)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("before", range(9))
def test_s10_an_abort_of_three_branches_at_any_moment(before: int, under_way: bool, rules: Rules) -> None:
    """Before the first step, in a chunk, as they fork, while they decode, in the step of their last tokens, after."""
    rig = Rig.of(40, 4, budget=6, rules=rules)
    params = SamplingParams(temperature=1.0, n=3)
    family = rig.add_family(request("r", prompt(0, 14), 3, params=params, seed=3))
    other = rig.add_family(request("other", prompt(1, 3), 12))
    for _ in range(before):
        rig.step()
    step = rig.schedule() if under_way else None
    over = family.state is State.FINISHED
    assert (rig.abort("r") is None) == over
    assert rig.abort("r") is None
    assert rig.abort("unknown") is None
    if step is not None:
        rig.finish(step)
    rig.run()
    assert rig.families.count(family) == 1
    assert len(rig.ended) == 4
    for sequence in family.sequences:
        assert sequence.finish_reason == ("length" if over else "abort")
        alone = solo(prompt(0, 14), 3, params=params, seed=3, index=sequence.index)
        assert output(sequence) == alone[: sequence.num_output]
    assert output(other.sequences[0]) == solo(prompt(1, 3), 12)


@pytest.mark.parametrize("names", [["r0"], ["r3"], ["r1", "r2"], ["r3", "r0"], ["r0", "r1", "r2", "r3"]])
@pytest.mark.parametrize("last", [False, True])
def test_s10_an_abort_of_some_who_decode_while_the_step_is_under_way(names: list[str], last: bool) -> None:
    """Of steady ones, that are handled together; also in the step that ends all of them."""
    rig = Rig.of(40, 4)
    families = [rig.add_family(request(f"r{i}", prompt(i, 5), 6)) for i in range(4)]
    for _ in range(5 if last else 3):
        rig.step()
    assert all(family.steady for family in families)
    step = rig.schedule()
    assert step is not None
    assert len(step.rows) == 4
    for name in names:
        assert rig.abort(name) is not None
    rig.finish(step)
    new = rig.add_family(request("new", prompt(9, 5), 3))
    rig.run()
    for i, family in enumerate([*families, new]):
        (sequence,) = family.sequences
        gone = family.request.request_id in names
        assert sequence.finish_reason == ("abort" if gone else "length")
        wanted = solo(prompt(i, 5), 6) if family is not new else solo(prompt(9, 5), 3)
        assert output(sequence) == (wanted[: 5 if last else 3] if gone else wanted)
    assert len(rig.families) == 5
