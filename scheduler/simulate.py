"""Replay a trace without a model: the scheduler and the manager of the engine, and a cost model for the clock.

Every step is scheduled as it would be; only its computation is left out. The clock then goes on by what the cost model
says, and requests are added when it has passed their arrival, so that they wait for the end of a step as real ones do.
A request's max_tokens is the length of its answer in the trace, and nothing ends it before. Of a trace that does not
say which prompts begin alike nothing can be found in a cache, so the prefix cache is off.

Replicas are engines of their own on machines of their own. A request goes where the least work is before it: tokens of
requests that have not ended, and of its own prompt what that replica has not seen begin so (by hash ids).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged.block_table import Windows
from paged.errors import RequestError
from paged.manager import KVCacheManager
from scheduler import policy
from scheduler.cost import CostModel, Floats, attended
from scheduler.outputs import EngineStats
from scheduler.request import Family, Request, State
from scheduler.scheduler import Scheduler
from scheduler.traces import Trace, TraceRequest
from worker.step import SamplingParams, Step, StepResult

_PARAMS = SamplingParams(temperature=0, ignore_eos=True)


class SimulatedExecutor:
    """Implements worker.executor.Executor. `seconds` is what the last step takes; tokens are made up, no two alike.

    held: the tokens that all pages in use have room for, each page counted once. No more are read, whoever shares them.
    """

    def __init__(
        self, num_pages: int, cost: CostModel, windows: Windows = (None,), held: Callable[[], float] = lambda: np.inf
    ) -> None:
        self.num_pages = num_pages
        self._held = held
        self.cost = cost
        self.windows = windows
        self.seconds = 0.0
        self._plain = set(windows) == {None}
        self._computed: dict[int, int] = {}  # tokens of each sequence
        self._step: Step | None = None

    def submit(self, step: Step) -> None:
        assert self._step is None or step.restart, "a step is under way"
        self._step = step

    def result(self) -> StepResult:
        step, self._step = self._step, None
        assert step is not None, "no step is under way"
        for seq_id in step.finished:
            self._computed.pop(seq_id, None)
        computed, tokens, read, pairs, sampled = self._computed, 0, 0.0, 0.0, []
        for row in step.rows:
            seq_id, n = row.seq_id, row.num_tokens
            context = computed[seq_id] if row.reset is None else row.reset.num_computed
            computed[seq_id] = context + n
            tokens += n
            if row.samples:
                sampled.append(seq_id)
            if self._plain:
                read += context
                pairs += n * context + n * (n + 1) / 2
            else:
                seen = attended(n, context, self.windows)
                read += seen[0]
                pairs += seen[1]
        self.seconds = self.cost.seconds(tokens, len(sampled), min(read, self._held()), pairs)
        # Negative, as no prompt of a trace has them but those without ids, which begin otherwise.
        return StepResult(step.number, tuple(sampled), tuple([-1 - seq_id for seq_id in sampled]))

    def update_weights(self, path: Path, replaced: Mapping[str, Any]) -> None:
        """There are none."""

    def close(self) -> None:
        self._step = None


class _Times:
    """When tokens came, by sequence id; a replica's sequence ids count its requests, as each has one sequence."""

    def __init__(self) -> None:
        self.arrivals = array("d")
        self.last = array("d")  # of each sequence its last token's time; negative before the first
        self.first = array("d")  # seconds from arrival to first token, of each request that has one
        self.gaps = array("d")  # seconds between two tokens

    def add(self, arrival: float) -> None:
        self.arrivals.append(arrival)
        self.last.append(-1.0)

    def tokens(self, seq_ids: tuple[int, ...], now: float) -> None:
        last, append = self.last, self.gaps.append
        for seq_id in seq_ids:
            before = last[seq_id]
            last[seq_id] = now
            if before < 0.0:
                self.first.append(now - self.arrivals[seq_id])
            else:
                append(now - before)


