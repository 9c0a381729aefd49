"""Router: never over its bound, never to a replica that is gone, and sums that add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.routing import BLOCKS, EPSILON, Router, Usage, digests

# Where requests go


def chain(*names: object) -> tuple[int, ...]:
    """Digests of a prompt whose blocks have these names, as equal as their beginnings are."""
    ids = [crc32(repr(name).encode()) for name in names for _ in range(BLOCKS[0])]
    return digests(ids)


def router_of(replicas: int, room: int = 100, capacity: int = 1_000_000, seats: int | None = None) -> Router:
    router = Router(0.25)
    for replica in range(replicas):
        router.add(replica, room, capacity, seats)
    return router


def send(router: Router, key: str, prompt: tuple[int, ...], size: int) -> int:
    replica = router.pick(prompt, size)
    assert replica is not None
    router.started(key, replica, prompt, size)
    return replica


def test_a_conversation_stays_where_it_began() -> None:
    router, homes = router_of(8), dict[int, int]()
    for talk in range(40):
        for turn in range(1, 6):
            prompt = chain(*[(talk, block) for block in range(4 * turn)])
            replica = send(router, f"{talk}-{turn}", prompt, 64 * len(prompt))
            router.finished(f"{talk}-{turn}", Usage(64 * len(prompt), router.known(replica, prompt), 5))
            assert homes.setdefault(talk, replica) == replica
    router.check()


def test_the_longest_prefix_wins() -> None:
    router = router_of(3)
    router.started("short", 0, chain("a"), 64)
    router.started("long", 1, chain("a", "b", "c"), 192)
    for key in ("short", "long"):
        router.finished(key, Usage(64, 0, 1))
    assert [router.known(replica, chain("a", "b", "x")) for replica in range(3)] == [64, 128, 0]
    assert router.pick(chain("a", "b", "x"), 192) == 1


def test_a_replica_that_is_much_busier_gives_way_to_the_next_best_prefix_and_then_to_any() -> None:
    prompt = chain(*range(8))
    router = router_of(3)
    router.started("a", 0, prompt, 512)
    router.started("b", 1, prompt[:4], 256)
    router.finished("a", Usage(512, 0, 1))
    router.finished("b", Usage(256, 0, 1))
    assert router.pick(prompt, 600) == 0
    router.started("load", 0, (), 600)  # 600 is less than 1.25 * 200 + 512
    assert router.pick(prompt, 600) == 0
    router.started("more", 0, (), 1000)
    assert router.pick(prompt, 600) == 1
    router.started("and more", 1, (), 6000)
    assert router.pick(prompt, 600) == 0  # 1600 is less than 1.25 * 2533 + 512 again
    router.started("much", 0, (), 6000)
    assert router.pick(prompt, 600) == 2
    router.check()


def test_a_prefix_that_is_a_small_part_of_a_prompt_does_not_count() -> None:
    """Else whoever begins as everybody does would go to the replica that was first."""
    router = router_of(8)
    places = set()
    for talk in range(64):
        prompt = chain("system", *[(talk, block) for block in range(15)])
        places.add(send(router, str(talk), prompt, 64 * 16))
        router.finished(str(talk), Usage(64 * 16, 0, 1))
    assert places == set(range(8))


def test_what_many_share_spreads_when_one_replica_is_not_enough() -> None:
    router, prompt = router_of(4), chain(*range(15))
    places = [send(router, str(i), (*prompt, i), 64 * 15 + 100) for i in range(200)]
    assert max(places.count(replica) for replica in range(4)) <= 1.25 * 200 / 4 + 10
    router.check()


def test_where_no_seat_is_left_a_prefix_goes_to_one_that_has_one() -> None:
    """Else the bound would leave a replica of four with nothing, and the others with a queue."""
    prompt = chain(*range(15))
    for seats, places in ((None, 3), (10, 4)):
        router = router_of(4, seats=seats)
        assert len({send(router, str(i), (*prompt, i), 64 * 15 + 100) for i in range(60)}) == places
        router.check()


def test_prompts_without_digests_go_to_the_least_busy() -> None:
    router = router_of(4)
    assert [send(router, str(i), (), 10 - i) for i in range(6)] == [0, 1, 2, 3, 3, 2]


def test_nobody_gets_more_than_it_has_room_for() -> None:
    router = router_of(2, room=2)
    assert sorted(send(router, str(i), chain("a"), 64) for i in range(4)) == [0, 0, 1, 1]
    assert router.pick(chain("a"), 64) is None
    assert router.pick((), 64) is None
    router.finished("2")
    assert router.pick((), 64) is not None
    router.finished("2")  # again: nothing
    router.check()


def test_a_replica_that_comes_or_goes_moves_only_its_own_share() -> None:
    prompts = [chain(("prompt", i)) for i in range(2_000)]
    before = {replicas: [router_of(replicas).pick(prompt, 64) for prompt in prompts] for replicas in (8, 9)}
    moved = [new for old, new in zip(before[8], before[9], strict=True) if old != new]
    assert set(moved) == {8}  # nobody moves but to the new one
    assert len(moved) == pytest.approx(2_000 / 9, rel=0.2)
    router = router_of(9)
    router.remove(3)
    after = [router.pick(prompt, 64) for prompt in prompts]
    assert all((old == new) == (old != 3) for old, new in zip(before[9], after, strict=True))
    counts = [after.count(replica) for replica in range(9) if replica != 3]
    assert min(counts) > 0.8 * 2_000 / 8
    assert max(counts) < 1.2 * 2_000 / 8


def test_what_is_known_does_not_move_to_a_new_replica() -> None:
    router, prompts = router_of(4), [chain(("prompt", i)) for i in range(200)]
    homes = []
    for i, prompt in enumerate(prompts):
        homes.append(send(router, str(i), prompt, 64))
        router.finished(str(i), Usage(64, 0, 1))
    router.add(4, 100, 10_000)
    assert [router.pick(prompt, 64) for prompt in prompts] == homes


# The picture of a cache


def test_a_replica_that_is_removed_and_comes_back_holds_nothing() -> None:
    router, prompt = router_of(2), chain("a", "b")
    router.started("1", 0, prompt, 128)
    router.started("2", 1, (), 1)
    router.started("3", 0, prompt, 128)
    assert router.remove(0) == ["1", "3"]
    router.check()
    assert router.pick(prompt, 128) == 1
    router.add(0, 100, 10_000)
    assert router.known(0, prompt) == 0
    assert router.load(0) == (0, 0)
    router.finished("1")  # it is forgotten, so nothing happens
    router.started("1", 1, prompt, 128)
    router.check()


def test_the_ends_of_what_was_not_used_for_longest_are_forgotten_first() -> None:
    router = router_of(1, capacity=6 * 64)
    for key, prompt in (("a", chain("a1", "a2", "a3")), ("b", chain("b1", "b2"))):
        router.started(key, 0, prompt, 200)
        router.finished(key)
    router.started("c", 0, chain("c1", "c2"), 128)
    assert router.known(0, chain("a1", "a2", "a3")) == 128
    assert router.known(0, chain("b1", "b2")) == 128
    router.check()


def test_answers_take_room_in_a_cache_too() -> None:
    router = router_of(1, capacity=10 * 64)
    for key, prompt, output in (("a", chain("a1", "a2"), 0), ("b", chain("b1"), 8 * 64)):
        router.started(key, 0, prompt, 200)
        router.finished(key, Usage(64 * len(prompt), 0, output))
    assert router.known(0, chain("a1", "a2")) == 64
    assert router.known(0, chain("b1")) == 64
    router.check()


def test_a_prompt_larger_than_the_cache_leaves_its_beginning() -> None:
    router = router_of(1, capacity=3 * 64)
    router.started("a", 0, chain(*range(10)), 640)
    assert router.known(0, chain(*range(10))) == 192
    router.check()


def test_a_prefix_that_was_not_found_forgets_all_that_is_as_old() -> None:
    router, old, older, newer = router_of(1), chain("o1", "o2"), chain("p1", "p2"), chain("n1", "n2")
    for prompt in (older, old, newer):
        router.started("x", 0, prompt, 128)
        router.finished("x", Usage(128, 0, 1))
    router.started("again", 0, old, 128)
    router.finished("again", Usage(128, 16, 1))
    assert [router.known(0, prompt) for prompt in (older, old, newer)] == [0, 128, 128]
    router.check()


def test_requests_of_other_drivers_make_a_replica_busy() -> None:
    router = router_of(2)
    router.started("a", 0, (), 100)
    assert router.pick((), 10) == 1
    router.report(1, 5)
    router.report(0, 1)
    assert [router.load(replica) for replica in (0, 1)] == [(1, 100), (0, 500)]
    assert router.pick((), 10) == 0
    router.check()
    router.report(1, 0)
    assert router.load(1) == (0, 0)
    router.check()


# Whatever happens


@dataclass
class Told:
    """What a router was told of a replica. others: other drivers' requests."""

    room: int
    seats: int
    others: int = 0


