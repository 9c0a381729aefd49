"""Several workers as one executor: rank 0 leads, in the engine's process, the others follow over a socket each.

    leader                              followers
    begin the step          step, and what the last one sampled ->    learn that, begin the step
    compute     <- sums of every layer, over worker/group.py ->       compute
    sample

Only the leader samples, and only it answers. It sends a step once it has begun it, so a step that does not fit fails
there alone, as with one worker, and the followers see the restart after it. From then on all compute the same list of
sums: whoever fails in between, ends, or does not come within TIMEOUT, leaves the others without one, and the whole
executor is lost. Sockets are of this machine, in a folder of this user, as what comes over them is unpickled.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from worker.executor import WorkerLost, uninterrupted
from worker.group import TIMEOUT, Group
from worker.loading import Load
from worker.runner import ModelRunner
from worker.step import Step, StepResult


class ParallelExecutor:
    """The leader: an Executor over its own runner, and those at the other ends of `links`, in order of rank.

    layer_bytes: what the weights of the layers take at each worker. why: says, after something broke, which worker is
    to blame.
    """

    def __init__(
        self,
        runner: ModelRunner,
        load: Load,
        group: Group,
        links: SequenceOf[Connection],
        why: Callable[[], str] = lambda: "",
    ) -> None:
        self._runner: ModelRunner | None = runner
        self._load, self._group, self._links, self._why = load, group, links, why
        self._step: Step | None = None
        self._sampled: StepResult | None = None  # by the last step, which the followers do not know yet
        self._lost: WorkerLost | None = None
        self.layer_bytes = (runner.model.layer_bytes, *self._answers())

    @property
    def num_pages(self) -> int:
        assert self._runner is not None
        return self._runner.pool.num_pages

    def submit(self, step: Step) -> None:
        assert self._step is None or step.restart, "a step is under way"
        self._step = step

    def result(self) -> StepResult:
        assert self._runner is not None
        assert self._step is not None, "no step is under way"
        step, self._step = self._step, None
        self._check()
        with torch.inference_mode():
            work = self._runner.begin(step)
            with uninterrupted():
                self._tell("step", step, self._sampled)
                self._sampled = None
                try:
                    logits, best = self._runner.compute(work)
                except BaseException as error:
                    raise self._broken(error) from error
                self._sampled = self._runner.finish(work, logits, best)
            return self._sampled

    def profile(self) -> dict[str, float]:
        """As LocalExecutor's, of rank 0."""
        assert self._runner is not None
        self._runner.seconds = {}
        return self._runner.seconds

    def update_weights(self, path: Path, replaced: Mapping[str, Any]) -> None:
        assert self._runner is not None
        assert self._step is None, "a step is under way"
        self._check()
        model = self._load(path, replaced)  # what does not fit fails here, and the others hear nothing
        with uninterrupted():
            self._tell("weights", path, dict(replaced))
            self._answers()
            self._runner.model = model

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._group.close()
        self._runner = self._step = None

    def _check(self) -> None:
        if self._lost is not None:
            raise WorkerLost(str(self._lost)) from self._lost

    def _tell(self, *message: Any) -> None:
        data = pickle.dumps(message)
        try:
            for link in self._links:
                link.send_bytes(data)
        except OSError as error:
            raise self._broken(error) from error

    def _answers(self) -> tuple[int, ...]:
        """What each follower says once it has loaded, however long that takes."""
        try:
            return tuple(int.from_bytes(link.recv_bytes()) for link in self._links)
        except (OSError, EOFError) as error:
            raise self._broken(error) from error

    def _broken(self, error: BaseException) -> WorkerLost:
        said = self._why() or f"rank 0: {type(error).__name__}: {error}"
        self._lost = WorkerLost(
            f"tensor parallel over {1 + len(self._links)} workers is broken, {said}: start the engine again, and send "
            "again what has no answer"
        )
        for link in self._links:
            link.close()
        self._group.close()
        return self._lost


def follow(link: Connection, runner: ModelRunner, load: Load) -> None:
    """Do what the leader says, until it ends. Raises whatever a step raises; then its process must not go on."""
    work = None
    link.send_bytes(_number(runner.model.layer_bytes))
    while True:
        try:
            kind, *message = pickle.loads(link.recv_bytes())
        except (OSError, EOFError):
            return
        if kind == "weights":
            runner.model = load(*message)
            link.send_bytes(_number(runner.model.layer_bytes))
            continue
        step, sampled = message
        with torch.inference_mode():
            if sampled is not None:
                assert work is not None
                runner.learn(work, sampled)
            work = runner.begin(step)
            runner.compute(work)


def _number(value: int) -> bytes:
    return value.to_bytes(8)


def listen(place: Path, count: int) -> socket.socket:
    """A socket at `place`, in a folder of this user, for `count` followers."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen(count)
    return listener


def accept(listener: socket.socket, count: int, timeout: float) -> list[Connection]:
    """Connections to followers, in order of their rank. Raises TimeoutError."""
    links = dict[int, Connection]()
    listener.settimeout(timeout)
    while len(links) < count:
        link = _link(listener.accept()[0])
        links[int.from_bytes(link.recv_bytes())] = link
    return [links[rank] for rank in sorted(links)]


def connect(place: Path, rank: int) -> Connection:
    """The follower's end."""
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(str(place))
    link = _link(connected)
    link.send_bytes(_number(rank))
    return link


def _link(connected: socket.socket) -> Connection:
    connected.setblocking(True)
    # Who does not read for so long is taken for dead, as in a sum.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(TIMEOUT), 0))
    return Connection(connected.detach())
