"""What takes part in bench_sweep.py: one process each, which does a point of the sweep when it is told to.

A point is a batch of prompts of one length and a number of new tokens. Every cache under transformers runs the same
greedy loop, over the same float32 weights: the prompts at once, then one decode step after another. The engine runs as
it serves: prompts in chunks under its token budget, with rows that are ready decoding beside them; its decode steps are
counted from when all rows decode, so its rows live a few tokens longer.

Memory: of each point the most that the process had at once (VmHWM, reset before) over what it had when the model was
loaded and everything compiled, the point's own K and V not yet there.
"""

from __future__ import annotations

import ctypes
import gc
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PAGE_SIZE = 16
Prompts = list[list[int]]


@dataclass(slots=True)
class Run:
    """One pass over a point. Times in seconds; bytes once for each decode step."""

    prefill_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)  # of K and V, and of what is not filled
    empty_bytes: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)  # [rows, new]
    gaps: list[list[float]] = field(default_factory=list)  # [rows, new], of the two best logits, where they are known
    peak_bytes: int = 0

    def hold(self, held: int, tokens: int, bytes_per_token: int) -> None:
        """held: bytes of K and V that are taken; tokens: of all rows whose K and V are there."""
        self.held_bytes.append(held)
        self.empty_bytes.append(held - tokens * bytes_per_token)


class Side(ABC):
    """A contender. `prepare` a point, `run` it as often as you like, `release` it."""

    @abstractmethod
    def prepare(self, prompts: Prompts, new: int) -> None:
        """Load or compile what the point needs, and leave no K and V in memory."""

    @abstractmethod
    def run(self) -> Run: ...

    @abstractmethod
    def release(self) -> None: ...

    def warm(self) -> None:
        """A small point, so that what a process sets up once is in no point's memory."""
        self.prepare([[1] * 8] * 2, 2)
        self.run()
        self.release()


class Engine(Side):
    """This project's engine. dtype: `auto` is its default."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        self._settings: dict[str, Any] = {"model": model, "threads": threads, "dtype": dtype}
        self._llm: Any = None

    def prepare(self, prompts: Prompts, new: int) -> None:
        from paged import LLM, SamplingParams

        self._prompts, self._new = prompts, new
        longest, batch = len(prompts[0]), len(prompts)
        budget = max(512, 2 * batch)
        # Rows that are ready early go on until the last is ready, and then as long as all others.
        self._spare = 2 + batch * longest // (budget - batch)
        self._llm = LLM(
            **self._settings,
            max_num_seqs=batch,
            max_model_len=longest + new + self._spare,
            max_num_batched_tokens=budget,
        )
        # Weights come into memory when they are first used; of K and V this leaves a page.
        self._llm.generate([[1, 2]], SamplingParams(temperature=0, ignore_eos=True, max_tokens=2))

    def run(self) -> Run:
        from paged import SamplingParams

        run, engine = Run(), self._llm.engine
        layout, manager = self._llm.plan.layout, engine.scheduler.manager
        engine.reset_prefix_cache()
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=self._new + self._spare)
        tokens: dict[str, list[int]] = {}
        start = time.perf_counter()
        for i, prompt in enumerate(self._prompts):
            engine.add(str(i), prompt, params, stream=True)

        def step() -> None:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)

        while len(tokens) < len(self._prompts):
            step()
        run.prefill_s = time.perf_counter() - start
        for _ in range(self._new - 1):
            start = time.perf_counter()
            step()
            run.token_s.append(time.perf_counter() - start)
            there = sum(len(prompt) + len(tokens[str(i)]) - 1 for i, prompt in enumerate(self._prompts))
            run.hold(manager.num_used * layout.bytes_per_page, there, layout.bytes_per_token)
        for i in range(len(self._prompts)):
            engine.abort(str(i))
        while engine.has_work:
            engine.step()
        run.tokens = [tokens[str(i)][: self._new] for i in range(len(self._prompts))]
        return run

    def release(self) -> None:
        self._llm.close()
        self._llm = None


class Transformers(Side):
    """A cache under transformers, by the loop that all of them share."""

    attention = "sdpa"

    def __init__(self, model: str, threads: int, compiled: bool = False) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from worker.checkpoints import resolve

        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = AutoModelForCausalLM.from_pretrained(
                resolve(model).path, dtype=torch.float32, attn_implementation=self.attention
            ).eval()
        config = self.model.config
        self._bytes_per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        self._compiled, self._kept = compiled, None

    @abstractmethod
    def cache(self, batch: int, max_len: int) -> Any:
        """An empty one, for so many rows and tokens of each."""

    def held(self, cache: Any) -> int:
        """Bytes of K and V that the cache takes."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    def prefill(self, ids: Tensor, cache: Any) -> Tensor:
        logits: Tensor = self.model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits

    def decode(self, ids: Tensor, cache: Any) -> Tensor:
        logits: Tensor = self.model(ids, cache=cache, use_cache=True).logits[:, -1]
        return logits

    def prepare(self, prompts: Prompts, new: int) -> None:
        self._ids, self._new = torch.tensor(prompts), new
        self._step: Callable[[Tensor, Any], Tensor] = self.decode
        if not self._compiled:
            return
        self._step = torch.compile(self.decode, fullgraph=True)
        # A compiled graph knows its cache's tensors, so that it stays the same one; its bytes are taken away again.
        self._kept = self._new_cache()
        with torch.inference_mode():
            self._loop(self._kept, 3)
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)

    def run(self) -> Run:
        cache = self._kept
        with torch.inference_mode():
            if cache is None:
                return self._loop(self._new_cache(), self._new)
            for tensor in self._tensors():
                if not tensor.untyped_storage().nbytes():
                    tensor.untyped_storage().resize_(tensor.nbytes)
                    tensor.zero_()
            cache.reset()
            return self._loop(cache, self._new)

    def release(self) -> None:
        self._kept = None
        torch._dynamo.reset()

    def warm(self) -> None:
        """Not compiled, which takes long and is done for every point anyway."""
        compiled, self._compiled = self._compiled, False
        super().warm()
        self._compiled = compiled

    def _new_cache(self) -> Any:
        batch, length = self._ids.shape
        return self.cache(batch, length + self._new)

    def _tensors(self) -> list[Tensor]:
        """K and V of the cache that is kept."""
        assert self._kept is not None
        return [tensor for layer in self._kept.layers for tensor in (layer.keys, layer.values)]

    def _loop(self, cache: Any, new: int) -> Run:
        run, (batch, length) = Run(), self._ids.shape
        start = time.perf_counter()
        logits = self.prefill(self._ids, cache)
        found = [logits.argmax(-1)]
        run.prefill_s = time.perf_counter() - start
        best = [logits.topk(2).values]
        for i in range(1, new):
            start = time.perf_counter()
            logits = self._step(found[-1][:, None], cache)
            found.append(logits.argmax(-1))
            run.token_s.append(time.perf_counter() - start)
            best.append(logits.topk(2).values)
            run.hold(self.held(cache), batch * (length + i), self._bytes_per_token)
        run.tokens = torch.stack(found, dim=1).tolist()
        top = torch.stack(best, dim=1)  # [batch, new, 2]
        run.gaps = (top[..., 0] - top[..., 1]).tolist()
        return run


