"""Workers of one replica as Ray actors: rank 0 is in this process, which owns the others, so that they end with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paged.errors import ConfigError
from paged.layout import KVLayout
from worker.executor import WorkerLost
from worker.group import Group
from worker.head import Head, end_head, join_ray, start_head
from worker.loading import load_runner
from worker.model_config import ModelConfig
from worker.parallel import Shard, shards
from worker.tensor_parallel import ParallelExecutor, accept, connect, follow, listen

try:
    import ray
    from ray.util import get_current_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(f"tensor_parallel_size above 1 needs Ray: pip install 'paged-kv[ray]' ({error})") from None

PLACING = 60.0  # seconds until a worker that Ray has no place for is given up; one in a placement group has its place
_ENDING = 5.0  # seconds in which workers end by themselves
_executors = 0  # over a Ray that was started here, which ends with the last of them
_head: Head | None = None  # of that


@dataclass(frozen=True, slots=True)
class Spec:
    """What a worker needs to know; `settings` are those of `load_runner`."""

    path: Path
    config: ModelConfig
    layout: KVLayout  # of the shard
    shard: Shard
    settings: dict[str, Any]


class RayWorker:
    """A worker other than rank 0, in its own process."""

    def pid(self) -> int:
        """The number of its process, once there is a place for it."""
        return os.getpid()

    def run(self, spec: Spec, folder: str) -> None:
        """Load a shard, and follow rank 0 until it ends."""
        shard = spec.shard
        link = connect(Path(folder) / "leader", shard.rank)
        group = Group(Path(folder) / "store", shard.rank, shard.size, spec.settings["device"])
        try:
            runner, load = load_runner(
                spec.path, spec.config, spec.layout, **spec.settings, shard=shard, total=group.total
            )
            follow(link, runner, load)
        finally:  # so that the others do not wait
            link.close()
            group.close()


class RayExecutor(ParallelExecutor):
    """An executor whose other workers are Ray actors; `close` ends them.

    Arguments as of `load_runner`, but `layout` is the whole model's, and `threads` each worker's. Inside of a placement
    group a worker takes the bundle of its rank; else it comes to this machine, in a Ray of our own where there is none
    yet. pids: processes of the ranks from 1 on. Raises ConfigError where the model cannot be divided so, or Ray has no
    place for a worker; CheckpointError; WorkerLost if one ends while it loads.
    """

    def __init__(
        self, path: Path, config: ModelConfig, layout: KVLayout, size: int, *, threads: int, **settings: Any
    ) -> None:
        parts = shards(config, size)
        self._actors, self._runs = list[Any](), list[Any]()
        self._ours = _start((size - 1) * threads)
        folder = Path(tempfile.mkdtemp(prefix="paged-"))
        try:
            options, devices = _places(size, settings.pop("device"), 0 if self._ours else threads)
            specs = [
                Spec(path, config, replace(layout, kv_heads=len(shard.kv_heads)), shard, {**settings, **more})
                for shard, device in zip(parts, devices, strict=True)
                if (more := {"threads": threads, "device": device})
            ]
            self._actors = [ray.remote(RayWorker).options(**option).remote() for option in options]
            self.pids = self._placed()
            own = specs[0]
            links, group = self._meet(specs[1:], folder, own)
            runner, load = load_runner(path, config, own.layout, **own.settings, shard=own.shard, total=group.total)
            super().__init__(runner, load, group, links, self._blame)
        except BaseException:
            self._end(0.0)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        super().close()
        self._end(_ENDING)

    def _meet(self, others: list[Spec], folder: Path, own: Spec) -> tuple[list[Connection], Group]:
        """The others are told what to load, and come: over a socket each, and into the group."""
        with listen(folder / "leader", len(others)) as listener:
            self._runs = [actor.run.remote(spec, str(folder)) for actor, spec in zip(self._actors, others, strict=True)]
            try:
                links = accept(listener, len(others), PLACING)
                return links, Group(folder / "store", 0, own.shard.size, own.settings["device"])
            except (OSError, EOFError, RuntimeError) as error:
                raise WorkerLost(
                    f"not all workers have come: {self._blame() or error}: start the engine again"
                ) from error

    def _placed(self) -> list[int]:
        try:
            found: list[int] = ray.get([actor.pid.remote() for actor in self._actors], timeout=PLACING)
        except ray.exceptions.GetTimeoutError:
            resources: dict[str, float] = ray.available_resources()
            free = ", ".join(f"{value:g} {name}" for name, value in sorted(resources.items()))
            raise ConfigError(
                f"Ray has not started {len(self._actors)} workers here in {PLACING:g} seconds; free in all of it: "
                f"{free}: lower tensor_parallel_size or threads, or give Ray more"
            ) from None
        return found

    def _blame(self) -> str:
        """What of the workers that have ended is known, once the first has."""
        ray.wait(self._runs, timeout=_ENDING)
        done, _ = ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        said = []
        for rank, run in enumerate(self._runs, 1):
            try:
                if run in done:
                    ray.get(run)
            except ray.exceptions.RayTaskError as error:
                said.append(f"rank {rank}: {type(error.cause).__name__}: {error.cause}")
            except ray.exceptions.RayError as error:
                said.append(f"rank {rank}: its process ended ({str(error).splitlines()[0]})")
        return "; ".join(said)

    def _end(self, patience: float) -> None:
        global _executors
        if ray.is_initialized():
            if self._runs and patience:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=patience)
            for actor in self._actors:
                ray.kill(actor)
        self._actors, self._runs = [], []
        if self._ours:
            self._ours = False
            _executors -= 1
            if not _executors:
                ray.shutdown()
                _end_head()


def _start(cpus: int) -> bool:
    """Whether Ray is one that was started here: now, if there is none in this process."""
    global _executors, _head
    if not ray.is_initialized():
        _executors, _head = 0, start_head(cpus)
        try:
            join_ray(_head.address)
        except BaseException:
            _end_head()
            raise
    elif not _executors:
        return False
    _executors += 1
    return True


def _end_head() -> None:
    global _head
    if _head is not None:
        _head.let_go()
        end_head(_head.address)
        _head = None


def _places(size: int, device: str, cpus: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Options of the actors of ranks from 1 on, and the device of every rank."""
    group = get_current_placement_group()
    if group is None:
        node = ray.get_runtime_context().get_node_id()
        option: dict[str, Any] = {"num_cpus": cpus, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, False)}
        if device == "cuda":  # all see all devices, and take that of their rank
            option["runtime_env"] = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
        return [option] * (size - 1), [f"cuda:{rank}" if device == "cuda" else device for rank in range(size)]
    if len(group.bundle_specs) < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and the placement group has {len(group.bundle_specs)} bundles: it needs "
            "one for each worker"
        )
    return [
        {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "memory": bundle.get("memory"),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        }
        for rank, bundle in enumerate(group.bundle_specs[:size])
        if rank
    ], [device] * size
