"""Driver: over replicas in threads, whose links fail in every way, each request has its own result once."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from fakes import solo
from replicas import SlowExecutor, in_this_process

from paged import CheckpointError, EngineClosed, RequestFailed, RequestOutput, SamplingParams
from scheduler import dispatch
from scheduler import driver as driver_module
from scheduler.desk import PromptRequest, Result
from scheduler.driver import Driver, ReplicaAway, ReplicaGone
from scheduler.replica import Replica, SessionEnded

SECONDS = 60
pids = itertools.count(1)


class Link:
    """A replica in this process. A call may fail before it runs, or when its answer is on the way."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(8)
        self.replica: Replica | None = None
        self.error: Exception = ReplicaAway("it is away")  # of calls when there is no replica
        self.lose_answers_of: set[str] = set()  # each once
        self.hangs: Future[Any] | None = None  # what calls return then
        self.ended = False
        self.start()

    def start(self) -> None:
        made = in_this_process(lambda error: None, SlowExecutor(4097, 16))
        made._info = replace(made._info, pid=next(pids))
        self.replica = made

    def kill(self) -> None:
        """Calls under way fail, and so do others until it is started again."""
        replica, self.replica = self.replica, None
        if replica is not None:
            replica.close()

    def call(self, method: str, *args: Any) -> Future[Any]:
        if self.hangs is not None:
            return self.hangs
        return self.threads.submit(self._call, self.replica, method, args)

    def _call(self, replica: Replica | None, method: str, args: tuple[Any, ...]) -> Any:
        if replica is None:
            raise self.error
        try:
            answer = getattr(replica, method)(*args)
        except SessionEnded:
            if self.replica is not replica:
                raise self.error from None
            raise
        if self.replica is not replica or method in self.lose_answers_of:
            self.lose_answers_of.discard(method)
            raise ReplicaAway("its answer is lost")
        return answer

    def restart(self) -> None:
        self.hangs = None
        self.kill()
        self.start()

    def end(self) -> None:
        self.ended = True
        self.kill()


class Results:
    """Of numbered prompts; each may have one."""

    def __init__(self, driver: Driver, count: int, tokens: int = 12) -> None:
        self.found: dict[int, Result] = {}
        self.count, self.tokens = count, tokens
        self.changed = threading.Condition()
        params = SamplingParams(temperature=0, max_tokens=tokens)
        self.keys = [driver.add(PromptRequest(self.prompt(i), params), self.sink(i)) for i in range(count)]

    def prompt(self, i: int) -> list[int]:
        return [i % 900, 5, 6, 7, i % 900]

    def sink(self, i: int) -> Callable[[Result], None]:
        def put(result: Result) -> None:
            with self.changed:
                assert i not in self.found, "a second result"
                self.found[i] = result
                self.changed.notify_all()

        return put

    def wait(self, count: int | None = None) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.found) >= (count or self.count), SECONDS), "they hang"

    def check(self) -> None:
        self.wait()
        for i, result in self.found.items():
            assert isinstance(result, RequestOutput)
            assert result.outputs[0].token_ids == solo(self.prompt(i), self.tokens)


@pytest.fixture
def links() -> Iterator[list[Link]]:
    made = [Link(), Link(), Link()]
    yield made
    for link in made:
        link.kill()
        link.threads.shutdown()


@pytest.fixture
def driver(links: list[Link]) -> Iterator[Driver]:
    made = Driver(lost_after=2.0)
    for index, link in enumerate(links):
        made.found(index, link)
    assert made.wait(len(links), SECONDS)
    yield made
    made.close()


def test_replicas_that_come_and_go_at_random_cost_nothing(
    driver: Driver, links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "RETRY", 0.01)
    monkeypatch.setattr(dispatch, "GUILTY", 1000)  # nobody is to blame
    results = Results(driver, 600)
    draw = random.Random(0)
    for count in range(20, 600, 20):
        results.wait(count)
        link = draw.choice(links)
        link.lose_answers_of = {draw.choice(["take", "add", "open"])}
        if draw.random() < 0.7:
            link.kill()
            link.start()
    results.check()


@pytest.mark.parametrize("method", ["take", "add", "abort"])
def test_an_answer_that_is_lost_ends_the_session_and_no_result(driver: Driver, links: list[Link], method: str) -> None:
    for link in links:
        link.lose_answers_of = {method}
    results = Results(driver, 30)
    driver.abort(results.keys[:3])
    results.wait(27)
    assert all(not link.lose_answers_of for link in links) or method == "abort"
    results.count = len(results.found)
    results.check()
    assert driver.wait(3, SECONDS)


def test_a_replica_that_hangs_is_started_again(
    driver: Driver, links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "HUNG", 3.0)
    links[1].hangs = Future()
    results = Results(driver, 60)
    results.check()
    assert links[1].hangs is None
    assert driver.wait(3, SECONDS)


