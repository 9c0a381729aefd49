"""AsyncLLM over a fake worker: what comes, who leaves early, and an engine that sleeps when idle."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from async_fakes import PROMPT, Gated, greedy, run, serving, tokens, until_idle
from fakes import fake_engine, solo

from paged import AsyncLLM, BeamSearchParams, RequestError, RequestFailed, RequestOutput, SamplingParams

# What comes


def test_many_at_once_get_what_each_gets_alone() -> None:
    async def main() -> None:
        async with serving(fake_engine(16, 4)[0]) as llm:
            outputs = await asyncio.gather(*(llm.generate([*PROMPT, i], greedy(3 + i)) for i in range(20)))
            assert [tokens(output) for output in outputs] == [solo([*PROMPT, i], 3 + i) for i in range(20)]
            assert len({output.request_id for output in outputs}) == 20

    run(main())


def test_a_stream_gives_every_token_once_and_ends() -> None:
    async def collect(llm: AsyncLLM, i: int) -> list[RequestOutput]:
        return [output async for output in llm.stream([*PROMPT, i], greedy(9, logprobs=1))]

    async def main() -> None:
        async with serving(fake_engine(16, 4)[0]) as llm:
            for i, parts in enumerate(await asyncio.gather(*(collect(llm, i) for i in range(9)))):
                assert [token for part in parts for token in tokens(part)] == solo([*PROMPT, i], 9)
                assert sum(len(part.outputs[0].logprobs or []) for part in parts) == 9
                assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
                assert parts[-1].num_output_tokens == 9

    run(main())


def test_several_answers_and_beams() -> None:
    several = SamplingParams(temperature=1.0, n=3, max_tokens=5, seed=3)

    async def main() -> tuple[RequestOutput, RequestOutput, list[RequestOutput]]:
        async with serving(fake_engine(40, 4)[0]) as llm:
            parts = [part async for part in llm.stream(PROMPT, several)]
            return await llm.generate(PROMPT, several), await llm.generate(PROMPT, BeamSearchParams(2, 4)), parts

    answers, beams, parts = run(main())
    wanted = [solo(PROMPT, 5, params=several, seed=3, index=index) for index in range(3)]
    assert [choice.token_ids for choice in answers.outputs] == wanted
    assert len(beams.outputs) == 2
    given: list[list[int]] = [[], [], []]
    for part in parts:
        for choice in part.outputs:
            given[choice.index] += choice.token_ids
    assert given == wanted


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ([5, 1000], None, "token id 1000 is not one of the model's"),
        ("text", None, "text needs a tokenizer, and this engine has none"),
        (5, None, "a prompt is text or a list of token ids"),
        (PROMPT, "hot", "params must be SamplingParams"),
        (PROMPT, SamplingParams(max_tokens=2000), "2000"),
        ({"prompt_token_ids": PROMPT, "cache_salt": ""}, None, "cache_salt must be"),
        (PROMPT, BeamSearchParams(2, 4), "cannot be streamed"),
    ],
)
def test_what_is_refused_is_raised_where_it_is_awaited(prompt: Any, params: Any, match: str) -> None:
    async def main() -> None:
        async with serving(fake_engine(16, 4)[0]) as llm:
            with pytest.raises(RequestError, match=match):
                await anext(llm.stream(prompt, params))
            if not isinstance(params, BeamSearchParams):
                with pytest.raises(RequestError, match=match):
                    await llm.generate(prompt, params)
            assert tokens(await llm.generate(PROMPT, greedy(2))) == solo(PROMPT, 2)

    run(main())


def test_a_slow_consumer_holds_up_nobody_and_gets_more_at_once() -> None:
    async def main() -> None:
        fake = Gated(41, 4)
        async with serving(fake_engine(40, 4, executor=fake)[0]) as llm:
            slow = llm.stream(PROMPT, greedy(50, logprobs=2))
            fake.gate.release()
            first = await anext(slow)
            fake.open()
            assert tokens(await llm.generate([1, 2], greedy(90))) == solo([1, 2], 90)
            rest = await anext(slow)
            assert rest.finished
            assert tokens(first) + tokens(rest) == solo(PROMPT, 50)
            assert rest.outputs[0].finish_reason == "length"
            assert len(first.outputs[0].logprobs or []) + len(rest.outputs[0].logprobs or []) == 50

    run(main())


def test_event_loops_of_several_threads_share_one() -> None:
    llm = AsyncLLM.from_engine(fake_engine(16, 4)[0])
    found: dict[int, list[int]] = {}

    async def one(i: int) -> None:
        async for part in llm.stream([*PROMPT, i], greedy(8)):
            found.setdefault(i, []).extend(tokens(part))

    threads = [threading.Thread(target=lambda i=i: run(one(i))) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: solo([*PROMPT, i], 8) for i in range(6)}
    run(llm.close())


# Idle


def test_an_idle_engine_takes_no_step_and_no_processor() -> None:
    async def main() -> tuple[float, int]:
        engine, fake = fake_engine(16, 4)
        async with serving(engine) as llm:
            await llm.generate(PROMPT, greedy(2))
            clock = time.pthread_getcpuclockid(await llm.call(lambda _: threading.get_ident()))
            before, steps = time.clock_gettime(clock), len(fake.steps)
            await asyncio.sleep(0.5)
            return time.clock_gettime(clock) - before, len(fake.steps) - steps

    used, steps = run(main())
    assert steps == 0
    assert used < 0.02  # seconds of its own, not of the clock on the wall: one that polls every millisecond takes more


# Leaving early


async def cancel_a_task(llm: AsyncLLM, fake: Gated) -> None:
    task = asyncio.create_task(llm.generate(PROMPT, greedy(500)))
    await fake.reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def break_out(llm: AsyncLLM, fake: Gated) -> None:
    fake.gate.release()
    async for _ in llm.stream(PROMPT, greedy(500)):
        break


async def close_the_stream(llm: AsyncLLM, fake: Gated) -> None:
    fake.gate.release()
    outputs = llm.stream(PROMPT, greedy(500))
    await anext(outputs)
    await outputs.aclose()


async def raise_in_the_loop(llm: AsyncLLM, fake: Gated) -> None:
    fake.gate.release()

    async def consume() -> None:
        async with aclosing(llm.stream(PROMPT, greedy(500))) as outputs:
            async for _ in outputs:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()


async def time_out(llm: AsyncLLM, fake: Gated) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await llm.generate(PROMPT, greedy(500))


@pytest.mark.parametrize("leave", [cancel_a_task, break_out, close_the_stream, raise_in_the_loop, time_out])
def test_who_leaves_early_aborts_the_request(leave: Any) -> None:
    """S4: its pages are free before two more steps are done; the neighbour notices nothing."""

    async def main() -> None:
        fake = Gated(201, 4)
        async with serving(fake_engine(200, 4, executor=fake)[0]) as llm:
            await leave(llm, fake)
            for _ in range(5):
                await asyncio.sleep(0)  # what `break` leaves behind is closed by the event loop
            fake.open()
            assert tokens(await llm.generate([1, 2], greedy(4))) == solo([1, 2], 4)
            await until_idle(llm)
            assert max(len(step.rows) for step in fake.steps) <= 2
            assert len(fake.steps) < 20

    run(main())


def test_a_task_that_is_cancelled_before_its_request_began_leaves_nothing() -> None:
    async def main() -> None:
        async with serving(fake_engine(16, 4)[0]) as llm:
            for turns in range(4):
                task = asyncio.create_task(llm.generate(PROMPT, greedy(5)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert tokens(await llm.generate(PROMPT, greedy(5))) == solo(PROMPT, 5)

    run(main())


def test_an_event_loop_that_is_gone_takes_its_requests_with_it() -> None:
    """asyncio.run would close them; a loop that is just closed cannot."""
    fake = Gated(401, 4)
    llm = AsyncLLM.from_engine(fake_engine(400, 4, executor=fake)[0])
    loop = asyncio.new_event_loop()
    outputs = llm.stream(PROMPT, greedy(900))
    fake.gate.release()
    loop.run_until_complete(anext(outputs))
    loop.close()
    fake.open()

    async def main() -> None:
        await until_idle(llm)
        await llm.close()

    run(main())
    assert len(fake.steps) < 100
    asyncio.run(outputs.aclose())  # else Python would end it in the loop that is gone


# Calls


def test_a_call_runs_between_two_steps() -> None:
    async def main() -> None:
        engine, fake = fake_engine(16, 4)
        async with serving(engine) as llm:
            await llm.generate([*PROMPT] * 2, greedy(2))
            assert await llm.call(lambda own: own.pin([*PROMPT] * 2, 60.0)) == 8
            assert await llm.call(lambda own: own.stats.finished) == 1
            with pytest.raises(RequestError, match="whole numbers"):
                await llm.call(lambda own: own.pin(cast(Any, ["x"]), 60.0))
            await llm.call(lambda own: own.update_weights(Path(), {"model": lambda last, position: 3}))
            assert tokens(await llm.generate(PROMPT, greedy(2))) == [3, 3]
            assert fake.steps

    run(main())


def test_a_request_that_a_call_aborts_is_told_so() -> None:
    async def main() -> None:
        fake = Gated(401, 4)
        async with serving(fake_engine(400, 4, executor=fake)[0]) as llm:
            task = asyncio.create_task(llm.generate(PROMPT, greedy(900)))
            await fake.reached()
            call = asyncio.create_task(llm.call(lambda own: own.abort(own.scheduler.live_ids()[0])))
            await asyncio.sleep(0)
            fake.open()
            output = await call
            assert output is not None
            assert output.outputs[0].finish_reason == "abort"
            with pytest.raises(RequestFailed, match="ended by a call"):
                await task

    run(main())
