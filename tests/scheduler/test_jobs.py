"""Jobs: every line has its answer or its error record, and a bad one costs nobody else anything (cases B01 and B02)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged import LLM, ConfigError, RequestError, SamplingParams
from scheduler import openai
from scheduler.job_files import JobFiles
from scheduler.jobs import JobProgress, run_job
from scheduler.outputs import CompletionOutput, Logprob, RequestOutput
from worker.checkpoints import Checkpoint

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def llm(smollm2: Checkpoint) -> LLM:
    return LLM("smollm2", dtype="float32", kv_memory="256MiB", max_num_seqs=16)


def line(custom_id: Any, **body: Any) -> dict[str, Any]:
    body = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def chat(custom_id: Any, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def run(llm: LLM, folder: Path, lines: list[Any]) -> tuple[Records, JobProgress]:
    """Bytes are written as they are, all else as JSON; the records in order of their line."""
    content = b"\n".join(item if isinstance(item, bytes) else json.dumps(item).encode() for item in lines)
    (folder / "in.jsonl").write_bytes(content)
    progress = run_job(llm, folder / "in.jsonl", folder / "out.jsonl", overwrite=True)
    records = [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]
    assert progress.ok + progress.failed == len(records)
    llm.engine.scheduler.check()
    assert not llm.engine.has_work
    for record in records:  # B07: the failure is in one place only
        assert record["error"] is None
        assert (record["response"]["status_code"] == 200) == ("error" not in record["response"]["body"])
    return sorted(records, key=lambda r: int(r["response"]["request_id"].removeprefix("line-"))), progress


def status(records: Records) -> list[int]:
    return [record["response"]["status_code"] for record in records]


def message(record: dict[str, Any]) -> str:
    return str(record["response"]["body"]["error"]["message"])


def test_b01_bad_requests_cost_one_record_each(llm: LLM, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [line(f"id-{i}") for i in range(1, 21)]
    lines[2]["body"]["prompt"] = [5] * 9000
    lines[6]["body"]["temperature"] = -1
    lines[10]["url"] = "/v1/unknown"
    lines[12] = chat("id-13", messages=[])
    del lines[16]["body"]
    records, progress = run(llm, tmp_path, lines)
    assert (progress.ok, progress.failed) == (15, 5)
    assert [r["custom_id"] for r in records] == [f"id-{i}" for i in range(1, 21)]
    bad = {i + 1: record for i, record in enumerate(records) if record["response"]["status_code"] != 200}
    params = {number: record["response"]["body"]["error"]["param"] for number, record in bad.items()}
    assert params == {3: "prompt", 7: "temperature", 11: "url", 13: "messages", 17: "body"}
    assert all(f"line {number}: " in message(record) for number, record in bad.items())
    good = [r["response"]["body"] for r in records if r["response"]["status_code"] == 200]
    assert {body["choices"][0]["text"] for body in good} == {" Paris."}


def test_b02_valid_json_that_is_no_request(llm: LLM, tmp_path: Path) -> None:
    lines: list[Any] = [
        b"\xef\xbb\xbf" + json.dumps(line("first")).encode(),  # a byte order mark
        *(b"[1,2]", b'"x"', b"null", b"5", b"{}"),
        {"custom_id": "a", "body": "str"},
        line(7),
        *(b"", b"   "),
        b"{broken",
        json.dumps(line("crlf")).encode() + b"\r",
        b'{"custom_id": "\xff"}',
        line("long", prompt="word " * 1_000_000),
        line("last"),  # no newline after it
    ]
    records, progress = run(llm, tmp_path, lines)
    assert len(records) + 2 == len(lines)
    good = [record["custom_id"] for record in records if record["response"]["status_code"] == 200]
    assert good == ["first", "crlf", "last"]
    assert progress.failed == 10
    numbers = [int(message(r).split(":")[0].removeprefix("line ")) for r in records if "error" in r["response"]["body"]]
    assert numbers == [2, 3, 4, 5, 6, 7, 8, 11, 13, 14]


def test_s09_a_custom_id_that_comes_again_is_refused_with_both_lines(llm: LLM, tmp_path: Path) -> None:
    records, _ = run(llm, tmp_path, [line("x"), line("y"), line("x", prompt="Other")])
    assert status(records) == [200, 200, 400]
    assert message(records[2]).startswith("line 3: custom_id 'x' is that of line 1")
    assert records[2]["custom_id"] == "x"


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 9000}, "max_tokens"),
    ({"temprature": 1}, "temprature"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"stream": True}, "stream"),
    ({"echo": True}, "echo"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"07": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [5, -1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": "a"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"bad_words": [""]}, "bad_words"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": 17, "max_tokens": None}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {"prompt": "a"}}, "prompt"),
    ({"prompt": [1, [2]]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": "a\ud83d"}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"model": "gpt-4"}, "model"),
    ({"logprobs": 50}, "logprobs"),
    ({"messages": []}, "messages"),
]


def test_a_bad_field_is_named(llm: LLM, tmp_path: Path) -> None:
    records, _ = run(llm, tmp_path, [line(f"{i}", **body) for i, (body, _) in enumerate(BAD_BODIES)])
    assert status(records) == [400] * len(BAD_BODIES)
    assert [r["response"]["body"]["error"]["param"] for r in records] == [param for _, param in BAD_BODIES]
    assert "did you mean temperature?" in message(records[2])


def test_penalties_biases_and_bans_are_openais_and_vllms(llm: LLM, tmp_path: Path) -> None:
    """Without any of them the answer to `line` begins " Paris." (7042, 30)."""
    lines = [
        line("a", logit_bias={"7042": -100}),
        line("b", logit_bias={"42": 100, "7042": 0}, max_tokens=2),
        line("c", bad_words=["Paris"], allowed_token_ids=[7042, 42, 30], max_tokens=2),
        line(
            "d", logit_bias={"42": 100}, presence_penalty=2, frequency_penalty=2, repetition_penalty=1.5, max_tokens=3
        ),
        line("e", stop=".", min_tokens=2, max_tokens=4),
        chat("f", logit_bias={"42": 100}, frequency_penalty=0.5, max_tokens=2),
    ]
    records, _ = run(llm, tmp_path, lines)
    assert status(records) == [200] * 6
    texts = [r["response"]["body"]["choices"][0].get("text") for r in records]
    name = llm.engine.tokenizer.token_text(42)  # type: ignore[union-attr]
    assert not texts[0].startswith(" Paris")
    assert texts[1] == name * 2
    assert "Paris" not in texts[2]
    assert texts[3] == name * 3, "a bias of 100 outweighs them all"
    assert texts[4].startswith(" Paris.")
    assert records[5]["response"]["body"]["choices"][0]["message"]["content"] == name * 2


def test_a_bad_field_of_a_chat_is_named(llm: LLM, tmp_path: Path) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": "4", "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": None, "max_completion_tokens": -5}, "max_completion_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"x" * 100_000: 1}, "x" * 80),
        ({"prompt": "a"}, "prompt"),
        ({"messages": [{"role": "user"}]}, "messages"),
    ]
    records, _ = run(llm, tmp_path, [chat(f"{i}", **body) for i, (body, _) in enumerate(bad)])
    assert [r["response"]["body"]["error"]["param"] for r in records] == [param for _, param in bad]
    assert all(param in message(record) for record, (_, param) in zip(records, bad, strict=True))
    assert max(len(message(record)) for record in records) < 300


def test_null_means_absent(llm: LLM, tmp_path: Path) -> None:
    names = ("top_p", "seed", "stop", "n", "stream", "logprobs", "logit_bias", "user", "model", "suffix")
    records, _ = run(llm, tmp_path, [line("a", **dict.fromkeys(names)), line("b", prompt=["The capital of France is"])])
    assert status(records) == [200, 200]


def test_an_answer_has_the_shape_of_openais(llm: LLM, tmp_path: Path) -> None:
    lines = [line("a", logprobs=2, max_tokens=3), chat("b", logprobs=True, top_logprobs=2), chat("c", logprobs=True)]
    (first, second, third), _ = run(llm, tmp_path, lines)
    body = first["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["model"] == "smollm2"
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    choice = body["choices"][0]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, " Paris.\n", "length")
    assert choice["logprobs"]["tokens"] == [" Paris", ".", "\n"]
    assert choice["logprobs"]["text_offset"] == [0, 6, 7]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2, 2, 2]
    body = second["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == body["choices"][0]["message"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    content = third["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]


def test_log_probabilities_of_a_prompt_are_in_the_answer(llm: LLM, tmp_path: Path) -> None:
    """N06, over a file; and a class for the policy `priority`."""
    ids = llm.tokenizer.encode("The capital of France is Paris").tolist()
    body = {"prompt": ids, "prompt_logprobs": 1, "max_tokens": 0}
    records, _ = run(llm, tmp_path, [line("a", **body, priority=3), line("b", **body, priority="x")])
    assert status(records) == [200, 400]
    assert "priority must be a whole number from -10 to 10" in message(records[1])
    first, *rows = records[0]["response"]["body"]["choices"][0]["prompt_logprobs"]
    assert first is None
    found = [row[str(token)]["logprob"] for row, token in zip(rows, ids[1:], strict=True)]
    assert found == pytest.approx([-11.5393, -0.3376, -2.4387, -0.4509, -0.2581], abs=1e-3)
    assert all(any(entry["rank"] == 1 for entry in row.values()) for row in rows)


def test_a_constraint_that_fails_on_the_way_costs_its_own_line_only(llm: LLM, tmp_path: Path) -> None:
    """No token of SmolLM2 has the byte 6, which shows only where it must come."""
    lines = [line(f"id-{i}") for i in range(5)]
    for i in (1, 3):
        lines[i]["body"] |= {"structured_outputs": {"choice": [f"hello there {i}\x06c"]}, "max_tokens": 12}
    records, progress = run(llm, tmp_path, lines)
    assert (progress.ok, progress.failed) == (3, 2)
    by_id = {record["custom_id"]: record for record in records}
    assert sorted(by_id) == [f"id-{i}" for i in range(5)]
    assert [by_id[f"id-{i}"]["response"]["status_code"] for i in range(5)] == [200, 500, 200, 500, 200]
    assert message(by_id["id-3"]).startswith("line 4: the request ended without an answer: the constraint cannot")
    assert by_id["id-3"]["response"]["body"]["error"]["type"] == "server_error"
    assert {by_id[f"id-{i}"]["response"]["body"]["choices"][0]["text"] for i in (0, 2, 4)} == {" Paris."}
    llm.engine.scheduler.manager.check(idle=True)


def test_several_choices_are_one_answer(llm: LLM, tmp_path: Path) -> None:
    lines = [line("three", n=3, seed=1, max_tokens=4, temperature=1), chat("two", n=2, seed=1, max_tokens=4)]
    records, progress = run(llm, tmp_path, lines)
    for record, n in zip(sorted(records, key=lambda r: -len(r["custom_id"])), (3, 2), strict=True):
        body = record["response"]["body"]
        assert [choice["index"] for choice in body["choices"]] == list(range(n))
        assert body["usage"]["completion_tokens"] <= 4 * n
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert progress.failed == 0


@pytest.mark.parametrize(("skip", "offsets"), [(True, [0, 6, 6]), (False, [0, 6, 16])])
def test_offsets_are_those_in_the_text_that_is_shown(llm: LLM, skip: bool, offsets: list[int]) -> None:
    """A special token has its length where it is shown, and none where it is left out."""
    ids = [38699, 2, 905]  # " Hello", "<|im_end|>", " world"
    logprobs = [{token: Logprob(-1.0, 1, llm.tokenizer.token_text(token))} for token in ids]
    completion = CompletionOutput(0, llm.tokenizer.decode(ids, skip), ids, logprobs, -3.0, "length")
    output = RequestOutput("a", None, [1], [completion], finished=True)
    params = SamplingParams(logprobs=0, skip_special_tokens=skip)
    choice = openai.answer_body(output, params, chat=False, model="m", tokenizer=llm.tokenizer)["choices"][0]
    assert choice["logprobs"]["text_offset"] == offsets
    assert choice["text"].startswith(" world", offsets[-1])


def test_a_stop_token_is_counted_and_not_shown(llm: LLM, tmp_path: Path) -> None:
    (record,), _ = run(llm, tmp_path, [line("a", max_tokens=9, stop_token_ids=[198])])
    body = record["response"]["body"]
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (" Paris.", "stop")
    assert body["usage"]["completion_tokens"] == 3


def test_more_lines_than_the_engine_takes_at_once(llm: LLM, tmp_path: Path) -> None:
    records, progress = run(llm, tmp_path, [line(f"{i}", prompt=[i], max_tokens=1) for i in range(100)])
    assert status(records) == [200] * 100
    assert progress.stats.max_running <= 16


def test_a_step_that_raises_leaves_what_is_written(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the engine goes on."""
    honest, calls = llm.engine.executor.result, iter(range(100))

    def result() -> Any:
        if next(calls) == 3:
            raise RuntimeError("the worker broke")
        return honest()

    monkeypatch.setattr(llm.engine.executor, "result", result)
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(line(f"{i}", max_tokens=1 + 8 * i)) for i in range(3)))
    with pytest.raises(RuntimeError, match="broke"):
        run_job(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert [json.loads(text)["custom_id"] for text in (tmp_path / "out.jsonl").read_text().splitlines()] == ["0"]
    assert not llm.engine.has_work
    monkeypatch.undo()
    llm.engine.executor._step = None  # type: ignore[attr-defined]  # what our own result() never took
    assert status(run(llm, tmp_path, [line("after")])[0]) == [200]


def test_paths_that_cannot_work_are_refused(llm: LLM, tmp_path: Path) -> None:
    good, out = tmp_path / "good.jsonl", tmp_path / "out.jsonl"
    good.write_text(json.dumps(line("a")))
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    out.write_text("precious")
    refused = [
        (tmp_path / "none.jsonl", out, "does not exist"),
        (tmp_path, out, "is no file"),
        (tmp_path / "empty.jsonl", tmp_path / "new.jsonl", "has no request"),
        (good, out, "exists.*--overwrite"),
        (good, tmp_path / "no" / "out.jsonl", "does not exist"),
        (good, tmp_path, "is a folder"),
    ]
    for source, target, text in refused:
        with pytest.raises(ConfigError, match=text):
            run_job(llm, source, target)
    with pytest.raises(ConfigError, match="is the input"):
        run_job(llm, good, good, overwrite=True)
    assert out.read_text() == "precious"


@pytest.mark.parametrize(("denied", "text"), [(os.R_OK, "may not be read"), (os.W_OK, "may not be written")])
def test_files_that_may_not_be_used_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: int, text: str
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(line("a")))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != denied)  # root, as in CI, may do everything
    with pytest.raises(ConfigError, match=text):
        JobFiles(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))


