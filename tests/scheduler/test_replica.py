"""Replica: sessions over one engine thread; what is silent, left, unreadable or broken costs nobody else."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import FakeExecutor, idle, solo
from replicas import in_this_process, text

from paged import RequestError, RequestFailed, RequestOutput, SamplingParams
from scheduler.desk import LineRequest, PromptRequest, Response, Result
from scheduler.replica import SILENT, Replica, SessionEnded
from worker.executor import WorkerLost
from worker.step import Step, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def prompt(i: int, **more: Any) -> bytes:
    return pickle.dumps(PromptRequest([i, 2, 3, 4, i], SamplingParams(temperature=0, max_tokens=6), **more))


def line(i: int) -> bytes:
    body = {"prompt": text([i, 2, 3, 4, i]), "temperature": 0, "max_tokens": 6}
    return pickle.dumps(LineRequest("POST", "/v1/completions", body))


def answers(replica: Replica, client: str, count: int) -> dict[str, Result]:
    """So many results of a session, each key once."""
    found: dict[str, Result] = {}
    while len(found) < count:
        results, _ = replica.take(client, 60)
        assert results, "nothing came"
        assert not found.keys() & {key for key, _ in results}
        found.update(results)
    assert len(found) == count
    return found


def tokens(result: Result) -> list[int]:
    assert isinstance(result, RequestOutput)
    return result.outputs[0].token_ids


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def not_broken(error: BaseException) -> None:
    pytest.fail(f"taken for broken: {error!r}")


class Shut(FakeExecutor):
    """Steps wait until the gate is open."""

    def __init__(self) -> None:
        super().__init__(4097, 16)
        self.gate = threading.Event()

    def submit(self, step: Step) -> None:
        self.gate.wait(60)
        super().submit(step)


class Failing(FakeExecutor):
    """The next steps raise these, one each."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(4097, 16)
        self.errors = list(errors)

    def execute(self, step: Step) -> StepResult:
        if self.errors:
            raise self.errors.pop(0)
        return super().execute(step)


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = in_this_process(not_broken)
    yield made
    made.close()


def test_prompts_and_lines_have_their_own_results(replica: Replica) -> None:
    info = replica.open("me")
    assert (info.pid, info.room, info.model_name) == (os.getpid(), 16, "fake")
    replica.add("me", [(f"p{i}", prompt(i)) for i in range(10)])
    replica.add("me", [(f"l{i}", line(i)) for i in range(10)])
    found = answers(replica, "me", 20)
    for i in range(10):
        wanted = solo([i, 2, 3, 4, i], 6)
        assert tokens(found[f"p{i}"]) == wanted
        response = found[f"l{i}"]
        assert isinstance(response, Response)
        assert response.body is not None
        assert response.body["choices"][0]["text"] == text(wanted)
    assert replica.report().requests == 0
    assert replica.report().stats.finished == 20


def test_sessions_may_have_the_same_keys(replica: Replica) -> None:
    for i, client in enumerate(("a", "b")):
        replica.open(client)
        replica.add(client, [("key", prompt(i))])
    for i, client in enumerate(("a", "b")):
        assert tokens(answers(replica, client, 1)["key"]) == solo([i, 2, 3, 4, i], 6)


def test_take_waits_no_longer_than_it_is_told(replica: Replica) -> None:
    replica.open("me")
    results, report = replica.take("me", 0.01)
    assert (results, report.requests) == ([], 0)


def test_a_session_that_is_not_open_has_nothing(replica: Replica) -> None:
    for call in (
        lambda: replica.add("me", [("0", prompt(0))]),
        lambda: replica.take("me", 0),
        lambda: replica.abort("me", ["0"]),
    ):
        with pytest.raises(SessionEnded, match="session me is not open here"):
            call()
    replica.leave("me")


