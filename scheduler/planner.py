"""How many pages, how many replicas? Replays of one trace at several settings, and what follows from them.

    1. one replica with the memory that was given
    2. if that does not hold the targets, more replicas: from the number that the load asks for half as many more each
       time, until they do or more of them do not help; then the fewest that do
    3. with that many replicas, a quarter, half, twice and four times the memory; and halves of the least, as long as
       the knee is not found

The knee is the smallest pool with which the 99th percentile of the first token is at most 10 % over that of the largest
pool, no fewer requests served.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scheduler.cost import CostModel
from scheduler.policy import Limits, Rules
from scheduler.simulate import Replay, simulate
from scheduler.traces import Trace

KNEE = 1.1  # of the largest pool's first token
HELPS = 0.9  # of the times of fewer replicas, or more of them do not help
FACTORS = (0.25, 0.5, 2.0, 4.0)  # of the memory given
MOST_HALVES = 4
QUANTILES = 2001  # of times, that are kept of a replay
MOMENTS = 500  # of its timeline
SMALL = 500_000  # tokens of a trace that is replayed before another process has started


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds that the 99th percentiles are to stay below."""

    first: float
    gap: float

    def held_by(self, replay: Replay) -> bool:
        if not replay.served or replay.overloaded:
            return False
        return replay.first_token(99) <= self.first and replay.between_tokens(99) <= self.gap


@dataclass(frozen=True, slots=True)
class Run:
    """One setting and what it gave. kv_bytes: of a replica's pages."""

    kv_bytes: int
    replay: Replay


@dataclass(frozen=True, slots=True)
class Capacity:
    """All runs and what they say.

    base: one replica with the memory given. by_replicas: with that memory, fewest first. by_pool: with `replicas`
    replicas, smallest first. holds: whether that many replicas hold the targets. knee, least: of by_pool the one at
    the knee and the smallest that holds the targets; None where none does.
    """

    trace: Trace
    targets: Targets
    base: Run
    by_replicas: tuple[Run, ...]
    by_pool: tuple[Run, ...]
    replicas: int
    holds: bool
    knee: Run | None
    least: Run | None

    @property
    def chosen(self) -> Run:
        """With the memory given, at `replicas` replicas."""
        return next(run for run in self.by_replicas if run.replay.replicas == self.replicas)


