"""Metrics: when requests waited, began, went on and ended, and where the time of the steps went.

Engine tells what happens, in this order in every step: `admitted`, `updated`, `step`; `added` and an `updated` for an
abort come between steps. Counts of tokens and pages are the scheduler's own (EngineStats); here is what needs a clock.
Nothing is kept of a request beyond its end, and memory does not grow: times are counted in buckets.

Figures are never worth a step: what goes wrong in here is kept in `fault` and not raised. docs/metrics.md has every
figure with its formula.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from itertools import accumulate
from typing import Concatenate, ParamSpec

from scheduler.outputs import EngineStats, FinishReason, RequestMetrics
from scheduler.request import Family, State, Timing

SECONDS = (*(float(f"{digit}e{power}") for power in range(-3, 3) for digit in (1, 2, 5)), 1000.0)
TOKENS = tuple(2.0**power for power in range(17))
_GROWTH = 1.02  # from bucket to bucket; the middle of one is within sqrt(1.02) - 1 < 1 % of all that lies in it
_FINE = tuple(1e-5 * _GROWTH**i for i in range(1164))  # 10 us to 28 hours

Arguments = ParamSpec("Arguments")


def _harmless(
    method: Callable[Concatenate[Metrics, Arguments], None],
) -> Callable[Concatenate[Metrics, Arguments], None]:
    @wraps(method)
    def run(self: Metrics, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  a step is worth more than its figures
            self.fault = error

    return run


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of many times, in seconds. p50, p90 and p99 (nearest rank) are within 1 % of the value at that rank, or 10 us."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Distribution:
    """How many values lie in each bucket. A value counts in the first bucket whose bound is not below it.

    shown: bounds at which counts are exact. fine: more bounds, for percentiles.
    """

    def __init__(self, shown: tuple[float, ...], fine: tuple[float, ...] = ()) -> None:
        self._shown = shown
        self._bounds = sorted({*shown, *fine})
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0
        self.least, self.most = math.inf, 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, `times` over. A clock that went backwards makes no negative values, and NaN is 0."""
        value = max(0.0, value)
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times
        self.least, self.most = min(self.least, value), max(self.most, value)

    def buckets(self) -> list[tuple[float, int]]:
        """Of each bound shown, and of infinity: how many values do not exceed it."""
        below = list(accumulate(self._counts))
        shown = [(bound, below[bisect_left(self._bounds, bound)]) for bound in self._shown]
        return [*shown, (math.inf, below[-1])]

    def percentiles(self) -> Percentiles | None:
        """None without any value."""
        below = list(accumulate(self._counts))
        count = below[-1]
        if not count:
            return None
        p50, p90, p99 = (self._middle(bisect_left(below, -(-count * percent // 100))) for percent in (50, 90, 99))
        return Percentiles(count, self.total / count, p50, p90, p99, self.most)

    def _middle(self, bucket: int) -> float:
        """The middle of a bucket by ratio, which errs by the same share to both sides."""
        if bucket == len(self._bounds):
            return self.most
        below = self._bounds[bucket - 1] if bucket else 0.0
        return min(max(math.sqrt(below * self._bounds[bucket]), self.least), self.most)


@dataclass(frozen=True, slots=True)
class MetricsSummary:
    """All figures of an engine at one moment; times in seconds, None where nothing has been measured."""

    stats: EngineStats  # as they were then
    queue: Percentiles | None
    first_token: Percentiles | None
    between_tokens: Percentiles | None
    e2e: Percentiles | None  # of requests that were not aborted
    ended: dict[FinishReason, int]  # requests, by reason
    schedule_s: float  # the time of all steps, split
    execute_s: float
    update_s: float
    output_s: float

    @property
    def busy_s(self) -> float:
        """Time spent in steps. An engine without work spends none."""
        return self.schedule_s + self.execute_s + self.update_s + self.output_s

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens of admitted requests, cached ones included, a second of busy time."""
        return self.stats.prompt_tokens / self.busy_s if self.busy_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.stats.output_tokens / self.busy_s if self.busy_s else 0.0

    def rows(self) -> list[tuple[str, str]]:
        """As a table for people: name and figures of each line."""
        stats, busy = self.stats, self.busy_s or 1.0
        prompt, output = self.prompt_tokens_per_s, self.output_tokens_per_s
        split = ((name, getattr(self, f"{name}_s") / busy) for name in ("schedule", "execute", "update", "output"))
        return [
            ("speed", f"{prompt:,.1f} prompt and {output:,.1f} output tokens/s of step time"),
            ("queue", _times(self.queue)),
            ("first token", _times(self.first_token)),
            ("between tokens", _times(self.between_tokens)),
            ("whole request", _times(self.e2e)),
            ("prefix hits", f"{stats.cached_tokens:,} tokens, {stats.hit_rate:.1%} of the prompts"),
            ("pages", f"{stats.peak_pages:,} of {stats.total_pages:,} at most, {stats.cached_pages:,} cached now"),
            ("preemptions", f"{stats.preemptions:,}"),
            ("recomputed", f"{stats.recomputed_tokens:,} tokens, {stats.recomputed_share:.1%} of those computed"),
            ("waste", f"{stats.waste:.1%} of the bytes of tokens"),
            ("steps", f"{stats.num_steps:,}, of up to {stats.max_running:,} sequences"),
            ("step time", ", ".join(f"{name} {share:.1%}" for name, share in split)),
        ]


class Metrics:
    """Figures of one engine, or of a simulated one.

    clock: seconds from any beginning, read once a call; it must not raise. stats: the counters that go into a summary.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, stats: EngineStats | None = None) -> None:
        self.clock = clock
        self.stats = EngineStats() if stats is None else stats
        self.queue = Distribution(SECONDS, _FINE)
        self.first_token = Distribution(SECONDS, _FINE)
        self.between_tokens = Distribution(SECONDS, _FINE)
        self.e2e = Distribution(SECONDS, _FINE)
        self.step_tokens = Distribution(TOKENS)
        self.ended: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0}
        self.schedule_s = self.execute_s = self.update_s = self.output_s = 0.0
        self.fault: Exception | None = None  # the last thing that went wrong in here; some figures are short then

    @_harmless
    def added(self, family: Family) -> None:
        """A request was queued."""
        family.timing = Timing(self.clock())

    @_harmless
    def admitted(self, families: Iterable[Family]) -> None:
        """`schedule` let these run. Of each only the first time counts, not what it waits after a preemption."""
        now = self.clock()
        for family in families:
            timing = family.timing
            if timing is not None and timing.admitted is None:
                timing.admitted = now
                self.queue.add(now - timing.arrived)

    @_harmless
    def updated(self, changed: Iterable[Family]) -> None:
        """These have a new token or have ended: all that `update` returned, or one that was aborted.

        A family counts once a step, however many tokens it got.
        """
        now = self.clock()
        before, gap, times = None, 0.0, 0  # most had their last token at the same moment: these are counted at once
        for family in changed:
            timing = family.timing
            if timing is None or timing.ended is not None:
                continue
            if family.state is State.FINISHED:
                timing.ended = now
                reason = _reason(family)
                self.ended[reason] += 1
                if reason == "abort":
                    continue
                self.e2e.add(now - timing.arrived)
                if not any(sequence.num_output for sequence in family.sequences):
                    continue
            last, timing.last = timing.last, now
            if last is None:
                timing.first = now
                self.first_token.add(now - timing.arrived)
                continue
            if last != before:
                if times:
                    self.between_tokens.add(gap, times)
                before, gap, times = last, now - last, 0
            times += 1
            if gap > timing.longest:
                timing.longest = gap
        if times:
            self.between_tokens.add(gap, times)

    @_harmless
    def step(self, schedule_s: float, execute_s: float, update_s: float, output_s: float, num_tokens: int) -> None:
        """A step is done: where its time went, and the tokens that it computed."""
        self.schedule_s += schedule_s
        self.execute_s += execute_s
        self.update_s += update_s
        self.output_s += output_s
        self.step_tokens.add(num_tokens)

    def request(self, family: Family) -> RequestMetrics | None:
        """How a request fared that has ended; None for one that was not seen from its beginning to its end."""
        timing = family.timing
        if timing is None or timing.ended is None:
            return None
        first, last = timing.first, timing.last
        # The tokens of a beam search come all at its end.
        longest = 0 if family.search else max((sequence.num_output for sequence in family.sequences), default=0)
        between = None if first is None or last is None or longest < 2 else (last - first) / (longest - 1)
        return RequestMetrics(
            arrived=timing.arrived,
            queue_s=None if timing.admitted is None else timing.admitted - timing.arrived,
            first_token_s=None if first is None else first - timing.arrived,
            mean_between_s=between,
            max_between_s=None if between is None else timing.longest,
            e2e_s=timing.ended - timing.arrived,
            num_cached=family.num_cached or 0,
            num_recomputed=family.num_recomputed,
            num_preemptions=family.num_preemptions,
        )

    def summary(self) -> MetricsSummary:
        """The figures as they are now."""
        return MetricsSummary(
            stats=replace(self.stats),
            queue=self.queue.percentiles(),
            first_token=self.first_token.percentiles(),
            between_tokens=self.between_tokens.percentiles(),
            e2e=self.e2e.percentiles(),
            ended=dict(self.ended),
            schedule_s=self.schedule_s,
            execute_s=self.execute_s,
            update_s=self.update_s,
            output_s=self.output_s,
        )

    def prometheus(self) -> str:
        """The figures as they are now, in Prometheus' text format. Raises ConfigError without prometheus-client."""
        from scheduler.prometheus import exposition

        return exposition(self)


def _reason(family: Family) -> FinishReason:
    """Why a request ended: `abort` if any of its sequences did not come to an end, else as its first one."""
    reasons = [sequence.finish_reason for sequence in family.sequences]
    if "abort" in reasons or not reasons:  # a beam search whose text cannot be made has no sequence
        return "abort"
    return reasons[0] or "abort"


def _times(it: Percentiles | None) -> str:
    if it is None:
        return "none"
    parts = (f"{name} {_seconds(value)}" for name, value in (("p50", it.p50), ("p99", it.p99), ("longest", it.max)))
    return ", ".join(parts)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
