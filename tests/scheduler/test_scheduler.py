"""What runs in a step and what becomes of it: the cases of the field, over a fake model that checks every page."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest
from fakes import FakeExecutor, WrongPage, fake_engine, idle, next_token, solo

from paged import RequestError, RequestOutput, SamplingParams
from scheduler import policy
from scheduler.engine import Engine
from scheduler.policy import Limits
from scheduler.request import TRANSITIONS, Family, Request, State


def greedy(max_tokens: int | None, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def run(engine: Engine, limit: int = 500) -> dict[str, RequestOutput]:
    """Step until idle; every request must end exactly once, and within the limit."""
    ended: dict[str, RequestOutput] = {}
    for _ in range(limit):
        for output in engine.step():
            assert output.request_id not in ended
            ended[output.request_id] = output
        engine.scheduler.check()
        if not engine.has_work:
            assert idle(engine.scheduler.manager)
            return ended
    raise AssertionError(f"still at work after {limit} steps")


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def prompt(number: int, length: int) -> list[int]:
    return [(number * 37 + i * 11) % 900 for i in range(length)]


def chunks(fake: FakeExecutor, seq_id: int = 0) -> list[int]:
    return [row.num_tokens for step in fake.steps for row in step.rows if row.seq_id == seq_id]


def test_s01_what_can_never_fit_is_refused_and_nobody_else_notices() -> None:
    engine, fake = fake_engine(8, 16)
    with pytest.raises(RequestError, match=r"200 tokens and needs 13 pages, the pool has 8 \(128") as caught:
        engine.add("r1", prompt(0, 200), greedy(4))
    assert caught.value.param == "prompt"
    engine.add("r2", prompt(1, 10), greedy(4))
    assert tokens(run(engine)["r2"]) == solo(prompt(1, 10), 4)
    assert len(fake.steps) <= 6


def test_s01_growth_is_counted_when_a_request_is_refused() -> None:
    engine, _ = fake_engine(8, 16)
    with pytest.raises(RequestError, match="lower max_tokens to 29") as caught:
        engine.add("r", prompt(0, 100), greedy(30))
    assert caught.value.param == "max_tokens"
    engine.add("r", prompt(0, 100), greedy(29))
    assert len(tokens(run(engine)["r"])) == 29


@pytest.mark.parametrize("caching", [True, False])
def test_s03_a_full_pool_finishes_all_in_order_of_arrival(caching: bool) -> None:
    engine, fake = fake_engine(5, 4, caching=caching)
    prompts = {f"r{i}": [100 * i + j for j in range(8)] for i in range(4)}
    for name, ids in prompts.items():
        engine.add(name, ids, greedy(8))
    ended = run(engine)
    assert list(ended) == list(prompts)
    assert all(tokens(ended[name]) == solo(ids, 8) for name, ids in prompts.items())
    assert all(step.num_tokens > 0 for step in fake.steps)
    assert len(fake.steps) <= 60


def force_preemption(engine: Engine, at: dict[str, set[int]]) -> None:
    """Before the next step, preempt every running sequence whose length is one of those given for it."""
    for family in tuple(engine.scheduler.running):
        wanted, (sequence,) = at[family.request.request_id], family.sequences
        if sequence.num_tokens in wanted:
            wanted.discard(sequence.num_tokens)
            engine.scheduler._preempt(family)


@pytest.mark.parametrize("length", [10, 16, 32])
@pytest.mark.parametrize("at", [{15}, {16}, {17}, {31}, {32}, {33}, {15, 16, 17, 31, 32, 33}])
def test_s06_preemption_at_a_page_edge_changes_nothing(length: int, at: set[int]) -> None:
    engine, _ = fake_engine(20, 16)
    wanted = {"r": {n for n in at if n > length}, "other": set[int]()}
    engine.add("r", prompt(0, length), greedy(30))
    engine.add("other", prompt(1, 7), greedy(30))
    expected = len(wanted["r"])
    ended: dict[str, RequestOutput] = {}
    while engine.has_work:
        force_preemption(engine, wanted)
        ended |= {output.request_id: output for output in engine.step()}
        engine.scheduler.check()
    assert engine.stats.preemptions == expected
    assert tokens(ended["r"]) == solo(prompt(0, length), 30)
    assert tokens(ended["other"]) == solo(prompt(1, 7), 30)


@pytest.mark.parametrize(
    ("budget", "length", "expected"),
    [(4, 10, [4, 4, 2]), (4, 8, [4, 4]), (8, 9, [8, 1]), (16, 16, [16]), (16, 17, [16, 1])],
)
def test_s07_chunks_of_a_prompt(budget: int, length: int, expected: list[int]) -> None:
    engine, fake = fake_engine(8, 16, budget=budget)
    engine.add("r", prompt(0, length), greedy(1))
    assert tokens(run(engine)["r"]) == solo(prompt(0, length), 1)
    assert chunks(fake) == expected
    assert [row.samples for step in fake.steps for row in step.rows] == [False] * (len(expected) - 1) + [True]


def test_s07_a_cached_prefix_leaves_one_chunk_of_one() -> None:
    engine, fake = fake_engine(8, 16, budget=16)
    for name in ("warm", "again"):
        engine.add(name, prompt(0, 33), greedy(1))
        output = run(engine)[name]
    assert output.num_cached_tokens == 32
    assert chunks(fake, 1) == [1]


def test_s07_two_prompts_share_a_budget() -> None:
    engine, fake = fake_engine(8, 16, budget=16)
    engine.add("a", prompt(0, 9), greedy(1))
    engine.add("b", prompt(1, 9), greedy(1))
    run(engine)
    assert [[row.num_tokens for row in step.rows] for step in fake.steps] == [[9, 7], [2]]


def test_s07_no_tokens_wanted_computes_the_prompt_and_ends() -> None:
    engine, fake = fake_engine(8, 16, budget=4)
    engine.add("r", prompt(0, 10), greedy(0))
    output = run(engine)["r"]
    assert (tokens(output), output.outputs[0].finish_reason, chunks(fake)) == ([], "length", [4, 4, 2])
    engine.add("again", prompt(0, 10) + prompt(0, 8), greedy(0))
    run(engine)


def test_a12_the_tokens_to_run_come_from_the_allocation_itself() -> None:
    """A preempted request finds its own two pages again; with the tail evicted, only one."""
    for evict, expected in ((False, (8, 1)), (True, (4, 5))):
        engine, fake = fake_engine(3, 4)
        engine.add("r", prompt(0, 9), greedy(2))
        engine.step()
        (family,) = engine.scheduler.running
        family.sequences[0].num_tokens = 9  # as if preempted before its first token was sampled
        engine.scheduler._preempt(family)
        if evict:
            manager = engine.scheduler.manager
            manager._pages.reclaim(manager.prefix_cache.evict())
        engine.step()
        row = fake.steps[-1].rows[0]
        assert row.reset is not None
        assert (row.reset.num_computed, row.num_tokens) == expected


def test_s09_an_id_in_use_is_refused_and_can_be_used_again_later() -> None:
    engine, _ = fake_engine(16, 4)
    engine.add("x", prompt(0, 5), greedy(8))
    engine.step()
    with pytest.raises(RequestError, match="'x' is in use"):
        engine.add("x", prompt(1, 5), greedy(8))
    assert tokens(run(engine)["x"]) == solo(prompt(0, 5), 8)
    engine.add("x", prompt(1, 5), greedy(3))
    engine.step()
    aborted = engine.abort("x")
    assert aborted is not None
    assert aborted.outputs[0].finish_reason == "abort"
    assert idle(engine.scheduler.manager)
    engine.add("x", prompt(1, 5), greedy(3))
    assert tokens(run(engine)["x"]) == solo(prompt(1, 5), 3)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_s10_an_abort_between_steps_is_one_terminal_event(steps: int) -> None:
    """Before the first step, in the middle of the prompt, while it generates."""
    engine, _ = fake_engine(16, 4, budget=4)
    engine.add("r", prompt(0, 10), greedy(8))
    engine.add("other", prompt(1, 3), greedy(8))
    for _ in range(steps):
        engine.step()
    output = engine.abort("r")
    assert output is not None
    assert output.finished
    assert engine.abort("r") is None
    assert engine.abort("unknown") is None
    ended = run(engine)
    assert list(ended) == ["other"]
    assert tokens(ended["other"]) == solo(prompt(1, 3), 8)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_s10_an_abort_while_a_step_is_under_way(before: int) -> None:
    """In a middle chunk, in the last one, and in the step that gives the final token."""
    engine, fake = fake_engine(16, 4, budget=8)
    engine.add("r", prompt(0, 10), greedy(2))
    for _ in range(before):
        engine.step()
    step = engine.scheduler.schedule()
    assert step is not None
    assert engine.abort("r") is not None
    fake.submit(step)
    assert engine.scheduler.update(fake.result()) == []
    engine.scheduler.check()
    assert idle(engine.scheduler.manager)
    assert engine.abort("r") is None
    assert engine.scheduler.manager.match(engine.resolve("", prompt(0, 10), greedy(1)).prompt_token_ids) <= 8 * before


def test_s10_an_abort_after_the_end_is_nothing() -> None:
    engine, _ = fake_engine(16, 4)
    engine.add("r", prompt(0, 10), greedy(2))
    run(engine)
    assert engine.abort("r") is None


def test_s12_every_end_token_ends_and_ignore_eos_covers_them_all_but_not_the_users() -> None:
    free = solo(prompt(0, 5), 16)
    second = free[3]

    def ended(**more: Any) -> Any:
        engine, _ = fake_engine(16, 4, eos=(999, second))
        engine.add("r", prompt(0, 5), greedy(16, **more))
        return run(engine)["r"].outputs[0]

    plain, ignored, by_user = ended(), ended(ignore_eos=True), ended(ignore_eos=True, stop_token_ids=[second])
    assert (plain.token_ids, plain.finish_reason, plain.stop_reason) == (free[:4], "stop", None)
    assert (ignored.token_ids, ignored.finish_reason) == (free, "length")
    assert (by_user.token_ids, by_user.finish_reason, by_user.stop_reason) == (free[:4], "stop", second)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_step_that_raises_costs_no_request(error: BaseException) -> None:
    fake = FakeExecutor(17, 4, raise_at={2: error, 5: error})
    engine, _ = fake_engine(16, 4, executor=fake)
    for i in range(3):
        engine.add(f"r{i}", prompt(i, 6), greedy(8))
    ended: dict[str, RequestOutput] = {}
    raised = 0
    while engine.has_work:
        try:
            ended |= {output.request_id: output for output in engine.step()}
        except type(error):
            raised += 1
        engine.scheduler.check()
    assert raised == 2
    assert all(tokens(ended[f"r{i}"]) == solo(prompt(i, 6), 8) for i in range(3))
    assert idle(engine.scheduler.manager)


def test_equal_prompts_in_one_step_give_equal_answers() -> None:
    engine, _ = fake_engine(32, 4)
    for i in range(4):
        engine.add(f"r{i}", prompt(0, 12), greedy(6))
    assert [tokens(o) for o in run(engine).values()] == [solo(prompt(0, 12), 6)] * 4


LIMITS = [(31, None, 1), (20, 12, 12), (32, 0, 0), (1, None, 16), (30, None, 2)]


@pytest.mark.parametrize(("length", "asked", "given"), LIMITS)
def test_h07_max_tokens_up_to_the_context(length: int, asked: int | None, given: int) -> None:
    assert policy.resolve_max_tokens(length, asked, False, Limits(32, 100, 16)) == given


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("length", "asked", "message"),
    [(32, None, "32 tokens.*32: shorten"), (33, None, "33"), (20, 13, "lower max_tokens to 12"), (20, 100, "to 12")],
)
def test_h07_past_the_context_is_refused(chat: bool, length: int, asked: int | None, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        policy.resolve_max_tokens(length, asked, chat, Limits(32, 100, 16))


def test_a_chat_may_fill_the_context_or_the_pool() -> None:
    assert policy.resolve_max_tokens(10, None, True, Limits(32, 100, 16)) == 22
    assert policy.resolve_max_tokens(10, None, True, Limits(1000, 2, 16)) == 23


def test_transitions_are_those_of_the_table() -> None:
    request = Request("r", None, engine_tokens(), greedy(1), 1, 0, frozenset())
    for start, end in itertools.product(State, State):
        family = Family(0, request)
        family.state = start
        if end in TRANSITIONS[start]:
            family.move_to(end)
            assert family.state is end
        else:
            with pytest.raises(AssertionError, match="cannot become"):
                family.move_to(end)


def engine_tokens() -> Any:
    return fake_engine(4, 4)[0].resolve("", [1, 2], greedy(1)).prompt_token_ids


class Planned(Exception):
    """Raised by the fake worker."""


def random_load(seed: int) -> None:
    """Requests that come, are aborted and fail at random, over a tiny pool; then the same answers as alone."""
    rng = random.Random(seed)
    page_size, usable = rng.choice([1, 4, 16]), rng.randint(3, 12)
    fake = FakeExecutor(usable + 1, page_size)
    budget = rng.randint(1, 40)
    engine, _ = fake_engine(
        usable, page_size, budget=budget, seqs=rng.randint(1, 8), caching=rng.random() < 0.8, executor=fake
    )
    prefixes = [prompt(i, 40) for i in range(2)]
    wanted: dict[str, tuple[list[int], int]] = {}
    ended: dict[str, str | None] = {}

    def take(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in ended, "a second terminal event"
            ended[output.request_id] = output.outputs[0].finish_reason
            ids, number = wanted[output.request_id]
            expected = solo(ids, number)
            assert tokens(output) == expected[: len(tokens(output))]
            assert len(tokens(output)) == number or output.outputs[0].finish_reason == "abort"

    for turn in range(2000):
        if turn < 40 and rng.random() < 0.6:
            ids = rng.choice(prefixes)[: rng.randint(0, 20)] + [rng.randrange(900) for _ in range(rng.randint(1, 9))]
            number, name = rng.randint(0, 12), f"r{turn}"
            if len(ids) + max(number - 1, 0) <= usable * page_size:
                engine.add(name, ids, greedy(number))
                wanted[name] = (ids, number)
        if rng.random() < 0.05:
            fake.raise_at = {len(fake.steps): Planned()}
        live = engine.scheduler.live_ids()
        if live and rng.random() < 0.05:
            output = engine.abort(rng.choice(live))
            take([output] if output else [])
        with contextlib.suppress(Planned):
            take(engine.step())
        engine.scheduler.check()
        assert all(step.num_tokens <= budget for step in fake.steps[-1:])
        if turn >= 40 and not engine.has_work:
            break
    assert ended.keys() == wanted.keys()
    assert idle(engine.scheduler.manager)


@pytest.mark.parametrize("seed", range(60))
def test_random_loads_end_and_equal_solo_runs(seed: int) -> None:
    random_load(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_loads_end_and_equal_solo_runs(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        random_load(seed)


def test_the_fake_worker_catches_a_page_handed_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that the tests above stand on can fail."""
    engine, fake = fake_engine(16, 4)
    allocator = engine.scheduler.manager.allocator
    honest = allocator.allocate
    monkeypatch.setattr(allocator, "allocate", lambda n: [min(3, page) for page in honest(n)])
    for i in range(3):
        engine.add(f"r{i}", prompt(i, 9), greedy(4))
    step = engine.scheduler.schedule()
    assert step is not None
    fake.submit(step)
    with pytest.raises(WrongPage):
        fake.result()


def test_the_fake_model_is_the_one_of_the_cases() -> None:
    assert next_token(5, 9) == 44


def test_a_stream_gives_every_token_once() -> None:
    engine, _ = fake_engine(16, 4)
    engine.add("r", prompt(0, 5), greedy(6, logprobs=0), stream=True)
    outputs = [output for _ in range(6) for output in engine.step()]
    assert [t for output in outputs for t in tokens(output)] == solo(prompt(0, 5), 6)
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert [len(output.outputs[0].logprobs or []) for output in outputs] == [1] * 6


@pytest.mark.parametrize("bad", [[], [1, -1], [1, 1000], [True], [1.5], ["a"], [[1]], [2**70]])
def test_token_ids_that_cannot_be_are_refused(bad: list[Any]) -> None:
    engine, fake = fake_engine(16, 4)
    with pytest.raises(RequestError) as caught:
        engine.add("r", bad, greedy(1))
    assert caught.value.param == "prompt"
    assert fake.steps == []


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        fake_engine(16, 4)[0].add("r", [1], greedy(1, stop="x"))
