"""What does the memory manager itself cost in a step of a busy server, without a model?

    python benchmarks/bench_manager.py [--quick] [--output FILE]

One decode step of 256 running sequences at page size 16: each grows by a token, sixteen of them need a page, one ends,
and one of 128 tokens is admitted and computed; the block tables come out as one int32 matrix. The prefix cache is on
and the pool is as good as full, so that pages for new tokens are taken from cached ones. And: how long looking up a
prompt of 4,096 tokens takes that is cached whole. Medians over the steps of five rounds; tokens are made outside of
what is timed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

import numpy as np
import report

from paged import KVCacheManager
from paged.prefix_cache import Tokens

SEQUENCES, PAGE_SIZE, PROMPT, LONGEST = 256, 16, 128, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "manager.json")
    args = parser.parse_args()
    rounds = [decode_steps(50) if args.quick else decode_steps(300) for _ in range(1 if args.quick else 5)]
    medians = [statistics.median(sum(step.values()) for step in steps) for steps in rounds]
    parts = [step for steps in rounds for step in steps]
    totals = [sum(step.values()) for step in parts]
    print(f"a decode step of {SEQUENCES} sequences: {statistics.median(totals):.1f} microseconds in median")
    print(f"  of each round: {', '.join(f'{median:.0f}' for median in medians)}")
    for name in parts[0]:
        print(f"  {name:<32}{statistics.median(step[name] for step in parts):7.1f}")
    lookups = look_up(20 if args.quick else 500)
    print(f"looking up a cached prompt of 4,096 tokens: {statistics.median(lookups) / 1000:.3f} milliseconds in median")
    samples = {name: [round(step[name], 1) for step in parts] for name in parts[0]}
    report.write(
        args.output,
        unit="microseconds",
        median_step=statistics.median(totals),
        median_of_each_round=medians,
        median_look_up=statistics.median(lookups),
        steps=samples,
        look_ups=[round(span, 1) for span in lookups],
    )


def decode_steps(steps: int) -> list[dict[str, float]]:
    """Microseconds of each part of each step."""
    rng = np.random.default_rng(0)

    def fresh() -> Tokens:
        return rng.integers(0, 50_000, LONGEST, dtype=np.int32)

    # Sixteen sequences at each offset into a page, of 128 to 600 tokens.
    starts = [PROMPT + i % PAGE_SIZE + PAGE_SIZE * int(rng.integers(0, 29)) for i in range(SEQUENCES)]
    used = sum(-(-start // PAGE_SIZE) for start in starts)
    manager = KVCacheManager(int(used * 1.4), PAGE_SIZE)
    tokens = {seq_id: fresh() for seq_id in range(SEQUENCES)}
    lengths = dict(enumerate(starts))
    for seq_id, start in lengths.items():
        manager.allocate(seq_id, tokens[seq_id][:start], start)
        manager.commit(seq_id, tokens[seq_id], start)
    rounds = []
    for step in range(steps + 20):
        ids = list(tokens)
        ends = np.array([lengths[seq_id] + 1 for seq_id in ids], dtype=np.int64)
        buffers = [tokens[seq_id] for seq_id in ids]
        # The one that ends is the longest of those that would need a page next, as the new one will.
        last = max((n + 1, seq_id) for seq_id, n in lengths.items() if (n + 1) % PAGE_SIZE == 0)[1]
        new_id, new = SEQUENCES + step, fresh()
        prompt = new[:PROMPT]

        clock = [time.perf_counter()]
        manager.extend_all(ids, ends)
        clock.append(time.perf_counter())
        tables = manager.tables(ids)
        clock.append(time.perf_counter())
        manager.commit_all(ids, buffers, ends)
        clock.append(time.perf_counter())
        manager.free(last)
        clock.append(time.perf_counter())
        manager.allocate(new_id, prompt, PROMPT)
        manager.commit(new_id, prompt, PROMPT)
        clock.append(time.perf_counter())

        assert tables.shape[0] == SEQUENCES
        assert tables.dtype == np.int32
        names = ("room for a token each", "tables as int32", "publish what is full", "one ends", "one is admitted")
        spans = [(after - before) * 1e6 for before, after in itertools.pairwise(clock)]
        if step >= 20:
            rounds.append(dict(zip(names, spans, strict=True)))
        lengths = {seq_id: n + 1 for seq_id, n in lengths.items() if seq_id != last} | {new_id: PROMPT}
        del tokens[last]
        tokens[new_id] = new
    manager.check()
    return rounds


def look_up(times: int) -> list[float]:
    manager = KVCacheManager(1000, PAGE_SIZE)
    prompt = np.random.default_rng(1).integers(0, 50_000, 4096, dtype=np.int32)
    manager.allocate(0, prompt, len(prompt))
    manager.commit(0, prompt, len(prompt))
    spans = []
    for _ in range(times):
        start = time.perf_counter()
        found = manager.match(prompt)
        spans.append((time.perf_counter() - start) * 1e6)
        assert found == len(prompt) - PAGE_SIZE
    return spans


if __name__ == "__main__":
    main()
