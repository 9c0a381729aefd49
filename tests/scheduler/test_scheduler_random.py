"""Random mixed loads over tiny pools: whatever comes, is aborted, and fails, every request gets what it gets alone.

After every step: the invariants of manager and scheduler, S3, and that the running requests are the oldest ones. The
fake worker proves every page that is read. A load counts its steps against the bound of S2.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from fakes import GREEDY, FakeText, Rig, output, request, solo

from paged import RequestError, SamplingParams
from scheduler import policy
from scheduler.request import Family, Request, State

SAMPLED = SamplingParams(temperature=1.0)
FAMILIES = [[(37 * family + 11 * i) % 900 for i in range(200)] for family in range(3)]


class Planned(Exception):
    """What the fake worker raises."""


@dataclass
class Load:
    """One seed's load, drawn as it runs."""

    seed: int
    failures: float = 0.0
    aborts: float = 0.0
    rng: random.Random = field(init=False)
    rig: Rig = field(init=False)
    growing: bool = field(init=False)  # short prompts and long outputs: these run out of pages
    added: dict[str, Family] = field(default_factory=dict)
    num_failed: int = 0
    num_waited: int = 0  # steps in which one waited for what an older one was computing
    num_gave_way: int = 0  # preempted for want of pages, not by a failure

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.growing = rng.random() < 0.6
        page_size = rng.choice([1, 4, 4] if self.growing else [1, 4, 16])
        self.rig = Rig.of(
            rng.randint(5 if self.growing else 2, 12) if page_size > 1 else rng.randint(20 if self.growing else 4, 40),
            page_size,
            budget=rng.choice([4, 7, 16] if self.growing else [1, 2, 3, 7, 16, 33, 64]),
            max_num_seqs=rng.randint(2 if self.growing else 1, 8),
            caching=rng.random() < 0.8,
        )

    def run(self) -> int:
        """Run it to the end. Returns the number of steps."""
        arrivals = self.rng.randint(3, 15 if self.growing else 25)
        while arrivals or self.rig.scheduler.has_work:
            while arrivals and (self.rng.random() < 0.4 or not self.rig.scheduler.has_work):
                arrivals -= 1
                self.add(f"r{arrivals}")
            self.maybe_abort()
            self.step()
            assert len(self.rig.executor.steps) <= self.bound(), "S2"
        self.rig.assert_idle()
        return len(self.rig.executor.steps)

    def add(self, name: str) -> None:
        wanted = self.draw(name)
        try:
            policy.resolve_max_tokens(len(wanted.prompt_token_ids), wanted.max_tokens, False, self.rig.scheduler.limits)
        except RequestError:
            return
        self.added[name] = self.rig.add_family(wanted)

    def draw(self, name: str) -> Request:
        rng, manager = self.rng, self.rig.scheduler.manager
        room = manager.num_usable * manager.page_size
        shared = rng.randint(0, room // 8 if self.growing else room)
        prompt = rng.choice(FAMILIES)[:shared] + [rng.randrange(900) for _ in range(rng.randint(0, 5))]
        params, seed = rng.choice([GREEDY, SAMPLED]), rng.randrange(3)
        most = rng.randint(room // 2, room - 10) if self.growing else rng.choice([0, 1, 2, rng.randint(1, 30)])
        free = solo(prompt or [1], most, params=params, seed=seed)
        eos = [rng.choice(free)] if free and rng.random() < 0.2 else []
        return request(name, prompt or [1], most, params=params, seed=seed, eos=eos)

    def maybe_abort(self) -> None:
        live = self.rig.scheduler.live_ids()
        if live and self.rng.random() < self.aborts:
            name = self.rng.choice(live)
            assert self.rig.abort(name) is self.added[name]
            assert self.rig.abort(name) is None

    def step(self) -> None:
        before = self.rig.scheduler.stats.preemptions
        step = self.rig.schedule()
        self.num_gave_way += self.rig.scheduler.stats.preemptions - before
        if step is None:
            return
        self.check_order()
        self.maybe_abort()  # between schedule() and update()
        self.maybe_abort()
        if self.rng.random() < self.failures:
            self.rig.executor.raise_at[step.number] = Planned()
            self.num_failed += 1
            with pytest.raises(Planned):
                self.rig.finish(step)
        else:
            self.rig.finish(step)
        stats, running = self.rig.scheduler.stats, self.rig.scheduler.running
        assert (stats.running, stats.running + stats.waiting) == (len(running), len(self.rig.scheduler.live_ids()))

    def check_order(self) -> None:
        """First come, first served: whoever runs arrived before whoever waits."""
        live = sorted(family for family in self.added.values() if family.state is not State.FINISHED)
        running = [family for family in live if family.state is State.RUNNING]
        assert running == self.rig.scheduler.running == live[: len(running)]
        self.num_waited += any(self.rig.scheduler._waits_for_older(family) for family in live[len(running) :][:1])

    def bound(self) -> int:
        """S2: the oldest always runs and never gives way, so it ends within its chunks and one step a token; a step
        that fails costs its own and the chunks of the oldest again."""
        budget = self.rig.scheduler.limits.max_num_batched_tokens
        requests = [family.request for family in self.added.values()]
        longest = -(-max((wanted.peak_tokens for wanted in requests), default=0) // budget)
        steps = sum(-(-wanted.peak_tokens // budget) + wanted.max_tokens for wanted in requests)
        return steps + self.num_failed * (longest + 1)

    def check_answers(self) -> None:
        """Every request has ended, once, with the tokens it gets alone."""
        ended = self.rig.ended
        assert sorted(s.seq_id for s in ended) == sorted(f.sequences[0].seq_id for f in self.added.values())
        for sequence in ended:
            wanted, tokens = sequence.request, output(sequence)
            free = solo(wanted.prompt_token_ids.tolist(), wanted.max_tokens, params=wanted.params, seed=wanted.seed)
            ends = [i for i, token in enumerate(free) if token in wanted.eos_token_ids]
            alone = free[: ends[0] + 1] if ends else free
            assert isinstance(sequence.text, FakeText)
            assert sequence.text.finishes == 1
            if sequence.finish_reason == "abort":
                assert tokens == alone[: len(tokens)]
                assert len(tokens) < max(len(alone), 1)
            else:
                assert tokens == alone
                assert sequence.finish_reason == ("stop" if ends else "length")


def run(seed: int) -> Load:
    """Seeds in turn: plain, with aborts, with failing steps, with both."""
    load = Load(seed, failures=0.04 * (seed % 4 >= 2), aborts=0.03 * (seed % 2))
    load.run()
    load.check_answers()
    return load


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_once_with_the_tokens_it_gets_alone(seed: int) -> None:
    run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(60, 660, 20))
def test_every_request_of_many_loads_ends_once_with_the_tokens_it_gets_alone(first: int) -> None:
    for seed in range(first, first + 20):
        run(seed)


def test_the_loads_reach_what_they_are_for() -> None:
    """Preemption, prefix hits, aborts, failures and refusals all happen in the sample that the plain run takes."""
    loads = [run(seed) for seed in range(20)]
    stats = [load.rig.scheduler.stats for load in loads]
    assert sum(load.num_gave_way for load in loads) > 20
    assert sum(s.recomputed_tokens for s in stats) > 100
    assert sum(s.cached_tokens for s in stats) > 50
    assert sum(load.num_failed for load in loads) > 20
    assert sum(load.num_waited for load in loads) > 2
    assert sum(s.finish_reason == "abort" for load in loads for s in load.rig.ended) > 20
    assert any(len(load.rig.executor.steps) < load.bound() for load in loads)
