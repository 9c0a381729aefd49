"""Dispatcher: each request has exactly one result, whatever replicas do, and who kills them is found."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from paged import RequestFailed
from scheduler.desk import Response, Result
from scheduler.dispatch import LOST_AFTER, Dispatcher, Parcel

ROOM = 4
ANSWER = Response(200, {})


def parcel(line: bool = True, prefix: int = 0) -> Parcel:
    return Parcel(b"data", (prefix,) if prefix else (), 100, line)


def code(result: Result) -> int | str:
    assert isinstance(result, Response)
    return result.status


def sent(dispatcher: Dispatcher) -> dict[int, list[str]]:
    """The keys that go to each replica now."""
    found = {index: [key for key, data in requests] for index, requests in dispatcher.send().items()}
    dispatcher.check()
    return found


def filled(replicas: int, requests: int, room: int = ROOM) -> tuple[Dispatcher, dict[int, list[str]]]:
    """A dispatcher whose requests `0`, `1`, ... are at its replicas, as far as there is room."""
    dispatcher = Dispatcher()
    for index in range(replicas):
        dispatcher.replica_up(index, room, 1000, room)
    for i in range(requests):
        dispatcher.add(str(i), parcel())
    return dispatcher, sent(dispatcher)


def test_requests_go_out_as_far_as_there_is_room_and_the_rest_as_answers_come() -> None:
    dispatcher, there = filled(2, 10)
    assert sorted(len(keys) for keys in there.values()) == [ROOM, ROOM]
    assert (dispatcher.room, len(dispatcher)) == (2 * ROOM, 10)
    dispatcher.results(0, [(key, ANSWER) for key in there[0][:2]], 2)
    assert dispatcher.answers() == [(key, ANSWER) for key in there[0][:2]]
    assert sent(dispatcher) == {0: ["8", "9"]}
    assert dispatcher.answers() == []


def test_a_request_goes_where_its_prefix_is_though_another_replica_has_just_answered() -> None:
    """In flight at all are no more than both have room for, of which one may have more than half."""
    dispatcher = Dispatcher()
    for index in range(2):
        dispatcher.replica_up(index, ROOM, 1000, 10 * ROOM)
    dispatcher.add("first", parcel(prefix=7))
    ((holder, _),) = sent(dispatcher).items()
    for i in range(2 * ROOM):
        dispatcher.add(str(i), parcel())
    there = sent(dispatcher)
    assert {index: len(keys) for index, keys in there.items()} == {holder: ROOM - 1, 1 - holder: ROOM}
    dispatcher.add("last", parcel(prefix=7))
    assert sent(dispatcher) == {}
    other = 1 - holder
    dispatcher.results(other, [(key, ANSWER) for key in there[other][:2]], ROOM - 2)
    went = sent(dispatcher)
    assert sum(map(len, went.values())) == 2
    assert "last" in went[holder]


def test_what_a_dead_replica_had_is_sent_first_in_its_order_to_others_and_to_it_when_it_is_back() -> None:
    dispatcher, there = filled(2, 10)
    dispatcher.replica_down(0, now=0.0)
    assert sent(dispatcher) == {}  # the other one is full
    dispatcher.results(1, [(there[1][0], ANSWER)], 3)
    assert sent(dispatcher) == {1: there[0][:1]}
    dispatcher.replica_up(0, ROOM, 1000, ROOM)
    assert sent(dispatcher) == {0: [*there[0][1:], "8"]}


def test_a_result_that_a_replica_had_before_it_died_counts_no_more() -> None:
    dispatcher, _ = filled(1, 1)
    dispatcher.replica_down(0, now=0.0)
    dispatcher.replica_up(0, ROOM, 1000, ROOM)
    dispatcher.results(0, [("0", ANSWER)], 0)
    assert dispatcher.answers() == []
    assert sent(dispatcher) == {0: ["0"]}
    dispatcher.results(0, [("0", ANSWER), ("0", ANSWER)], 0)
    assert dispatcher.answers() == [("0", ANSWER)]


def test_an_aborted_request_has_no_result_and_its_replica_is_told() -> None:
    dispatcher, _ = filled(1, 6)
    assert dispatcher.abort(["1", "5", "unknown"]) == {0: ["1"]}
    dispatcher.results(0, [("1", ANSWER), ("0", ANSWER)], 2)
    assert [key for key, _ in dispatcher.answers()] == ["0"]
    assert sent(dispatcher) == {0: ["4"]}
    assert len(dispatcher) == 3


def test_who_was_there_at_two_deaths_runs_alone_while_others_go_on_elsewhere() -> None:
    dispatcher, _ = filled(1, 2)
    dispatcher.replica_down(0, now=0.0)
    dispatcher.replica_up(0, ROOM, 1000, ROOM)
    assert sent(dispatcher) == {0: ["0", "1"]}
    dispatcher.replica_down(0, now=1.0)
    dispatcher.replica_up(0, ROOM, 1000, ROOM)
    dispatcher.replica_up(1, ROOM, 1000, ROOM)
    dispatcher.add("new", parcel())
    found = sent(dispatcher)
    assert sorted(found.values()) == [["0"], ["new"]]
    (alone,) = (index for index, keys in found.items() if keys == ["0"])
    dispatcher.add("another", parcel())
    assert sent(dispatcher) == {1 - alone: ["another"]}
    dispatcher.results(alone, [("0", ANSWER)], 0)
    assert sent(dispatcher) == {alone: ["1"]}
    dispatcher.results(alone, [("1", ANSWER)], 0)
    for i in range(4):
        dispatcher.add(f"more {i}", parcel())
    assert set(sent(dispatcher)) == {0, 1}  # it takes others again


def test_who_is_never_alone_is_answered_at_the_eighth_death() -> None:
    dispatcher, _ = filled(1, 1)
    for death in range(8):
        assert dispatcher.answers() == []
        dispatcher.results(0, [], requests=5)  # those of another driver
        dispatcher.replica_down(0, now=float(death))
        dispatcher.replica_up(0, ROOM, 1000, ROOM)
        dispatcher.send()
    ((key, result),) = dispatcher.answers()
    assert key == "0"
    assert isinstance(result, Response)
    assert (result.status, result.message) == (
        "request_kills_worker",
        "8 times the replica that computed this request died, so the request is not tried again",
    )


def test_a_busy_replica_takes_nothing_new_until_a_suspect_has_run_there() -> None:
    dispatcher, _ = filled(1, 2)
    for _ in range(2):
        dispatcher.replica_down(0, now=0.0)
        dispatcher.replica_up(0, ROOM, 1000, ROOM)
        dispatcher.send()
    dispatcher.results(0, [("0", ANSWER)], 0)  # the first suspect
    dispatcher.add("late", parcel())
    assert sent(dispatcher) == {0: ["1"]}
    dispatcher.results(0, [("1", ANSWER)], 0)
    assert sent(dispatcher) == {0: ["late"]}


def test_a_suspect_waits_for_a_replica_that_is_up() -> None:
    dispatcher, _ = filled(1, 3)
    for _ in range(2):
        dispatcher.replica_down(0, now=0.0)
        dispatcher.replica_up(0, ROOM, 1000, ROOM)
        dispatcher.send()
    dispatcher.replica_down(0, now=1.0)  # it was reserved
    assert sent(dispatcher) == {}
    dispatcher.replica_up(0, ROOM, 1000, ROOM)
    assert sent(dispatcher) == {0: ["1"]}


@pytest.mark.parametrize("line", [True, False])
def test_who_was_alone_at_two_deaths_is_answered_so(line: bool) -> None:
    dispatcher = Dispatcher()
    dispatcher.add("poison", parcel(line))
    for _ in range(2):
        assert dispatcher.answers() == []
        dispatcher.replica_up(0, ROOM, 1000, ROOM)
        assert sent(dispatcher) == {0: ["poison"]}
        dispatcher.replica_down(0, now=0.0)
    ((key, result),) = dispatcher.answers()
    assert key == "poison"
    if line:
        assert isinstance(result, Response)
        assert (result.status, result.body) == ("request_kills_worker", None)
        message = result.message
    else:
        assert isinstance(result, RequestFailed)
        message = str(result)
    assert "died 2 times while it had nothing else to do" in message


def test_deaths_while_another_client_had_requests_there_prove_nothing() -> None:
    dispatcher = Dispatcher()
    dispatcher.add("0", parcel())
    for _ in range(5):
        dispatcher.replica_up(0, ROOM, 1000, ROOM)
        assert sent(dispatcher) == {0: ["0"]}
        dispatcher.results(0, [], 2)
        dispatcher.replica_down(0, now=0.0)
    assert dispatcher.answers() == []


def test_replicas_that_are_ended_on_purpose_count_as_no_deaths() -> None:
    dispatcher = Dispatcher()
    dispatcher.add("0", parcel())
    for index in range(5):
        dispatcher.replica_up(index, ROOM, 1000, ROOM)
        assert sent(dispatcher) == {index: ["0"]}
        dispatcher.replica_lost(index, now=0.0)
    for _ in range(5):
        dispatcher.replica_up(9, ROOM, 1000, ROOM)
        assert sent(dispatcher) == {9: ["0"]}
        dispatcher.replica_down(9, now=0.0, died=False)
    assert dispatcher.answers() == []


def test_with_nothing_left_that_could_come_back_everything_is_lost_at_once() -> None:
    """R01, the constructor of the replacement fails."""
    dispatcher, _ = filled(2, 10)
    dispatcher.replica_down(0, now=5.0)
    dispatcher.replica_down(1, now=5.0)
    dispatcher.replica_lost(0, now=6.0)
    dispatcher.tick(6.0)
    assert dispatcher.answers() == []
    dispatcher.replica_lost(1, now=7.0)
    dispatcher.tick(7.0)
    dispatcher.add("late", parcel(line=False))
    answers = dict(dispatcher.answers())
    assert {code(answers[str(i)]) for i in range(10)} == {"cluster_lost"}
    assert isinstance(answers["late"], RequestFailed)
    assert dispatcher.room > 0  # a job goes on, so that every line has its record


def test_what_does_not_come_back_in_time_is_lost_and_serves_again_if_it_comes_late() -> None:
    dispatcher, _ = filled(1, 1)
    dispatcher.replica_down(0, now=100.0)
    dispatcher.tick(100.0 + LOST_AFTER - 1)
    assert dispatcher.answers() == []
    dispatcher.tick(100.0 + LOST_AFTER)
    ((key, result),) = dispatcher.answers()
    assert (key, code(result)) == ("0", "cluster_lost")
    dispatcher.replica_up(0, ROOM, 1000, ROOM)
    dispatcher.add("1", parcel())
    assert sent(dispatcher) == {0: ["1"]}


def test_a_model_that_loads_slowly_has_more_time_to_come_back() -> None:
    dispatcher = Dispatcher()
    dispatcher.replica_up(0, ROOM, 1000, ROOM, load_s=200.0)
    dispatcher.add("0", parcel())
    dispatcher.replica_down(0, now=0.0)
    dispatcher.tick(419.0)
    assert dispatcher.answers() == []
    dispatcher.tick(420.0)
    assert len(dispatcher.answers()) == 1


def test_before_the_first_replica_is_up_nothing_is_lost() -> None:
    dispatcher = Dispatcher()
    dispatcher.replica_starting(0)
    dispatcher.add("0", parcel())
    dispatcher.tick(1e6)
    assert dispatcher.answers() == []
    dispatcher.replica_lost(0, now=1e6)
    dispatcher.tick(1e6)
    assert len(dispatcher.answers()) == 1


@given(
    replicas=st.integers(1, 4),
    innocents=st.integers(0, 30),
    poisons=st.integers(1, 3),
    kills=st.integers(0, 4),
    seed=st.integers(0, 2**32),
)
def test_a_request_that_kills_its_replica_is_found_and_costs_no_other_its_answer(
    replicas: int, innocents: int, poisons: int, kills: int, seed: int
) -> None:
    """Beside poisons, somebody kills replicas too, never twice the same request's while it is alone."""
    draw = random.Random(seed)
    dispatcher = Dispatcher()
    poisoned = {f"poison {i}" for i in range(poisons)}
    keys = [*poisoned, *(f"good {i}" for i in range(innocents))]
    draw.shuffle(keys)
    for key in keys:
        dispatcher.add(key, parcel(prefix=draw.randrange(3)))
    there: dict[int, set[str]] = {}
    answers: dict[str, Result] = {}
    deaths = dict.fromkeys(poisoned, 0)
    hit: set[str] = set()

    def die(index: int) -> None:
        dispatcher.replica_down(index, now=0.0)
        for key in poisoned & there[index]:
            deaths[key] += 1
        del there[index]

    for _ in range(2000):
        for index in range(replicas):
            if index not in there and draw.random() < 0.3:
                there[index] = set()
                dispatcher.replica_up(index, ROOM, 1000, ROOM)
        for index, found in sent(dispatcher).items():
            there[index].update(found)
        if not there:
            continue
        index = draw.choice(sorted(there))
        bad = poisoned & there[index]
        alone = next(iter(there[index])) if len(there[index]) == 1 else None
        if bad and draw.random() < 0.7:
            die(index)
        elif kills and there[index] and alone not in hit and not bad and draw.random() < 0.3:
            kills -= 1
            hit.update(() if alone is None else (alone,))
            die(index)
        elif there[index] - poisoned:
            key = draw.choice(sorted(there[index] - poisoned))
            there[index].remove(key)
            dispatcher.results(index, [(key, ANSWER)], len(there[index]))
        for key, result in dispatcher.answers():
            assert key not in answers
            answers[key] = result
        if len(answers) == len(keys):
            break
    assert {key: code(result) for key, result in answers.items()} == {
        key: "request_kills_worker" if key in poisoned else 200 for key in keys
    }
    assert max(deaths.values()) <= 4


