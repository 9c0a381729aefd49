"""What does batching over pages give an offline job? paged against transformers' generate, in turn, in one run.

    python benchmarks/bench_offline.py [--quick] [--output FILE]

Workload: the first requests of W1 (workloads/workload_smollm2.json: greedy, ignore_eos, exactly the tokens asked for), on
SmolLM2-135M-Instruct with the same weights on both sides. transformers answers them one after another, with its own
cache; paged all at once, at most 32 running. Each side runs once to warm up, then they take turns; the ratio is that of
the medians. In float32 the tokens of both sides are compared, and any difference fails the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paged import LLM, SamplingParams

FOLDER = Path(__file__).parent
Request = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 short requests, one turn")
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "offline.json")
    args = parser.parse_args()
    requests = json.loads((FOLDER / "workloads" / "workload_smollm2.json").read_text())["W1"]
    requests = [r | {"out": min(r["out"], 8)} for r in requests[:4]] if args.quick else requests[:24]
    turns = 1 if args.quick else 3
    report = {"command": " ".join(["python", *sys.argv]), "commit": commit(), "machine": machine(), "workload": {}}
    report["workload"] = {
        "name": f"first {len(requests)} of W1",
        "prompt_tokens": sum(len(r["prompt"]) for r in requests),
        "output_tokens": sum(r["out"] for r in requests),
    }
    for dtype in ("float32", "bfloat16"):
        report[dtype] = compare(requests, dtype, turns)
        print_result(dtype, report[dtype])
    args.output.write_text(json.dumps(report, indent=1) + "\n")


def compare(requests: list[Request], dtype: str, turns: int) -> dict[str, Any]:
    """Seconds of both sides, in turn, and the ratio of their medians."""
    sides = {"transformers": transformers_side(requests, dtype), "paged": paged_side(requests, dtype)}
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
            print(f"  {dtype} turn {turn}: {name} {time.perf_counter() - start:.2f} s", file=sys.stderr)
        if dtype == "float32" and tokens["paged"] != tokens["transformers"]:
            raise SystemExit("the tokens of the two sides differ: the comparison is worth nothing")
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return {
        "seconds": samples,
        "median": medians,
        "times_faster": medians["transformers"] / medians["paged"],
        "load_average_before_each": loads,
    }


def paged_side(requests: list[Request], dtype: str) -> Callable[[], list[list[int]]]:
    # Without the prefix cache: a turn must not find the pages of the turn before.
    llm = LLM("smollm2", dtype=dtype, max_num_seqs=32, enable_prefix_caching=False)
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=r["out"]) for r in requests]

    def run() -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate([r["prompt"] for r in requests], params)]

    return run


def transformers_side(requests: list[Request], dtype: str) -> Callable[[], list[list[int]]]:
    from transformers import AutoModelForCausalLM
    from worker.checkpoints import resolve

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(resolve("smollm2").path, dtype=getattr(torch, dtype))
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


def print_result(dtype: str, result: dict[str, Any]) -> None:
    median = result["median"]
    print(
        f"{dtype}: transformers {median['transformers']:.1f} s, paged {median['paged']:.1f} s, "
        f"{result['times_faster']:.1f} times faster"
    )


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=FOLDER, check=False)
    return done.stdout.strip() or "not a checkout"


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "cpu": names[0].split(":")[1].strip() if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
