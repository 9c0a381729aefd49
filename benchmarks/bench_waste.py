"""How much of the memory that a KV cache holds has no token in it? Pages against contiguous caches, on W1.

    python benchmarks/bench_waste.py [--quick] [--output FILE]

The requests of W1 go through the real scheduler and manager, at most 32 at once; a worker that computes nothing stands
in for the model, as what is held depends on lengths alone. Waste is bytes held minus bytes of tokens, over bytes of
tokens, averaged over the steps. Beside it what transformers' caches hold for the same requests, in batches of 32 in the
order of the file: DynamicCache pads every row to the longest prompt of the batch and grows by a token a step;
StaticCache holds the longest prompt and the longest answer for every row from the first step. Rows whose request has
ended stay in the batch until its last one has.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import report

from paged import Engine, KVLayout, SamplingParams, Step, StepResult
from scheduler.policy import Limits

AT_ONCE, VOCAB = 32, 49_152
LAYOUT = KVLayout(num_layers=30, kv_heads=3, head_dim=64, dtype="float32", page_size=16)  # SmolLM2-135M
Request = dict[str, Any]


class Nothing:
    """An executor that gives token 0 wherever one is asked for."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._step: Step | None = None

    def submit(self, step: Step) -> None:
        self._step = step

    def result(self) -> StepResult:
        assert self._step is not None
        ids = tuple(row.seq_id for row in self._step.rows if row.samples)
        return StepResult(self._step.number, ids, (0,) * len(ids))

    def update_weights(self, path: Path, replaced: Mapping[str, Any]) -> None:
        raise AssertionError("there are none")

    def close(self) -> None:
        self._step = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="page size 16 only")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "waste.json")
    args = parser.parse_args()
    requests = report.workload("W1")
    rows = [pages(requests, size) for size in ([16] if args.quick else [1, 4, 16, 64])]
    rows += [contiguous(requests, grows=True), contiguous(requests, grows=False)]
    print(f"W1: {len(requests)} requests, at most {AT_ONCE} at once; {LAYOUT.bytes_per_token:,} bytes a token")
    for row in rows:
        print(f"  {row['cache']:<32} waste {row['waste']:8.1%}   most held {row['peak_bytes'] / 2**20:7.1f} MiB")
    report.write(args.output, rows=rows)


def pages(requests: list[Request], page_size: int) -> dict[str, Any]:
    num_pages = 40_000 // page_size
    engine = Engine(
        Nothing(num_pages), None, Limits(8192, num_pages - 1, page_size, (None,), AT_ONCE, 512), vocab_size=VOCAB
    )
    for i, request in enumerate(requests):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=request["out"])
        engine.add(str(i), request["prompt"], params)
    while engine.has_work:
        engine.step()
    engine.scheduler.manager.check(idle=True)
    assert engine.stats.max_running == AT_ONCE
    peak = engine.stats.peak_pages * page_size * LAYOUT.bytes_per_token
    return {"cache": f"pages of {page_size}", "waste": engine.stats.waste, "peak_bytes": peak}


def contiguous(requests: list[Request], grows: bool) -> dict[str, Any]:
    wastes, peak = [], 0
    for first in range(0, len(requests), AT_ONCE):
        batch = requests[first : first + AT_ONCE]
        prompt, out = (max(lengths) for lengths in ((len(r["prompt"]) for r in batch), (r["out"] for r in batch)))
        for step in range(1, out + 1):
            held = len(batch) * (prompt + (step if grows else out))
            used = sum(len(r["prompt"]) + step for r in batch if step <= r["out"])
            wastes.append((held - used) / used)
            peak = max(peak, held)
    name = "DynamicCache, padded" if grows else "StaticCache"
    return {"cache": name, "waste": statistics.fmean(wastes), "peak_bytes": peak * LAYOUT.bytes_per_token}


if __name__ == "__main__":
    main()
