"""Replays: exact times of a trace worked out by hand, every request once, and the same steps as an engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import fake_engine
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cost import CostModel
from scheduler.engine import Engine
from scheduler.policy import Limits
from scheduler.simulate import Replay, SimulatedExecutor, simulate
from scheduler.traces import Trace, TraceRequest
from worker.executor import Executor
from worker.step import SamplingParams

COST = CostModel(step=1.0, token=0.1, read=0.01)
LIMITS = Limits(max_model_len=256, num_pages=100, page_size=4, max_num_seqs=8, max_num_batched_tokens=64)


def trace(*requests: TraceRequest) -> Trace:
    return Trace("made up", requests)


def close(found: object, *expected: float) -> None:
    assert np.asarray(found).tolist() == pytest.approx(list(expected), abs=1e-9)


def test_two_requests_take_the_times_that_they_take_by_hand() -> None:
    """A: 10 tokens at 0.0, three answered; B: 5 at 2.5, two answered.

    Steps: A's prompt 1 + 1.0, to 2.0. A's second token, 10 read, 1 + 0.1 + 0.1, to 3.2. B has come: A's third, 11
    read, and B's prompt 1 + 0.6 + 0.11, to 4.91. B's second, 5 read, 1 + 0.1 + 0.05, to 6.06.
    """
    replay = simulate(trace(TraceRequest(0.0, 10, 3), TraceRequest(2.5, 5, 2)), LIMITS, COST)
    close(replay.steps, 2.0, 1.2, 1.71, 1.15)
    close(replay.first, 2.0, 2.41)
    close(replay.gaps, 1.15, 1.2, 1.71)
    assert replay.end == pytest.approx(6.06)
    assert replay.busy == pytest.approx(6.06)
    close(replay.timeline[:, 0], 0.0, 2.0, 3.2, 4.91)
    close(replay.timeline[:, 1], 1, 1, 2, 1)
    close(replay.timeline[:, 3], 3, 3, 5, 2)  # pages of 4 tokens


def test_an_idle_machine_waits_for_the_next_arrival() -> None:
    replay = simulate(trace(TraceRequest(0.0, 10, 1), TraceRequest(50.0, 10, 1)), LIMITS, COST)
    close(replay.first, 2.0, 2.0)
    assert replay.end == pytest.approx(52.0)
    assert replay.busy == pytest.approx(4.0)
    assert replay.load == pytest.approx(4 / 50)
    assert not replay.overloaded


def test_a_prompt_is_cut_into_chunks_of_the_budget() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=8)
    replay = simulate(trace(TraceRequest(0.0, 20, 1)), limits, COST)
    close(replay.steps, 1.8, 1.8 + 0.08, 1.4 + 0.16)
    close(replay.first, 5.24)


def test_a_window_bounds_what_is_read() -> None:
    windowed = replace(LIMITS, windows=(None, 5))
    plain, found = (simulate(trace(TraceRequest(0.0, 10, 2)), limits, COST) for limits in (LIMITS, windowed))
    close(plain.steps, 2.0, 1.2)
    close(found.steps, 2.0, 1.1 + 0.01 * (10 + 4) / 2)


requests = st.lists(
    st.builds(
        TraceRequest,
        st.floats(0, 30),
        st.integers(1, 60),
        st.integers(0, 30),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.just(8),
    ).map(lambda r: replace(r, hash_ids=r.hash_ids[: -(-r.prompt_tokens // 8)])),
    min_size=1,
    max_size=20,
).map(lambda found: trace(*sorted(found, key=lambda r: r.arrival)))


@given(requests, st.integers(1, 3), st.integers(6, 40), st.booleans())
def test_every_request_is_served_once_or_refused(trace: Trace, replicas: int, pages: int, caching: bool) -> None:
    limits = replace(LIMITS, num_pages=pages)
    replay = simulate(trace, limits, COST, replicas, caching)
    served = [r for r in trace.requests if r.prompt_tokens + max(r.output_tokens - 1, 0) <= pages * 4]
    assert replay.served == len(served) == sum(stats.finished for stats in replay.stats)
    assert sum(replay.refused.values()) == len(trace.requests) - len(served)
    assert len(replay.first) == sum(r.output_tokens > 0 for r in served)
    assert len(replay.gaps) == sum(max(r.output_tokens - 1, 0) for r in served)
    assert sum(stats.prompt_tokens for stats in replay.stats) == sum(r.prompt_tokens for r in served)
    assert all((stats.running, stats.waiting, stats.used_pages) == (0, 0, 0) for stats in replay.stats)
    assert (replay.first > 0).all()
    assert (replay.gaps >= 1.0).all()  # a step takes a second at least
    assert replay.busy == pytest.approx(replay.steps.sum())
    assert caching or replay.hit_rate == 0


@given(requests, st.integers(1, 3))
def test_the_same_trace_gives_the_same_figures(trace: Trace, replicas: int) -> None:
    limits = replace(LIMITS, num_pages=30)
    one, two = (simulate(trace, limits, COST, replicas) for _ in range(2))
    for name in ("first", "gaps", "steps", "timeline"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert (one.stats, one.end, one.refused) == (two.stats, two.end, two.refused)


@pytest.mark.parametrize("pages", [24, 100])
def test_it_takes_the_steps_that_an_engine_takes(pages: int) -> None:
    """The same tokens through an engine with a worker that checks every page: steps, hits and preemptions are equal."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 1000, 24).tolist()
    prompts = [tuple(shared[: 8 * (i % 4)] + rng.integers(0, 1000, 9 + i).tolist()) for i in range(12)]
    made = trace(*(TraceRequest(0.0, len(p), 20, p, block_tokens=1) for p in prompts))
    replay = simulate(made, replace(LIMITS, num_pages=pages), COST)
    engine, _ = fake_engine(pages, 4)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), list(prompt), SamplingParams(temperature=0, max_tokens=20))
    while engine.has_work:
        engine.step()
    assert replay.stats[0] == engine.stats
    assert replay.hit_rate > 0.1
    assert (replay.preemptions > 0) == (pages == 24)


