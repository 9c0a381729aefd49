"""OpenVINO GenAI, as a child of bench_peers.py (child.py says how it is spoken to): `pip install openvino-genai`.

MODEL is a GGUF file that it reads (F16, Q8_0 and Q4_0 among them, F32 and BF16 not), or a folder that
`optimum-cli export openvino` has written. The dtype is that of its calculations and its cache; the weights are what the
file holds, and with int8 both calculations are left in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from peers.child import KV_BYTES, MAX_RUNNING, Answer, Request, parser, serve

PRECISION = {"float32": "f32", "bfloat16": "bf16", "int8": "bf16"}


class OpenVino:
    def __init__(self, args: argparse.Namespace) -> None:
        import openvino_genai  # type: ignore[import-not-found]  # only in its own environment

        self.genai = openvino_genai
        self.args = args
        self.about = {
            "version": openvino_genai.__version__,
            "dtype": f"{PRECISION[args.dtype]}, weights of {Path(args.model).name}",
            "threads": args.threads,
        }
        self._load()

    def _load(self) -> None:
        self.pipeline: Any = None  # the old one first: two do not fit everywhere
        settings = self.genai.SchedulerConfig()
        settings.max_num_seqs = MAX_RUNNING
        settings.cache_size = KV_BYTES // 2**30
        settings.enable_prefix_caching = True
        precision = PRECISION[self.args.dtype]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": self.args.threads,
        }
        self.pipeline = self.genai.ContinuousBatchingPipeline(self.args.model, settings, "CPU", properties)

    def renew(self) -> None:
        """Nothing empties its prefix cache, so the model is loaded again."""
        self._load()

    def prepare(self, requests: list[Request]) -> Callable[[], Answer]:
        import numpy as np
        import openvino  # type: ignore[import-not-found]  # as above

        prompts = [openvino.Tensor(np.array([request["prompt"]], dtype=np.int64)) for request in requests]
        settings = []
        for request in requests:
            one = self.genai.GenerationConfig()
            one.max_new_tokens, one.ignore_eos, one.do_sample = request["out"], True, False
            settings.append(one)

        def run() -> Answer:
            outputs = self.pipeline.generate(prompts, settings)
            # Its time to the first token leaves out how long a request waited, which one alone does not.
            alone = [outputs[0].perf_metrics.get_ttft().mean / 1000] if len(outputs) == 1 else []
            return [list(output.m_generation_ids[0]) for output in outputs], alone

        return run


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    serve(lambda: OpenVino(arguments))
