"""Tensor parallel workers as threads of one process: everything but gloo and Ray."""

from __future__ import annotations

import threading
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from torch import Tensor

from scheduler.engine import Engine
from scheduler.llm import kv_layout
from scheduler.policy import Limits, Rules
from worker.checkpoints import resolve
from worker.loading import load_executor, load_runner
from worker.parallel import shards
from worker.runner import ModelRunner
from worker.tensor_parallel import ParallelExecutor, follow


class Seat:
    """One worker's place in sums over threads; as worker.group.Group."""

    def __init__(self, rank: int, barrier: threading.Barrier, parts: list[Tensor | None]) -> None:
        self._rank, self._barrier, self._parts = rank, barrier, parts
        self.sums = 0

    def total(self, part: Tensor) -> Tensor:
        self.sums += 1
        self._parts[self._rank] = part.clone()
        self._barrier.wait()
        first, *others = [part for part in self._parts if part is not None]
        total = first.float()
        for other in others:
            total = total + other
        self._barrier.wait()
        return total.to(part.dtype)

    def close(self) -> None:
        self._barrier.abort()


class Threads(ParallelExecutor):
    """Rank 0 in the thread that asks, each other worker in one of its own. errors: what ended a worker, by rank."""

    def __init__(self, folder: Path, size: int, page_size: int, num_pages: int, dtype: str, **settings: Any) -> None:
        config = resolve(str(folder)).config
        self.errors = dict[int, BaseException]()
        self.runners = dict[int, ModelRunner]()
        barrier, parts = threading.Barrier(size, timeout=30), list[Tensor | None]([None] * size)
        self.seats = [Seat(rank, barrier, parts) for rank in range(size)]
        links = [Pipe() for _ in range(size - 1)]

        def load(rank: int) -> Any:
            shard = shards(config, size)[rank]
            layout = replace(kv_layout(config, dtype, page_size), kv_heads=len(shard.kv_heads))
            return load_runner(
                folder, config, layout, num_pages=num_pages, shard=shard, total=self.seats[rank].total, **settings
            )

        def serve(rank: int) -> None:
            link = links[rank - 1][1]
            try:
                self.runners[rank], again = load(rank)
                follow(link, self.runners[rank], again)
            except BaseException as error:  # noqa: BLE001  as of another process, which would end
                self.errors[rank] = error
            finally:
                link.close()
                self.seats[rank].close()

        self.threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(1, size)]
        for thread in self.threads:
            thread.start()
        self.runners[0], again = load(0)
        super().__init__(self.runners[0], again, self.seats[0], [mine for mine, _ in links], self._blame)  # type: ignore[arg-type]

    def close(self) -> None:
        super().close()
        for thread in self.threads:
            thread.join()

    def _blame(self) -> str:
        self.threads[0].join(5)
        return "; ".join(f"rank {rank}: {error!r}" for rank, error in self.errors.items())


def engine_of(
    folder: Path,
    size: int,
    *,
    usable: int = 300,
    budget: int = 64,
    page_size: int = 4,
    dtype: str = "float32",
    rules: Rules | None = None,
    backend: str = "native",
    quantization: str | None = None,
) -> Engine:
    """An engine over `size` workers, of one without anything of the others."""
    config = resolve(str(folder)).config
    settings: dict[str, Any] = {"max_model_len": 128, "backend": backend, "quantization": quantization}
    layout = kv_layout(config, dtype, page_size)
    executor: Any
    if size == 1:
        executor = load_executor(folder, config, layout, num_pages=usable + 1, **settings)
    else:
        executor = Threads(folder, size, page_size, usable + 1, dtype, **settings)
    limits = Limits(128, usable, page_size, layout.windows, 8, budget)
    return Engine(executor, None, limits, vocab_size=config.vocab_size, rules=rules, seed=1)
