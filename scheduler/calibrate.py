"""Fit a cost model to steps of a loaded model, in some seconds.

Steps are made by hand and given to the worker at once, so that a long context costs no prompt: its pages hold copies of
one page. What the engine adds to a step (scheduling, text) is measured by itself, with one sequence and with as many as
there may be.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paged.errors import ConfigError
from paged.pages import Move
from scheduler.cost import CostModel, attended, fit
from worker.step import Reset, Row, SamplingParams, Step

if TYPE_CHECKING:
    from scheduler.llm import LLM
    from worker.executor import Executor

MOST_CONTEXT = 2**16  # tokens of K and V in all, which is gigabytes
ROUNDS = 3  # through all probes; the median counts, as processors and neighbours change from moment to moment
_GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class _Probe:
    """Steps of one kind: so many single tokens after `context` others, and a chunk after `before` others."""

    decodes: int
    context: int
    chunk: int = 0
    before: int = 0
    steps: int = 4

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Tokens computed before and in the first step, of each row."""
        chunk = [(self.before, self.chunk)] if self.chunk else []
        return [(self.context, 1)] * self.decodes + chunk


def _probes(max_num_seqs: int, budget: int, max_model_len: int, most_context: int) -> Iterator[_Probe]:
    """Those that the engine could be asked for, and that its pages have room for."""
    batches = sorted({min(2**i, max_num_seqs, budget) for i in range(max_num_seqs.bit_length() + 1)})
    contexts = (16, 256, 1024, 4096)
    chunks = sorted({min(n, budget) for n in (16, 64, 128, 256, 512, budget)})
    few = max(1, min(batches[-1], budget) // 2)
    every = [
        *(_Probe(batch, context) for batch in batches for context in contexts),
        *(_Probe(0, 0, chunk, before, steps=1) for chunk in chunks for before in (0, 1024, 4096)),
        *(_Probe(few, context, chunk - few, 0, steps=1) for context in contexts for chunk in chunks if chunk > few),
    ]
    for probe in every:
        ends = [before + n + probe.steps for before, n in probe.lengths]
        if max(ends) <= max_model_len and sum(ends) + 16 * len(ends) <= most_context:
            yield probe


class _Steps:
    """Gives steps to a worker, and takes their time."""

    def __init__(self, llm: LLM) -> None:
        limits = llm.engine.limits
        self.executor: Executor = llm.engine.executor
        self.page_size, self.groups = limits.page_size, len(limits.windows)
        self.vocab_size = llm.model_config.vocab_size
        self.windows = limits.windows
        self.most_context = min(limits.num_pages * self.page_size // self.groups, MOST_CONTEXT)
        self.random = np.random.default_rng(0)
        self.number = 0

    def fill(self) -> None:
        """Write to every page that will be read: one that was never written may be no memory at all."""
        self._step((self._row(0, 0, self.page_size, first_page=1),), restart=True)
        last = self.most_context * self.groups // self.page_size
        self._step((), moves=tuple(Move(1, page) for page in range(2, last + 1)))

    def run(self, probe: _Probe) -> tuple[list[float], float]:
        """What one of the probe's steps does, in the middle of them, and the seconds that one took (their median)."""
        rows, page = list[Row](), 1
        for seq_id, (before, n) in enumerate(probe.lengths):
            rows.append(self._row(seq_id, before, n, page, probe.steps))
            page += len(rows[-1].reset.tables[0]) * self.groups if rows[-1].reset else 0
        # Whoever decodes is known to a worker when it does; a chunk of a prompt may well be new to it.
        seconds = [self._step(tuple(rows), restart=True)]
        if probe.steps > 1:
            again = tuple(Row(row.seq_id, 1) for row in rows)
            seconds = [self._step(again) for _ in range(1, probe.steps)]
        later = probe.steps // 2
        each = [attended(n, before + later, self.windows) for before, n in probe.lengths]
        tokens, sampled = sum(n for _, n in probe.lengths), sum(row.samples for row in rows)
        works = [tokens, sampled, sum(read for read, _ in each), sum(pairs for _, pairs in each)]
        return works, statistics.median(seconds)

    def _row(self, seq_id: int, before: int, n: int, first_page: int, steps: int = 1) -> Row:
        """A new sequence that computes n tokens after `before` that lie in its pages, with room for more steps."""
        pages = -(-(before + n + steps) // self.page_size)
        tables = tuple(
            tuple(range(first_page + group * pages, first_page + (group + 1) * pages)) for group in range(self.groups)
        )
        tokens = self.random.integers(0, self.vocab_size, before + n, dtype=np.int32)
        reset = Reset(tokens, tables, before, _GREEDY, seed=0, index=0, num_prompt=before + n)
        return Row(seq_id, n, samples=n == 1, reset=reset)

    def _step(self, rows: tuple[Row, ...], moves: tuple[Move, ...] = (), restart: bool = False) -> float:
        step = Step(self.number, rows, moves, restart=restart)
        self.number += 1
        start = time.perf_counter()
        self.executor.submit(step)
        self.executor.result()
        return time.perf_counter() - start


class _Timed:
    """An executor that knows how long its last step took."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def result(self) -> Any:
        start = time.perf_counter()
        result = self._executor.result()
        self.seconds = time.perf_counter() - start
        return result


def calibrate(llm: LLM) -> CostModel:
    """Fit a cost model to the steps that this engine could be asked for. Takes about 20 seconds.

    Its prefix cache is empty afterwards. Raises ConfigError if requests are under way.
    """
    engine = llm.engine
    if engine.has_work:
        raise ConfigError("calibrate needs an engine without requests: wait for their end, or abort them")
    limits, start = engine.limits, time.perf_counter()
    steps = _Steps(llm)
    probes = list(_probes(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len, steps.most_context))
    try:
        steps.fill()
        for probe in probes[:: max(1, len(probes) // 4)]:
            steps.run(probe)  # to warm up
        rounds = [[steps.run(probe) for probe in probes] for _ in range(ROUNDS)]
    finally:
        engine.scheduler.fail()  # what the worker knows is not what the scheduler has told it
        engine.reset_prefix_cache()
    works = [works for works, _ in rounds[0]]
    model = fit(works, [statistics.median(turn[i][1] for turn in rounds) for i in range(len(probes))])
    most = min(limits.max_num_seqs, steps.most_context // (4 * limits.page_size))
    one, many = _engine_seconds(llm, 1), _engine_seconds(llm, most)
    a_row = max(0.0, many - one) / max(1, most - 1)
    it = llm.plan
    measured = (
        f"{llm.model_name}, {llm.config.quantization or it.dtype}, {it.threads} threads, {it.backend_reason}: "
        f"{len(probes)} kinds of steps in {time.perf_counter() - start:.0f} s"
    )
    return replace(model, step=model.step + max(0.0, one - a_row), sample=model.sample + a_row, measured=measured)


def _engine_seconds(llm: LLM, batch: int) -> float:
    """What the engine does in a step of so many streaming sequences, besides waiting for the worker."""
    engine, tokens, found = llm.engine, 16, list[float]()
    params = replace(_GREEDY, max_tokens=min(tokens, engine.limits.longest() - 2))
    timed: Any = _Timed(engine.executor)
    names = [llm.new_id() for _ in range(batch)]
    try:
        engine.executor = timed
        for name in names:
            engine.add(name, [1, 2], params, stream=True)
        while engine.has_work:
            start = time.perf_counter()
            outputs = engine.step()
            if len(outputs) == batch:
                found.append(time.perf_counter() - start - timed.seconds)
    finally:
        engine.executor = timed._executor
        for name in names:
            engine.abort(name)
        engine.reset_prefix_cache()
    return statistics.median(found) if found else 0.0