def test_the_examples_are_sixty_four_good_requests(llm: LLM) -> None:
    """Each is accepted by the engine, which does not run them here."""
    path = Path(__file__).parents[2] / "examples" / "requests.jsonl"
    requests = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({request["custom_id"] for request in requests}) == len(requests) == 64
    for request in requests:
        is_chat, body = request["url"] == openai.CHAT, request["body"]
        params = openai.sampling_params(body, is_chat)
        _, tokens = llm.tokens(body["messages"] if is_chat else openai.completion_prompt(body), is_chat)
        llm.engine.resolve("", tokens, params, chat=is_chat)


def test_a_job_and_other_users_of_the_engine_get_their_own_outputs(llm: LLM, tmp_path: Path) -> None:
    """A job in the middle of a stream, and an answer asked for in a job's progress: nothing is swallowed (J1)."""
    prompt, greedy = "Water boils at", SamplingParams(temperature=0, max_tokens=4)
    (alone,) = llm.generate(prompt, greedy)
    stream = llm.stream(prompt, greedy)
    parts = [next(stream)]
    records, _ = run_beside(llm, tmp_path, [line("a"), line("b")], lambda: parts.append(next(stream)))
    parts += list(stream)
    assert "".join(part.outputs[0].text for part in parts) == alone.outputs[0].text
    assert status(records) == [200, 200]
    answers: list[RequestOutput] = []
    records, _ = run_beside(llm, tmp_path, [line("a"), line("b")], lambda: answers.extend(llm.generate(prompt, greedy)))
    assert status(records) == [200, 200]
    assert {answer.outputs[0].text for answer in answers} == {alone.outputs[0].text}


