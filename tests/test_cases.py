"""Cases of the field that name real tokens: SmolLM2 in float32, through the whole engine (A01, N01, S08, S11, S12)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paged import LLM, RequestError, SamplingParams
from worker.checkpoints import Checkpoint

FOX = [504, *[2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30, 378] * 3, 2365]  # 32 tokens
FRANCE = "The capital of France is"
ALPHABET = "Here is the English alphabet: A B C"


@pytest.fixture
def llm(smollm2: Checkpoint) -> LLM:
    return LLM("smollm2", dtype="float32", kv_memory="64MiB")


def ids(llm: LLM, prompt: str | list[int], params: SamplingParams) -> list[int]:
    return llm.generate(prompt, params)[0].outputs[0].token_ids


def test_a01_a_prompt_that_is_cached_whole(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    outputs = [llm.generate(prompt, greedy)[0] for prompt in (FOX, FOX, [*FOX, 504])]
    expected = [6354, 16438, 27003, 690, 260, 23790, 2767, 30]
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 32]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids == expected
    assert outputs[2].outputs[0].token_ids == [2365, *expected[:-1]]


def test_n01_a_seeded_request_is_the_same_in_any_company(llm: LLM) -> None:
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)

    def beside(other: SamplingParams, first: bool = True) -> list[int]:
        pair = [seeded, other] if first else [other, seeded]
        return llm.generate([FRANCE, FRANCE], pair)[0 if first else 1].outputs[0].token_ids

    def preempted() -> list[int]:
        stream = llm.stream(FRANCE, seeded)
        tokens: list[int] = []
        for output in stream:
            tokens += output.outputs[0].token_ids
            if len(tokens) == 5:
                llm.engine.scheduler._preempt(llm.engine.scheduler.running[0])
        return tokens

    unseeded = SamplingParams(temperature=0.8, max_tokens=16)
    preemptions = llm.engine.stats.preemptions
    alone = ids(llm, FRANCE, seeded)
    runs = [
        beside(unseeded),
        beside(SamplingParams(temperature=0.8, seed=7, max_tokens=16)),
        beside(seeded),
        beside(unseeded, first=False),
        preempted(),
        beside(SamplingParams(temperature=0.8, seed=7, max_tokens=2)),
    ]
    assert runs == [alone] * 6
    assert llm.engine.stats.preemptions == preemptions + 1
    assert len({tuple(ids(llm, FRANCE, unseeded)) for _ in range(10)}) > 1


def test_a_seed_of_the_engine_makes_unseeded_requests_repeatable(smollm2: Checkpoint) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    runs = []
    for _ in range(2):
        llm = LLM("smollm2", dtype="float32", kv_memory="64MiB", seed=3)
        runs.append([output.outputs[0].token_ids for output in llm.generate([FRANCE] * 3, params)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) > 1


@pytest.mark.parametrize("prompts", ["", [""], [[]], ["ok", ""]])
def test_s08_an_empty_prompt_is_refused_whole_and_nobody_notices(llm: LLM, prompts: str | list[str]) -> None:
    with pytest.raises(RequestError, match=r"prompt \d: the prompt is empty"):
        llm.generate(prompts, SamplingParams(max_tokens=2))
    assert llm.engine.stats.num_steps == 0
    assert ids(llm, FRANCE, SamplingParams(temperature=0, max_tokens=2)) == [7042, 30]


@pytest.mark.parametrize(
    ("params", "text", "reason", "count"),
    [
        ({"stop": "F", "min_tokens": 5}, " D E F G H I J K", "length", 8),
        ({"stop": "G", "min_tokens": 3}, " D E F ", "stop", 4),
        ({"stop": "F", "min_tokens": 3}, " D E F G H I J K", "length", 8),
        ({"stop": "F", "min_tokens": 2}, " D E ", "stop", 3),
        ({"stop": ["F", " H I J"], "min_tokens": 5}, " D E F G", "stop", 7),
    ],
)
def test_s11_a_stop_string_counts_once_min_tokens_are_there(
    llm: LLM, params: dict[str, Any], text: str, reason: str, count: int
) -> None:
    """Streamed and at once. The third and fourth are at the border; in the last a string begins within min_tokens."""
    wanted = SamplingParams(temperature=0, max_tokens=8, **params)
    output = llm.generate(ALPHABET, wanted)[0].outputs[0]
    assert (output.text, output.finish_reason, len(output.token_ids)) == (text, reason, count)
    parts = list(llm.stream(ALPHABET, wanted))
    assert "".join(part.outputs[0].text for part in parts) == text
    assert parts[-1].outputs[0].finish_reason == reason


@pytest.mark.parametrize("more", [{}, {"stop_token_ids": [9]}, {"ignore_eos": True, "stop_token_ids": [2]}])
@pytest.mark.parametrize("n", [1, 2])
def test_s11_end_tokens_come_once_min_tokens_are_there(llm: LLM, more: dict[str, Any], n: int) -> None:
    """The model's end token is the best at every step, a stop token the next where there is one, then token 7."""
    biases = {2: 100.0, 9: 75.0 if more.get("stop_token_ids") == [9] else 0.0, 7: 50.0}
    temperature = 0 if n == 1 else 0.1
    params = SamplingParams(temperature=temperature, seed=1, n=n, min_tokens=2, max_tokens=5, logit_bias=biases, **more)
    for output in llm.generate(FRANCE, params)[0].outputs:
        assert (output.token_ids, output.finish_reason) == ([7, 7, 2], "stop")
        assert llm.engine.tokenizer is not None
        assert output.text == llm.engine.tokenizer.decode([7, 7])
    free = SamplingParams(temperature=0, min_tokens=2, max_tokens=5, ignore_eos=True, logit_bias=biases)
    assert ids(llm, FRANCE, free) == [2] * 5, "an end token that ends nothing is not held back"


def test_s11_more_tokens_than_there_may_be_are_refused(llm: LLM) -> None:
    """Where max_tokens is unset, its default counts."""
    with pytest.raises(RequestError, match="min_tokens 6 is more than max_tokens 5"):
        llm.generate(FRANCE, SamplingParams(min_tokens=6, max_tokens=5))
    with pytest.raises(RequestError, match="min_tokens 17 is more than max_tokens 16"):
        llm.generate(FRANCE, SamplingParams(min_tokens=17))


def test_s12_several_end_tokens(smollm2: Checkpoint, tmp_path: Path) -> None:
    """A newline is an end token too, by generation_config.json."""
    for file in smollm2.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 198]}))
    llm = LLM(str(tmp_path), dtype="float32", kv_memory="64MiB")

    def run(**more: object) -> tuple[str, list[int], str | None]:
        params = SamplingParams(temperature=0, max_tokens=16, **more)  # type: ignore[arg-type]
        output = llm.generate(FRANCE, params)[0].outputs[0]
        return output.text, output.token_ids, output.finish_reason

    free = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33]
    assert run() == (" Paris.", [7042, 30, 198], "stop")
    assert run(ignore_eos=True)[1:] == (free, "length")
    assert run(ignore_eos=True, stop_token_ids=[198]) == (" Paris.", [7042, 30, 198], "stop")
