"""How near is the planner to real runs? W1 and W2 through an engine, and simulated with a cost model measured then.

    python benchmarks/bench_plan.py [--quick] [--output FILE]

Workloads of workloads/workload_smollm2.json (greedy, ignore_eos, all submitted together, at most 32 running) on
SmolLM2-135M-Instruct in the dtype of this machine. The real run streams, as the simulation assumes. Both go through the
same scheduler, so steps, hit rate and pages must be equal; times are compared as they come. Real runs and calibrations
take turns, and of each workload the turn with the quickest real run counts: a neighbour on the machine disturbs either.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import report

from paged import LLM, SamplingParams
from scheduler.calibrate import calibrate
from scheduler.simulate import Replay, simulate
from scheduler.traces import Trace, TraceRequest

Request = dict[str, Any]
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 short requests of each, one turn")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "plan.json")
    args = parser.parse_args()
    workloads = {name: report.workload(name) for name in ("W1", "W2")}
    if args.quick:
        workloads = {name: [r | {"out": min(r["out"], 8)} for r in some[:8]] for name, some in workloads.items()}
    llm = LLM("smollm2", max_num_seqs=32, kv_memory="2GiB")
    warm = report.workload("WARM")
    turns: list[dict[str, Any]] = []
    for turn in range(1 if args.quick else 3):
        cost = calibrate(llm)
        run(llm, warm)
        results = {}
        for name, requests in workloads.items():
            found, said = run(llm, requests), said_by(simulate(trace(requests), llm.engine.limits, cost))
            exact = ("steps", "hit_rate", "preemptions")
            if any(found[key] != said[key] for key in exact):
                raise SystemExit(f"{name}: the same scheduler took other steps: {found}, {said}")
            results[name] = {"real": found, "simulated": said}
        turns.append({"cost": asdict(cost), "results": results})
        print(f"turn {turn + 1}: {cost}, off by {cost.error:.1%} in median", flush=True)
    errors = {name: compare(name, [turn["results"][name] for turn in turns]) for name in workloads}
    report.write(args.output, model=llm.model_name, dtype=llm.plan.dtype, errors=errors, turns=turns)


def trace(requests: list[Request]) -> Trace:
    """The same requests with the same tokens: every id of a trace may stand for one token."""
    each = (TraceRequest(0.0, len(r["prompt"]), r["out"], tuple(r["prompt"]), block_tokens=1) for r in requests)
    return Trace("workload", tuple(each))


def run(llm: LLM, requests: list[Request]) -> Figures:
    """The real engine, from an empty prefix cache."""
    engine = llm.engine
    llm.reset_prefix_cache()
    before = engine.stats.num_steps, engine.stats.prompt_tokens, engine.stats.cached_tokens, engine.stats.preemptions
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    steps, gaps = [], []
    for request in requests:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=request["out"])
        engine.add(llm.new_id(), request["prompt"], params, stream=True)
    start = now = time.perf_counter()
    while engine.has_work:
        outputs = engine.step()
        steps.append(time.perf_counter() - now)
        now = time.perf_counter()
        for output in outputs:
            if output.request_id in last:
                gaps.append(now - last[output.request_id])
            first.setdefault(output.request_id, now - start)
            last[output.request_id] = now
    stats = engine.stats
    prompt, cached = stats.prompt_tokens - before[1], stats.cached_tokens - before[2]
    return {
        "total_s": now - start,
        "step_median_s": statistics.median(steps),
        "first_token_p50_s": float(np.percentile(list(first.values()), 50)),
        "first_token_p99_s": float(np.percentile(list(first.values()), 99)),
        "between_tokens_p50_s": float(np.percentile(gaps, 50)),
        "between_tokens_p99_s": float(np.percentile(gaps, 99)),
        "steps": stats.num_steps - before[0],
        "hit_rate": cached / prompt,
        "preemptions": stats.preemptions - before[3],
    }


def said_by(replay: Replay) -> Figures:
    return {
        "total_s": replay.end,
        "step_median_s": float(np.median(replay.steps)),
        "first_token_p50_s": replay.first_token(50),
        "first_token_p99_s": replay.first_token(99),
        "between_tokens_p50_s": replay.between_tokens(50),
        "between_tokens_p99_s": replay.between_tokens(99),
        "steps": len(replay.steps),
        "hit_rate": replay.hit_rate,
        "preemptions": replay.preemptions,
    }


def compare(name: str, results: list[dict[str, Figures]]) -> Figures:
    """Of every time, how far the simulation is from the real run; in the turn with the quickest."""
    real, said = min(((r["real"], r["simulated"]) for r in results), key=lambda pair: pair[0]["total_s"])
    errors = {}
    for key in (key for key in real if key.endswith("_s")):
        errors[key] = said[key] / real[key] - 1
        print(f"{name} {key:22} real {real[key]:8.4f}  simulated {said[key]:8.4f}  {errors[key]:+6.1%}")
    print(f"{name} steps {real['steps']}, hit rate {real['hit_rate']:.4f}: equal")
    return errors


if __name__ == "__main__":
    main()