def test_when_none_comes_back_all_are_lost_and_one_that_comes_late_serves(driver: Driver, links: list[Link]) -> None:
    results = Results(driver, 100, tokens=900)
    for link in links:
        link.kill()
    results.wait()
    lost = [one for one in results.found.values() if isinstance(one, RequestFailed)]
    assert len(lost) > 50
    assert {"the cluster was lost" in str(one) for one in lost} == {True}
    assert {peer.state for peer in driver.peers()} == {"restarting"}
    links[0].start()
    assert driver.wait(1, SECONDS)
    Results(driver, 10).check()


def test_when_none_can_come_back_all_are_lost_at_once(links: list[Link]) -> None:
    driver = Driver(lost_after=1e9)
    try:
        for index, link in enumerate(links[:2]):
            driver.found(index, link)
        assert driver.wait(2, SECONDS)
        results = Results(driver, 100, 400)
        results.wait(1)
        links[0].kill()
        driver.none_returns("Ray has ended")  # the other is there, and goes on
        results.wait(10)
        assert all(isinstance(result, RequestOutput) for result in results.found.values())
        links[1].kill()
        began = time.monotonic()
        while len(results.found) < 100:
            driver.none_returns("Ray has ended")
            time.sleep(0.05)
            assert time.monotonic() < began + SECONDS
        lost = [result for result in results.found.values() if isinstance(result, RequestFailed)]
        assert "can be restarted" in str(lost[0])
        assert [peer.state for peer in driver.peers()] == ["lost", "lost"]
    finally:
        driver.close()


def test_a_replica_that_is_gone_is_not_called_again_and_another_may_take_its_number(
    driver: Driver, links: list[Link]
) -> None:
    links[0].error = ReplicaGone("for good")
    links[0].kill()
    until(lambda: driver.peers()[0].state == "lost")
    Results(driver, 10).check()
    counted = driver.stats().output_tokens
    driver.found(0, Link())
    until(lambda: driver.peers()[0].state != "lost")
    assert driver.wait(3, SECONDS)
    assert driver.stats().output_tokens == counted
    Results(driver, 10).check()


def test_what_a_constructor_refuses_is_raised_and_its_process_ended(driver: Driver) -> None:
    broken = Link()
    broken.kill()
    broken.error = CheckpointError("no such model")
    driver.found(3, broken)
    with pytest.raises(CheckpointError, match="no such model"):
        driver.wait(4, SECONDS)
    assert broken.ended
    Results(driver, 10).check()
    assert driver.wait(3, SECONDS)  # who needs no more than are warm does not mind


def test_who_waits_for_a_replica_that_was_up_and_is_gone_hears_of_it(driver: Driver, links: list[Link]) -> None:
    links[0].error = ReplicaGone("for good")
    links[0].kill()
    with pytest.raises(ReplicaGone, match="for good"):
        until(lambda: driver.wait(3, 0.01) and False)


def test_a_replica_that_was_away_is_not_given_up_at_its_first_refusal(
    driver: Driver, links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "RETRY", 0.01)
    monkeypatch.setattr(links[0], "restart", lambda: None)
    links[0].kill()
    until(lambda: driver.peers()[0].failures > 2 * driver_module.MOST_LOADS)
    links[0].error = CheckpointError("no memory")
    until(lambda: driver.peers()[0].refusals == 1)
    links[0].start()
    assert driver.wait(3, SECONDS)
    assert not links[0].ended
    assert (driver.peers()[0].failures, driver.peers()[0].refusals) == (0, 0)


def test_a_replica_that_never_comes_up_is_given_up(driver: Driver) -> None:
    away = Link()
    away.kill()
    driver.found(3, away)
    with pytest.raises(ReplicaAway, match="it is away"):
        driver.wait(4, SECONDS)


def test_closing_ends_what_waits_and_refuses_what_comes(driver: Driver, links: list[Link]) -> None:
    results = Results(driver, 50, tokens=900)
    driver.close()
    results.wait()
    assert any(isinstance(one, RequestFailed) and "was closed" in str(one) for one in results.found.values())
    with pytest.raises(EngineClosed):
        Results(driver, 1)
    until(lambda: all(link.replica is None or link.replica.report().requests == 0 for link in links))


def test_counters_go_on_when_a_process_is_another_or_none(driver: Driver, links: list[Link]) -> None:
    Results(driver, 30).check()
    until(lambda: driver.stats().output_tokens == 30 * 12)
    assert driver.stats().total_pages == 3 * 4096
    links[0].kill()
    until(lambda: driver.peers()[0].state == "restarting")
    links[0].start()
    assert driver.wait(3, SECONDS)
    until(lambda: driver.stats().total_pages == 3 * 4096)
    assert driver.stats().output_tokens == 30 * 12
    driver.dismiss(2)
    until(lambda: len(driver.peers()) == 2)
    assert driver.stats().output_tokens == 30 * 12
    assert driver.stats().total_pages == 2 * 4096


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