class Machine(RuleBasedStateMachine):
    """Any events in any order, against a model of who has what."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = self.make()
        self.now = 0.0
        self.count = 0
        self.open: set[str] = set()  # requests without a result
        self.up: dict[int, set[str]] = {}  # what each replica that is up has
        self.deaths: dict[str, int] = {}
        self.down: set[int] = set()

    def make(self) -> Dispatcher:
        return Dispatcher()

    def note(self) -> None:
        for key, result in self.dispatcher.answers():
            assert key in self.open, f"{key} has a second result, or one after its abort"
            self.open.remove(key)
            if code(result) == "request_kills_worker":
                assert self.deaths[key] >= 2
        held = set[str]().union(*self.up.values())
        assert len(self.dispatcher) == len(self.open)
        assert self.dispatcher.lost or held <= self.open

    def send(self) -> None:
        for index, keys in sent(self.dispatcher).items():
            assert index in self.up, "sent to a replica that is not up"
            for key in keys:
                assert key in self.open, "sent, and nobody waits for it"
                assert all(key not in there for there in self.up.values()), "sent twice"
            self.up[index].update(keys)
            assert len(self.up[index]) <= 2 * ROOM, "more in flight than there is room for"
            suspects = [key for key in self.up[index] if self.deaths[key] >= 2]
            assert not suspects or len(self.up[index]) == 1, "a suspect is not alone"
        self.note()

    @rule(prefix=st.integers(0, 3), count=st.integers(1, 6))
    def add(self, prefix: int, count: int) -> None:
        for _ in range(count):
            key = str(self.count)
            self.count += 1
            self.open.add(key)
            self.deaths[key] = 0
            self.dispatcher.add(key, parcel(prefix=prefix))
        self.note()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        keys = data.draw(st.sets(st.sampled_from(sorted(self.open)), min_size=1, max_size=3))
        there = self.dispatcher.abort(keys)
        expected = {index: sorted(keys & held) for index, held in self.up.items() if keys & held}
        assert {index: sorted(found) for index, found in there.items()} == expected
        self.open -= keys
        for held in self.up.values():
            held -= keys
        self.note()

    @rule()
    def send_now(self) -> None:
        self.send()

    @rule(index=st.integers(0, 3))
    def up_or_starting(self, index: int) -> None:
        if index in self.up:
            self.dispatcher.replica_starting(index)
            return
        self.down.discard(index)
        self.up[index] = set()
        self.dispatcher.replica_up(index, ROOM, 500, ROOM)
        self.send()

    @precondition(lambda self: self.up)
    @rule(data=st.data(), died=st.booleans())
    def die(self, data: st.DataObject, died: bool) -> None:
        index = data.draw(st.sampled_from(sorted(self.up)))
        for key in self.up.pop(index):
            self.deaths[key] += died
        self.down.add(index)
        self.dispatcher.replica_down(index, self.now, died=died)
        self.note()

    @rule(index=st.integers(0, 3))
    def lose(self, index: int) -> None:
        self.up.pop(index, None)
        self.down.discard(index)
        self.dispatcher.replica_lost(index, self.now)
        self.note()

    @precondition(lambda self: any(self.up.values()))
    @rule(data=st.data(), others=st.integers(0, 2))
    def answer(self, data: st.DataObject, others: int) -> None:
        index = data.draw(st.sampled_from([index for index, held in sorted(self.up.items()) if held]))
        keys = data.draw(st.sets(st.sampled_from(sorted(self.up[index])), min_size=1))
        self.up[index] -= keys
        stray = [(str(self.count + 1), ANSWER), *((key, ANSWER) for key in self.elsewhere(index))]
        answers = [(key, ANSWER) for key in keys]
        self.dispatcher.results(index, [*answers, *stray], len(self.up[index]) + others)
        self.note()

    def elsewhere(self, index: int) -> Iterable[str]:
        """What another replica has: its result from here would be one of a session that has ended."""
        return [key for other, held in self.up.items() if other != index for key in list(held)[:1]]

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.dispatcher.tick(self.now)
        if self.dispatcher.lost:
            assert not self.up
        self.note()

    @invariant()
    def consistent(self) -> None:
        self.dispatcher.check()

    def teardown(self) -> None:
        """From wherever it is, all are answered by one replica that lives."""
        if 0 not in self.up:
            self.dispatcher.replica_up(0, ROOM, 500, ROOM)
            self.up[0] = set()
        for _ in range(2 * self.count + 1):
            self.send()
            for index, held in self.up.items():
                answers: list[tuple[str, Any]] = [(key, ANSWER) for key in held]
                held.clear()
                self.dispatcher.results(index, answers, 0)
            self.note()
        assert not self.open
        self.dispatcher.check()


PLANTED = settings(
    max_examples=300, database=None, phases=[Phase.generate], report_multiple_bugs=False, derandomize=True
)
TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=200, stateful_step_count=50)


def test_the_machine_notices_a_dispatcher_that_loses_what_a_dead_replica_had() -> None:
    class Forgetful(Dispatcher):
        def replica_down(self, index: int, now: float, *, died: bool = True) -> None:
            there = [key for key, one in self._requests.items() if one.replica == index]
            super().replica_down(index, now, died=died)
            for key in there[2:]:
                self._requests.pop(key, None)

    class Planted(Machine):
        def make(self) -> Dispatcher:
            return Forgetful()

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Planted, settings=PLANTED)


def test_the_machine_notices_results_that_are_taken_from_anybody() -> None:
    class Gullible(Dispatcher):
        def results(self, index: int, results: Any, requests: int) -> None:
            for key, _ in results:
                if key in self._requests and self._requests[key].replica not in (index, None):
                    self._answers.append((key, ANSWER))
            super().results(index, results, requests)

    class Planted(Machine):
        def make(self) -> Dispatcher:
            return Gullible()

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Planted, settings=PLANTED)