def test_what_is_wrong_with_a_request_is_its_own_result(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    before = replica._desk.llm.tokens

    def tokens_or_fault(given: Any, chat: bool) -> Any:
        if given == "boom":
            raise ZeroDivisionError("a tokenizer's fault")
        return before(given, chat)

    monkeypatch.setattr(replica._desk.llm, "tokens", tokens_or_fault)
    replica.open("me")
    requests = [
        ("refused", pickle.dumps(PromptRequest([5000], GREEDY))),
        ("unreadable", b"no pickle"),
        ("fault", pickle.dumps(PromptRequest("boom", GREEDY))),
        ("fault of a line", pickle.dumps(LineRequest("POST", "/v1/completions", {"prompt": "boom"}))),
        ("good", prompt(1)),
    ]
    replica.add("me", requests)
    found = answers(replica, "me", 5)
    assert isinstance(found["refused"], RequestError)
    assert "cannot be read by a replica" in str(found["unreadable"])
    assert isinstance(found["fault"], RequestFailed)
    assert "a tokenizer's fault" in str(found["fault"])
    response = found["fault of a line"]
    assert isinstance(response, Response)
    assert response.status == 500
    assert tokens(found["good"]) == solo([1, 2, 3, 4, 1], 6)


def test_aborted_requests_have_no_result_and_hold_nothing() -> None:
    executor = Shut()
    replica = in_this_process(not_broken, executor)
    replica.open("me")
    replica.add("me", [(str(i), prompt(i)) for i in range(8)])
    replica.abort("me", [str(i) for i in range(7)] + ["unknown"])
    executor.gate.set()
    assert set(answers(replica, "me", 1)) == {"7"}
    assert replica.take("me", 0.01)[0] == []
    replica.close()
    assert idle(replica._desk.llm.engine.scheduler.manager)


def test_a_client_that_takes_no_more_is_dead_and_one_that_waits_is_not() -> None:
    now = 0.0
    executor = Shut()
    replica = in_this_process(not_broken, executor, lambda: now)
    for client in ("silent", "waiting", "other"):
        replica.open(client)
    replica.add("silent", [(str(i), prompt(i)) for i in range(30)])
    replica.add("waiting", [("0", prompt(0))])
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(replica.take("waiting", 60)))
    waiting.start()
    until(lambda: replica._sessions["waiting"].taking == 1)
    now = SILENT + 1
    executor.gate.set()
    replica.add("other", [("0", prompt(0))])
    until(lambda: "silent" not in replica._sessions)
    waiting.join()
    assert [key for key, _ in found[0][0]] == ["0"]
    with pytest.raises(SessionEnded):
        replica.take("silent", 0)
    until(lambda: replica.report().requests == 0)
    assert replica.report().stats.output_tokens < 30 * 6
    replica.close()
    assert idle(replica._desk.llm.engine.scheduler.manager)


def test_leaving_wakes_who_waits_for_results(replica: Replica) -> None:
    replica.open("me")
    raised: list[BaseException] = []

    def take() -> None:
        try:
            replica.take("me", 60)
        except SessionEnded as error:
            raised.append(error)

    waiting = threading.Thread(target=take)
    waiting.start()
    until(lambda: replica._sessions["me"].taking == 1)
    replica.leave("me")
    waiting.join(60)
    assert len(raised) == 1


def test_steps_that_fail_twice_cost_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    replica = in_this_process(not_broken, Failing(OSError("once"), OSError("twice")))
    replica.open("me")
    replica.add("me", [("0", prompt(0))])
    assert tokens(answers(replica, "me", 1)["0"]) == solo([0, 2, 3, 4, 0], 6)
    replica.close()
    assert "a step failed, its requests go on: OSError('twice')" in capsys.readouterr().err


@pytest.mark.parametrize("errors", [(OSError("1"), OSError("2"), OSError("3")), (WorkerLost("rank 1 has ended"),)])
def test_an_engine_that_is_broken_ends_the_process(errors: tuple[Exception, ...]) -> None:
    ended: list[BaseException] = []
    replica = in_this_process(ended.append, Failing(*errors))
    replica.open("me")
    replica.add("me", [("0", prompt(0))])
    until(lambda: bool(ended))
    assert ended == [errors[-1]]
