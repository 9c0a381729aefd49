"""AsyncLLM over a fake worker: closing, steps that raise, and storms. Every request ends once, and holds nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from async_fakes import PROMPT, Gated, greedy, is_idle, run, serving, tokens
from fakes import FailingTokenizer, FakeExecutor, fake_engine, solo

from paged import AsyncLLM, EngineClosed, RequestFailed, WorkerLost
from worker.step import Step, StepResult

# Closing


def test_closing_ends_what_is_in_flight_with_an_exception() -> None:
    async def main() -> None:
        fake = Gated(17, 4)
        engine, _ = fake_engine(16, 4, executor=fake)
        llm = AsyncLLM.from_engine(engine)
        tasks = [asyncio.create_task(llm.generate([*PROMPT, i], greedy(9))) for i in range(5)]
        stream = llm.stream(PROMPT, greedy(9))
        tasks.append(asyncio.create_task(anext(stream)))
        await fake.reached()
        closing = [asyncio.create_task(llm.close()) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in closing)  # the step under way is waited for
        fake.open()
        await asyncio.gather(*closing)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineClosed] * 6
        assert fake.closed
        assert is_idle(engine)
        await llm.close()

    run(main())


def test_what_is_closed_says_so() -> None:
    async def main() -> None:
        async with AsyncLLM.from_engine(fake_engine(16, 4)[0]) as llm:
            pass
        with pytest.raises(EngineClosed, match="the engine was closed: make another"):
            await llm.generate(PROMPT)
        with pytest.raises(EngineClosed):
            await anext(llm.stream(PROMPT))
        with pytest.raises(EngineClosed):
            await llm.call(is_idle)

    run(main())


def test_what_closing_raises_is_raised() -> None:
    class Stuck(FakeExecutor):
        def close(self) -> None:
            raise ConnectionError("no worker")

    async def main() -> None:
        llm = AsyncLLM.from_engine(fake_engine(16, 4, executor=Stuck(17, 4))[0])
        with pytest.raises(ConnectionError):
            await llm.close()

    run(main())


def test_a_lost_worker_ends_the_engine_and_everyone_who_waits_hears_why() -> None:
    """No step would ever run again."""

    async def main() -> None:
        fake = FakeExecutor(17, 4, raise_at={2: WorkerLost("rank 1: its process ended")})
        llm = AsyncLLM.from_engine(fake_engine(16, 4, executor=fake)[0])
        tasks = [asyncio.create_task(llm.generate([*PROMPT, i], greedy(9))) for i in range(3)]
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineClosed] * 3
        assert isinstance(ends[0], EngineClosed)  # the others may have come too late
        assert isinstance(ends[0].__cause__, WorkerLost)
        with pytest.raises(EngineClosed):
            await llm.generate(PROMPT)
        await llm.close()
        assert fake.closed

    run(main())


def test_one_that_is_forgotten_ends_its_thread_and_its_worker() -> None:
    engine, fake = fake_engine(16, 4)

    async def main() -> threading.Thread:
        llm = AsyncLLM.from_engine(engine)
        await llm.generate(PROMPT)
        return await llm.call(lambda _: threading.current_thread())

    thread = run(main())
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert fake.closed


def test_a_program_that_never_closes_ends_all_the_same() -> None:
    """Its last step is waited for: a thread in native code must not outlive the interpreter."""
    program = f"""
import asyncio, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from fakes import FakeExecutor, fake_engine
from paged import AsyncLLM, SamplingParams

class Slow(FakeExecutor):
    def result(self):
        time.sleep(0.2)
        return super().result()
    def close(self):
        print("closed")

llm = AsyncLLM.from_engine(fake_engine(400, 4, executor=Slow(401, 4))[0])
async def main():
    async for part in llm.stream([5, 6], SamplingParams(max_tokens=900)):
        return
asyncio.run(main())
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


# Faults


def test_a_step_that_raises_ends_its_own_requests_and_no_other() -> None:
    """The first prompt takes the whole budget of the step that raises; the second waits, and is answered."""

    async def main() -> None:
        fake = Gated(41, 4, raise_at={1: RuntimeError("no memory")})
        async with serving(fake_engine(40, 4, budget=8, executor=fake)[0]) as llm:
            first = asyncio.create_task(llm.generate([*PROMPT] * 4, greedy()))
            await fake.reached()
            second = asyncio.create_task(llm.generate([1, 2, 3], greedy()))
            while not await waiting(llm):
                await asyncio.sleep(0)
            fake.open()
            with pytest.raises(RequestFailed, match=r"RuntimeError\('no memory'\)") as caught:
                await first
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert tokens(await second) == solo([1, 2, 3], 6)
            assert tokens(await llm.generate([*PROMPT] * 4, greedy())) == solo([*PROMPT] * 4, 6)

    async def waiting(llm: AsyncLLM) -> bool:
        return len(llm._thread._inbox) > 0  # its thread is held in a step, so nothing else can be asked

    run(main())


