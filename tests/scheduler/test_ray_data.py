"""Generate: in any batch format each row has the LLM's answer, or says what is wrong with it alone."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paged import ConfigError, EngineConfig, Generate, SamplingParams
from worker.checkpoints import Checkpoint

PROMPTS: list[Any] = ["The capital of France is", None, "Water boils at", [504, 2365, 6354], [5] * 600, 7, ""]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_memory": "64MiB", "max_model_len": 256, "threads": 1}
NEW = ["text", "prompt_tokens", "output_tokens", "finish_reason", "error"]


@pytest.fixture(scope="module")
def generate(smollm2: Checkpoint) -> Generate:
    return Generate("smollm2", GREEDY, **SETTINGS)


@pytest.fixture(scope="module")
def chat(generate: Generate) -> Generate:
    """The same model, for conversations."""
    made = Generate.__new__(Generate)
    made.__dict__.update(generate.__dict__, _chat=True, _input="messages", _output="answer")
    return made


def arrays(prompts: list[Any]) -> np.ndarray[Any, Any]:
    """As Ray gives a column of lists."""
    column = np.empty(len(prompts), dtype=object)
    column[:] = [np.array(prompt) if isinstance(prompt, list) else prompt for prompt in prompts]
    return column


def texts(generate: Generate, prompts: list[Any]) -> list[str]:
    outputs = generate._desk.llm.generate(prompts, GREEDY)
    return [output.outputs[0].text for output in outputs]


def test_each_row_of_a_dict_is_answered_or_says_what_is_wrong(generate: Generate) -> None:
    batch = {"number": np.arange(7), "prompt": arrays(PROMPTS)}
    answered = generate(batch)
    assert list(answered) == ["number", "prompt", *NEW]
    assert answered["number"] is batch["number"]
    good = [0, 2, 3]
    assert [answered["text"][i] for i in good] == texts(generate, [PROMPTS[i] for i in good])
    assert answered["error"].tolist() == [
        None,
        "a prompt is text or a list of token ids, not None",
        None,
        None,
        answered["error"][4],
        "a prompt is text or a list of token ids, not 7",
        answered["error"][6],
    ]
    assert "600" in answered["error"][4]
    assert "at least one token" in answered["error"][6] or "empty" in answered["error"][6]
    assert answered["prompt_tokens"].tolist() == [5, 0, 3, 3, 0, 0, 0]
    assert answered["output_tokens"].tolist() == [4, 0, 4, 4, 0, 0, 0]
    assert answered["finish_reason"].tolist() == [None if error else "length" for error in answered["error"]]
    assert answered["prompt_tokens"].dtype == answered["output_tokens"].dtype == np.int64
    generate._desk.llm.engine.scheduler.check()


def test_pandas_and_pyarrow_give_the_same_in_their_own_form(generate: Generate) -> None:
    import pandas
    import pyarrow

    prompts = ["The capital of France is", None, "Water boils at"]
    expected = generate({"prompt": arrays(prompts)})
    frame = generate(pandas.DataFrame({"prompt": pandas.Series(prompts, dtype=object), "number": [1, 2, 3]}))
    assert list(frame) == ["prompt", "number", *NEW]
    table = generate(pyarrow.table({"prompt": prompts, "text": [1, 2, 3]}))  # a column of that name is replaced
    assert table.column_names == ["prompt", *NEW]
    for name in NEW:
        values = [None if pandas.isna(value) else value for value in frame[name]]
        assert values == table[name].to_pylist() == expected[name].tolist()
    kinds = [pyarrow.string(), pyarrow.int64(), pyarrow.int64(), pyarrow.string(), pyarrow.string()]
    assert table.schema.types[1:] == kinds
    # A column without any value keeps its type too, so that all batches have one schema.
    assert generate(pyarrow.table({"prompt": prompts[:1]})).schema.types[1:] == kinds


def test_token_ids_may_be_a_column_of_two_dimensions(generate: Generate) -> None:
    ids = np.array([[504, 2365, 6354], [504, 2365, 1000]])
    assert generate({"prompt": ids})["text"].tolist() == texts(generate, ids.tolist())


def test_conversations_are_answered_in_any_form(chat: Generate) -> None:
    import pyarrow

    parts = [{"type": "text", "text": "Name a"}, {"type": "text", "text": " river."}]
    plain = [[{"role": "user", "content": "Name a river."}], []]
    (expected,) = chat._desk.llm.chat([plain[0]], GREEDY)
    for batch in (
        {"messages": arrays([[*plain[0]], []])},
        {"messages": arrays([[{"role": "user", "content": np.array(parts)}], []])},
        pyarrow.table({"messages": plain}),
    ):
        answered = chat(batch)
        assert (
            answered["answer"].tolist()
            if isinstance(batch, dict)
            else answered["answer"].to_pylist()
            == [
                expected.outputs[0].text,
                None,
            ]
        )
        assert "messages" in str(answered["error"][1])


def test_an_empty_batch_gives_empty_columns(generate: Generate) -> None:
    answered = generate({"prompt": np.array([], dtype=object)})
    assert {name: len(values) for name, values in answered.items()} == dict.fromkeys(["prompt", *NEW], 0)


def test_after_a_step_that_failed_the_next_batch_is_answered(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = generate._desk.llm.engine.executor
    with monkeypatch.context() as patched:
        patched.setattr(executor, "result", lambda: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            generate({"prompt": arrays(["Water boils at"])})
    assert len(generate._desk) == 0
    answered = generate({"prompt": arrays(["Water boils at"])})
    assert answered["text"].tolist() == texts(generate, ["Water boils at"])
    generate._desk.llm.engine.scheduler.check()


def test_a_batch_without_the_column_is_an_error(generate: Generate) -> None:
    with pytest.raises(KeyError, match="prompt"):
        generate({"text": arrays(["a"])})


def test_settings_are_checked_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="n is 2"):
        Generate("smollm2", SamplingParams(n=2), **SETTINGS)
    with pytest.raises(ConfigError, match="did you mean kv_memory"):
        Generate("smollm2", kv_memmory="1GiB", threads=1)


@pytest.mark.parametrize(("cpus", "threads"), [({"CPU": 3.0}, 3), ({"CPU": 0.5}, 1), ({}, 1)])
def test_an_actor_takes_as_many_threads_as_it_has_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: dict[str, float], threads: int
) -> None:
    made: list[EngineConfig] = []
    monkeypatch.setattr("scheduler.ray_data.LLM", SimpleNamespace(from_config=made.append))
    fake = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_assigned_resources=lambda: cpus))
    monkeypatch.setitem(sys.modules, "ray", fake)
    Generate("smollm2")
    Generate("smollm2", threads=5)
    assert [config.threads for config in made] == [threads, 5]


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'paged-kv\[ray\]'"):
        Generate("smollm2")
