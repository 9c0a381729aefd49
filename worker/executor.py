"""Executor: how an engine reaches its workers. LocalExecutor: one worker in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paged.errors import PagedError
from worker.step import Step, StepResult

if TYPE_CHECKING:
    from worker.runner import Model, ModelRunner  # torch, which the scheduler's side of this seam does without


class WorkerLost(PagedError):
    """A worker ended, hangs, or is out of step with the others. This executor, and its engine, are of no more use."""


class Executor(Protocol):
    """Runs steps in the order in which they are submitted."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page counted; of several workers the least."""

    def submit(self, step: Step) -> None:
        """Begin a step. At most one may be under way; a restart takes the place of one that was given up."""

    def result(self) -> StepResult:
        """Wait for the step under way. Raises whatever the worker raised.

        After WorkerLost every further call but `close` raises it again.
        """

    def update_weights(self, path: Path, replaced: Mapping[str, Any]) -> None:
        """Take the weights of the checkpoint in the folder `path`, with the tensors `replaced` by name, from now on.

        No step may be under way. Raises CheckpointError, and keeps the old ones, for what does not fit the model.
        """

    def close(self) -> None:
        """Let go of everything. Further calls are a fault."""


class LocalExecutor:
    """One ModelRunner, in this process and thread: a step runs when its result is asked for.

    load: makes the model from a folder and replaced tensors.
    """

    def __init__(self, runner: ModelRunner, load: Callable[[Path, Mapping[str, Any]], Model]) -> None:
        self._runner: ModelRunner | None = runner
        self._load = load
        self._step: Step | None = None

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
        return self._runner.execute(step)

    def profile(self) -> dict[str, float]:
        """From now on the seconds of each kind of native operation are added up in this dict."""
        assert self._runner is not None
        self._runner.seconds = {}
        return self._runner.seconds

    def update_weights(self, path: Path, replaced: Mapping[str, Any]) -> None:
        assert self._runner is not None
        assert self._step is None, "a step is under way"
        self._runner.model = self._load(path, replaced)

    def close(self) -> None:
        self._runner = self._step = None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, where half a change would be left. Only the main thread ever gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if caught:
            signal.raise_signal(signal.SIGINT)
