"""The cost model: what it counts, how it is fitted, how it is written down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged import LLM, ConfigError, SamplingParams
from scheduler.calibrate import calibrate
from scheduler.cost import TERMS, CostModel, attended, fit, parse_cost


@given(n=st.integers(1, 40), context=st.integers(0, 60), windows=st.lists(st.none() | st.integers(1, 50), min_size=1))
def test_attention_is_counted_query_by_query(n: int, context: int, windows: list[int | None]) -> None:
    pairs = [
        min(position + 1, window or 10**9) for window in windows for position in range(context, context + n)
    ]  # each sees itself and those before
    read = [min(context, 10**9 if window is None else window - 1) for window in windows]
    expected = sum(read) / len(windows), sum(pairs) / len(windows)
    assert attended(n, context, tuple(windows)) == expected


def steps(count: int) -> list[list[float]]:
    rng = np.random.default_rng(1)
    found: list[list[float]] = rng.integers(1, 1000, (count, 4)).astype(float).tolist()
    return found


def test_a_fit_finds_the_model_that_the_times_come_from() -> None:
    true = CostModel(0.01, 1e-4, 2e-4, 1e-4, 3e-6, 1e-7, few=32)
    found = fit(steps(200), [true.seconds(*work) for work in steps(200)])
    assert found.few == 32
    for name in TERMS:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_the_first_tokens_cost_less_than_those_after() -> None:
    model = CostModel(step=1.0, token=0.1, more=0.5, few=8)
    assert [model.seconds(n, 0, 0, 0) for n in (1, 8, 10)] == pytest.approx([1.1, 1.8, 3.0])


def test_no_term_of_a_fit_is_negative_and_its_error_is_told() -> None:
    """Times that fall with the rows that sample: the best of the allowed models leaves that term out."""
    found = fit(steps(50), [0.01 + 2e-4 * work[0] - 1e-6 * work[1] for work in steps(50)])
    assert found.sample == 0
    assert min(found.step, found.token, found.read, found.pair) >= 0
    assert 0 < (found.error or 0) < 0.05


def test_numbers_and_files_give_the_same_model(tmp_path: Path) -> None:
    model = parse_cost("step=0.01, token=2e-4,pair=1e-7")
    assert model == CostModel(0.01, 2e-4, pair=1e-7)
    with_error = replace(model, error=0.04, measured="here")
    with_error.save(tmp_path / "cost.json")
    assert parse_cost(str(tmp_path / "cost.json")) == with_error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step=fast", "is not understood"),
        ("step=0.1,token", "is not understood"),
        ("token=0.1", "a cost model has step"),
        ("step=0.1,tokens=3", "a cost model has step"),
        ("step=-1", "step of a cost model must be seconds"),
        ("step=nan", "step of a cost model must be seconds"),
        ("step=0", "takes no time"),
        ("step=1,few=0.5", "few of a cost model must be a whole number"),
        ("none.json", "cannot be read as JSON"),
    ],
)
def test_a_cost_that_cannot_work_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_cost(text)


@pytest.mark.parametrize("content", ["[1]", '{"step": "1"}', '{"step": true}', "{"])
def test_a_file_that_holds_no_cost_model_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "cost.json").write_text(content)
    with pytest.raises(ConfigError):
        parse_cost(str(tmp_path / "cost.json"))


@pytest.mark.usefixtures("smollm2")
def test_calibration_measures_a_real_engine_and_leaves_it_as_it_was() -> None:
    llm = LLM("smollm2", dtype="float32", max_model_len=300, max_num_seqs=2, kv_memory="64MiB")
    params = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate(["The capital of France is"], params)
    model = calibrate(llm)
    assert model.step > 0
    assert model.token + model.more > 0  # the first tokens may cost nothing: they hide behind reading the weights
    assert model.error is not None
    assert "float32" in model.measured
    # A prompt of 256 tokens takes longer than one token after as many, whatever the machine.
    assert model.seconds(256, 1, 0, 32_896) > model.seconds(1, 1, 256, 257) > 0.001
    assert llm.engine.scheduler.manager.num_used == 0
    after = llm.generate(["The capital of France is"], params)
    assert after[0].outputs == before[0].outputs
    assert after[0].num_cached_tokens == 0
    llm.engine.add("one", [1, 2], params)
    with pytest.raises(ConfigError, match="without requests"):
        calibrate(llm)
    llm.close()