class Replica:
    """One engine of a simulation: a scheduler, a manager, a clock."""

    def __init__(
        self, limits: policy.Limits, cost: CostModel, prefix_caching: bool, rules: policy.Rules | None = None
    ) -> None:
        manager = KVCacheManager(limits.num_pages + 1, limits.page_size, prefix_caching, limits.windows, poison=False)
        self.scheduler = Scheduler(manager, limits, rules)
        tokens = limits.page_size / len(limits.windows)  # of a page, as a share of all groups
        self.executor = SimulatedExecutor(limits.num_pages + 1, cost, limits.windows, lambda: manager.num_used * tokens)
        self.clock = 0.0
        self.busy = 0.0  # seconds in steps
        self.outstanding = 0  # tokens, prompt and output, of requests that have not ended
        self.times = _Times()
        self.step_seconds = array("d")
        self.timeline = array("d")  # of each step, one after another: time, requests running, waiting, pages held
        self._seen: set[tuple[int, int]] = set()  # hash ids that prompts had here, with the id before

    def missing(self, request: TraceRequest) -> int:
        """Tokens of the prompt after the longest beginning in hash ids that was seen here."""
        known = 0
        for pair in zip((-1, *request.hash_ids), request.hash_ids, strict=False):
            if pair not in self._seen:
                break
            known += request.block_tokens
        return max(request.prompt_tokens - known, 0)

    def add(self, number: int, request: TraceRequest, prompt: npt.NDArray[np.int32]) -> None:
        """At its arrival; an idle clock goes on to that."""
        self.clock = max(self.clock, request.arrival)
        self.outstanding += request.prompt_tokens + request.output_tokens
        self._seen.update(zip((-1, *request.hash_ids), request.hash_ids, strict=False))
        self.times.add(request.arrival)
        self.scheduler.add(
            Request(str(number), None, prompt, _PARAMS, request.output_tokens, seed=0, eos_token_ids=frozenset())
        )

    def step(self) -> list[Family]:
        """Those that ended."""
        scheduler, stats = self.scheduler, self.scheduler.stats
        step = scheduler.schedule()
        assert step is not None, "requests wait, and none can run"
        self.timeline.extend((self.clock, stats.running, stats.waiting, stats.used_pages))
        self.executor.submit(step)
        result = self.executor.result()
        self.clock += self.executor.seconds
        self.busy += self.executor.seconds
        self.step_seconds.append(self.executor.seconds)
        scheduler.took(self.executor.seconds)
        finished = stats.finished
        changed = scheduler.update(result)
        self.times.tokens(result.seq_ids, self.clock)
        ended = [family for family in changed if family.state is State.FINISHED] if stats.finished > finished else []
        for family in ended:
            self.outstanding -= len(family.request.prompt_token_ids) + family.request.max_tokens
        return ended


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay gave. Times in seconds; arrays float64, sorted."""

    num_pages: int  # of a replica, that can be handed out
    replicas: int
    served: int
    refused: dict[str, int]  # why, and how many
    span: float  # from the first arrival to the last
    end: float  # of the last step
    busy: float  # in steps, all replicas together
    backlog: int  # requests that waited to run after the last arrival
    first: Floats = field(repr=False)  # arrival to first token, of each request
    gaps: Floats = field(repr=False)  # between two tokens, of all requests
    steps: Floats = field(repr=False)  # what each took
    timeline: Floats = field(repr=False)  # [steps, 4]: of all replicas: time, running, waiting, pages held
    stats: tuple[EngineStats, ...] = field(repr=False)  # of each replica

    @property
    def hit_rate(self) -> float:
        prompt = sum(stats.prompt_tokens for stats in self.stats)
        return sum(stats.cached_tokens for stats in self.stats) / prompt if prompt else 0.0

    @property
    def preemptions(self) -> int:
        return sum(stats.preemptions for stats in self.stats)

    @property
    def recomputed(self) -> float:
        """Share of the computed tokens that had been computed before and were lost to a preemption."""
        computed = sum(stats.computed_tokens for stats in self.stats)
        return sum(stats.recomputed_tokens for stats in self.stats) / computed if computed else 0.0

    @property
    def load(self) -> float:
        """Seconds that the steps take over seconds in which the requests come; infinite if all come at once."""
        return self.busy / self.span if self.span else np.inf

    @property
    def overloaded(self) -> bool:
        """Whether the queue grows to the end: more work than time, and over 1 % of the requests wait at the last."""
        return bool(self.span and self.load > self.replicas and self.backlog > max(1, 0.01 * self.served))

    @property
    def replicas_needed(self) -> int:
        """That the load asks for, by arithmetic: none of them would ever be idle."""
        return int(np.ceil(self.load)) if self.span else 1

    def first_token(self, percent: float) -> float:
        return _percentile(self.first, percent)

    def between_tokens(self, percent: float) -> float:
        return _percentile(self.gaps, percent)


def _percentile(values: Floats, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0


def simulate(
    trace: Trace,
    limits: policy.Limits,
    cost: CostModel,
    replicas: int = 1,
    prefix_caching: bool = True,
    rules: policy.Rules | None = None,
) -> Replay:
    """Replay a trace through so many engines with these limits each. What an engine would refuse is refused."""
    prefix_caching = prefix_caching and trace.has_content
    engines = [Replica(limits, cost, prefix_caching, rules) for _ in range(replicas)]
    served, refused = 0, dict[str, int]()
    # Where nothing is looked up any tokens will do, so all prompts are one array.
    same = np.zeros(0 if prefix_caching else max(r.prompt_tokens for r in trace.requests), dtype=np.int32)
    longest = limits.longest()
    for number, request in enumerate(trace.requests):
        if request.prompt_tokens + request.output_tokens > longest and (why := refusal(request, limits)):
            refused[why] = refused.get(why, 0) + 1
            continue
        _run(engines, until=request.arrival)
        replica = min(engines, key=lambda engine: engine.outstanding + engine.missing(request))
        prompt = request.tokens(number) if prefix_caching else same[: request.prompt_tokens]
        replica.add(number, request, prompt)
        served += 1
    for engine in engines:
        if engine.scheduler.has_work:
            engine.step()
    backlog = sum(engine.scheduler.stats.waiting for engine in engines)
    _run(engines, until=np.inf)
    timelines = [np.array(engine.timeline).reshape(-1, 4) for engine in engines]
    return Replay(
        num_pages=limits.num_pages,
        replicas=replicas,
        served=served,
        refused=refused,
        span=trace.span,
        end=max(engine.clock for engine in engines),
        busy=sum(engine.busy for engine in engines),
        backlog=backlog,
        first=np.sort(np.concatenate([engine.times.first for engine in engines])),
        gaps=np.sort(np.concatenate([engine.times.gaps for engine in engines])),
        steps=np.concatenate([engine.step_seconds for engine in engines]),
        timeline=_together(timelines),
        stats=tuple(engine.scheduler.stats for engine in engines),
    )


def _run(engines: Iterable[Replica], until: float) -> None:
    """Step each until its clock has come to `until`, or it has nothing to do."""
    for engine in engines:
        while engine.clock < until and engine.scheduler.has_work:
            engine.step()


def refusal(request: TraceRequest, limits: policy.Limits) -> str | None:
    """Why an engine would refuse it, without its own numbers; None if it would not."""
    try:
        policy.resolve_max_tokens(request.prompt_tokens, request.output_tokens, False, limits)
    except RequestError:
        length = request.prompt_tokens + request.output_tokens
        if length > limits.max_model_len:
            return f"longer than max_model_len {limits.max_model_len:,}"
        return f"longer than the pool's {limits.num_pages:,} pages"
    return None


def _together(timelines: list[Floats]) -> Floats:
    """Timelines of several replicas as one: at each step of any of them the sums over all."""
    if len(timelines) == 1:
        return timelines[0]
    times = np.sort(np.concatenate([timeline[:, 0] for timeline in timelines]))
    total = np.zeros((len(times), 4))
    total[:, 0] = times
    for timeline in timelines:
        if len(timeline):
            place = np.searchsorted(timeline[:, 0], times, side="right") - 1
            total[:, 1:] += np.where(place[:, None] >= 0, timeline[np.maximum(place, 0), 1:], 0.0)
    return total
