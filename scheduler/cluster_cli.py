"""`paged launch`, `status`, `scale` and `stop`: clusters on the command line. Tables go to stdout."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from paged.errors import ClusterError
from scheduler import cluster_state
from scheduler.cluster import Cluster, ReplicaStatus
from scheduler.config import EngineConfig
from worker.head import end_head, silence

EVERY = 5.0  # seconds between two lines on how far replicas are
SILENT = 10.0  # seconds without Ray's head, after which a launcher takes its cluster for lost
ENDING = 45.0  # seconds until a launcher that was asked to end must have
_COLUMNS = (
    *(("replica", "index"), ("state", "state"), ("node", "node"), ("pid", "pid"), ("threads", "threads")),
    *(("running", "running"), ("waiting", "waiting"), ("pages", "total_pages"), ("used", "used_pages")),
    *(("tokens", "output_tokens"), ("restarts", "restarts")),
)


def launch(config: EngineConfig, replicas: int, name: str, address: str | None, detach: bool) -> int:
    """Start a cluster, and stay until it is stopped, or with `detach` leave it; the exit code."""
    with _told() as told:
        try:
            cluster = Cluster.launch_config(
                config, replicas=replicas, name=name, address=address, detach=detach, on_progress=_Progress(replicas)
            )
        except (KeyboardInterrupt, SystemExit):  # the latter while Ray has SIGTERM
            _say("stopped before the cluster was up: nothing of it is left")
            return 128 + (told.number or signal.SIGTERM)
        told.is_up = True
        try:
            print(table(cluster.status()), flush=True)
            if detach:
                _say(f"cluster {name} is up at {cluster.address}: `paged batch --cluster {name}`, `paged stop`")
                return 0
            _say(f"cluster {name} is up at {cluster.address}, until Ctrl-C: `paged batch --cluster {name}` elsewhere")
            if not told.wait(cluster.address):
                _say(f"Ray's head at {cluster.address} has ended, and the cluster with it")
                return 1
        finally:
            if not detach:
                _say("ending")
                cluster.stop()
            cluster.close()
    return 128 + told.number


def status(name: str, address: str | None) -> int:
    with Cluster.connect(name, address, wait=False) as cluster:
        if not cluster.num_replicas:
            raise ClusterError(f"no replica of cluster {name} is there, at {cluster.address}")
        end = time.monotonic() + EVERY  # those that are warm have said how they stand by then
        while sum(row.used_pages is not None for row in cluster.status()) < cluster.num_replicas:
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        cluster.compare()
        rows = cluster.status()
        known = any(row.used_pages is not None for row in rows)
        _say(f"cluster {name} at {cluster.address}, {f'model {cluster.model_name}' if known else 'no replica is warm'}")
        print(table(rows))
    return 0


def scale(replicas: int, name: str, address: str | None) -> int:
    with Cluster.connect(name, address) as cluster:
        cluster.scale(replicas)
        end = time.monotonic() + EVERY  # the table shows them
        while len(cluster.status()) != replicas and time.monotonic() < end:
            time.sleep(0.1)
        print(table(cluster.status()))
    return 0


def stop(name: str, address: str | None) -> int:
    """End a cluster whole, whoever launched it."""
    state = cluster_state.read(name)
    if state is not None and address not in (None, state.address):
        state = None
    if state is not None and state.pid is not None and not state.here:
        raise ClusterError(
            f"cluster {name} was launched on {state.host}: stop it there, or delete {cluster_state.path_of(name)} if "
            "that machine is no more"
        )
    if state is not None and state.pid is not None and not state.head:
        _end_launcher(state)
        _say(f"cluster {name} is stopped, and process {state.pid}, which launched it, has ended")
        return 0
    try:
        with Cluster.connect(name, address, wait=False) as cluster:
            ended = cluster.num_replicas
            cluster.stop()
    except ClusterError as error:
        if state is None or (not state.head and silence(state.address) is None):  # it is there, and not to be joined
            raise
        if state.head:
            end_head(state.address)
        cluster_state.forget(name, state.address)
        _say(f"cluster {name} is stopped; its replicas were gone or out of reach: {error}")
        return 0
    if not ended and state is None:
        raise ClusterError(f"no replica of cluster {name} was there, at {address}")
    what = "Ray" if state is not None and state.head else "not Ray, which was there before"
    _say(f"cluster {name} is stopped: {ended} {'replica has' if ended == 1 else 'replicas have'} ended, {what}")
    return 0


def table(rows: list[ReplicaStatus]) -> str:
    """One line for each replica."""
    cells = [[title for title, _ in _COLUMNS]]
    for row in rows:
        values = [getattr(row, field) for _, field in _COLUMNS]
        cells.append(["-" if value is None else str(value) for value in values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def _end_launcher(state: cluster_state.ClusterState) -> None:
    assert state.pid is not None
    with suppress(ProcessLookupError):
        os.kill(state.pid, signal.SIGTERM)
    end = time.monotonic() + ENDING
    while state.alive:
        if time.monotonic() > end:
            raise ClusterError(
                f"process {state.pid}, which launched cluster {state.name}, has not ended: end it by hand"
            )
        time.sleep(0.1)
    cluster_state.forget(state.name, state.address)


class _Progress:
    """Says every few seconds how many replicas are warm."""

    def __init__(self, replicas: int) -> None:
        self._replicas, self._next = replicas, time.monotonic() + EVERY

    def __call__(self, rows: list[ReplicaStatus]) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            _say(f"{sum(row.state == 'warm' for row in rows)} of {self._replicas} replicas are warm")


class _Told:
    """Whether Ctrl-C or SIGTERM came, and which."""

    number = 0
    is_up = False  # the cluster is: a signal is waited for, and interrupts nothing

    def __init__(self) -> None:
        self._event = threading.Event()

    def tell(self, number: int, frame: FrameType | None) -> None:
        if self.number == 0 and not self.is_up:
            self.number = number
            raise KeyboardInterrupt
        self.number = number
        self._event.set()

    def wait(self, address: str) -> bool:
        """Until one has come, or nobody answers at `address` for a while; whether one has come."""
        heard = time.monotonic()
        while not self._event.wait(1.0):
            now = time.monotonic()
            if silence(address) is None:
                heard = now
            elif now - heard > SILENT:
                return False
        return True


@contextmanager
def _told() -> Iterator[_Told]:
    told = _Told()
    before = {number: signal.signal(number, told.tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _say(text: str) -> None:
    print(f"paged: {text}", file=sys.stderr, flush=True)
