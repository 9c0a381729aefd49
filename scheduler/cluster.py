"""Cluster: replicas of one model as Ray actors, and the driver that sends them work. The one front door to them.

    from paged import Cluster, SamplingParams

    with Cluster.launch("smollm2", replicas=2) as cluster:
        outputs = cluster.generate(prompts, SamplingParams(temperature=0))

A replica is an actor that Ray restarts when its process or node dies; driver.py and dispatch.py run again what it had.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from paged.errors import ClusterError, ConfigError, RequestError, RequestFailed
from scheduler import cluster_state, placement
from scheduler.actors import CALLS, PREFIX, RayLink, Watcher, actor_class, end_replica, indices_of, restarts
from scheduler.cluster_state import ClusterState
from scheduler.config import EngineConfig
from scheduler.desk import LineRequest, PromptRequest, Response, Result
from scheduler.driver import MOST_LOADS, Driver, Peer, State
from scheduler.llm import Params, Prompt, is_one_prompt, plan
from scheduler.outputs import EngineStats, RequestOutput
from scheduler.replica import Replica
from worker.head import Head, silence
from worker.step import SamplingParams

WAITING = 5.0  # seconds without a warm replica, after which who connects is told what it waits for


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """How one replica stands; None for what only one that is warm can say. restarts: those that Ray has counted."""

    index: int
    state: State
    restarts: int | None = None
    node: str | None = None
    pid: int | None = None
    threads: int | None = None
    running: int | None = None
    waiting: int | None = None
    used_pages: int | None = None
    total_pages: int | None = None
    output_tokens: int | None = None


class Cluster:
    """Made by `launch` or `connect`. Every method may be called from any thread, `submit` from any event loop.

    What a job uses (jobs.Answerer): model_name, room, add, take, abort, stats. Keys of `add` are the caller's, who is
    the only one.
    """

    def __init__(self, home: placement.Home, name: str | None, detached: bool) -> None:
        self._home, self._detached = home, detached
        self._namespace = _namespace(name)
        self._replica: type = Replica
        self._driver = Driver()
        self._watcher = Watcher(self._driver, home.address, self._namespace)
        self._outbox = _Outbox()
        self._keys: dict[str, str] = {}  # the driver's key, by the caller's
        # Of replicas made here. An actor that is not detached ends with the handle it was made with, and the driver may
        # have got another one before, from the watcher.
        self._handles: dict[int, Any] = {}
        self._died: dict[int, int] = {}  # how often replicas had, when that was first asked
        self._let_go = partial(_let_go, self._watcher, self._driver, home, self._namespace, name)
        self._close = weakref.finalize(self, self._let_go, end=not detached)
        atexit.register(self._close)  # before Ray's own, as it is registered later

    @classmethod
    def launch(
        cls,
        model: str = "smollm2",
        *,
        replicas: int = 1,
        name: str | None = None,
        address: str | None = None,
        detach: bool = False,
        placement_timeout: float = placement.PLACING,
        **settings: Any,
    ) -> Self:
        """Start replicas of a model, and return when all are warm. Settings are those of EngineConfig, of one replica.

        name: by which `connect`, also in other processes of this user, finds it. address: of a Ray to join (host:port
        of its head); None starts Ray here, which ends with this process, or with `detach` goes on until `stop`. Raises
        ConfigError for what cannot work, CheckpointError for a model that cannot be had, and ClusterError for a name
        that is taken, versions that differ, or no room within placement_timeout seconds; nothing is left then.
        """
        config = EngineConfig.from_settings(model=model, **settings)
        return cls.launch_config(
            config,
            replicas=replicas,
            name=name,
            address=address,
            detach=detach,
            placement_timeout=placement_timeout,
        )

    @classmethod
    def launch_config(
        cls,
        config: EngineConfig,
        *,
        replicas: int = 1,
        name: str | None = None,
        address: str | None = None,
        detach: bool = False,
        placement_timeout: float = placement.PLACING,
        on_progress: Callable[[list[ReplicaStatus]], None] = lambda rows: None,
        _replica: type = Replica,
    ) -> Self:
        """`launch` for settings that are together. on_progress: called every second until all replicas are warm."""
        if replicas < 1:
            raise ConfigError(f"a cluster has at least one replica, not {replicas}")
        if detach and name is None:
            raise ConfigError("a detached cluster needs a name, by which it can be found and stopped")
        there = None if name is None else cluster_state.read(name)
        if there is not None:
            raise ClusterError(cluster_state.taken(there.name))
        if Path(config.model).exists():
            config = replace(config, model=str(Path(config.model).resolve()))  # workers start elsewhere
        here = plan(config).computes if address is None else None  # what cannot work is refused before all else
        namespace = _namespace(name)
        home = placement.start(namespace) if address is None else placement.join(address, namespace)
        try:
            if name is not None:
                _claim(name, home, detach)
        except BaseException:
            home.end()
            raise
        made = cls(home, name, detach)
        made._replica = _replica
        try:
            made._add_replicas(placement.resolve(config, replicas), range(replicas), placement_timeout)
            while not made._driver.wait(replicas, 1.0):
                on_progress([_status(peer) for peer in made._driver.peers()])
                made._check_loads()
            made.compare(here)
        except BaseException:
            made.stop()
            raise
        return made

    @classmethod
    def connect(cls, name: str = "default", address: str | None = None, *, wait: bool = True) -> Self:
        """The cluster of this name, once one of its replicas is warm. `close` leaves it as it is.

        address: of its Ray, where another user or machine has launched it. wait: for a warm replica. Raises
        ClusterError where there is no such cluster.
        """
        state = cluster_state.read(name)
        if address is None and state is None:
            known = ", ".join(cluster_state.names()) or "none"
            raise ClusterError(f"no cluster {name}; there are: {known}: start it by `paged launch --name {name}`")
        home = placement.join(address or state.address, _namespace(name))  # type: ignore[union-attr]  # one is there
        if state is not None and state.head and state.address == home.address:
            home.head = Head(state.pid, state.address)  # type: ignore[arg-type]  # a head has a pid
        made = cls(home, name, detached=True)
        try:
            made._find(name, wait)
        except BaseException:
            made.close()
            raise
        return made

    @property
    def address(self) -> str:
        """Of its Ray, host:port."""
        return self._home.address

    # Prompts

    def generate(
        self,
        prompts: Prompt | SequenceOf[Any],
        sampling_params: Params = None,
        *,
        chat: bool = False,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Continue each prompt, or with `chat` answer each conversation; the outputs in the order of the prompts.

        prompts, sampling_params: as for LLM.generate. Raises RequestError, which names the prompt, and RequestFailed
        for one that kills its replicas or if the cluster is lost; the other requests are given up then.
        """
        items = [prompts] if is_one_prompt(prompts, chat) else list(prompts)
        one = isinstance(sampling_params, SamplingParams) or sampling_params is None
        params = [sampling_params] * len(items) if one else list(sampling_params)  # type: ignore[arg-type]  # not None
        if len(params) != len(items):
            raise RequestError(f"{len(items)} prompts and {len(params)} sampling_params: give one, or one for each")
        outbox, outputs, keys = _Outbox(), dict[int, RequestOutput](), []
        try:
            for i, (item, param) in enumerate(zip(items, params, strict=True)):
                request = PromptRequest(item, param, chat, priority)  # type: ignore[arg-type]
                keys.append(self._driver.add(request, partial(outbox.put, str(i))))
            while len(outputs) < len(items):
                for number, result in outbox.take(1.0):
                    outputs[int(number)] = _output(result, number)
        except BaseException:
            self._driver.abort(keys)
            raise
        return [outputs[i] for i in range(len(items))]

    async def submit(
        self,
        prompt: Prompt | SequenceOf[Any],
        sampling_params: SamplingParams | None = None,
        *,
        chat: bool = False,
        priority: int = 0,
    ) -> RequestOutput:
        """Continue one prompt, or with `chat` one conversation. A task that is cancelled gives its request up.

        Raises RequestError, RequestFailed and EngineClosed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result) -> None:
            if not future.done():
                future.set_result(result)

        def sink(result: Result) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, result)

        key = self._driver.add(PromptRequest(prompt, sampling_params, chat, priority), sink)
        try:
            result = await future
        finally:
            self._driver.abort([key])
        if isinstance(result, RequestOutput):
            return result
        assert isinstance(result, Exception)
        raise result

    # Lines, of a job

    @property
    def model_name(self) -> str:
        return next(peer.info.model_name for peer in self._driver.peers() if peer.info is not None)

    @property
    def room(self) -> int:
        """Most requests that should be handed over and not answered; it changes as replicas come and go."""
        return self._driver.room

    @property
    def stats(self) -> EngineStats:
        """The sum over the replicas, as of a second or two ago."""
        return self._driver.stats()

    def add(self, key: str, request: LineRequest) -> None:
        """Send a line; what is wrong with it is its result. Raises EngineClosed."""
        self._keys[key] = self._driver.add(request, partial(self._outbox.put, key))

    def take(self, timeout: float) -> list[tuple[str, Response]]:
        """The answers that are here; waits for the first, but no longer than `timeout` seconds."""
        answers = []
        for key, result in self._outbox.take(timeout):
            self._keys.pop(key, None)
            answers.append((key, _response(result)))
        return answers

    def abort(self, keys: Iterable[str]) -> None:
        """Forget these lines, and their answers."""
        keys = set(keys)
        self._driver.abort([self._keys.pop(key) for key in keys if key in self._keys])
        self._outbox.drop(keys)

    # The cluster

    def status(self) -> list[ReplicaStatus]:
        """How every replica stands, by number."""
        answers = silence(self.address) is None
        return [
            replace(_status(peer), restarts=restarts(peer.link) if answers else None) for peer in self._driver.peers()
        ]

    @property
    def num_replicas(self) -> int:
        """How many there are, warm or not."""
        return self._watcher.look()

    def scale(self, replicas: int) -> None:
        """Have so many replicas: starts more, without waiting until they are warm, or ends those of highest number."""
        if replicas < 1:
            raise RequestError(f"a cluster has at least one replica, not {replicas}: end it by stop()")
        if (error := silence(self.address)) is not None:  # Ray would wait
            raise ClusterError(f"no Ray answers at {self.address} ({error}): the cluster is lost")
        there = indices_of(self._namespace)  # the driver may not have heard of all
        for index in there[replicas:]:
            self._watcher.skip(index)
            self._driver.dismiss(index)
            end_replica(self._namespace, index)
            placement.release([f"{self._namespace}/{PREFIX}{index}"])
        missing = replicas - len(there)
        if missing > 0:
            config = next((peer.info.config for peer in self._driver.peers() if peer.info is not None), None)  # of one
            if config is None:
                raise ClusterError("no replica of this cluster has been warm: there is nothing to add to")
            free = [index for index in range(replicas) if index not in there]
            self._add_replicas(config, free[:missing], placement.PLACING)

    def stop(self) -> None:
        """End every replica, whoever started it, and Ray where we did."""
        if self._close.detach() is not None:
            self._let_go(end=True)

    def close(self) -> None:
        """Let go of the cluster; one that is not detached ends. It may be called again."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _find(self, name: str, wait: bool) -> None:
        there = self._watcher.look()
        if not wait:
            return
        if not there:
            raise ClusterError(f"no replica of cluster {name} is there, at {self.address}")
        began, said = time.monotonic(), False
        while not self._driver.wait(1, 1.0):
            self._check_loads()
            if not said and time.monotonic() - began > WAITING:
                said = True
                print(f"paged: no replica of cluster {name} is warm yet: waiting for the first", file=sys.stderr)
        self.compare()

    def _check_loads(self) -> None:
        """Raises ClusterError for a replica whose process dies again and again before it is warm."""
        if silence(self.address) is not None:  # Ray would wait
            return
        for peer in self._driver.peers():
            if peer.info is not None or (died := restarts(peer.link)) is None:
                continue
            deaths = died - self._died.setdefault(peer.index, died)
            if deaths >= MOST_LOADS:
                raise ClusterError(
                    f"the process of replica {peer.index} has died {deaths} times while it loaded the model: has "
                    "its node enough memory? What it said is among the logs of Ray there"
                )

    def compare(self, here: str | None = None) -> None:
        """Warn of replicas with other packages than here, or that compute otherwise than `here`, or than the first."""
        first = None if here is None else (here, "this process")
        for peer in self._driver.peers():
            if peer.info is None:
                continue
            name, computes = f"replica {peer.index}", peer.info.computes
            found = [placement.differences(name, peer.info.versions)]
            first = first or (computes, name)
            if computes != first[0]:
                other = f"{first[1]} {first[0]}"
                found.append(f"{name} computes {computes}, {other}: the same request may get other tokens there")
            for line in filter(None, found):
                print(f"paged: warning: {line}", file=sys.stderr)

    def _add_replicas(self, config: EngineConfig, indices: SequenceOf[int], placement_timeout: float) -> None:
        """With these settings, in which threads and memory are those of one."""
        need = placement.need_of(config, plan(config, runs_here=False).weight_bytes)
        names = [f"{PREFIX}{index}" for index in indices]
        rooms = [f"{self._namespace}/{name}" for name in names]
        placement.release(rooms)  # of a replica of this number that is lost
        placed = placement.place([need] * len(names), placement_timeout, rooms, self._detached)
        actor = actor_class(self._replica)
        for index, name, one in zip(indices, names, placed, strict=True):
            handle = actor.options(
                name=name,
                namespace=self._namespace,
                lifetime="detached" if self._detached else None,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=CALLS,
                **placement.options(one, 0),
            ).remote(config)
            self._handles[index] = handle
            self._driver.found(index, RayLink(handle))


