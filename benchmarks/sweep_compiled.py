"""The step of our engine in plain torch, compiled as one graph over block tables of fixed width, for bench_sweep.py.

The decoder of worker/models/decoder.py with the native attention over pages as an operator. Rows grow over page
boundaries, so block tables fill up; they are padded with the null page to the width of the longest, and no shape
changes. What is compiled again is counted: graphs that come to the backend after the first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged import KVCacheManager, kernels
from paged.attention import AttentionMetadata, cpu
from paged.pool import KVPool
from scheduler.llm import kv_layout
from worker.checkpoints import resolve
from worker.loading import load_runner
from worker.models.decoder import Decoder

PAGE_SIZE = 16
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Step = Callable[..., Tensor]


def measure(model: str, prompts: list[list[int]], new: int, threads: int, turns: int) -> dict[str, Any]:
    """Times of eager and compiled decode steps in float32, in turn, and how often was compiled again.

    prompts: of one length. Where there are no native kernels, the reason why nothing was run.
    """
    if kernels.library() is None:
        return {"not_run": f"native kernels are not here: {kernels.why_not()}"}
    checkpoint = resolve(model)
    batch, longest = len(prompts), len(prompts[0]) + new
    layout = kv_layout(checkpoint.config, "float32", PAGE_SIZE)
    width = -(-longest // PAGE_SIZE)
    num_pages = batch * width * len(layout.windows) + 1
    runner, _ = load_runner(
        checkpoint.path, checkpoint.config, layout, num_pages=num_pages, max_model_len=longest, threads=threads
    )
    decoder, pool = runner.model, runner.pool
    assert isinstance(decoder, Decoder)
    eager, graphs = step_of(decoder, pool), 0

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        nonlocal graphs
        graphs += 1
        return compile_fx(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, backend=backend)
    samples: dict[str, list[float]] = {"eager": [], "compiled": []}
    tokens: dict[str, list[list[int]]] = {}
    for turn in range(turns + 1):
        for name, step in (("eager", eager), ("compiled", compiled)):
            tokens[name], times = generate(Rows(prompts, num_pages, layout.windows, width), eager, step, new)
            if turn:  # the first was to compile and to warm up
                samples[name] += times
    torch._dynamo.reset()
    return {
        "batch": batch,
        "prompt": len(prompts[0]),
        "new": new,
        "page_size": PAGE_SIZE,
        "page_boundaries": (longest - 2) // PAGE_SIZE - (len(prompts[0]) - 1) // PAGE_SIZE,
        "eager_token_s": samples["eager"],
        "compiled_token_s": samples["compiled"],
        "eager_over_compiled": statistics.median(samples["eager"]) / statistics.median(samples["compiled"]),
        "graphs": graphs,
        "recompiles": graphs - 1,
        "agrees": sum(a == b for a, b in zip(tokens["eager"], tokens["compiled"], strict=True)),
    }


def step_of(decoder: Decoder, pool: KVPool) -> Step:
    """Logits behind every row's last token, from `Inputs`; there is nothing in it that depends on what they hold."""

    def step(
        token_ids: Tensor,
        positions: Tensor,
        starts: Tensor,
        lengths: Tensor,
        tables: Tensor,
        slots: Tensor,
        sampled: Tensor,
    ) -> Tensor:
        metas = [AttentionMetadata(starts, lengths, tables[g], slots[g]) for g in range(len(tables))]
        hidden = decoder.forward(token_ids, positions, metas, pool, cpu.paged_attention)
        return decoder.logits(hidden[sampled])

    return step


class Rows:
    """Sequences of equal length in pages, with block tables of one width."""

    def __init__(self, prompts: list[list[int]], num_pages: int, windows: tuple[int | None, ...], width: int) -> None:
        self._manager = KVCacheManager(num_pages, PAGE_SIZE, enable_prefix_caching=False, windows=windows, poison=False)
        self._ids, self._width, self._length = list(range(len(prompts))), width, 0
        self.prompts = np.array(prompts, dtype=np.int64)
        for seq_id in self._ids:
            self._manager.allocate(seq_id, np.empty(0, dtype=np.int32), 0)

    def extend(self, tokens: npt.NDArray[np.int64]) -> Inputs:
        """What a step over `tokens` [rows, new] takes."""
        manager, (rows, count), before = self._manager, tokens.shape, self._length
        after = self._length = before + count
        manager.extend_all(self._ids, np.full(rows, after))
        shape = len(manager.windows), rows, self._width
        tables = np.zeros(shape, dtype=np.int32)  # the null page where there is none yet
        for group in range(shape[0]):
            found = manager.tables(self._ids, group)
            tables[group, :, : found.shape[1]] = found
        positions = np.arange(before, after)
        slots = tables[:, :, positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
        ends = np.arange(0, rows * count + 1, count, dtype=np.int32)
        return (
            torch.from_numpy(tokens.reshape(-1)),
            torch.from_numpy(np.tile(positions, rows)),
            torch.from_numpy(ends),
            torch.full((rows,), after, dtype=torch.int32),
            torch.from_numpy(tables),
            torch.from_numpy(slots.reshape(shape[0], -1)),
            torch.from_numpy(ends[1:].astype(np.int64) - 1),
        )


@torch.inference_mode()
def generate(rows: Rows, prefill: Step, step: Step, new: int) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens [rows, new], and the time of each step after the prompts."""
    found = [prefill(*rows.extend(rows.prompts)).argmax(-1)]
    times = []
    for _ in range(new - 1):
        start = time.perf_counter()
        found.append(step(*rows.extend(found[-1][:, None].numpy())).argmax(-1))
        times.append(time.perf_counter() - start)
    return torch.stack(found, dim=1).tolist(), times
