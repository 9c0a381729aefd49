"""What tests of AsyncLLM share: a limit on hanging, an idle check, and a worker whose steps end when the test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fakes import FakeExecutor, idle

from paged import AsyncLLM, RequestOutput, SamplingParams
from scheduler.engine import Engine
from worker.step import StepResult

T = TypeVar("T")
PROMPT = [5, 6, 7, 8, 9]


def run(wanted: Coroutine[Any, Any, T]) -> T:
    """The result; what hangs is an error."""

    async def limited() -> T:
        async with asyncio.timeout(60):
            return await wanted

    return asyncio.run(limited())


def greedy(max_tokens: int = 6, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def is_idle(engine: Engine) -> bool:
    engine.scheduler.check()
    return not engine.has_work and idle(engine.scheduler.manager)


async def until_idle(llm: AsyncLLM) -> None:
    """Returns when nothing is held; who waits may be told of an end before the engine's next turn, which cleans up."""
    while not await llm.call(is_idle):
        await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM that must hold nothing when the block is done."""
    async with AsyncLLM.from_engine(engine) as llm:
        yield llm
        await until_idle(llm)
        assert not llm._thread._mailboxes


class Gated(FakeExecutor):
    """A step ends only when the test opens the gate for it, or for all."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        self.gate.release()

    def result(self) -> StepResult:
        self.begun.release()
        if not self.is_open:
            assert self.gate.acquire(timeout=30)
        return super().result()

    async def reached(self) -> None:
        """Another step is under way."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=30)