class _Outbox:
    """Results that nobody has taken yet."""

    def __init__(self) -> None:
        self._filled = threading.Condition()
        self._results: list[tuple[str, Result]] = []

    def put(self, key: str, result: Result) -> None:
        with self._filled:
            self._results.append((key, result))
            self._filled.notify()

    def take(self, timeout: float) -> list[tuple[str, Result]]:
        with self._filled:
            self._filled.wait_for(lambda: self._results, timeout)
            results, self._results = self._results, []
            return results

    def drop(self, keys: set[str]) -> None:
        with self._filled:
            self._results = [one for one in self._results if one[0] not in keys]


def _namespace(name: str | None) -> str:
    """In which Ray has the replicas of a cluster."""
    return f"paged-{uuid.uuid4().hex if name is None else name}"


def _claim(name: str, home: placement.Home, detach: bool) -> None:
    """Take a name. Raises ClusterError where another has it, also one who launched elsewhere over the same Ray."""
    if indices_of(_namespace(name)):
        raise ClusterError(cluster_state.taken(name))
    head = home.head if detach else None
    pid = head.pid if head is not None else None if detach else os.getpid()
    born = None if pid is None else cluster_state.born(pid)
    ClusterState(name, home.address, pid, born, head=head is not None).save()
    if head is not None:
        head.stay()