def fault(router: Router, prompt: tuple[int, ...], picked: int | None, told: dict[int, Told]) -> str | None:
    """What is wrong with a choice, from what anybody can ask a router."""
    loads = {replica: router.load(replica) for replica in told}
    free = {replica for replica in told if loads[replica][0] < told[replica].room}
    if picked is None:
        return f"{free} have room" if free else None
    if picked not in free:
        return f"{picked} is gone or full"
    load, worth = loads[picked][1], router.known(picked, prompt)
    if load <= min(loads[replica][1] for replica in free):
        return None
    average = sum(load for _, load in loads.values()) / len(loads)
    if load > (1 + EPSILON) * average + worth + 1e-6:
        return f"{picked} has {load}, on average they have {average}"
    seated = {replica for replica, one in told.items() if loads[replica][0] + one.others < one.seats}
    if picked not in seated and any(load > loads[replica][1] + worth for replica in seated):
        return f"{picked} has {load} and no seat, and {seated} have"
    return None


class Routing(RuleBasedStateMachine):
    """Two routers that are told the same, and what is wrong with either."""

    @initialize(replicas=st.integers(1, 4), capacity=st.integers(0, 2_000))
    def begin(self, replicas: int, capacity: int) -> None:
        self.one, self.other = Router(), Router()
        self.told: dict[int, Told] = {}
        self.keys: dict[str, int] = {}
        self.names: Iterator[int] = count()
        for replica in range(replicas):
            self.add(replica, 4, capacity, 2)

    def both(self, act: Callable[[Router], Any]) -> Any:
        result = act(self.one)
        assert act(self.other) == result
        return result

    @rule(
        replica=st.integers(0, 6),
        room=st.integers(0, 5),
        capacity=st.integers(0, 2_000),
        seats=st.none() | st.integers(0, 5),
    )
    def add(self, replica: int, room: int, capacity: int, seats: int | None) -> None:
        if replica not in self.told:
            self.both(lambda router: router.add(replica, room, capacity, seats))
            self.told[replica] = Told(room, room if seats is None else seats)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.told)))
        del self.told[replica]
        lost = self.both(lambda router: router.remove(replica))
        assert lost == [key for key, place in self.keys.items() if place == replica]
        self.keys = {key: place for key, place in self.keys.items() if place != replica}

    @rule(
        words=st.lists(st.sampled_from("abc"), max_size=6),
        size=st.integers(1, 1_000),
        stray=st.none() | st.integers(0, 6),
    )
    def request(self, words: list[str], size: int, stray: int | None) -> None:
        prompt = chain(*words)
        picked = self.both(lambda router: router.pick(prompt, size))
        assert fault(self.one, prompt, picked, self.told) is None
        replica = stray if stray in self.told else picked  # a driver may send it elsewhere
        if replica is not None:
            key = str(next(self.names))
            self.both(lambda router: router.started(key, replica, prompt, size))
            self.keys[key] = replica

    @precondition(lambda self: self.keys)
    @rule(data=st.data(), said=st.none() | st.builds(Usage, *[st.integers(0, 400)] * 3))
    def finish(self, data: st.DataObject, said: Usage | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.keys)))
        del self.keys[key]
        self.both(lambda router: router.finished(key, said))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), requests=st.integers(0, 10))
    def report(self, data: st.DataObject, requests: int) -> None:
        replica = data.draw(st.sampled_from(sorted(self.told)))
        self.both(lambda router: router.report(replica, requests))
        self.told[replica].others = max(requests - self.one.load(replica)[0], 0)

    @invariant()
    def sums_are_right(self) -> None:
        self.one.check()
        assert len(self.one) == len(self.keys)
        for replica in self.told:
            assert self.one.load(replica)[0] == list(self.keys.values()).count(replica)


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_router_without_its_bound_is_found_out() -> None:
    router = router_of(3)
    router._fit = lambda *bounds: [router._replicas[0]]  # type: ignore[method-assign]  # a fault
    found = None
    for i in range(5):
        picked = router.pick(chain("a"), 100)
        found = found or fault(router, chain("a"), picked, dict.fromkeys(range(3), Told(100, 100)))
        router.started(str(i), 0, chain("a"), 100)
    assert found is not None
    assert found.startswith("0 has ")


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda router: setattr(router, "_load", 1), "load of all"),
        (lambda router: setattr(router._replicas[0], "load", 1), "load"),
        (lambda router: router._replicas[0].held.popitem(), "held tokens"),
        (lambda router: setattr(router, "_open", 0), "open"),
        (lambda router: router._holders.clear(), "holders"),
        (lambda router: router._replicas.pop(1), "has room"),
    ],
)
def test_check_finds_faults(break_it: Callable[[Router], Any], said: str) -> None:
    router = router_of(2)
    router.started("a", 0, chain("a", "b"), 200)
    router.check()
    break_it(router)
    with pytest.raises(AssertionError, match=said):
        router.check()
