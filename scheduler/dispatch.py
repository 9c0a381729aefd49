"""Dispatcher: which request is where, and what becomes of those of a replica that dies. Pure state: no Ray, no clock.

It keeps every request until its result is here. What it is told: requests, replicas that come and go, results, the
time. What it decides: what to send where, and the results. Each request gets exactly one.

    waiting ---send---> at one replica ---results---> answered
       ^                     |
       '---- it is down <----'        a request was there at so many deaths of replicas:
                                          1   it waits in front
                                          2   it is a suspect: sent only to a replica that has nothing else of ours, and
                                              gets nothing else meanwhile
                                          alone there at 2 deaths: it kills replicas, and is answered so
                                          8   it is answered so too: others send there, so that it is never alone

So what somebody else kills costs no innocent request its answer, and one that kills replicas costs at most four, or
eight where other drivers send to them. When
no replica is up, and none can come back or none has for so long, every request is answered that the cluster is lost, as
is every later one until a replica is up again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from paged.errors import RequestFailed
from scheduler.desk import Response, Result
from scheduler.routing import Router, usage

LOST_AFTER = 40.0  # seconds without any replica; longer where a model takes longer to load
SUSPECT = 2  # deaths of replicas at which a request was there
GUILTY = 2  # deaths of replicas at which it was alone there
MOST_DEATHS = 8  # at which a request was there; where it never is alone, as others send to its replicas too
_START = 10.0  # seconds, about, until a process begins to load
_ROOM_WHEN_LOST = 1024
_SHARES = 2  # of the room of all, that one replica may have: else only who has just answered would be open


@dataclass(frozen=True, slots=True)
class Parcel:
    """A request ready to be sent. digests, size: of routing.outline. line: whether its result is a Response."""

    data: bytes
    digests: tuple[int, ...]
    size: int
    line: bool

    def failed(self, code: str, message: str) -> Result:
        """The result that says that nobody could answer."""
        return Response(code, None, message) if self.line else RequestFailed(message)


@dataclass(slots=True)
class _Request:
    parcel: Parcel
    replica: int | None = None  # that has it
    deaths: int = 0
    deaths_alone: int = 0


@dataclass(slots=True)
class _Replica:
    room: int = 0
    capacity: int = 0
    seats: int = 0
    up: bool = False
    reserved: bool = False  # for one suspect at a time
    others: bool = False  # other clients have requests there
    keys: dict[str, None] = field(default_factory=dict)  # in flight, in the order in which they were sent


class Dispatcher:
    """Requests by key over replicas by number. `now` is any clock's time in seconds."""

    def __init__(self, lost_after: float = LOST_AFTER) -> None:
        self._lost_after = lost_after
        self._router = Router()
        self._requests: dict[str, _Request] = {}  # without a result
        self._waiting: deque[str] = deque()  # keys that are gone from _requests stay until they come up
        self._suspects: deque[str] = deque()  # waiting too
        self._replicas: dict[int, _Replica] = {}  # up, starting or expected back
        self._answers: list[tuple[str, Result]] = []
        self._none_since: float | None = None  # no replica is up; None before the first ever was
        self._lost = False

    def __len__(self) -> int:
        """Requests without a result."""
        return len(self._requests)

    @property
    def lost(self) -> bool:
        return self._lost

    @property
    def room(self) -> int:
        """Requests that the replicas take, those counted that are expected back."""
        return _ROOM_WHEN_LOST if self._lost else sum(one.room for one in self._replicas.values())

    # What happens

    def add(self, key: str, parcel: Parcel) -> None:
        """A request; its key is one that was never used."""
        assert key not in self._requests, f"key {key} is in use"
        if self._lost:
            self._answers.append((key, self._lost_result(parcel)))
            return
        self._requests[key] = _Request(parcel)
        self._waiting.append(key)

    def abort(self, keys: Iterable[str]) -> dict[int, list[str]]:
        """Forget these requests, which get no result. Returns, by replica, what is to be aborted there."""
        there: dict[int, list[str]] = {}
        for key in keys:
            request = self._requests.pop(key, None)
            if request is not None and request.replica is not None:
                self._left(key, request.replica)
                there.setdefault(request.replica, []).append(key)
        return there

    def replica_starting(self, index: int) -> None:
        """A replica that is expected to come up."""
        self._replicas.setdefault(index, _Replica())

    def replica_up(self, index: int, room: int, capacity: int, seats: int, load_s: float = 0.0) -> None:
        """It serves. room: requests it may have, on average with the others; capacity: tokens its pages hold; seats:
        requests that run there at once; load_s: how long it took.
        """
        one = self._replicas.setdefault(index, _Replica())
        assert not one.up, f"replica {index} is up"
        one.room, one.capacity, one.seats = max(room, 1), capacity, seats
        one.up, one.reserved, one.others = True, False, False
        self._route(index)
        self._lost_after = max(self._lost_after, 2 * (load_s + _START))
        self._none_since, self._lost = None, False

    def replica_down(self, index: int, now: float, *, died: bool = True) -> None:
        """It does not serve any more, and is expected back; all it had waits again, in front.

        died: by itself, so that what it had may be the cause.
        """
        self._down(index, now, died)

    def replica_lost(self, index: int, now: float) -> None:
        """It is gone for good, because somebody wanted it to, or cannot be started again."""
        self._down(index, now, died=False)
        self._replicas.pop(index, None)
        if not self._replicas and self._none_since is None:
            self._none_since = now

    def results(self, index: int, results: SequenceOf[tuple[str, Result]], requests: int) -> None:
        """What a replica has answered, and how many requests it still has, of all clients."""
        one = self._replicas[index]
        for key, result in results:
            request = self._requests.get(key)
            if request is not None and request.replica == index:
                del self._requests[key]
                self._left(key, index, result)
                self._answers.append((key, result))
        one.others = requests > len(one.keys)
        if not one.reserved:
            self._router.report(index, requests)

    def tick(self, now: float) -> None:
        """Give up where there is nothing to wait for."""
        if self._none_since is None or self._lost:
            return
        if not self._replicas or now - self._none_since >= self._lost_after:
            self._lost = True
            for key, request in self._requests.items():
                self._answers.append((key, self._lost_result(request.parcel)))
            self._requests.clear()
            self._waiting.clear()
            self._suspects.clear()

    # What is to be done

    def send(self) -> dict[int, list[tuple[str, bytes]]]:
        """By replica, the requests that go there now."""
        sent: dict[int, list[tuple[str, bytes]]] = {}
        self._reserve()
        for index, one in self._replicas.items():
            if one.reserved and not one.keys and self._next(self._suspects):
                self._begin(self._suspects.popleft(), index, sent)
        free = sum(one.room - len(one.keys) for one in self._replicas.values() if one.up and not one.reserved)
        while free > 0 and (request := self._next(self._waiting)) is not None:
            free -= 1
            picked = self._router.pick(request.parcel.digests, request.parcel.size)
            if picked is None:
                break
            key = self._waiting.popleft()
            self._router.started(key, picked, request.parcel.digests, request.parcel.size)
            self._begin(key, picked, sent)
        return sent

    def answers(self) -> list[tuple[str, Result]]:
        """The results that were not returned yet."""
        answers, self._answers = self._answers, []
        return answers

    def check(self) -> None:
        """Recompute all from scratch; AssertionError names what is wrong."""
        self._router.check()
        waiting = [key for key in (*self._waiting, *self._suspects) if key in self._requests]
        assert len(waiting) == len(set(waiting)), "a request waits twice"
        assert set(waiting) == {key for key, one in self._requests.items() if one.replica is None}, "who waits"
        for index, one in self._replicas.items():
            there = {key for key, request in self._requests.items() if request.replica == index}
            assert set(one.keys) == there, f"replica {index}: keys"
            assert one.up or not there, f"replica {index} is not up and has requests"
            assert len(there) <= _SHARES * one.room, f"replica {index}: more than there is room for"
        assert sum(len(one.keys) for one in self._replicas.values()) + len(waiting) == len(self._requests), "at none"
        assert not (self._lost and self._requests), "requests of a lost cluster"

    # Inside

    def _route(self, index: int) -> None:
        one = self._replicas[index]
        self._router.add(index, _SHARES * one.room, one.capacity, one.seats)

    def _next(self, queue: deque[str]) -> _Request | None:
        while queue and queue[0] not in self._requests:
            queue.popleft()
        return self._requests[queue[0]] if queue else None

    def _begin(self, key: str, index: int, sent: dict[int, list[tuple[str, bytes]]]) -> None:
        request = self._requests[key]
        request.replica = index
        self._replicas[index].keys[key] = None
        sent.setdefault(index, []).append((key, request.parcel.data))

    def _left(self, key: str, index: int, result: Result | None = None) -> None:
        del self._replicas[index].keys[key]
        self._router.finished(key, None if result is None else usage(result))

    def _reserve(self) -> None:
        """Suspects get one replica, which first has to become empty, and all that have nothing to do."""
        up = {index: one for index, one in self._replicas.items() if one.up}
        suspects = sum(key in self._requests for key in self._suspects)
        ready = sum(one.reserved and not one.keys for one in up.values())
        while suspects > ready:
            free = [index for index, one in up.items() if not one.reserved]
            if not free:
                return
            index = min(free, key=lambda index: len(up[index].keys))
            reserved = any(one.reserved for one in up.values())
            if reserved and (up[index].keys or self._next(self._waiting)):
                return
            up[index].reserved = True
            self._router.remove(index)  # what it holds of prefixes is forgotten, as it may die
            ready += not up[index].keys
        for index, one in up.items():
            if one.reserved and not one.keys and ready > suspects:
                one.reserved = False
                self._route(index)
                ready -= 1

    def _down(self, index: int, now: float, died: bool) -> None:
        one = self._replicas.get(index)
        if one is None or not one.up:
            return
        if not one.reserved:
            self._router.remove(index)
        one.up = one.reserved = False
        alone = len(one.keys) == 1 and not one.others
        again = []
        for key in one.keys:
            request = self._requests[key]
            request.replica = None
            request.deaths += died
            request.deaths_alone += died and alone
            if request.deaths_alone >= GUILTY or request.deaths >= MOST_DEATHS:
                del self._requests[key]
                why = _ALONE if request.deaths_alone >= GUILTY else _EVERYWHERE
                self._answers.append((key, request.parcel.failed("request_kills_worker", why)))
            elif request.deaths >= SUSPECT:
                self._suspects.append(key)
            else:
                again.append(key)
        self._waiting.extendleft(reversed(again))
        one.keys = {}
        if not any(other.up for other in self._replicas.values()):
            self._none_since = now

    def _lost_result(self, parcel: Parcel) -> Result:
        why = f"has come back within {self._lost_after:g} s" if self._replicas else "can be restarted"
        return parcel.failed(
            "cluster_lost", f"the cluster was lost before this was answered: none of its replicas {why}; send it again"
        )


_ALONE = (
    f"the replica that computed this request died {GUILTY} times while it had nothing else to do, so the request is "
    "not tried again"
)
_EVERYWHERE = f"{MOST_DEATHS} times the replica that computed this request died, so the request is not tried again"