def _let_go(
    watcher: Watcher, driver: Driver, home: placement.Home, namespace: str, name: str | None, *, end: bool
) -> None:
    """Let go of what belongs to a Cluster here; to end it is to end its replicas too, and Ray where it is ours."""
    import ray

    watcher.end()
    driver.close()
    if not end:
        home.leave()
        return
    if ray.is_initialized() and silence(home.address) is None:  # else Ray would wait, and end this process
        with suppress(Exception):  # it may end now
            for index in indices_of(namespace):
                with suppress(Exception):
                    end_replica(namespace, index)
            placement.release(placement.rooms(namespace))
    home.end()
    if name is not None:
        cluster_state.forget(name, home.address)


def _status(peer: Peer) -> ReplicaStatus:
    status = ReplicaStatus(peer.index, peer.state)
    if peer.state == "warm" and peer.info is not None and peer.report is not None:
        info, stats = peer.info, peer.report.stats
        status = replace(status, node=info.node, pid=info.pid, threads=info.threads, output_tokens=stats.output_tokens)
        status = replace(status, running=stats.running, waiting=stats.waiting)
        status = replace(status, used_pages=stats.used_pages, total_pages=stats.total_pages)
    return status


def _output(result: Result, number: str) -> RequestOutput:
    """What `generate` gives for a prompt; it raises what there is instead of an output."""
    if isinstance(result, RequestOutput):
        return replace(result, request_id=number)
    assert isinstance(result, (RequestError, RequestFailed))
    if isinstance(result, RequestError):
        raise RequestError(f"prompt {number}: {result}", result.param)
    raise RequestFailed(f"prompt {number}: {result}") from result.__cause__


def _response(result: Result) -> Response:
    if isinstance(result, Response):
        return result
    return Response("cluster_lost", None, str(result))
