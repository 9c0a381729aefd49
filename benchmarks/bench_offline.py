"""What does batching over pages give an offline job? paged against transformers' generate, in turn, in one run.

    python benchmarks/bench_offline.py [--quick] [--output FILE]

Workload: the first 16 requests of W1 (workloads/workload_smollm2.json: greedy, ignore_eos), at most 32 tokens each, on
SmolLM2-135M-Instruct in float32, the same weights on both sides. transformers answers them one after another, with its
own cache; paged all at once. Each side runs once to warm up, then they take turns; the ratio is that of the medians.
The tokens of both sides are compared, and any difference fails the run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch

from paged import LLM, SamplingParams

Request = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 short requests, one turn")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "offline.json")
    args = parser.parse_args()
    requests = report.workload("W1")
    number, most, turns = (4, 8, 1) if args.quick else (16, 32, 3)
    requests = [r | {"out": min(r["out"], most)} for r in requests[:number]]
    described = {
        "name": f"first {number} requests of W1, at most {most} tokens each",
        "prompt_tokens": sum(len(r["prompt"]) for r in requests),
        "output_tokens": sum(r["out"] for r in requests),
    }
    result = compare(requests, turns)
    median = result["median"]
    print(
        f"float32: transformers {median['transformers']:.1f} s, paged {median['paged']:.1f} s, "
        f"{result['times_faster']:.1f} times faster"
    )
    report.write(
        args.output, workload=described, float32=result, threads=torch.get_num_threads(), torch=torch.__version__
    )


def compare(requests: list[Request], turns: int) -> dict[str, Any]:
    """Seconds of both sides, in turn, and the ratio of their medians."""
    sides = {"transformers": transformers_side(requests), "paged": paged_side(requests)}
    samples: dict[str, list[float]] = {name: [] for name in sides}
    loads = []
    for turn in range(turns + 1):
        tokens = {}
        for name, run in sides.items():
            loads.append(os.getloadavg()[0])
            start = time.perf_counter()
            tokens[name] = run()
            if turn > 0:  # the first was to warm up
                samples[name].append(time.perf_counter() - start)
            print(f"  turn {turn}: {name} {time.perf_counter() - start:.2f} s", file=sys.stderr)
        if tokens["paged"] != tokens["transformers"]:
            raise SystemExit("the tokens of the two sides differ: the comparison is worth nothing")
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return {
        "seconds": samples,
        "median": medians,
        "times_faster": medians["transformers"] / medians["paged"],
        "load_average_before_each": loads,
    }


def paged_side(requests: list[Request]) -> Callable[[], list[list[int]]]:
    # Without the prefix cache: a turn must not find the pages of the turn before.
    llm = LLM("smollm2", dtype="float32", max_num_seqs=32, enable_prefix_caching=False)
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=r["out"]) for r in requests]

    def run() -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate([r["prompt"] for r in requests], params)]

    return run


def transformers_side(requests: list[Request]) -> Callable[[], list[list[int]]]:
    from transformers import AutoModelForCausalLM

    from worker.checkpoints import resolve

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(resolve("smollm2").path, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as ignore_eos

    def run() -> list[list[int]]:
        result = []
        for request in requests:
            prompt = torch.tensor([request["prompt"]])
            mask = torch.ones_like(prompt)
            ids = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=request["out"])
            result.append(ids[0, prompt.shape[1] :].tolist())
        return result

    return run


if __name__ == "__main__":
    main()
