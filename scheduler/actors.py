"""Replicas as Ray actors: their class, the links to them, and who looks for those that are new."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from paged.errors import PagedError
from scheduler.config import EngineConfig
from scheduler.driver import Driver, Link, ReplicaAway, ReplicaGone, ReplicaLoading
from worker.head import silence

WATCH = 2.0  # seconds between looks for replicas that are new
REFUSED = 5.0  # seconds in which nobody listens at the address of Ray's head, after which it is taken for gone
SILENT = 30.0  # as REFUSED, where nothing is heard at all
CALLS = 256  # that a replica serves at once: one that waits for results for each client, and a few more
PREFIX = "replica-"  # of an actor's name, before its number


class RayLink:
    """A replica that is a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def call(self, method: str, *args: Any) -> Future[Any]:
        import ray

        if not ray.is_initialized():  # else the call would start another
            raise ReplicaAway("Ray has ended")
        ours: Future[Any] = Future()

        def settle(theirs: Future[Any]) -> None:
            error = theirs.exception()
            if error is None:
                ours.set_result(theirs.result())
            else:
                ours.set_exception(_plain(error))

        getattr(self.actor, method).remote(*args).future().add_done_callback(settle)
        return ours

    def restart(self) -> None:
        self._kill(no_restart=False)

    def end(self) -> None:
        self._kill(no_restart=True)

    def _kill(self, *, no_restart: bool) -> None:
        import ray

        if ray.is_initialized():
            with suppress(Exception):  # Ray knows it no more, or is away itself
                ray.kill(self.actor, no_restart=no_restart)


def _plain(error: BaseException) -> BaseException:
    """An error of Ray's as one of ours: what was raised over there, or what has become of the replica."""
    from ray.exceptions import ActorDiedError, RayTaskError

    if isinstance(error, RayTaskError) and isinstance(error.cause, PagedError):
        return error.cause
    text = re.sub(r"\x1b\[\d+m", "", str(error))
    if isinstance(error, ActorDiedError):
        return ReplicaGone(text)
    return ReplicaLoading(text) if "restarting" in text else ReplicaAway(text)


def actor_class(replica: type) -> Any:
    """The actor class around a replica's."""
    import ray

    class PagedReplica:
        def __init__(self, config: EngineConfig) -> None:
            self._replica: Any = None
            try:
                self._replica = replica(config)
            except PagedError as error:  # Ray would make text of it
                self._error = error

        def open(self, client: str) -> Any:
            if self._replica is None:
                raise self._error
            return self._replica.open(client)

        def take(self, client: str, timeout: float) -> Any:
            return self._replica.take(client, timeout)

        # One group of one thread keeps these in the order in which they were called.
        @ray.method(concurrency_group="ordered")
        def add(self, client: str, requests: Any) -> None:
            self._replica.add(client, requests)

        @ray.method(concurrency_group="ordered")
        def abort(self, client: str, keys: Any) -> None:
            self._replica.abort(client, keys)

        @ray.method(concurrency_group="ordered")
        def leave(self, client: str) -> None:
            self._replica.leave(client)

    return ray.remote(  # type: ignore[call-overload]  # Ray's stubs lack concurrency_groups
        concurrency_groups={"ordered": 1}
    )(PagedReplica)


class Watcher:
    """A thread that tells a driver of replicas that are new, of a node that came late or of another's `scale`, and when
    Ray has ended, without which none is started again.
    """

    def __init__(self, driver: Driver, address: str, namespace: str) -> None:
        self._driver, self._address, self._namespace = driver, address, namespace
        self._skipped: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paged-watcher", daemon=True)
        self._thread.start()

    def look(self) -> int:
        """Look for new ones; how many replicas there are."""
        import ray

        known = {peer.index for peer in self._driver.peers() if peer.state != "lost"}
        indices = indices_of(self._namespace)
        for index in indices:
            if not self._ended.is_set() and index not in known and time.monotonic() > self._skipped.get(index, 0.0):
                with suppress(ValueError):  # it has ended meanwhile
                    actor = ray.get_actor(f"{PREFIX}{index}", self._namespace)
                    self._driver.found(index, RayLink(actor))
        return len(indices)

    def skip(self, index: int) -> None:
        """A replica is being ended, and is there for a while."""
        self._skipped[index] = time.monotonic() + 5 * WATCH

    def end(self) -> None:
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(WATCH)

    def _run(self) -> None:
        heard = time.monotonic()
        while not self._ended.wait(WATCH):
            error, now = silence(self._address), time.monotonic()
            if error is None:
                heard = now
                with suppress(Exception):  # Ray is away: it is looked for again
                    self.look()
            elif now - heard > (REFUSED if isinstance(error, ConnectionRefusedError) else SILENT):
                self._driver.none_returns(f"Ray's head at {self._address} has ended, or is out of reach ({error})")


def indices_of(namespace: str) -> list[int]:
    """The numbers of the replicas that there are."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    names = [one["name"] for one in named if one["namespace"] == namespace and one["name"].startswith(PREFIX)]
    return sorted(int(name.removeprefix(PREFIX)) for name in names)


def end_replica(namespace: str, index: int) -> None:
    import ray

    with suppress(ValueError):  # it has ended already
        ray.kill(ray.get_actor(f"{PREFIX}{index}", namespace))


def restarts(link: Link) -> int | None:
    """Ray counts them, and tells it in its dashboard, which is off; else only here."""
    from ray._private import state

    with suppress(Exception):
        assert isinstance(link, RayLink)
        return int(state.actors(link.actor._actor_id.hex())["NumRestarts"])
    return None