class Planner:
    """Replays one trace at many settings, in other processes where the trace is long.

    limits: of an engine with the memory given. bytes_per_page: what a page takes, to say what others would.
    """

    def __init__(
        self,
        trace: Trace,
        limits: Limits,
        bytes_per_page: int,
        cost: CostModel,
        targets: Targets,
        *,
        prefix_caching: bool = True,
        rules: Rules | None = None,
        max_replicas: int = 16,
        processes: int = 1,
        on_run: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.trace, self.limits, self.targets = trace, limits, targets
        self._bytes_per_page = bytes_per_page
        self._given = trace, cost, prefix_caching, rules
        self._max_replicas = max_replicas
        self._on_run = on_run
        tokens = sum(request.prompt_tokens + request.output_tokens for request in trace.requests)
        self._processes = 1 if tokens < SMALL else processes
        self._pool: ProcessPoolExecutor | None = None
        self._others = set(multiprocessing.active_children())

    def __enter__(self) -> Planner:
        if self._processes > 1:
            # Spawned, as PyTorch's threads, which a calibration has started, do not survive a fork.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, context, initializer=_begin, initargs=self._given)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:
            for child in set(multiprocessing.active_children()) - self._others:
                child.terminate()  # nobody waits for what it computes

    def run(self) -> Capacity:
        """Everything."""
        (base,) = self._runs([(self.limits.num_pages, 1)])
        by_replicas = self._scale(base)
        best = next((run for run in by_replicas if self.targets.held_by(run.replay)), None)
        # If none holds: the fewest that keep up, or else one.
        chosen = best or next((run for run in by_replicas if not run.replay.overloaded), base)
        by_pool = self._pools(chosen)
        held = [run for run in by_pool if self.targets.held_by(run.replay) and _serves_all(run, by_pool)]
        return Capacity(
            trace=self.trace,
            targets=self.targets,
            base=base,
            by_replicas=tuple(by_replicas),
            by_pool=tuple(by_pool),
            replicas=chosen.replay.replicas,
            holds=best is not None,
            knee=knee(by_pool),
            least=held[0] if held else None,
        )

    def _scale(self, base: Run) -> list[Run]:
        """With the memory given, more replicas until they hold the targets; then the fewest that do."""
        found, held, most = {1: base}, self.targets.held_by, self._max_replicas
        number = max(2, base.replay.replicas_needed if base.replay.overloaded else 2)
        while not held(found[max(found)].replay) and number <= most:
            several = [number]
            while len(several) < self._processes and several[-1] < most:
                several.append(min(_half_more(several[-1]), most))
            before = found[max(found)].replay
            found |= self._with_replicas(several)
            if not any(_helps(before, found[more].replay) for more in several):
                break
            number = _half_more(several[-1])
            number = most if several[-1] < most < number else number
        while holding := [number for number, run in found.items() if held(run.replay)]:
            least = min(holding)
            below = max((number for number in found if number < least), default=least)
            if below == 1 and base.replay.overloaded:
                below = max(below, base.replay.replicas_needed - 1)
            between = np.linspace(below, least, self._processes + 2)[1:-1]
            several = sorted({round(one) for one in between.tolist()} - {below, least})
            if not several:
                break
            found |= self._with_replicas(several)
        return [found[number] for number in sorted(found)]

    def _with_replicas(self, numbers: list[int]) -> dict[int, Run]:
        return {run.replay.replicas: run for run in self._runs([(self.limits.num_pages, one) for one in numbers])}

    def _pools(self, chosen: Run) -> list[Run]:
        replicas, given = chosen.replay.replicas, self.limits.num_pages
        # More than the longest sequences of a full step take an engine would not have (scheduler.llm.plan).
        most = self.limits.max_num_seqs * self.limits.pages(self.limits.max_model_len)
        found = {given: chosen}
        wanted = {max(1, min(int(given * factor), most)) for factor in FACTORS}
        for _ in range(1 + MOST_HALVES // 2):
            fresh = sorted(wanted - found.keys())
            found |= {run.replay.num_pages: run for run in self._runs([(pages, replicas) for pages in fresh])}
            runs = [found[pages] for pages in sorted(found)]
            if not fresh or knee(runs) is not runs[0]:
                break
            wanted = {max(1, min(found) // 2), max(1, min(found) // 4)}
        return runs

    def _runs(self, settings: list[tuple[int, int]]) -> list[Run]:
        """Replays with so many (pages, replicas), in this order."""
        futures: list[Future[Replay]] = []
        several = [(replace(self.limits, num_pages=pages), replicas) for pages, replicas in settings]
        if self._pool is not None:
            futures = [self._pool.submit(_replay_here, *one) for one in several]
        runs = []
        for i, one in enumerate(several):
            replay = futures[i].result() if futures else _replay(*self._given, *one)
            runs.append(Run((replay.num_pages + 1) * self._bytes_per_page, replay))
            self._on_run(runs[-1])
        return runs


def _half_more(number: int) -> int:
    return number + -(-number // 2)


def knee(runs: list[Run]) -> Run | None:
    """Of pools, smallest first, the one at the knee; None if the largest serves nothing."""
    if not runs or not runs[-1].replay.served:
        return None
    bound = KNEE * runs[-1].replay.first_token(99)
    return next(run for run in runs if _serves_all(run, runs) and run.replay.first_token(99) <= bound)


def _serves_all(run: Run, runs: list[Run]) -> bool:
    return run.replay.served == runs[-1].replay.served


def _helps(fewer: Replay, more: Replay) -> bool:
    return (
        fewer.overloaded
        or more.first_token(99) < HELPS * fewer.first_token(99)
        or more.between_tokens(99) < HELPS * fewer.between_tokens(99)
    )


_here: tuple[Trace, CostModel, bool, Rules | None] | None = None  # in another process: what it replays


def _begin(trace: Trace, cost: CostModel, prefix_caching: bool, rules: Rules | None) -> None:
    global _here
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    _here = trace, cost, prefix_caching, rules


def _replay_here(limits: Limits, replicas: int) -> Replay:
    assert _here is not None
    return _replay(*_here, limits, replicas)


def _replay(
    trace: Trace, cost: CostModel, prefix_caching: bool, rules: Rules | None, limits: Limits, replicas: int
) -> Replay:
    return thin(simulate(trace, limits, cost, replicas, prefix_caching, rules))


def thin(replay: Replay) -> Replay:
    """The same with quantiles in place of all times, and a timeline of few moments, of each the most that there was."""
    few: dict[str, Any] = {}
    for name in ("first", "gaps", "steps"):
        values = getattr(replay, name)
        few[name] = np.quantile(values, np.linspace(0, 1, QUANTILES)) if len(values) > QUANTILES else np.sort(values)
    timeline = replay.timeline
    if len(timeline) > MOMENTS:
        edges = np.linspace(timeline[0, 0], timeline[-1, 0], MOMENTS + 1)[:-1]
        starts = np.unique(np.searchsorted(timeline[:, 0], edges))
        timeline = np.column_stack((timeline[starts, 0], np.maximum.reduceat(timeline[:, 1:], starts)))
    return replace(replay, **few, timeline=timeline)
