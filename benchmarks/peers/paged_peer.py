"""paged, as a child of bench_peers.py (child.py says how it is spoken to)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from peers.child import KV_BYTES, MAX_RUNNING, Answer, Request, parser, serve

import paged
from paged import LLM, SamplingParams


class Paged:
    def __init__(self, args: argparse.Namespace) -> None:
        int8 = args.dtype == "int8"
        self.llm = LLM(
            args.model,
            dtype="bfloat16" if int8 else args.dtype,
            quantization="int8" if int8 else None,
            threads=args.threads,
            max_model_len=args.max_len,
            max_num_seqs=MAX_RUNNING,
            kv_memory=KV_BYTES,
        )
        plan = self.llm.plan
        self.about = {
            "version": paged.__version__,
            "dtype": f"int8 weights, {plan.dtype}" if int8 else plan.dtype,
            "threads": plan.threads,
            "backend": plan.backend,
        }

    def renew(self) -> None:
        self.llm.engine.reset_prefix_cache()

    def prepare(self, requests: list[Request]) -> Callable[[], Answer]:
        self.renew()
        prompts = [request["prompt"] for request in requests]
        params = [SamplingParams(temperature=0, max_tokens=r["out"], ignore_eos=True) for r in requests]

        def run() -> Answer:
            outputs = self.llm.generate(prompts, params)
            firsts = [output.metrics.first_token_s for output in outputs if output.metrics is not None]
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            return tokens, [first for first in firsts if first is not None]

        return run


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    serve(lambda: Paged(arguments))
