"""Engine: what goes in and what comes out, streams, seeds, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import FakeExecutor, fake_engine, idle, next_token, solo, with_tokens_at
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from paged import RequestError, RequestOutput, SamplingParams
from scheduler.engine import Engine
from scheduler.text import Tokenizer
from worker.step import StepResult

PROMPT = [5, 6, 7, 8, 9]


def greedy(max_tokens: int | None = 6, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def run(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.scheduler.check()
    assert idle(engine.scheduler.manager)
    return outputs


def final(engine: Engine, prompt: list[int] = PROMPT, params: SamplingParams | None = None) -> RequestOutput:
    engine.add("r", prompt, params or greedy())
    (output,) = run(engine)
    return output


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """Token i is the word wi."""
    return Tokenizer(FastTokenizer(WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0")), None, {})


def spelled(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


# Outputs


def test_an_answer_holds_the_request_and_its_tokens() -> None:
    engine, _ = fake_engine(16, 4)
    engine.add("r", PROMPT, greedy(), prompt="text")
    (output,) = run(engine)
    completion = output.outputs[0]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "text", PROMPT)
    assert (output.finished, output.num_output_tokens, output.num_cached_tokens) == (True, 6, 0)
    assert (completion.index, completion.token_ids, completion.finish_reason) == (0, solo(PROMPT, 6), "length")
    assert (completion.text, completion.logprobs, completion.cumulative_logprob) == ("", None, None)


def test_without_a_stream_only_ends_are_given() -> None:
    engine, _ = fake_engine(16, 4)
    engine.add("short", PROMPT, greedy(2))
    engine.add("long", PROMPT[::-1], greedy(5))  # else it would wait for the other's prefix
    given = [[output.request_id for output in engine.step()] for _ in range(5)]
    assert given == [[], ["short"], [], [], ["long"]]


def test_an_engine_without_work_gives_nothing() -> None:
    assert fake_engine(16, 4)[0].step() == []


def test_text_is_that_of_the_tokens(words: Tokenizer) -> None:
    assert final(fake_engine(16, 4, tokenizer=words)[0]).outputs[0].text == spelled(solo(PROMPT, 6))


@pytest.mark.parametrize("stop", [None, [" w"], [spelled(solo(PROMPT, 6)[2:4])], [spelled(solo(PROMPT, 6)[2:4]) + "x"]])
@pytest.mark.parametrize("include", [False, True])
def test_the_deltas_of_a_stream_are_the_answer(words: Tokenizer, stop: list[str] | None, include: bool) -> None:
    """Text, token ids and logprobs, whatever is held back for a stop string."""
    params = greedy(stop=stop, include_stop_str_in_output=include, logprobs=2)
    whole = final(fake_engine(16, 4, tokenizer=words)[0], params=params).outputs[0]
    engine, _ = fake_engine(16, 4, tokenizer=words)
    engine.add("r", PROMPT, params, stream=True)
    parts = [output.outputs[0] for output in run(engine)]
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [row for part in parts for row in part.logprobs or ()] == whole.logprobs
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [whole.finish_reason]


def test_a_stop_string_ends_the_text_before_it(words: Tokenizer) -> None:
    ids = solo(PROMPT, 6)
    stop = f" w{ids[3]}"
    completion = final(fake_engine(16, 4, tokenizer=words)[0], params=greedy(stop=[stop])).outputs[0]
    assert (completion.text, completion.token_ids) == (spelled(ids[:3]), ids[:4])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_stream_counts_all_tokens_in_every_part() -> None:
    engine, _ = fake_engine(16, 4)
    engine.add("r", PROMPT, greedy(3), stream=True)
    assert [output.num_output_tokens for output in run(engine)] == [1, 2, 3]


def test_a_stream_without_output_gives_its_end_alone() -> None:
    engine, _ = fake_engine(16, 4, budget=2)
    engine.add("r", PROMPT, greedy(0), stream=True)
    (output,) = run(engine)
    assert (tokens(output), output.finished, output.outputs[0].finish_reason) == ([], True, "length")


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_one_dict_a_token_with_the_chosen_first(words: Tokenizer, count: int) -> None:
    completion = final(fake_engine(16, 4, tokenizer=words)[0], params=greedy(logprobs=count)).outputs[0]
    assert completion.logprobs is not None
    assert [next(iter(row)) for row in completion.logprobs] == completion.token_ids
    assert [len(row) for row in completion.logprobs] == [max(1, count)] * 6
    assert [row[t].decoded_token for row, t in zip(completion.logprobs, completion.token_ids, strict=True)] == [
        f"w{t}" for t in completion.token_ids
    ]


def test_the_cumulative_logprob_is_the_sum() -> None:
    completion = final(fake_engine(16, 4)[0], params=greedy(logprobs=0)).outputs[0]
    assert completion.logprobs is not None
    total = sum(row[t].logprob for row, t in zip(completion.logprobs, completion.token_ids, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)


def test_logprobs_stay_aligned_through_a_preemption() -> None:
    engine, _ = fake_engine(16, 4)
    engine.add("r", PROMPT, greedy(logprobs=1))
    engine.step()
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    (output,) = run(engine)
    rows = output.outputs[0].logprobs
    assert rows is not None
    assert [next(iter(row)) for row in rows] == solo(PROMPT, 6)


# Aborts and ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_gives_the_last_output_once(steps: int, stream: bool) -> None:
    engine, _ = fake_engine(16, 4)
    engine.add("r", PROMPT, greedy(), stream=stream)
    before = [token for _ in range(steps) for output in engine.step() for token in tokens(output)]
    output = engine.abort("r")
    assert output is not None
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    assert before + tokens(output) == solo(PROMPT, 6)[:steps]
    assert engine.abort("r") is None
    assert (engine.step(), engine.has_work) == ([], False)
    assert idle(engine.scheduler.manager)


def test_the_worker_forgets_an_aborted_sequence_with_the_next_step() -> None:
    engine, fake = fake_engine(16, 4)
    engine.add("r", PROMPT, greedy())
    engine.step()
    engine.abort("r")
    engine.add("s", PROMPT, greedy(1))
    run(engine)
    assert fake.steps[-1].finished == (0,)


def test_a_streaming_id_can_be_used_again_without_a_stream() -> None:
    engine, _ = fake_engine(16, 4)
    engine.add("x", PROMPT, greedy(2), stream=True)
    run(engine)
    engine.add("x", PROMPT, greedy(3))
    (output,) = run(engine)
    assert tokens(output) == solo(PROMPT, 3)
    assert engine._streams == {}


def test_close_ends_what_is_left() -> None:
    engine, fake = fake_engine(16, 4)
    engine.add("r", PROMPT, greedy(), stream=True)
    engine.add("s", PROMPT, greedy())
    engine.step()
    engine.close()
    assert (fake.closed, engine.has_work, engine._streams) == (True, False, {})
    assert idle(engine.scheduler.manager)


# Refusals


@pytest.mark.parametrize("bad", [[1000], [-1], [1, 2, 10**30], [True], [1.0], [None], ["1"], [[1]]])
def test_a_bad_token_id_is_refused_as_the_prompts_fault(bad: list[Any]) -> None:
    engine, fake = fake_engine(16, 4)
    with pytest.raises(RequestError, match="token id") as caught:
        engine.add("r", [1, *bad], greedy())
    assert caught.value.param == "prompt"
    assert not engine.has_work
    assert fake.steps == []


@pytest.mark.parametrize("empty", [[], (), np.array([], dtype=np.int32)])
def test_s08_an_empty_prompt_is_refused_and_the_next_request_runs(empty: Any) -> None:
    engine, fake = fake_engine(16, 4)
    with pytest.raises(RequestError, match="the prompt is empty") as caught:
        engine.add("r", empty, greedy())
    assert caught.value.param == "prompt"
    assert fake.steps == []
    assert tokens(final(engine)) == solo(PROMPT, 6)


def test_a_refused_request_leaves_its_id_free() -> None:
    engine, _ = fake_engine(16, 4)
    with pytest.raises(RequestError):
        engine.add("r", [1] * 100, greedy())
    assert tokens(final(engine)) == solo(PROMPT, 6)


@pytest.mark.parametrize("ids", [PROMPT, tuple(PROMPT), np.asarray(PROMPT), np.asarray(PROMPT, dtype=np.uint8)])
def test_token_ids_come_as_list_tuple_or_array(ids: Any) -> None:
    assert tokens(final(fake_engine(16, 4)[0], ids)) == solo(PROMPT, 6)


def test_the_callers_array_may_change_afterwards() -> None:
    engine, _ = fake_engine(16, 4)
    ids = np.asarray(PROMPT, dtype=np.int32)
    engine.add("r", ids, greedy())
    ids[:] = 1
    assert tokens(run(engine)[0]) == solo(PROMPT, 6)


def test_unset_max_tokens_is_16_or_for_a_chat_what_fits() -> None:
    engine, _ = fake_engine(16, 4, max_model_len=40)
    for chat, expected in ((False, 16), (True, 35)):
        engine.add("r", PROMPT, greedy(None), chat=chat)
        assert len(tokens(run(engine)[0])) == expected


def test_the_longest_prompt_is_accepted_and_one_more_is_not() -> None:
    for usable, context in ((8, 100), (30, 40)):
        engine, _ = fake_engine(usable, 4, max_model_len=context)
        most = engine.max_prompt_tokens
        engine.resolve("", [1] * most, greedy(0))
        with pytest.raises(RequestError):
            engine.resolve("", [1] * (most + 1), greedy(0))


# Seeds


def seeds(seed: int | None, count: int = 4) -> list[int]:
    engine, _ = fake_engine(16, 4, seed=seed)
    return [engine.resolve("", PROMPT, SamplingParams()).seed for _ in range(count)]


def test_the_engines_seed_draws_those_of_requests() -> None:
    assert seeds(3) == seeds(3) != seeds(4)
    assert len(set(seeds(3))) == 4


def test_without_any_seed_runs_differ() -> None:
    assert len({tuple(seeds(None)) for _ in range(10)}) == 10


def test_a_requests_own_seed_is_kept() -> None:
    assert fake_engine(16, 4)[0].resolve("", PROMPT, SamplingParams(seed=-7)).seed == -7


def test_n02_a_seeded_request_is_the_same_alone_beside_others_and_preempted() -> None:
    params = SamplingParams(seed=42, max_tokens=16)
    alone = tokens(final(fake_engine(16, 4)[0], params=params))
    assert alone == solo(PROMPT, 16, params=params, seed=42)
    for neighbour in (SamplingParams(max_tokens=16), SamplingParams(seed=42, max_tokens=3)):
        for names in (("r", "other"), ("other", "r")):
            engine, _ = fake_engine(30, 4)
            for name in names:
                engine.add(name, PROMPT if name == "r" else [1, 2], params if name == "r" else neighbour)
            for _ in range(6):
                engine.step()
            for sequence in [s for s in engine.scheduler.running if s.request.request_id == "r"]:
                engine.scheduler._preempt(sequence)
            assert {o.request_id: tokens(o) for o in run(engine)}["r"] == alone


# Stop tokens


def test_an_end_token_is_in_the_ids_and_not_in_the_text(words: Tokenizer) -> None:
    fake = FakeExecutor(17, 4, model=with_tokens_at(next_token, {8: 999}))
    engine, _ = fake_engine(16, 4, eos=(998, 999), executor=fake, tokenizer=words)
    completion = final(engine).outputs[0]
    assert completion.token_ids == [*solo(PROMPT, 3), 999]
    assert (completion.text, completion.finish_reason) == (spelled(solo(PROMPT, 3)), "stop")


def test_a_result_that_answers_another_step_is_a_fault() -> None:
    engine, _ = fake_engine(16, 4)
    engine.add("r", PROMPT, greedy())
    engine.scheduler.schedule()
    with pytest.raises(AssertionError, match="result 5 came for step 0"):
        engine.scheduler.update(StepResult(5, (), ()))


def test_a_second_step_may_not_be_scheduled_before_the_result_of_the_first() -> None:
    engine, _ = fake_engine(16, 4)
    engine.add("r", PROMPT, greedy())
    engine.scheduler.schedule()
    with pytest.raises(AssertionError, match="is due"):
        engine.scheduler.schedule()
