"""Random mixed loads over tiny pools: whatever comes, is aborted, and fails, every request gets what it gets alone.

After every step: the invariants of manager and scheduler, S3, that the senior gets on, and that nobody passes one who
is overdue. The fake worker proves every page that is read. Every request counts its steps against the bound of S2
(docs/scheduling.md); admission, order, victim, patience and speculation are drawn with the load.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from fakes import FakeText, Rig, next_token, output, request, score, solo

from paged import RequestError, SamplingParams
from scheduler import policy
from scheduler.policy import Rules
from scheduler.request import Family, Request, State

FAMILIES = [[(37 * family + 11 * i) % 900 for i in range(200)] for family in range(3)]
MODES = {"plain": (0.0, 0.0), "aborts": (0.03, 0.0), "failures": (0.0, 0.04), "both": (0.03, 0.04)}


def rhyme(last: int, position: int) -> int:
    """A model that says the same again and again, but for a slip now and then."""
    return position % 5 + 100 * (position % 13 == 0)


@pytest.fixture(autouse=True)
def few_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens a step than the least chunk of a large budget, as of a large budget on a GPU."""
    monkeypatch.setattr(policy, "MOST_SCORED", 5)


class Planned(Exception):
    """What the fake worker raises."""


@dataclass
class Load:
    """One seed's load, drawn as it runs."""

    seed: int
    aborts: float = 0.0
    failures: float = 0.0
    rng: random.Random = field(init=False)
    rig: Rig = field(init=False)
    growing: bool = field(init=False)  # short prompts and long outputs: these run out of pages
    added: dict[str, Family] = field(default_factory=dict)
    ends: dict[Family, int] = field(default_factory=dict)  # the step in which each ended
    before: dict[Family, set[Family]] = field(default_factory=dict)  # of an overdue one: whose turns may come first
    tenure: Counter[Family] = field(default_factory=Counter)  # steps in which each was the senior
    num_failed: int = 0
    num_waited: int = 0  # steps in which one waited for what an older one was computing
    num_gave_way: int = 0  # preempted for want of pages, not by a failure
    num_passed: int = 0  # admitted before one that arrived earlier
    worst: float = 0.0  # of the steps that a request took, over the bound

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
            model=rng.choice([next_token, next_token, rhyme]),
            rules=Rules(
                rng.choice(policy.ADMISSIONS),
                rng.choice(list(policy.ORDERS.values())),
                rng.choice(list(policy.VICTIMS.values())),
                rng.choice([0, 3, 20, 256]),
                num_speculative_tokens=rng.choice([0, 0, 3]),
            ),
        )

    @property
    def rules(self) -> Rules:
        return self.rig.scheduler.rules

    def run(self) -> int:
        """Run it to the end. Returns the number of steps."""
        arrivals = self.rng.randint(3, 15 if self.growing else 25)
        while arrivals or self.rig.scheduler.has_work:
            while arrivals and (self.rng.random() < 0.4 or not self.rig.scheduler.has_work):
                arrivals -= 1
                self.add(f"r{arrivals}")
            self.maybe_abort()
            self.step()
            assert len(self.rig.executor.steps) <= self.bound_of_all(), "S2"
        self.rig.assert_idle()
        return len(self.rig.executor.steps)

    def add(self, name: str) -> None:
        wanted = self.draw(name)
        limits = self.rig.scheduler.limits
        try:
            policy.resolve_max_tokens(
                len(wanted.prompt_token_ids), wanted.max_tokens, False, limits, wanted.num_sequences
            )
        except RequestError:
            return
        self.added[name] = self.rig.add_family(wanted)

    def draw(self, name: str) -> Request:
        rng, manager = self.rng, self.rig.scheduler.manager
        room = manager.num_usable * manager.page_size
        shared = rng.randint(0, room // 8 if self.growing else room)
        prompt = rng.choice(FAMILIES)[:shared] + [rng.randrange(900) for _ in range(rng.randint(0, 5))] or [1]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            n=rng.choice([1, 1, 1, 2, 3, 6]),
            prompt_logprobs=rng.choice([None, None, 0]),
        )
        seed = rng.randrange(3)
        most = rng.randint(room // 2, room - 10) if self.growing else rng.choice([0, 1, 2, rng.randint(1, 30)])
        free = solo(prompt, most, self.rig.executor.model, params=params, seed=seed)
        eos = [rng.choice(free)] if free and rng.random() < 0.2 else []
        return request(name, prompt, most, params=params, seed=seed, eos=eos, priority=rng.randint(-10, 10))

    def maybe_abort(self) -> None:
        live = self.rig.scheduler.live_ids()
        if live and self.rng.random() < self.aborts:
            name = self.rng.choice(live)
            assert self.rig.abort(name) is self.added[name]
            assert self.rig.abort(name) is None

    def step(self) -> None:
        scheduler = self.rig.scheduler
        before, senior = scheduler.stats.preemptions, scheduler.senior
        step = self.rig.schedule()
        self.num_gave_way += scheduler.stats.preemptions - before
        if step is None:
            return
        assert senior is None or scheduler.senior is senior
        rows = {row.seq_id for row in step.rows}
        assert scheduler.senior is not None
        assert rows & {sequence.seq_id for sequence in scheduler.senior.live}, "the senior gets on in every step"
        self.tenure[scheduler.senior] += 1
        self.check_order(step.number)
        self.maybe_abort()  # between schedule() and update()
        self.maybe_abort()
        if self.rng.random() < self.failures:
            self.rig.executor.raise_at[step.number] = Planned()
            self.num_failed += 1
            with pytest.raises(Planned):
                self.rig.finish(step)
        else:
            self.rig.finish(step)
        stats, running = scheduler.stats, scheduler.running
        assert (stats.running, stats.running + stats.waiting) == (len(running), len(scheduler.live_ids()))
        for family in self.rig.families:
            self.ends.setdefault(family, step.number)

    def check_order(self, number: int) -> None:
        """Nobody passes one that is overdue, but the senior. Notes whose turns may come before that one's end."""
        scheduler, patience = self.rig.scheduler, self.rules.patience
        live = sorted(family for family in self.added.values() if family.state is not State.FINISHED)
        waiting = [family for family in live if family.state is not State.RUNNING]
        overdue = [family for family in waiting if number - family.arrived >= patience]
        for family in scheduler.admitted:
            assert family is scheduler.senior or not any(other < family for other in overdue), "S2"
            self.num_passed += any(other < family for other in waiting)
        for family in live:
            if number - family.arrived >= patience and family not in self.before:
                self.before[family] = {other for other in live if other < family} | set(scheduler.running) | {family}
        self.num_waited += any(scheduler._waits_for_older(family) for family in waiting[:1])

    def alone(self, family: Family) -> int:
        return policy.steps_alone(family.request, self.rig.scheduler.limits, self.rules)

    @property
    def lost(self) -> int:
        """Steps that failures cost at most: each its own, and the chunks of the senior again."""
        chunks = [self.alone(family) - family.request.max_tokens for family in self.added.values()]
        return self.num_failed * (max(chunks, default=0) + 1)

    def bound_of_all(self) -> int:
        return sum(map(self.alone, self.added.values())) + self.lost

    def check_answers(self) -> None:
        """Every request has ended, once, within its bound, with the tokens it gets alone."""
        ended = self.rig.ended
        assert sorted(s.seq_id for s in ended) == sorted(s.seq_id for f in self.added.values() for s in f.sequences)
        assert sorted(self.rig.families) == sorted(self.added.values())
        for sequence in ended:
            self.check_answer(sequence.request, sequence.index, output(sequence), sequence.finish_reason)
            assert isinstance(sequence.text, FakeText)
            assert sequence.text.finishes == 1
        for family in self.added.values():
            reasons = {sequence.finish_reason for sequence in family.sequences}
            if family.request.params.prompt_logprobs is not None and "abort" not in reasons:
                assert family.scores == [score(token) for token in family.request.prompt_token_ids[1:].tolist()]
            assert self.tenure[family] <= self.alone(family) + self.lost, f"S2: {family} was the senior too long"
            if family in self.before and family in self.ends:
                turns = sum(map(self.alone, self.before[family]))
                bound, took = self.rules.patience + turns + self.lost, self.ends[family] - family.arrived + 1
                assert took <= bound, f"S2: {family} took {took} steps, at most {bound} are promised"
                self.worst = max(self.worst, took / bound)

    def check_answer(self, wanted: Request, index: int, tokens: list[int], reason: str | None) -> None:
        prompt = wanted.prompt_token_ids.tolist()
        model = self.rig.executor.model
        free = solo(prompt, wanted.max_tokens, model, wanted.params, wanted.seed, index)
        ends = [i for i, token in enumerate(free) if token in wanted.eos_token_ids]
        alone = free[: ends[0] + 1] if ends else free
        if reason == "abort":
            assert tokens == alone[: len(tokens)]
            assert len(tokens) < max(len(alone), 1)
        else:
            assert tokens == alone
            assert reason == ("stop" if ends else "length")


def run(seed: int, mode: str) -> Load:
    load = Load(seed, *MODES[mode])
    load.run()
    load.check_answers()
    guaranteed = load.rules.admission == "guaranteed"
    assert not (guaranteed and load.num_gave_way), "what was guaranteed gave way"
    return load


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_every_request_ends_once_within_its_bound_with_the_tokens_it_gets_alone(first: int, mode: str) -> None:
    for seed in range(first, first + 20):
        run(seed, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", range(200, 1200, 50))
def test_every_request_of_many_loads_ends_once_within_its_bound(first: int, mode: str) -> None:
    for seed in range(first, first + 50):
        run(seed, mode)


def loads() -> Iterator[Load]:
    for seed in range(60):
        yield run(seed, list(MODES)[seed % 4])


def test_the_loads_reach_what_they_are_for() -> None:
    """Preemption, hits, waiting, passing, aborts, failures and drafts all happen in the sample of the plain run."""
    sample = list(loads())
    stats = [load.rig.scheduler.stats for load in sample]
    assert sum(load.num_gave_way for load in sample) > 20
    assert sum(s.recomputed_tokens for s in stats) > 100
    assert sum(s.cached_tokens for s in stats) > 50
    assert sum(s.accepted_tokens for s in stats) > 5
    assert sum(load.num_failed for load in sample) > 20
    assert sum(load.num_waited for load in sample) > 2
    assert sum(load.num_passed for load in sample) > 5
    assert sum(len(load.before) for load in sample) > 100
    assert sum(s.finish_reason == "abort" for load in sample for s in load.rig.ended) > 20
    assert 0.1 < max(load.worst for load in sample) <= 1
