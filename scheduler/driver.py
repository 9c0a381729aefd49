"""Driver: the thread between a program and the replicas of its cluster. Knows no Ray: replicas are reached by links.

    add(request, sink) --> Dispatcher --> link.call("add") ... link.call("take") --> Dispatcher --> sink(result)

With every replica that is up it has one session (replica.py has the rules) and one `take` that waits. Whatever fails
ends the session: the dispatcher queues again what was there, and `open` is tried until the replica is back or gone.
"""

from __future__ import annotations

import itertools
import pickle
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from paged.errors import EngineClosed, PagedError, RequestError, RequestFailed, shown
from scheduler.desk import AnyRequest, LineRequest, Result, failure
from scheduler.dispatch import LOST_AFTER, Dispatcher, Parcel
from scheduler.outputs import EngineStats
from scheduler.replica import ReplicaInfo, Report, SessionEnded
from scheduler.routing import outline

POLL = 2.0  # seconds that a take waits for results; at least so often a replica reports how it stands
RETRY = 0.5  # seconds between attempts to reach a replica that is away
HUNG = 60.0  # seconds without an answer to a take, after which a replica's process is ended
MOST_LOADS = 3  # attempts after which a replica that never was up is given up
_GAUGES = frozenset({"running", "waiting", "total_pages", "used_pages", "cached_pages", "peak_pages"})

Sink: TypeAlias = Callable[[Result], None]  # called once, in the driver's thread; must not wait
State: TypeAlias = Literal["starting", "warm", "restarting", "lost"]


class ReplicaAway(PagedError):
    """A replica cannot be reached, and may come back."""


class ReplicaLoading(ReplicaAway):
    """Its process is being started."""


class ReplicaGone(PagedError):
    """A replica has ended for good."""


