"""Does bringing shared prefixes together make a shuffled job find as much in the prefix cache as a sorted one?

    python benchmarks/bench_grouping.py [--quick] [--output FILE]

A job file of 40 prefixes of 512 tokens, with 25 requests each of 32 tokens of its own and 16 of output, goes through
`Job`, the scheduler and the manager; steps are simulated. The pool holds a fraction of the prefixes beside what runs.
The hit rate is that of the engine: prompt tokens found in the cache over prompt tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Collection
from pathlib import Path

import report

from scheduler.cost import CostModel
from scheduler.desk import LineRequest, Response
from scheduler.engine import Engine
from scheduler.job_files import JobFiles
from scheduler.jobs import ROOM, Job
from scheduler.policy import Limits
from scheduler.simulate import SimulatedExecutor
from worker.step import SamplingParams

PREFIX, OWN, OUTPUT, PAGE_SIZE, MAX_NUM_SEQS = 512, 32, 16, 16, 16
POOLS = (400, 600, 1000, 2000)  # pages; all prefixes are 1,280
PARAMS = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)


class SimulatedAnswerer:
    """Implements Answerer over an engine whose steps are simulated."""

    def __init__(self, num_pages: int) -> None:
        limits = Limits(4096, num_pages, PAGE_SIZE, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512)
        self.engine = Engine(SimulatedExecutor(num_pages + 1, CostModel(step=1.0)), None, limits, vocab_size=49152)
        self.model_name, self.room, self.stats = "simulated", ROOM * MAX_NUM_SEQS, self.engine.stats

    def add(self, key: str, request: LineRequest) -> None:
        self.engine.add(key, request.body["prompt"], PARAMS)

    def take(self, timeout: float) -> list[tuple[str, Response]]:
        return [(output.request_id, Response(200, {})) for output in self.engine.step()]

    def abort(self, keys: Collection[str]) -> None:
        for key in keys:
            self.engine.abort(key)


def requests(prefixes: int, each: int) -> list[str]:
    """Lines of a job, those of a prefix one after another."""
    rng, lines = random.Random(0), list[str]()
    for prefix in range(prefixes):
        shared = rng.choices(range(49152), k=PREFIX)
        for i in range(each):
            prompt = shared + rng.choices(range(49152), k=OWN)
            body = {"prompt": prompt, "max_tokens": OUTPUT}
            line = {"custom_id": f"{prefix}-{i}", "method": "POST", "url": "/v1/completions", "body": body}
            lines.append(json.dumps(line))
    return lines


def hit_rate(lines: list[str], num_pages: int, folder: Path, group: bool) -> float:
    (folder / "in.jsonl").write_text("\n".join(lines))
    answerer = SimulatedAnswerer(num_pages)
    job = Job(JobFiles(str(folder / "in.jsonl"), str(folder / "out.jsonl"), overwrite=True, group=group), {})
    try:
        progress = job.run(answerer)
    finally:
        job.close()
    assert progress.ok == len(lines)
    return answerer.stats.hit_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 prefixes of 10 requests, one pool")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "grouping.json")
    args = parser.parse_args()
    prefixes, each, pools = (10, 10, POOLS[:1]) if args.quick else (40, 25, POOLS)
    lines, rows = requests(prefixes, each), []
    shuffled = random.Random(1).sample(lines, len(lines))
    print(f"{len(lines):,} requests, {prefixes} prefixes of {PREFIX} tokens")
    print(f"{'pages':>8} {'sorted':>8} {'shuffled':>9} {'grouped':>8}")
    with tempfile.TemporaryDirectory() as name:
        for pages in pools:
            row = {
                "pages": pages,
                "sorted": hit_rate(lines, pages, Path(name), group=False),
                "shuffled": hit_rate(shuffled, pages, Path(name), group=False),
                "shuffled_grouped": hit_rate(shuffled, pages, Path(name), group=True),
            }
            rows.append(row)
            print(f"{pages:8,} {row['sorted']:8.1%} {row['shuffled']:9.1%} {row['shuffled_grouped']:8.1%}", flush=True)
    report.write(args.output, requests=len(lines), prefixes=prefixes, prefix_tokens=PREFIX, rows=rows)


if __name__ == "__main__":
    main()