def test_a_worker_that_always_raises_keeps_nobody_waiting() -> None:
    class Broken(FakeExecutor):
        def result(self) -> StepResult:
            raise SystemExit("gone")

        def submit(self, step: Step) -> None:
            self.steps.append(step)

    async def main() -> None:
        fake = Broken(17, 4)
        async with serving(fake_engine(16, 4, executor=fake)[0]) as llm:
            ends = await asyncio.gather(
                *(llm.generate([*PROMPT, i], greedy()) for i in range(30)), return_exceptions=True
            )
            assert [type(end) for end in ends] == [RequestFailed] * 30
            assert len(fake.steps) <= 30

    run(main())


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("n", range(1, 16))
def test_a_tokenizer_that_raises_ends_only_the_request_whose_text_it_was(n: int, logprobs: int | None) -> None:
    tokenizer = FailingTokenizer(n)

    async def main() -> list[Any]:
        async with serving(fake_engine(40, 4, tokenizer=cast(Any, tokenizer))[0]) as llm:
            params = [greedy(1), greedy(4, stop="no"), greedy(5, logprobs=logprobs)]
            wanted = (llm.generate([i, i + 1], param) for i, param in enumerate(params))
            return await asyncio.gather(*wanted, return_exceptions=True)

    ends = run(main())
    failed = [end for end in ends if isinstance(end, Exception)]
    assert [type(end) for end in failed] == [RequestFailed] * (tokenizer.left <= 0)
    for i, count in enumerate([1, 4, 5]):
        if not isinstance(ends[i], Exception):
            assert tokens(ends[i]) == solo([i, i + 1], count)


@pytest.mark.parametrize("broken", ["schedule", "update", "after update"])
def test_a_fault_of_the_scheduler_itself_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Where it comes after update, some requests have ended, and their outputs are lost."""

    async def main() -> None:
        engine, _ = fake_engine(16, 4)
        async with serving(engine) as llm:
            name = broken.removeprefix("after ")
            honest = getattr(engine.scheduler, name)

            def fault(*args: Any) -> Any:
                if broken != name:
                    honest(*args)
                raise AssertionError("a fault of ours")

            monkeypatch.setattr(engine.scheduler, name, fault)
            wanted = (llm.generate([*PROMPT, i], greedy(1 + i % 2)) for i in range(12))
            ends = await asyncio.gather(*wanted, return_exceptions=True)
            assert [type(end) for end in ends] == [RequestFailed] * 12
            monkeypatch.undo()
            assert tokens(await llm.generate(PROMPT, greedy())) == solo(PROMPT, 6)

    run(main())


def test_a_thread_that_dies_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine, _ = fake_engine(16, 4)
        llm = AsyncLLM.from_engine(engine)

        def fault(request_id: str) -> Any:
            raise AssertionError("a fault of ours")

        monkeypatch.setattr(engine, "abort", fault)
        monkeypatch.setattr(engine.executor, "raise_at", {3: RuntimeError()})
        ends = await asyncio.gather(*(llm.generate([*PROMPT, i], greedy()) for i in range(12)), return_exceptions=True)
        assert {type(end) for end in ends} <= {RequestFailed, EngineClosed}
        with pytest.raises(EngineClosed):
            await llm.generate(PROMPT)
        with pytest.raises(AssertionError, match="a fault of ours"):
            await llm.close()

    run(main())


# All at once


async def one_of_a_storm(llm: AsyncLLM, number: int, rng: random.Random) -> str:
    """A request that may be left at any moment. How it ended; whatever it got was right."""
    prompt = [number % 5, *(rng.randrange(3) for _ in range(rng.randrange(20)))]
    count, leaves = rng.randrange(1, 12), rng.randrange(3)
    wanted, got = solo(prompt, count), []
    try:
        if rng.random() < 0.4:
            if leaves == 0:
                async with asyncio.timeout(rng.random() * 0.02):
                    got = tokens(await llm.generate(prompt, greedy(count)))
            else:
                got = tokens(await llm.generate(prompt, greedy(count)))
            assert got == wanted
            return "answered"
        async with aclosing(llm.stream(prompt, greedy(count))) as parts:
            async for part in parts:
                got += tokens(part)
                assert got == wanted[: len(got)]
                if part.finished:
                    assert got == wanted
                    return "answered"
                if leaves == 0 and rng.random() < 0.3:
                    return "left"
                if leaves == 1:
                    await asyncio.sleep(rng.random() * 0.002)
    except TimeoutError:
        return "left"
    except RequestFailed as error:
        return "failed" if isinstance(error.__cause__, MemoryError) else repr(error)
    raise AssertionError("a stream ended without an end")


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(i, marks=pytest.mark.slow) for i in range(12, 200))])
def test_a_storm_of_requests_cancellations_and_faults(seed: int) -> None:
    """Each of 60 requests ends once, with its own tokens; nothing is held afterwards."""
    rng = random.Random(seed)
    faults: dict[int, BaseException] = {step: MemoryError() for step in range(300) if rng.random() < 0.05}
    fake = FakeExecutor(17, 4, raise_at=faults)

    async def main() -> None:
        async with serving(fake_engine(16, 4, budget=12, seqs=6, executor=fake)[0]) as llm:
            tasks = []
            for number in range(60):
                tasks.append(asyncio.create_task(one_of_a_storm(llm, number, random.Random(rng.random()))))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.005)
                if rng.random() < 0.1:
                    rng.choice(tasks).cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert {end if isinstance(end, str) else type(end) for end in ends} <= {
                *("answered", "left", "failed"),
                asyncio.CancelledError,
            }
            assert "answered" in ends
            stats = await llm.call(lambda own: own.stats)
            assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)

    run(main())