def run_beside(llm: LLM, folder: Path, lines: list[Any], other: Callable[[], object]) -> tuple[Records, JobProgress]:
    """A job in whose progress, the first time, something else is done on the same engine; and another job too."""
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    calls = 0

    def on_progress(progress: JobProgress) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            other()
            run_job(llm, folder / "in.jsonl", folder / "inner.jsonl", overwrite=True)

    progress = run_job(llm, folder / "in.jsonl", folder / "out.jsonl", overwrite=True, on_progress=on_progress)
    inner = (folder / "inner.jsonl").read_text().splitlines()
    assert len(inner) == len(lines)
    return [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()], progress


@pytest.mark.parametrize("how", ["abort", "step"])
def test_an_iterator_whose_request_was_ended_by_somebody_else_says_so(llm: LLM, how: str) -> None:
    """It must not wait for an output that will never come."""
    stream = llm.stream("Water boils at", SamplingParams(temperature=0, max_tokens=8))
    next(stream)
    if how == "abort":
        (request_id,) = llm.engine.scheduler.live_ids()
        llm.engine.abort(request_id)
    else:
        while llm.engine.has_work:
            llm.engine.step()
    with pytest.raises(RequestError, match="somebody else took their outputs"):
        list(stream)


@pytest.mark.parametrize("prompts", [None, 5, 1.5, {1, 2}])
def test_prompts_of_no_kind_that_is_known_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts)
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate("x", 5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate(["x"], [None])  # type: ignore[list-item]


def test_the_speed_of_a_job_counts_its_own_tokens_only(llm: LLM, tmp_path: Path) -> None:
    llm.generate("Water boils at", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    _, progress = run(llm, tmp_path, [line("a", max_tokens=3, ignore_eos=True)])
    assert progress.tokens_per_second == 3 / progress.seconds
