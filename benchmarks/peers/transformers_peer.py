"""transformers' generate, or its continuous batching, as a child of bench_peers.py (child.py says how it is spoken to).

generate answers one request after another. `--continuous` uses the manager that `generate_batch` starts, because
requests of one batch end at lengths of their own; its cache is made anew for each run, before the clock starts, and is
as large as the requests that run at once need, not larger: its attention masks all of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import torch
import transformers
from peers.child import MAX_RUNNING, Answer, Request, parser, serve

PAGE_SIZE = 256  # its default
STEP_TOKENS = 512  # most in a step: as many as paged takes on a CPU


class First:
    """A streamer that only keeps when the first token came. The first thing that it is given is the prompt."""

    def __init__(self) -> None:
        self.puts = 0
        self.at = 0.0

    def put(self, value: object) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


class Transformers:
    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        dtype = getattr(torch, args.dtype)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        self.model.generation_config.eos_token_id = None  # no request may end early
        self.about: dict[str, Any] = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
        }

    def renew(self) -> None:
        """generate keeps nothing; the cache of the other is new in each run."""


class Generate(Transformers):
    def prepare(self, requests: list[Request]) -> Callable[[], Answer]:
        prompts = [torch.tensor([request["prompt"]]) for request in requests]

        def run() -> Answer:
            start = time.perf_counter()
            tokens, firsts = [], []
            for prompt, request in zip(prompts, requests, strict=True):
                first = First()
                ids = self.model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=request["out"],
                    streamer=first,
                )
                tokens.append(ids[0, prompt.shape[1] :].tolist())
                firsts.append(first.at - start)
            return tokens, firsts

        return run


class Continuous(Transformers):
    def prepare(self, requests: list[Request]) -> Callable[[], Answer]:
        pages = sorted((-(-(len(r["prompt"]) + r["out"]) // PAGE_SIZE) for r in requests), reverse=True)
        settings = transformers.ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=sum(pages[:MAX_RUNNING]) + 1,
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=MAX_RUNNING,
        )
        plain = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)  # no token has this id
        context = self.model.continuous_batching_context_manager(
            generation_config=plain, continuous_batching_config=settings
        )
        manager = context.__enter__()
        # One token of nothing: the cache is made in the manager's thread, and is there when this is answered.
        manager.add_request([0], request_id="first", max_new_tokens=1)
        self._collect(manager, 1)

        def run() -> Answer:
            start = time.perf_counter()
            for i, request in enumerate(requests):
                manager.add_request(
                    request["prompt"], request_id=str(i), max_new_tokens=request["out"], record_timestamps=True
                )
            found = self._collect(manager, len(requests))
            context.__exit__(None, None, None)
            in_order = [found[str(i)] for i in range(len(requests))]
            return [one.generated_tokens for one in in_order], [one.timestamps[0] - start for one in in_order]

        return run

    @staticmethod
    def _collect(manager: Any, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while len(found) < count:
            output = manager.get_result(timeout=1)
            if output is None:
                if not manager.is_running():
                    raise RuntimeError(f"its thread ended with {len(found)} of {count} requests answered")
            elif output.error is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            elif output.is_finished():
                found[output.request_id] = output
        return found


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--continuous", action="store_true")
    arguments = options.parse_args()
    serve(lambda: (Continuous if arguments.continuous else Generate)(arguments))
