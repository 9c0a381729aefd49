"""Replica: one engine, in a thread of its own, that serves several clients from afar. Knows no Ray.

A client is a driver's connection. It opens a session under a name that nobody has used before, and until it ends
everything is said once: a request is added once, a result taken once. No call is ever repeated. When one fails,
whatever the reason, the driver takes the session for ended and all that it had there for undone, and opens another
under a new name; so a lost reply costs a computation, never a result, and nothing has to be acknowledged. What the old
session still holds here is aborted when its client has not taken for SILENT seconds, as is a dead driver's.

    open(client) -> ReplicaInfo      a call of a session that is not open raises SessionEnded: the process is another
    add(client, requests)            one than before, or the client was silent for too long
    take(client, timeout) -> results, as soon as there are any, and the Report
    abort(client, keys)              add and abort of a client must arrive in the order in which they were sent
    leave(client)

The engine's thread takes requests in, runs a step, and gives results out. When steps fail MOST_FAILURES times in a row
the engine is taken for broken, as when a worker is lost: the process ends, and who started it starts another.
"""

from __future__ import annotations

import copy
import importlib.metadata
import os
import pickle
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, Self

from paged.errors import PagedError, RequestError, RequestFailed, shown
from scheduler.config import EngineConfig
from scheduler.desk import AnyRequest, Desk, Result, failure
from scheduler.llm import LLM
from scheduler.outputs import EngineStats
from worker.executor import WorkerLost

SILENT = 30.0  # seconds without a take, after which a client is taken for dead
MOST_FAILURES = 3  # steps that fail in a row
BROKEN = 70  # exit code of a process whose engine is broken
PACKAGES = ("paged-kv", "ray", "torch", "transformers")