def test_an_engine_runs_over_the_simulated_worker() -> None:
    """It is an Executor as any other: whole answers come, and each step has its seconds."""
    executor: Executor = SimulatedExecutor(LIMITS.num_pages + 1, COST)
    engine = Engine(executor, None, LIMITS, vocab_size=1000)
    engine.add("a", list(range(10)), SamplingParams(temperature=0, max_tokens=3))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3]
    assert isinstance(executor, SimulatedExecutor)
    assert executor.seconds == pytest.approx(1 + 0.1 + 0.11)
    engine.close()


def alike(count: int, apart: float) -> Trace:
    return trace(*(TraceRequest(i * apart, 20, 2, (0, 1), block_tokens=8) for i in range(count)))


def test_prompts_that_begin_alike_hit_all_but_the_first_time() -> None:
    replay = simulate(alike(5, apart=100.0), LIMITS, COST)
    assert replay.hit_rate == 4 * 16 / (5 * 20)
    close(replay.first[[0, -1]], 1.0 + 0.4 + 0.16, 1.0 + 2.0)
    assert simulate(alike(5, apart=100.0), LIMITS, COST, prefix_caching=False).hit_rate == 0


def test_what_sequences_share_is_read_once() -> None:
    """Two prompts of 17 tokens that share 16: five pages and one of its own hold them, and 24 tokens are all there is.

    The second waits for the first's pages, then computes its last token beside the first's second.
    """
    both = trace(*(TraceRequest(0.0, 17, 3, (0, 1), block_tokens=8) for _ in range(2)))
    replay = simulate(both, LIMITS, COST)
    assert replay.hit_rate == 16 / 34
    close(replay.steps, 1 + 1.7, 1 + 0.2 + 0.24, 1 + 0.2 + 0.24, 1 + 0.1 + 0.18)


def test_without_content_nothing_hits() -> None:
    replay = simulate(trace(*(TraceRequest(100.0 * i, 20, 2) for i in range(5))), LIMITS, COST)
    assert replay.hit_rate == 0


def test_a_request_goes_where_the_least_is_before_it() -> None:
    """Two at once go to two replicas, and take what each would alone; of those that begin alike one replica has all."""
    at_once = trace(TraceRequest(0.0, 10, 3), TraceRequest(0.0, 20, 3))
    found = simulate(at_once, LIMITS, COST, replicas=2)
    close(found.first, 2.0, 3.0)
    assert [stats.prompt_tokens for stats in found.stats] == [10, 20]
    spread = simulate(alike(5, apart=100.0), LIMITS, COST, replicas=2)
    assert [stats.finished for stats in spread.stats] == [5, 0]
    assert spread.hit_rate == 4 * 16 / (5 * 20)


def test_too_many_arrivals_are_an_overload_and_enough_replicas_end_it() -> None:
    """One step serves 64 tokens of prompts in 7.4 s, so 10 a second need about one and a half machines."""
    many = trace(*(TraceRequest(i / 2.0, 20, 1) for i in range(300)))
    one = simulate(many, LIMITS, COST)
    assert one.overloaded
    assert one.backlog > 50
    assert one.load == pytest.approx(300 / 3.2 * 7.4 / 149.5, rel=0.05)
    assert one.replicas_needed == int(np.ceil(one.load)) == 5
    enough = simulate(many, LIMITS, COST, replicas=8)
    assert not enough.overloaded
    assert enough.first_token(99) < one.first_token(50) / 5


def test_requests_that_all_come_at_once_are_no_overload() -> None:
    replay = simulate(trace(*(TraceRequest(0.0, 20, 5) for _ in range(100))), LIMITS, COST)
    assert not replay.overloaded
    assert (replay.load, replay.replicas_needed) == (np.inf, 1)


def test_what_an_engine_would_refuse_is_counted_by_reason() -> None:
    limits = replace(LIMITS, num_pages=20)
    asked = [(250, 10), (300, 1), (90, 1), (10, 5)]
    replay: Replay = simulate(trace(*(TraceRequest(0.0, *one) for one in asked)), limits, COST)
    assert replay.served == 1
    assert replay.refused == {"longer than max_model_len 256": 2, "longer than the pool's 20 pages": 1}
