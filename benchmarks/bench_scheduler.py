"""What does the scheduler cost in a step, and what do its choices do?

    python benchmarks/bench_scheduler.py [--quick] [--output FILE]

1. Time of schedule() and update() in a step of 256 running sequences, memory manager included, without a model: prompts
   of 64 to 192 tokens, outputs of 32 to 480, a new request for each that ends. Microseconds, medians of five rounds.
   Also where all are streams, whose tokens go to a text one by one (here one that only counts).
2. Victims: the share of tokens that are computed again, for each choice of who gives way, in the same load over a pool
   that is much too small, with and without the prefix cache.
3. Chunks: time between tokens of 4 decoding requests while a prompt of 2,500 tokens is computed beside them, with and
   without max_step_ms. SmolLM2, milliseconds.
4. Speculation: tokens a second of a request that summarises a text, alone, with and without drafts, in turn; and how
   many drafts are accepted. The tokens must be the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import report

from paged import LLM, KVCacheManager, SamplingParams
from scheduler.policy import VICTIMS, Limits, Rules
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from worker.step import StepResult

RUNNING, BUDGET = 256, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "scheduler.json")
    args = parser.parse_args()
    rounds = [steps(150 if args.quick else 1000, seed) for seed in range(1 if args.quick else 5)]
    medians = [statistics.median(sum(step) for step in one) for one in rounds]
    samples = [step for one in rounds for step in one]
    total = statistics.median(sum(step) for step in samples)
    print(f"a step of {RUNNING} sequences: {total:.0f} microseconds in median, of each round:", end=" ")
    print(", ".join(f"{median:.0f}" for median in medians))
    for name, i in (("schedule", 0), ("update", 1)):
        print(f"  {name:10}{statistics.median(step[i] for step in samples):6.0f}")
    streams = steps(150 if args.quick else 1000, 0, Counting)
    print(f"  all of them streams: {statistics.median(sum(step) for step in streams):.0f}")
    victims = {}
    for caching in (True, False):
        for name in VICTIMS:
            found = victims[f"{name}, {'' if caching else 'no '}prefix cache"] = victim(name, caching, args.quick)
            print(
                f"victim {name:9} {'with' if caching else 'without'} cache: {found['recomputed']:6.1%} of tokens are ",
                end="",
            )
            print(f"computed again, {found['preemptions']} preemptions, {found['steps']} steps")
    chunks = {str(target): between_tokens(target, args.quick) for target in (None, 60.0, 30.0)}
    for target, found in chunks.items():
        print(
            f"max_step_ms {target}: between tokens p50 {found['p50']:.0f}, longest {found['longest']:.0f} ms; ", end=""
        )
        print(f"the long prompt's first token after {found['first_token']:.0f} ms")
    drafts = speculation(args.quick)
    for most, one in drafts.items():
        print(f"drafts {most}: {statistics.median(one['tokens_per_s']):.1f} tokens/s, ", end="")
        print(f"{one['accepted']} of {one['drafted']} accepted, {one['steps']} steps for {one['tokens']} tokens")
    report.write(
        args.output,
        median_step_us=total,
        median_of_each_round_us=medians,
        median_step_of_streams_us=statistics.median(sum(step) for step in streams),
        steps_us=[[round(part, 1) for part in step] for step in samples],
        victims=victims,
        chunks=chunks,
        speculation=drafts,
    )


class Load:
    """Requests of random tokens, one after another, for ever."""

    def __init__(self, seed: int, prompt: tuple[int, int], out: tuple[int, int]) -> None:
        self.rng = np.random.default_rng(seed)
        self.prompt, self.out = prompt, out
        self.made = 0

    def request(self) -> Request:
        tokens = self.rng.integers(1, 50_000, int(self.rng.integers(*self.prompt)), dtype=np.int32)
        self.made += 1
        most = int(self.rng.integers(*self.out))
        return Request(f"r{self.made}", None, tokens, SamplingParams(temperature=0), most, 0, frozenset({0}))

    def answer(self, scheduler: Scheduler) -> tuple[float, float]:
        """Run one step, without a model. Seconds that scheduling and updating took."""
        began = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        assert step is not None
        ids = tuple(row.seq_id for row in step.rows if row.samples)
        result = StepResult(step.number, ids, tuple(self.rng.integers(1, 50_000, len(ids)).tolist()))
        answered = time.perf_counter()
        scheduler.update(result)
        return scheduled - began, time.perf_counter() - answered


class Counting:
    """A text of a stream, without a tokenizer."""

    stop_reason = None
    eager = True

    def __init__(self) -> None:
        self.tokens = 0

    def push(self, token_id: int) -> bool:
        self.tokens += 1
        return False

    def finish(self) -> None:
        pass


def steps(count: int, seed: int, text: Callable[[], Counting] | None = None) -> list[tuple[float, float]]:
    """Microseconds of schedule and update, of steps in which all seats are taken."""
    load, pages = Load(seed, (64, 192), (32, 480)), 20_000
    limits = Limits(4096, pages, 16, (None,), RUNNING, BUDGET)
    scheduler = Scheduler(KVCacheManager(pages + 1, 16), limits)
    found: list[tuple[float, float]] = []
    while len(found) < count:
        while scheduler.stats.waiting < 20:
            scheduler.add(load.request(), text)
        spent = load.answer(scheduler)
        if scheduler.stats.num_steps > 300:
            found.append((spent[0] * 1e6, spent[1] * 1e6))
    assert scheduler.stats.running > RUNNING - 8
    return found


def victim(name: str, caching: bool, quick: bool) -> dict[str, Any]:
    """A load whose outputs do not fit beside one another, with one choice of who gives way."""
    load, pages = Load(7, (20, 200), (100, 400)), 200
    limits = Limits(1024, pages, 16, (None,), 32, 256)
    scheduler = Scheduler(KVCacheManager(pages + 1, 16, caching), limits, Rules(victim=VICTIMS[name]))
    for _ in range(40 if quick else 300):
        scheduler.add(load.request())
    while scheduler.has_work:
        load.answer(scheduler)
    stats = scheduler.stats
    return {"recomputed": stats.recomputed_share, "preemptions": stats.preemptions, "steps": stats.num_steps}


def between_tokens(target: float | None, quick: bool) -> dict[str, float]:
    """Milliseconds between the tokens of those who decode, from when a long prompt comes until its first token."""
    llm = LLM("smollm2", kv_memory="512MiB", max_step_ms=target, max_num_batched_tokens=512)
    prompts = [one["prompt"] for one in report.workload("W1")]
    long = report.workload("W4")[0]["prompt"][: 600 if quick else 2500]
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    for i in range(4):
        llm.engine.add(f"d{i}", prompts[i][:64], params, stream=True)
    for _ in range(20):  # so that it is known how long a step takes
        llm.engine.step()
    llm.engine.add("warm", prompts[9][:200], SamplingParams(temperature=0, max_tokens=1), stream=True)
    while llm.engine.is_live("warm"):
        llm.engine.step()
    llm.engine.add("long", long, SamplingParams(temperature=0, max_tokens=1), stream=True)
    began, gaps = time.perf_counter(), []
    while llm.engine.is_live("long"):
        before = time.perf_counter()
        llm.engine.step()
        gaps.append((time.perf_counter() - before) * 1e3)
    first = (time.perf_counter() - began) * 1e3
    llm.close()
    return {"p50": statistics.median(gaps), "longest": max(gaps), "first_token": first, "steps": len(gaps)}


def speculation(quick: bool) -> dict[str, dict[str, Any]]:
    """Summaries of texts of the workload, one request at a time."""
    engines = {most: LLM("smollm2", kv_memory="512MiB", num_speculative_tokens=most) for most in (0, 4, 8)}
    some = [report.workload("W1")[i]["prompt"] for i in ((40,) if quick else (40, 41, 42, 43, 44, 45))]
    texts = [engines[0].tokenizer.decode(tokens[-300:]) for tokens in some]
    chats = [[{"role": "user", "content": f"Summarize this text, in its own words:\n\n{text}"}] for text in texts]
    params = SamplingParams(temperature=0, max_tokens=40 if quick else 160)
    answers: dict[int, list[Any]] = {}
    rates: dict[int, list[float]] = {most: [] for most in engines}
    for turn in range(2 if quick else 4):
        for most, llm in engines.items():
            began = time.perf_counter()
            outputs = [llm.chat(chat, params)[0].outputs[0].token_ids for chat in chats]
            seconds = time.perf_counter() - began
            assert answers.setdefault(0, outputs) == outputs, "drafts changed a token"
            if turn:  # the first one warms up
                rates[most].append(sum(map(len, outputs)) / seconds)
    result = {}
    for most, llm in engines.items():
        stats = llm.engine.stats
        result[str(most)] = {
            "tokens_per_s": rates[most],
            "drafted": stats.draft_tokens,
            "accepted": stats.accepted_tokens,
            "steps": stats.num_steps,
            "tokens": stats.output_tokens,
        }
        llm.close()
    return result


if __name__ == "__main__":
    main()