class SessionEnded(PagedError):
    """The session is not, or no longer, open here: its requests are to be sent again, in a new one."""


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a replica is. versions: of the packages that decide about answers; None where there is none."""

    pid: int
    node: str
    model_name: str
    max_num_seqs: int
    capacity: int  # tokens that its pages hold
    threads: int
    computes: str  # in which number format, and by which kernels
    load_s: float  # seconds from the constructor's call until it was warm
    config: EngineConfig
    versions: dict[str, str | None]

    @property
    def room(self) -> int:
        """Requests that one client should have here at most: enough that the engine never waits for the network."""
        return 4 * self.max_num_seqs


@dataclass(frozen=True, slots=True)
class Report:
    """How a replica stands. requests: without a result, of all clients."""

    requests: int
    stats: EngineStats


@dataclass(slots=True)
class _Session:
    heard: float  # when its last take ended
    taking: int = 0  # calls of take that wait
    keys: set[str] = field(default_factory=set)  # without a result
    results: list[tuple[str, Result]] = field(default_factory=list)


class Replica:
    """A loaded model that serves sessions. Every method may be called from any thread.

    Raises ConfigError for a bad setting, CheckpointError for a model that cannot be had.
    """

    def __init__(self, config: EngineConfig) -> None:
        began = time.monotonic()
        try:
            llm = LLM.from_config(config)
        except WorkerLost as error:  # another try may go well
            _end_process(error)
        self._start(llm, time.monotonic() - began, _end_process, time.monotonic)

    @classmethod
    def over(
        cls,
        llm: LLM,
        broken: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Over an LLM of one's own, which belongs to this object from now on. broken: called instead of an exit."""
        made = cls.__new__(cls)
        made._start(llm, 0.0, broken, clock)
        return made

    def _start(
        self, llm: LLM, load_s: float, broken: Callable[[BaseException], None], clock: Callable[[], float]
    ) -> None:
        self._desk = Desk(llm)  # the engine thread's own
        self._info = _info(llm, load_s)
        self._broken, self._clock = broken, clock
        self._changed = threading.Condition()  # guards all below
        self._inbox: deque[Callable[[], None]] = deque()
        self._sessions: dict[str, _Session] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="paged-replica", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        with self._changed:
            return self._report()

    def open(self, client: str) -> ReplicaInfo:
        """Begin a session."""
        assert "/" not in client, f"{client!r} is no client's name"
        with self._changed:
            assert client not in self._sessions, f"session {client} is open"
            self._sessions[client] = _Session(self._clock())
        return self._info

    def add(self, client: str, requests: SequenceOf[tuple[str, bytes]]) -> None:
        """Queue pickled requests, each under a key that the session has not had; what is wrong with one is its result.

        Raises SessionEnded.
        """
        with self._changed:
            session = self._session(client)
            for key, data in requests:
                session.keys.add(key)
                self._inbox.append(partial(self._add, client, key, data))
            self._changed.notify_all()

    def take(self, client: str, timeout: float) -> tuple[list[tuple[str, Result]], Report]:
        """The results that are here; waits for the first of them, but no longer than `timeout` seconds.

        Raises SessionEnded.
        """
        with self._changed:
            session = self._session(client)
            session.taking += 1
            self._changed.wait_for(lambda: session.results or self._sessions.get(client) is not session, timeout)
            session.taking -= 1
            session.heard = self._clock()
            self._session(client)
            results, session.results = session.results, []
            return results, self._report()

    def abort(self, client: str, keys: SequenceOf[str]) -> None:
        """Forget these requests of the session, and their results; unknown ones are none. Raises SessionEnded."""
        with self._changed:
            session = self._session(client)
            self._forget(client, session.keys.intersection(keys))
            session.keys.difference_update(keys)
            session.results = [one for one in session.results if one[0] not in keys]

    def leave(self, client: str) -> None:
        """End a session, and all that it has here."""
        with self._changed:
            self._end(client)

    def close(self) -> None:
        """End every session, the thread after the step under way, and let go of the model."""
        with self._changed:
            for client in list(self._sessions):
                self._end(client)
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # With the condition held

    def _session(self, client: str) -> _Session:
        if client not in self._sessions:
            raise SessionEnded(f"session {client} is not open here")
        return self._sessions[client]

    def _report(self) -> Report:
        requests = sum(len(session.keys) for session in self._sessions.values())
        return Report(requests, copy.copy(self._desk.llm.engine.stats))

    def _end(self, client: str) -> None:
        session = self._sessions.pop(client, None)
        if session is not None:
            self._forget(client, session.keys)
            self._changed.notify_all()

    def _forget(self, client: str, keys: set[str]) -> None:
        if keys:
            self._inbox.append(partial(self._desk.abort, [f"{client}/{key}" for key in keys]))
            self._changed.notify_all()

    def _end_silent(self) -> None:
        now = self._clock()
        for client, session in list(self._sessions.items()):
            if not session.taking and now - session.heard > SILENT:
                self._end(client)

    # The engine's thread

    def _run(self) -> None:
        try:
            self._serve()
            self._desk.llm.close()
        except BaseException as error:  # noqa: BLE001  whatever it is, nobody else would notice
            self._broken(error)

    def _serve(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._closing or len(self._desk), SILENT / 10)
                self._end_silent()
                commands, self._inbox = self._inbox, deque()
                closing = self._closing
            for command in commands:
                command()
            if closing:
                return
            try:
                results = self._desk.step()
            except Exception as error:
                failures += 1
                if failures == MOST_FAILURES or isinstance(error, WorkerLost):
                    raise
                _log(f"a step failed, its requests go on: {error!r}")
                continue
            failures = 0
            if results:
                self._give(results)

    def _add(self, client: str, key: str, data: bytes) -> None:
        name = f"{client}/{key}"
        try:
            request: AnyRequest = pickle.loads(data)
        except Exception as error:  # noqa: BLE001  what the class of a prompt raises, or that there is none here
            self._give([(name, RequestError(f"the request cannot be read by a replica: {shown(error)}"))])
            return
        try:
            self._desk.add(name, request)
        except Exception as error:  # noqa: BLE001  a fault of ours or of a tokenizer: others must not suffer for it
            failed = RequestFailed(f"the request could not be queued: {shown(error)}")
            self._give([(name, failure(request, failed))])

    def _give(self, results: list[tuple[str, Result]]) -> None:
        with self._changed:
            for name, result in results:
                client, _, key = name.partition("/")
                session = self._sessions.get(client)
                if session is not None and key in session.keys:
                    session.keys.remove(key)
                    session.results.append((key, result))
            self._changed.notify_all()


def _info(llm: LLM, load_s: float) -> ReplicaInfo:
    plan = llm.plan
    assert plan.limits is not None
    assert plan.layout is not None
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return ReplicaInfo(
        pid=os.getpid(),
        node=platform.node(),
        model_name=llm.model_name,
        max_num_seqs=plan.limits.max_num_seqs,
        capacity=plan.limits.num_pages * plan.layout.bytes_per_page // plan.layout.bytes_per_token,
        threads=plan.threads,
        computes=plan.computes,
        load_s=load_s,
        config=llm.config,
        versions=versions,
    )


def _log(line: str) -> None:
    print(f"paged replica {os.getpid()}: {line}", file=sys.stderr, flush=True)


def _end_process(error: BaseException) -> NoReturn:
    _log(f"the engine is broken, this process ends: {error!r}")
    os._exit(BROKEN)