class Dynamic(Transformers):
    def cache(self, batch: int, max_len: int) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)


class Static(Transformers):
    def cache(self, batch: int, max_len: int) -> Any:
        from transformers import StaticCache

        return StaticCache(config=self.model.config, max_cache_len=max_len)


class AppendLast(Transformers):
    def __init__(self, model: str, threads: int, compiled: bool = False) -> None:
        import append_last  # which imports transformers

        super().__init__(model, threads, compiled)
        self._scheme = append_last

    def cache(self, batch: int, max_len: int) -> Any:
        return self._scheme.AppendLastCache(self.model.config, max_len)

    def prefill(self, ids: Tensor, cache: Any) -> Tensor:
        return self._scheme.prefill(self.model, ids, cache)

    def decode(self, ids: Tensor, cache: Any) -> Tensor:
        return self._scheme.decode(self.model, ids, cache)


class Paged(Transformers):
    """paged.hf.PagedCache, which attends over pages in place."""

    def __init__(self, model: str, threads: int) -> None:
        import paged.hf

        self.attention, self._cache = paged.hf.NAME, paged.hf.PagedCache
        super().__init__(model, threads)

    def cache(self, batch: int, max_len: int) -> Any:
        pages = 1 + batch * -(-max_len // PAGE_SIZE)  # and the null page
        num_bytes = pages * PAGE_SIZE * self._bytes_per_token
        return self._cache(self.model.config, kv_memory=num_bytes, page_size=PAGE_SIZE)

    def held(self, cache: Any) -> int:
        num_bytes: int = cache.manager.num_used * cache.pool.layout.bytes_per_page
        return num_bytes


SIDES: dict[str, Callable[[str, int], Side]] = {
    "paged": lambda model, threads: Engine(model, threads, "float32"),
    "paged, default": lambda model, threads: Engine(model, threads, "auto"),
    "PagedCache": Paged,
    "DynamicCache": Dynamic,
    "StaticCache": Static,
    "StaticCache compiled": lambda model, threads: Static(model, threads, compiled=True),
    "append-last": AppendLast,
    "append-last compiled": lambda model, threads: AppendLast(model, threads, compiled=True),
}
ORACLE = "DynamicCache"  # whose tokens are the right ones, and whose gaps tell a tie
Answer = tuple[str, Any]  # of a process: ("done", a Run or None) or ("failed", why)


def serve(pipe: Connection, contender: str, model: str, threads: int) -> None:
    """A process: does what comes through the pipe, one thing at a time, and waits without working."""
    side, baseline = SIDES[contender](model, threads), 0
    side.warm()
    pipe.send(("done", None))
    while (order := pipe.recv())[0] != "end":
        try:
            found: Run | None = None
            match order:
                case ["prepare", prompts, new]:
                    side.prepare(prompts, new)
                    baseline = settle()
                case ["run"]:
                    found = side.run()
                    found.peak_bytes = max(memory("VmHWM") - baseline, 0)
                case ["release"]:
                    side.release()
            pipe.send(("done", found))
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "not enough memory" not in str(error):
                raise
            pipe.send(("failed", "not enough memory"))


def settle() -> int:
    """Give back what is free, and forget the peak; bytes that the process has then."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is what there is now: proc(5)
    return memory("VmRSS")


def memory(field_name: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field_name:
            return int(value.split()[0]) * 1024
    raise LookupError(field_name)
