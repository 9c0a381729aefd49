"""Engine: a step that raises, wherever it does, is raised; every request goes on as if nothing had been."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
from fakes import FailingTokenizer, FakeExecutor, fake_engine, idle, solo

import paged
from paged import BeamSearchParams, RequestOutput, SamplingParams
from scheduler.engine import Engine
from scheduler.request import Sequence
from scheduler.scheduler import Scheduler
from worker.executor import LocalExecutor
from worker.runner import ModelRunner
from worker.step import Step, StepResult

PROMPT = [5, 6, 7, 8, 9]


def greedy(max_tokens: int = 6, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def run(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.scheduler.check()
    assert idle(engine.scheduler.manager)
    return outputs


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


class FailsToSubmit(FakeExecutor):
    """Raises in submit() at step 2."""

    def submit(self, step: Step) -> None:
        if step.number == 2:
            raise ConnectionError("no worker")
        super().submit(step)


def answers_in_spite_of(error: type[BaseException], fake: FakeExecutor) -> tuple[Engine, dict[str, list[int]], int]:
    engine, _ = fake_engine(16, 4, executor=fake)
    for i in range(3):
        engine.add(f"r{i}", [*PROMPT, i], greedy(8))
    found: dict[str, list[int]] = {}
    raised = 0
    while engine.has_work:
        try:
            found |= {output.request_id: tokens(output) for output in engine.step()}
        except error:
            raised += 1
            assert engine.scheduler.manager.num_used == 0
        engine.scheduler.check()
    return engine, found, raised


@pytest.mark.parametrize("make", [RuntimeError, MemoryError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_step_that_raises_is_raised_and_every_request_goes_on(make: Callable[[], BaseException], at: int) -> None:
    error = make()
    fake = FakeExecutor(17, 4, raise_at={at: error, at + 1: error, at + 3: error})
    engine, found, raised = answers_in_spite_of(type(error), fake)
    assert raised == 3
    assert found == {f"r{i}": solo([*PROMPT, i], 8) for i in range(3)}
    assert idle(engine.scheduler.manager)


def test_a_step_that_cannot_be_submitted_is_raised_and_every_request_goes_on() -> None:
    engine, found, raised = answers_in_spite_of(ConnectionError, FailsToSubmit(17, 4))
    assert raised == 1
    assert found == {f"r{i}": solo([*PROMPT, i], 8) for i in range(3)}
    assert idle(engine.scheduler.manager)


def test_the_step_after_one_that_raised_is_a_restart_with_whole_rows() -> None:
    fake = FakeExecutor(17, 4, raise_at={2: RuntimeError()})
    answers_in_spite_of(RuntimeError, fake)
    assert [step.restart for step in fake.steps] == [True, False, False, True] + [False] * (len(fake.steps) - 4)
    assert all(row.reset is not None for row in fake.steps[3].rows)
    assert fake.steps[3].finished == ()


def test_what_was_computed_before_a_failure_is_found_again() -> None:
    """Full pages of steps that went well stay in the prefix cache; those of the failed step do not."""
    fake = FakeExecutor(17, 4, raise_at={1: RuntimeError()})
    engine, _ = fake_engine(16, 4, budget=8, executor=fake)
    engine.add("r", [*PROMPT] * 4, greedy(1))
    engine.step()
    with pytest.raises(RuntimeError):
        engine.step()
    (output,) = run(engine)
    reset = fake.steps[2].rows[0].reset
    assert reset is not None
    assert reset.num_computed == 8
    assert tokens(output) == solo([*PROMPT] * 4, 1)


def test_a_request_may_be_aborted_after_a_failure() -> None:
    engine, _ = fake_engine(16, 4, executor=FakeExecutor(17, 4, raise_at={1: RuntimeError()}))
    engine.add("r", PROMPT, greedy())
    engine.add("s", PROMPT, greedy())
    engine.step()
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.abort("r") is not None
    assert [tokens(output) for output in run(engine)] == [solo(PROMPT, 6)]


def raises_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """The method raises KeyboardInterrupt on its call number `at`, before it does anything."""
    honest, calls = getattr(owner, name), iter(range(1_000_000))

    def method(*args: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return honest(*args)

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        *[(Scheduler, "_waste", at) for at in (0, 4, 7)],  # the step is made, and not yet handed over
        *[(FakeExecutor, "result", at) for at in (0, 4, 7)],  # it is handed over, and not yet run
        *[(Scheduler, "update", at) for at in (0, 4, 7)],  # the worker has run it
        *[(Scheduler, "_computed", at) for at in (0, 1, 2)],  # some of it is taken in
        *[(Sequence, "append", at) for at in (0, 1, 2)],
        *[(Scheduler, "_update_lane", at) for at in (0, 3, 6)],
    ],
)
def test_ctrl_c_in_any_part_of_a_step_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int
) -> None:
    raises_once(monkeypatch, owner, name, at)
    engine, found, raised = answers_in_spite_of(KeyboardInterrupt, FakeExecutor(17, 4))
    assert raised == 1
    assert found == {f"r{i}": solo([*PROMPT, i], 8) for i in range(3)}
    assert idle(engine.scheduler.manager)


class Echo:
    """A runner that answers with the number of the step."""

    def execute(self, step: Step) -> StepResult:
        return StepResult(step.number, (), ())


def test_a_restart_takes_the_place_of_a_step_that_was_given_up() -> None:
    executor = LocalExecutor(cast("ModelRunner", Echo()), lambda path, replaced: pytest.fail("not asked for"))
    executor.submit(Step(0, ()))
    with pytest.raises(AssertionError, match="a step is under way"):
        executor.submit(Step(1, ()))
    executor.submit(Step(1, (), restart=True))
    assert executor.result().number == 1
    with pytest.raises(AssertionError, match="no step is under way"):
        executor.result()


def test_ctrl_c_at_any_line_leaves_everything_sound_and_loses_no_answer() -> None:
    """A signal at every so many lines of schedule, update and what they call; then all goes on to the same answers."""
    home = str(Path(paged.__file__).parent.parent)
    params: list[SamplingParams | BeamSearchParams] = [
        SamplingParams(temperature=1.0, n=2, max_tokens=6, seed=1),
        SamplingParams(temperature=0, max_tokens=9),
        BeamSearchParams(2, 5),
    ]

    def load(strike_at: int) -> tuple[dict[str, list[list[int]]], int, bool]:
        engine, _ = fake_engine(12, 4, budget=6)
        for i, param in enumerate(params):
            engine.add(f"r{i}", [*PROMPT, i], param)
        lines, struck = 0, False

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal lines, struck
            if not frame.f_code.co_filename.startswith((f"{home}/paged/", f"{home}/scheduler/")):
                return None
            if event == "line":
                lines += 1
                if lines == strike_at:
                    struck = True
                    signal.raise_signal(signal.SIGINT)
            return trace

        found: dict[str, list[list[int]]] = {}
        before = sys.gettrace()
        for _ in range(200):
            sys.settrace(trace)
            try:
                outputs = engine.step()
            except KeyboardInterrupt:
                outputs = []
                sys.settrace(before)
                engine.scheduler.check()
            finally:
                sys.settrace(before)
            for out in outputs:
                assert out.request_id not in found
                found[out.request_id] = [choice.token_ids for choice in out.outputs]
            if not engine.has_work and len(found) == 3:
                break
        assert idle(engine.scheduler.manager)
        return found, lines, struck

    expected, total, _ = load(0)
    assert len(expected) == 3
    step = max(1, total // 150)
    for strike_at in range(1, total, step):
        found, _, struck = load(strike_at)
        assert struck
        assert found == expected, f"line event {strike_at}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", range(1, 16))
def test_what_a_tokenizer_raises_ends_one_request_and_loses_no_answer(n: int, stream: bool) -> None:
    """S2, S4: every request ends once, the others with the tokens they have alone; the fault itself is raised."""
    params = {"a": greedy(1), "b": greedy(4, stop="no"), "c": greedy(5, stop=["such", "text"])}
    prompts = {"a": [1, 2], "b": [5, 6], "c": [7]}

    def answers(tokenizer: FailingTokenizer) -> tuple[dict[str, RequestOutput], int]:
        engine, _ = fake_engine(40, 4, tokenizer=cast(Any, tokenizer))
        for name, prompt in prompts.items():
            engine.add(name, prompt, params[name], stream=stream)
        found: list[RequestOutput] = []
        raised = 0
        for _ in range(20):
            try:
                found += engine.step()
            except RuntimeError:
                raised += 1
            engine.scheduler.check()
        assert not engine.has_work
        assert idle(engine.scheduler.manager)
        assert engine.stats.recomputed_tokens == 0
        ended = [output for output in found if output.finished]
        assert sorted(output.request_id for output in ended) == ["a", "b", "c"]
        for output in ended:  # of a stream, with all that came before
            parts = [it for it in found if it.request_id == output.request_id and it.outputs]
            output.outputs[0].token_ids = [token for part in parts for token in part.outputs[0].token_ids]
        return {output.request_id: output for output in ended}, raised

    counted = FailingTokenizer(0)
    wanted, _ = answers(counted)
    found, raised = answers(FailingTokenizer(n))
    ended = [name for name, output in found.items() if output.outputs[0].finish_reason == "abort"]
    assert len(ended) == raised == (n <= -counted.left)
    for name in found.keys() - set(ended):
        assert tokens(found[name]) == tokens(wanted[name])


def test_a_request_is_aborted_though_its_text_cannot_be_made() -> None:
    engine, _ = fake_engine(40, 4, tokenizer=cast(Any, FailingTokenizer(1)))
    engine.add("a", [1, 2], greedy(9))
    engine.step()
    output = engine.abort("a")
    assert output is not None
    assert (output.finished, output.outputs[0].finish_reason, output.outputs[0].text) == (True, "abort", "")
    assert idle(engine.scheduler.manager)
    with pytest.raises(RuntimeError, match="no text"):
        engine.step()
    assert not engine.has_work


def test_a_step_that_raises_names_its_requests() -> None:
    """The first prompt takes the whole budget of steps 0 to 2; the second has no row in them."""
    fake = FakeExecutor(41, 4, raise_at={1: RuntimeError()})
    engine, _ = fake_engine(40, 4, budget=8, executor=fake)
    for name in ("a", "b"):
        engine.add(name, [*PROMPT] * 4, greedy(2))
    engine.step()
    assert not engine.failed
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.failed == ("a",)
    assert engine.abort("a") is not None
    assert [output.request_id for output in run(engine)] == ["b"]
    assert not engine.failed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", range(1, 9))
def test_an_output_that_cannot_be_made_ends_its_request_and_no_other(n: int, stream: bool) -> None:
    """The text of single tokens beside log-probabilities; nobody has to compute anything again."""
    engine, _ = fake_engine(40, 4, tokenizer=cast(Any, FailingTokenizer(n)))
    engine.add("a", [1, 2], greedy(3, logprobs=1), stream=stream)
    engine.add("b", [5, 6], greedy(4), stream=stream)
    found: list[RequestOutput] = []
    failed: list[str] = []
    while engine.has_work:
        try:
            found += engine.step()
        except RuntimeError:
            failed += engine.failed
        engine.scheduler.check()
    assert len(failed) == 1
    assert sorted(output.request_id for output in found if output.finished) == ["a", "b"]
    other = "b" if failed == ["a"] else "a"
    given = [token for output in found if output.request_id == other for token in tokens(output)]
    assert given == (solo([5, 6], 4) if other == "b" else solo([1, 2], 3))
    assert engine.stats.recomputed_tokens == 0
    assert idle(engine.scheduler.manager)
