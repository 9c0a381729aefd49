"""Replicas without a model, which load in no time and die on demand; of a test's process, or of a Ray worker's."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fakes import VOCAB, FakeExecutor, fake_engine, next_token
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers

from paged import LLM, CheckpointError, EngineConfig
from scheduler import replica
from scheduler.replica import Replica
from scheduler.text import Tokenizer
from worker.step import Step

POISON = [1, 2, 666]  # a prompt that ends the process that computes it
BROKEN = "broken"  # a file in the folder `model` that lets the constructor fail
STEP_S = 0.005


def deadly(last: int, position: int) -> int:
    if (last, position) == (POISON[-1], len(POISON) - 1):
        os._exit(1)
    return next_token(last, position)


class SlowExecutor(FakeExecutor):
    def submit(self, step: Step) -> None:
        time.sleep(STEP_S)
        super().submit(step)


def words() -> Tokenizer:
    """Texts are numbers, which are the tokens."""
    made = FastTokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(made, None, {})


def text(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def fake_llm(config: EngineConfig, executor: FakeExecutor | None = None) -> Any:
    """An LLM over a fake worker."""
    llm: Any = LLM.__new__(LLM)
    llm.tokenizer = words()
    llm.engine, _ = fake_engine(4096, 16, seqs=config.max_num_seqs, tokenizer=llm.tokenizer, executor=executor)
    llm.config, llm.model_name = config, "fake"
    llm.plan = SimpleNamespace(
        limits=llm.engine.limits,
        layout=SimpleNamespace(bytes_per_page=16, bytes_per_token=1),
        threads=1,
        computes="by a fake",
        sizing="4,096 pages",
    )
    llm._ids, llm._mail = itertools.count(), {}
    return llm


class FakeReplica(Replica):
    def __init__(self, config: EngineConfig) -> None:
        replica.SILENT = 4.0
        if (Path(config.model) / BROKEN).exists():
            raise CheckpointError(f"{config.model} is broken")
        llm = fake_llm(config, SlowExecutor(4097, 16, deadly))
        self._start(llm, 0.1, _die, time.monotonic)


class DyingReplica(FakeReplica):
    """Its process ends while it loads, as where memory is out."""

    def __init__(self, config: EngineConfig) -> None:
        os._exit(1)


def _die(error: BaseException) -> None:
    os._exit(70)


def in_this_process(
    broken: Callable[[BaseException], None], executor: FakeExecutor | None = None, clock: Any = time.monotonic
) -> Replica:
    return Replica.over(fake_llm(EngineConfig(max_num_seqs=4), executor), broken, clock)