class Link(Protocol):
    """How a replica is reached."""

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Begin a call of the Replica's method of this name.

        It ends with what that raises, with ReplicaGone, or with anything else where nobody knows whether it ran.
        """

    def restart(self) -> None:
        """End its process, whatever it does, so that another is started."""

    def end(self) -> None:
        """End its process for good."""


@dataclass(slots=True)
class Peer:
    """A replica, as the driver sees it."""

    index: int
    link: Link
    state: State = "starting"
    session: str = ""
    opening: bool = False
    failures: int = 0  # to open a session, in a row
    refusals: int = 0  # of these, by its constructor
    retry_at: float = 0.0
    silence: float = 0.0  # seconds that the last take waits for its answer
    info: ReplicaInfo | None = None
    report: Report | None = None
    error: BaseException | None = None  # the last one


class Driver:
    """Any thread may call. lost_after: as Dispatcher's."""

    def __init__(self, lost_after: float = LOST_AFTER) -> None:
        self._name = uuid.uuid4().hex
        self._sessions = itertools.count()
        self._keys = itertools.count()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards the dispatcher and all below
        self._dispatcher = Dispatcher(lost_after)
        self._sinks: dict[str, Sink] = {}
        self._peers: dict[int, Peer] = {}  # changed in the thread only
        self._past = EngineStats()  # counters of processes that have ended
        self._woken = self._closing = False
        self._turned = time.monotonic()
        self._calls: list[tuple[Peer, str, tuple[Any, ...]]] = []  # to be made when the condition is let go
        self._thread = threading.Thread(target=self._run, name="paged-driver", daemon=True)
        self._thread.start()

    # Requests

    def add(self, request: AnyRequest, sink: Sink) -> str:
        """Send a request; its result goes to `sink`, here at once if it cannot be sent. Returns its key.

        Raises EngineClosed.
        """
        key = str(next(self._keys))
        parcel = packed(request)
        if isinstance(parcel, Parcel):
            with self._changed:
                self._check_open()
                self._sinks[key] = sink
                self._dispatcher.add(key, parcel)
                self._wake()
        else:
            sink(parcel)
        return key

    def abort(self, keys: Iterable[str]) -> None:
        """Forget these requests: their sinks are not called any more, but for what is being given this moment."""
        with self._changed:
            keys = [key for key in keys if self._sinks.pop(key, None) is not None]
            for index, there in self._dispatcher.abort(keys).items():
                self._post(partial(self._abort, index, there))

    @property
    def room(self) -> int:
        with self._changed:
            return self._dispatcher.room

    # Replicas

    def found(self, index: int, link: Link) -> None:
        """There is a replica of this number. It takes the place of one that is lost."""
        self._post(partial(self._found, index, link))

    def dismiss(self, index: int) -> None:
        """Nothing more is sent to a replica, and what it has goes elsewhere."""
        self._post(partial(self._dismiss, index))

    def none_returns(self, why: str) -> None:
        """Replicas that are away, now, are gone for good."""
        self._post(partial(self._none_returns, why))

    def peers(self) -> list[Peer]:
        """The replicas by number; their fields go on changing."""
        with self._changed:
            return [self._peers[index] for index in sorted(self._peers)]

    def wait(self, replicas: int, timeout: float | None = None) -> bool:
        """Until so many are warm; whether they are in time. Raises the error of one that never will be."""

        def ended() -> bool:
            self._check_open()
            if sum(peer.report is not None and peer.state == "warm" for peer in self._peers.values()) >= replicas:
                return True
            errors = [
                peer.error
                for peer in self._peers.values()
                if peer.error is not None
                and (peer.state == "lost" or (peer.state == "starting" and peer.failures >= MOST_LOADS))
            ]
            if errors and len(self._peers) - len(errors) < replicas:
                raise errors[0]
            return False

        with self._changed:
            return self._changed.wait_for(ended, timeout)

    def stats(self) -> EngineStats:
        """The sum over all replicas: of counters since they were first seen, also those of processes that ended."""
        with self._changed:
            total = EngineStats()
            _add(total, self._past, gauges=False)
            for peer in self._peers.values():
                if peer.report is not None:
                    _add(total, peer.report.stats, gauges=peer.state == "warm")
            return total

    def close(self) -> None:
        """End all sessions and the thread. Requests without a result get EngineClosed as theirs."""
        with self._changed:
            self._closing = True
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(10)

    def _check_open(self) -> None:
        if self._closing:
            raise EngineClosed("the cluster is closed")

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._events.put(None)

    def _post(self, event: Callable[[], None]) -> None:
        self._events.put(event)

    # The thread

    def _run(self) -> None:
        why: BaseException | None = None
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001  a fault of ours: who waits must hear of it
            why = error
        with self._changed:
            self._closing = True
            sinks, self._sinks = self._sinks, {}
            self._changed.notify_all()
        for peer in self._peers.values():
            if peer.state == "warm":
                self._call(peer, "leave", peer.session)
        closed = RequestFailed("the cluster was closed before this was answered")
        closed.__cause__ = why
        for sink in sinks.values():
            sink(closed)

    def _turn(self) -> bool:
        """Wait for events, and do what follows from them."""
        events = self._gather()
        with self._changed:
            if self._closing:
                return False
            self._woken = False
            for event in events:
                if event is not None:
                    event()
            now = time.monotonic()
            passed, self._turned = min(now - self._turned, 2 * RETRY), now  # less where this process was stopped
            for peer in self._peers.values():
                if peer.state in ("starting", "restarting") and not peer.opening and now >= peer.retry_at:
                    self._open(peer)
                elif peer.state == "warm":
                    peer.silence += passed
                    if peer.silence > HUNG:
                        peer.link.restart()
                        self._failed(peer, "take", ReplicaAway(f"it has not answered for {HUNG:g} s"))
            self._dispatcher.tick(now)
            for index, requests in self._dispatcher.send().items():
                assert self._peers[index].state == "warm"
                self._calls.append((self._peers[index], "add", (requests,)))
            answers = [
                (self._sinks.pop(key), result) for key, result in self._dispatcher.answers() if key in self._sinks
            ]
            self._changed.notify_all()
            calls, self._calls = self._calls, []
        for peer, method, args in calls:
            self._call(peer, method, peer.session, *args)
        for sink, result in answers:
            sink(result)
        return True

    def _gather(self) -> list[Callable[[], None] | None]:
        events = []
        try:
            events.append(self._events.get(timeout=RETRY))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def _call(self, peer: Peer, method: str, *args: Any) -> None:
        session = peer.session
        try:
            future = peer.link.call(method, *args)
        except Exception as error:  # noqa: BLE001  as if the call had failed on its way
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda done: self._events.put(partial(self._done, peer, session, method, done)))

    # With the condition held

    def _abort(self, index: int, keys: list[str]) -> None:
        peer = self._peers.get(index)
        if peer is not None and peer.state == "warm":  # else its session has ended, and with it the requests
            self._calls.append((peer, "abort", (keys,)))

    def _open(self, peer: Peer) -> None:
        peer.session, peer.opening = f"{self._name}.{next(self._sessions)}", True
        self._calls.append((peer, "open", ()))

    def _take(self, peer: Peer, timeout: float) -> None:
        peer.silence = 0.0
        self._calls.append((peer, "take", (timeout,)))

    def _found(self, index: int, link: Link) -> None:
        peer = self._peers.get(index)
        if peer is None or peer.state == "lost":
            if peer is not None:
                self._retire(peer)
            self._peers[index] = Peer(index, link)
            self._dispatcher.replica_starting(index)

    def _dismiss(self, index: int) -> None:
        peer = self._peers.pop(index, None)
        if peer is not None:
            self._retire(peer)
            self._dispatcher.replica_lost(index, time.monotonic())

    def _none_returns(self, why: str) -> None:
        for peer in self._peers.values():
            if peer.state in ("starting", "restarting"):
                peer.state, peer.error = "lost", ReplicaGone(why)
                self._dispatcher.replica_lost(peer.index, time.monotonic())

    def _done(self, peer: Peer, session: str, method: str, future: Future[Any]) -> None:
        if self._peers.get(peer.index) is not peer or peer.session != session:
            return  # of a session that has ended
        error = future.exception()
        if error is not None:
            self._failed(peer, method, error)
        elif method == "open":
            info: ReplicaInfo = future.result()
            if peer.info is not None and peer.info.pid != info.pid:
                self._retire(peer)
            peer.info, peer.state, peer.opening, peer.error = info, "warm", False, None
            peer.failures = peer.refusals = 0
            self._dispatcher.replica_up(peer.index, info.room, info.capacity, info.max_num_seqs, info.load_s)
            self._take(peer, 0.0)  # for its report
        elif method == "take":
            results, peer.report = future.result()
            self._dispatcher.results(peer.index, results, peer.report.requests)
            self._take(peer, POLL)

    def _failed(self, peer: Peer, method: str, error: BaseException) -> None:
        now = time.monotonic()
        ended = isinstance(error, SessionEnded)
        refused = (
            method == "open" and isinstance(error, PagedError) and not isinstance(error, (ReplicaAway, SessionEnded))
        )
        peer.error, peer.session, peer.opening, peer.retry_at = error, "", False, now + RETRY
        peer.failures += method == "open" and not isinstance(error, ReplicaLoading)
        peer.refusals += refused
        # What the constructor refuses, it would refuse again, unless it once was content.
        gone = isinstance(error, ReplicaGone) or (refused and (peer.info is None or peer.refusals >= MOST_LOADS))
        if refused and not gone:
            peer.link.restart()
        if gone:
            peer.state = "lost"
            if not isinstance(error, ReplicaGone):
                peer.link.end()
            self._dispatcher.replica_lost(peer.index, now)
        elif peer.state == "warm":
            peer.state = "restarting"
            self._dispatcher.replica_down(peer.index, now, died=not ended)

    def _retire(self, peer: Peer) -> None:
        """Its process is another now, or none: what it counted is kept."""
        if peer.report is not None:
            _add(self._past, peer.report.stats, gauges=False)
            peer.report = None


def packed(request: AnyRequest) -> Parcel | Result:
    """A request ready to be sent, or the result of one that cannot be."""
    try:
        data = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001  whatever the class of a prompt raises
        return failure(request, RequestError(f"the request cannot be sent: {shown(error)}", "prompt"))
    digests, size = outline(request)
    return Parcel(data, digests, size, isinstance(request, LineRequest))


def _add(total: EngineStats, part: EngineStats, *, gauges: bool) -> None:
    for one in fields(EngineStats):
        if gauges or one.name not in _GAUGES:
            setattr(total, one.name, getattr(total, one.name) + getattr(part, one.name))
