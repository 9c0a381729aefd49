"""AsyncLLM over SmolLM2: the answers are those of LLM, while others come and go."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from async_fakes import greedy, run, until_idle

from paged import LLM, AsyncLLM, EngineConfig, RequestOutput, SamplingParams
from worker.checkpoints import Checkpoint

CONFIG = EngineConfig(model="smollm2", dtype="float32", kv_memory="64MiB", max_model_len=256, seed=7)
PROMPTS: list[Any] = [
    "The capital of France is",
    "Water boils at",
    [504, 2365, 6354],
    "Here is the English alphabet: A B C",
]
CHAT = [{"role": "user", "content": "Name a river."}]


async def text_of(llm: AsyncLLM, prompt: Any, params: SamplingParams, chat: bool = False) -> tuple[str, list[int]]:
    text, tokens, last = "", list[int](), None
    async for output in llm.stream(prompt, params, chat=chat):
        (part,) = output.outputs
        text, tokens, last = text + part.text, tokens + part.token_ids, output
    assert last is not None
    assert last.finished
    return text, tokens


async def leaves(llm: AsyncLLM) -> None:
    async with aclosing(llm.stream("Once upon a time", greedy(200))) as outputs:
        async for output in outputs:
            if output.num_output_tokens >= 3:
                return


def test_answers_are_those_of_an_llm(smollm2: Checkpoint) -> None:
    """Streamed or not, greedy or drawn, text, token ids or chat; beside them others leave, or are cancelled."""
    drawn = SamplingParams(temperature=0.8, seed=3, max_tokens=6)
    one = LLM.from_config(CONFIG)
    wanted = one.generate(PROMPTS, greedy(8)) + one.generate(PROMPTS, drawn)
    chatted = one.chat(CHAT, greedy(6))[0]
    stopped = one.generate(PROMPTS[3], greedy(12, stop="G H"))[0]

    async def main() -> tuple[list[RequestOutput], list[tuple[str, list[int]]]]:
        async with AsyncLLM.from_config(CONFIG) as llm:
            left = [asyncio.create_task(leaves(llm)) for _ in range(2)]
            cancelled = asyncio.create_task(llm.generate("Never", greedy(200)))
            answers = [llm.generate(prompt, params) for params in (greedy(8), drawn) for prompt in PROMPTS]
            streams = [text_of(llm, prompt, params) for params in (greedy(8), drawn) for prompt in PROMPTS]
            streams += [text_of(llm, CHAT, greedy(6), chat=True), text_of(llm, PROMPTS[3], greedy(12, stop="G H"))]
            asyncio.get_running_loop().call_later(0.05, cancelled.cancel)
            found = await asyncio.gather(*answers), await asyncio.gather(*streams)
            await asyncio.gather(*left, cancelled, return_exceptions=True)
            assert cancelled.cancelled()
            await until_idle(llm)
            return found

    answers, streams = run(main())
    assert [output.outputs for output in answers] == [output.outputs for output in wanted]
    assert [output.prompt for output in answers] == [output.prompt for output in wanted]
    whole = [output.outputs[0] for output in (*wanted, chatted, stopped)]
    assert streams == [(choice.text, choice.token_ids) for choice in whole]


def test_missing_seeds_are_drawn_in_the_order_of_the_requests(smollm2: Checkpoint) -> None:
    """So with a `seed` of the engine a program that asks in order gets the same again, and what LLM gives."""
    drawn = SamplingParams(max_tokens=3)
    wanted = [output.outputs[0].token_ids for output in LLM.from_config(CONFIG).generate(["One"] * 6, drawn)]

    async def main() -> list[list[int]]:
        async with AsyncLLM("smollm2", **_settings()) as llm:
            outputs = await asyncio.gather(*(llm.generate("One", drawn) for _ in range(6)))
            return [output.outputs[0].token_ids for output in outputs]

    found = run(main())
    assert found == wanted
    assert len({tuple(tokens) for tokens in found}) > 1


def _settings() -> dict[str, Any]:
    return {name: getattr(CONFIG, name) for name in ("dtype", "kv_memory", "max_model_len", "seed")}
