"""Metrics: exact figures by a clock of our own, sums over random loads, and nothing that reaches a step."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
from fakes import FakeExecutor, Rig, fake_engine, request, solo
from hypothesis import given
from hypothesis import strategies as st

from paged import BeamSearchParams, Metrics, RequestMetrics, RequestOutput, SamplingParams
from scheduler.engine import Engine
from scheduler.metrics import _FINE, SECONDS, Distribution
from scheduler.outputs import EngineStats
from worker.step import Step, StepResult

PROMPT = [5, 6, 7, 8, 9]
STEP = 0.25  # seconds; sums of it are exact


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Timed(FakeExecutor):
    """Every step takes STEP, whether it raises or not."""

    clock = Clock()

    def execute(self, step: Step) -> StepResult:
        self.clock.now += STEP
        return super().execute(step)


def timed_engine(usable: int = 16, *, raise_at: dict[int, BaseException] | None = None, **more: Any) -> Engine:
    executor = Timed(usable + 1, 4, raise_at=raise_at or {})
    executor.clock = Clock()
    engine, _ = fake_engine(usable, 4, executor=executor, **more)
    engine.metrics = Metrics(executor.clock, engine.stats)
    return engine


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def run(engine: Engine) -> dict[str, RequestOutput]:
    """The last output of each request, by id."""
    found = {}
    while engine.has_work:
        try:
            outputs = engine.step()
        except RuntimeError:
            continue
        for output in outputs:
            assert (output.metrics is not None) == output.finished
            found[output.request_id] = output
    assert engine.metrics.fault is None
    return found


def metrics(output: RequestOutput | None) -> RequestMetrics:
    assert output is not None
    assert output.metrics is not None
    return output.metrics


# Of a request


def test_times_of_requests_that_run_one_after_the_other() -> None:
    engine = timed_engine(seqs=1)
    engine.add("a", PROMPT, greedy(3))
    engine.add("b", PROMPT, greedy(2))
    found = run(engine)
    assert metrics(found["a"]) == RequestMetrics(100.0, 0.0, STEP, STEP, STEP, 3 * STEP, 0, 0, 0)
    assert metrics(found["b"]) == RequestMetrics(100.0, 3 * STEP, 4 * STEP, STEP, STEP, 5 * STEP, 4, 0, 0)
    summary = engine.metrics.summary()
    assert summary.queue is not None
    assert (summary.queue.count, summary.queue.mean, summary.queue.max) == (2, 1.5 * STEP, 3 * STEP)
    assert summary.between_tokens is not None
    assert (summary.between_tokens.count, summary.between_tokens.p50) == (3, STEP)
    assert summary.ended == {"stop": 0, "length": 2, "abort": 0}


def test_a_chunked_prompt_has_its_first_token_after_its_last_chunk() -> None:
    engine = timed_engine(budget=2)
    engine.add("r", PROMPT, greedy(1))
    it = metrics(run(engine)["r"])
    assert (it.first_token_s, it.mean_between_s, it.max_between_s) == (3 * STEP, None, None)


def test_a_preemption_is_seen_in_the_pause_and_in_what_was_recomputed() -> None:
    engine = timed_engine(raise_at={2: RuntimeError()}, caching=False)
    engine.add("r", PROMPT, greedy(4))
    it = metrics(run(engine)["r"])
    # Prompt, one token, a step that raises, all 7 tokens of which 6 had been computed, one token.
    assert (it.num_preemptions, it.num_recomputed) == (1, 6)
    assert (it.max_between_s, it.mean_between_s, it.e2e_s) == (2 * STEP, 4 * STEP / 3, 5 * STEP)
    assert engine.metrics.queue.count == 1  # coming back is no second admission
    assert engine.stats.recomputed_share == 6 / 14


def test_a_request_that_is_aborted_while_waiting_was_never_admitted() -> None:
    engine = timed_engine(seqs=1)
    engine.add("a", PROMPT, greedy(4))
    engine.add("b", PROMPT, greedy(4))
    engine.step()
    assert metrics(engine.abort("b")) == RequestMetrics(100.0, None, None, None, None, STEP, 0, 0, 0)
    run(engine)
    assert [it.count for it in (engine.metrics.queue, engine.metrics.first_token, engine.metrics.e2e)] == [1, 1, 1]
    assert engine.metrics.ended == {"stop": 0, "length": 1, "abort": 1}


def test_a_request_that_is_aborted_while_running_keeps_what_it_had() -> None:
    engine = timed_engine()
    engine.add("r", PROMPT, greedy(9))
    for _ in range(3):
        engine.step()
    assert metrics(engine.abort("r")) == RequestMetrics(100.0, 0.0, STEP, STEP, STEP, 3 * STEP, 0, 0, 0)
    assert engine.metrics.e2e.count == 0


def test_a_request_without_tokens_has_an_end_and_no_first_token() -> None:
    engine = timed_engine()
    engine.add("r", PROMPT, greedy(0))
    it = metrics(run(engine)["r"])
    assert (it.first_token_s, it.e2e_s) == (None, STEP)
    assert engine.metrics.first_token.count == 0


def test_several_sequences_of_a_request_count_once_a_step() -> None:
    engine = timed_engine()
    engine.add("r", PROMPT, SamplingParams(n=3, seed=1, max_tokens=5))
    it = metrics(run(engine)["r"])
    # The prompt but for its last token, then five steps with a token for each.
    assert (it.first_token_s, it.mean_between_s, it.max_between_s) == (2 * STEP, STEP, STEP)
    assert engine.metrics.between_tokens.count == 4


def test_a_beam_search_gives_its_tokens_at_its_end() -> None:
    engine = timed_engine()
    engine.add("r", PROMPT, BeamSearchParams(beam_width=2, max_tokens=4))
    it = metrics(run(engine)["r"])
    assert it.first_token_s == it.e2e_s > STEP
    assert it.mean_between_s is None
    assert engine.metrics.between_tokens.count == 0


def test_a_stream_has_metrics_in_its_last_output_only() -> None:
    engine = timed_engine()
    engine.add("r", PROMPT, greedy(3), stream=True)
    assert [output.metrics is not None for _ in range(3) for output in engine.step()] == [False, False, True]


# Of the engine


def test_the_time_of_a_step_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = timed_engine()
    clock = engine.metrics.clock
    assert isinstance(clock, Clock)

    def slower(owner: Any, name: str, seconds: float) -> None:
        real = getattr(owner, name)

        def run(*args: Any) -> Any:
            clock.now += seconds
            return real(*args)

        monkeypatch.setattr(owner, name, run)

    slower(engine.scheduler, "schedule", 1.0)
    slower(engine.scheduler, "update", 2.0)
    slower(engine, "_output", 4.0)
    engine.add("r", PROMPT, greedy(2))
    run_steps = run(engine)
    assert len(run_steps) == 1
    it = engine.metrics.summary()
    assert (it.schedule_s, it.execute_s, it.update_s, it.output_s) == (2.0, 2 * STEP, 4.0, 4.0)
    assert it.busy_s == clock.now - 100
    assert (it.prompt_tokens_per_s, it.output_tokens_per_s) == (5 / it.busy_s, 2 / it.busy_s)
    assert engine.metrics.step_tokens.buckets()[:4] == [(1, 1), (2, 1), (4, 1), (8, 2)]


def test_pages_are_counted_by_state_and_a_reset_frees_the_cached_ones() -> None:
    engine = timed_engine(16)
    engine.add("r", PROMPT, greedy(6))
    engine.step()
    stats = engine.stats
    assert (stats.free_pages, stats.cached_pages, stats.used_pages) == (14, 0, 2)
    run(engine)
    assert (stats.free_pages, stats.cached_pages, stats.used_pages) == (14, 2, 0)
    engine.reset_prefix_cache()
    assert (stats.free_pages, stats.cached_pages) == (16, 0)


def test_pages_that_leave_a_window_are_counted_when_they_leave() -> None:
    engine, _ = fake_engine(16, 4, executor=FakeExecutor(17, 4, windows=(None, 8)))
    engine.add("r", PROMPT, greedy(28))
    manager = engine.scheduler.manager
    while engine.has_work:
        engine.step()
        assert (engine.stats.used_pages, engine.stats.cached_pages) == (manager.num_used, manager.num_cached)


def test_the_scheduler_names_who_the_last_schedule_admitted() -> None:
    rig = Rig.of(16, 4, max_num_seqs=1)
    first, second = (rig.add_family(request(name, PROMPT, 2)) for name in "ab")
    admitted = []
    while (step := rig.schedule()) is not None:
        admitted.append(rig.scheduler.admitted)
        if len(admitted) == 2:
            rig.scheduler.fail()
        else:
            rig.finish(step)
    assert admitted == [[first], [], [first], [second], []]


@pytest.mark.parametrize("seed", range(20))
def test_sums_over_requests_are_the_engines_figures(seed: int) -> None:
    """A tiny pool, shared prompts, aborts, and steps that raise."""
    rng = random.Random(seed)
    engine = timed_engine(
        10,
        budget=rng.choice((4, 16)),
        seqs=4,
        caching=rng.random() < 0.7,
        raise_at={step: RuntimeError() for step in rng.sample(range(30), 3)},
    )
    outputs: list[RequestOutput] = []
    for number in range(30):
        prompt = [*range(rng.randrange(1, 14)), rng.randrange(3)]
        engine.add(str(number), prompt, greedy(rng.randrange(0, 12), stop_token_ids=[rng.randrange(1000)] * 50))
        for _ in range(rng.randrange(4)):
            try:
                outputs += engine.step()
            except RuntimeError:
                assert engine.stats.running == 0
        if rng.random() < 0.2 and (output := engine.abort(str(rng.randrange(number + 1)))):
            outputs.append(output)
    outputs += run(engine).values()

    stats, total, each = engine.stats, engine.metrics, [metrics(output) for output in outputs]
    assert len(each) == stats.finished == sum(total.ended.values()) == 30
    assert sum(it.num_preemptions for it in each) == stats.preemptions > 0
    assert sum(it.num_recomputed for it in each) == stats.recomputed_tokens
    assert sum(it.num_cached for it in each) == stats.cached_tokens
    queued = [it.queue_s for it in each if it.queue_s is not None]
    first = [it.first_token_s for it in each if it.first_token_s is not None]
    assert (total.queue.count, total.queue.total) == (len(queued), sum(queued))
    assert (total.first_token.count, total.first_token.total) == (len(first), sum(first))
    assert sum(output.num_output_tokens for output in outputs) == stats.output_tokens
    assert total.between_tokens.count == stats.output_tokens - len(first)
    between = sum((o.num_output_tokens - 1) * (metrics(o).mean_between_s or 0) for o in outputs if o.num_output_tokens)
    assert total.between_tokens.total == pytest.approx(between)
    assert max((it.max_between_s or 0) for it in each) == total.between_tokens.most
    whole = [metrics(o).e2e_s for o in outputs if o.outputs[0].finish_reason != "abort"]
    assert (total.e2e.count, total.e2e.total) == (len(whole), sum(whole))
    assert total.ended["abort"] == len(outputs) - len(whole)
    for it in each:
        assert 0 <= (it.queue_s or 0) <= (it.first_token_s or it.e2e_s) <= it.e2e_s
    assert (total.step_tokens.count, total.step_tokens.total) == (stats.num_steps - 3, stats.computed_tokens)
    assert total.execute_s == total.summary().busy_s == STEP * (stats.num_steps - 3)
    assert (stats.free_pages + stats.cached_pages, stats.used_pages) == (10, 0)


# Buckets


@given(st.lists(st.floats(0, 3e5), min_size=1), st.integers(1, 3))
def test_percentiles_are_within_one_percent_and_shown_buckets_exact(values: list[float], times: int) -> None:
    distribution = Distribution(SECONDS, _FINE)
    for value in values:
        distribution.add(value, times)
    ranked = sorted(values * times)
    found = distribution.percentiles()
    assert found is not None
    for percent, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        wanted = ranked[-(-percent * len(ranked) // 100) - 1]
        assert value == (ranked[-1] if wanted > 1e5 else pytest.approx(wanted, rel=0.01, abs=1e-5))
    assert (found.count, found.max) == (len(ranked), ranked[-1])
    assert found.mean == pytest.approx(sum(ranked) / len(ranked))
    assert distribution.buckets() == [
        (bound, sum(value <= bound for value in ranked)) for bound in (*SECONDS, math.inf)
    ]


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_a_time_that_cannot_be_counts_as_none(value: float) -> None:
    distribution = Distribution((1.0, 2.0))
    distribution.add(value)
    assert distribution.buckets()[0] == (1.0, 1)
    assert (distribution.total, distribution.least, distribution.most) == (0.0, 0.0, 0.0)


def test_a_value_on_a_bound_belongs_to_it() -> None:
    distribution = Distribution((1.0, 2.0))
    distribution.add(1.0)
    assert distribution.buckets() == [(1.0, 1), (2.0, 1), (math.inf, 1)]


def test_without_values_there_are_no_percentiles() -> None:
    assert Distribution(SECONDS, _FINE).percentiles() is None
    it = Metrics().summary()
    assert (it.queue, it.prompt_tokens_per_s, it.output_tokens_per_s) == (None, 0.0, 0.0)
    assert dict(it.rows())["first token"] == "none"


def test_the_table_has_the_figures() -> None:
    engine = timed_engine(seqs=1)
    engine.add("a", PROMPT, greedy(3))
    engine.add("b", PROMPT, greedy(3))
    run(engine)
    assert dict(engine.metrics.summary().rows()) == {
        "speed": "6.7 prompt and 4.0 output tokens/s of step time",
        "queue": "p50 0.0 ms, p99 744.7 ms, longest 750.0 ms",
        "first token": "p50 250.6 ms, p99 996.2 ms, longest 1.00 s",
        "between tokens": "p50 250.0 ms, p99 250.0 ms, longest 250.0 ms",
        "whole request": "p50 750.0 ms, p99 1.49 s, longest 1.50 s",
        "prefix hits": "4 tokens, 40.0% of the prompts",
        "pages": "2 of 16 at most, 1 cached now",
        "preemptions": "0",
        "recomputed": "0 tokens, 0.0% of those computed",
        "waste": f"{engine.stats.waste:.1%} of the bytes of tokens",
        "steps": "6, of up to 1 sequences",
        "step time": "schedule 0.0%, execute 100.0%, update 0.0%, output 0.0%",
    }


# What goes wrong


class Broken(Distribution):
    def add(self, value: float, times: int = 1) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("moment", [math.nan, math.inf, -1e300])
def test_a_clock_that_jumps_changes_no_token(moment: float) -> None:
    engine, _ = fake_engine(16, 4)
    times = iter([5.0, moment] * 1000)
    engine.metrics = Metrics(lambda: next(times), engine.stats)
    engine.add("r", PROMPT, greedy(6))
    assert run(engine)["r"].outputs[0].token_ids == solo(PROMPT, 6)
    summary = engine.metrics.summary()
    assert summary.first_token is not None
    assert summary.first_token.count == 1
    assert summary.rows()


@pytest.mark.parametrize("name", ["queue", "first_token", "between_tokens", "e2e", "step_tokens"])
def test_a_fault_in_the_metrics_reaches_no_step(name: str) -> None:
    engine, _ = fake_engine(16, 4)
    setattr(engine.metrics, name, Broken(SECONDS))
    engine.add("r", PROMPT, greedy(6))
    found = []
    while engine.has_work:
        found += engine.step()
    assert found[0].outputs[0].token_ids == solo(PROMPT, 6)
    assert isinstance(engine.metrics.fault, ZeroDivisionError)


def test_a_request_that_metrics_never_heard_of_is_left_out() -> None:
    engine = timed_engine()
    engine.scheduler.add(engine.resolve("r", PROMPT, greedy(3)))
    while engine.has_work:
        for output in engine.step():
            assert output.metrics is None
    assert engine.metrics.fault is None
    assert engine.metrics.summary().first_token is None


def test_an_end_counts_once() -> None:
    engine = timed_engine()
    engine.queue(request := engine.resolve("r", PROMPT, greedy(1)))
    family = engine.scheduler._live[request.request_id]
    run(engine)
    before = engine.metrics.summary()
    engine.metrics.updated([family, family])
    assert engine.metrics.summary() == before


def test_metrics_without_an_engine_have_counters_of_their_own() -> None:
    assert Metrics().stats == EngineStats()
    assert Metrics().stats is not Metrics().stats
