"""A stand-in, until the real one is merged: Ray in this process, plain actors without placement groups."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

from paged.errors import ConfigError
from scheduler.config import EngineConfig, parse_memory


@dataclass(frozen=True)
class Need:
    cpus: float
    gpus: float
    memory: int
    workers: int


@dataclass(frozen=True)
class Placement:
    name: str
    need: Need


@dataclass
class Home:
    address: str
    ours: bool

    def end(self) -> None:
        import ray

        if self.ours:
            ray.shutdown()

    def leave(self) -> None:
        self.end()


def start(address: str | None, namespace: str, detach_head: bool = False, cpus: int | None = None) -> Home:
    try:
        import ray
    except ImportError:
        raise ConfigError("a cluster needs Ray: pip install 'paged-kv[ray]'") from None
    if ray.is_initialized():
        return Home("", ours=False)
    ray.init(
        address,
        num_cpus=None if address else cpus,
        namespace=namespace,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    return Home(ray.get_runtime_context().gcs_address, ours=True)


def place(needs: list[Need], timeout: float, names: list[str], detached: bool) -> list[Placement]:
    return [Placement(name, need) for name, need in zip(names, needs, strict=True)]


def options(placement: Placement, bundle: int) -> dict[str, Any]:
    return {"num_cpus": placement.need.cpus, "num_gpus": placement.need.gpus}


def resolve(config: EngineConfig, replicas: int, node_cpus: int) -> tuple[EngineConfig, Need]:
    threads = config.threads or max(1, node_cpus // replicas)
    memory = parse_memory(config.kv_memory)
    if isinstance(memory, float):
        config = replace(config, kv_memory=f"{100 * memory / replicas}%")
    return replace(config, threads=threads), Need(threads, 0, 0, 1)


def node_cpus() -> int:
    return len(os.sched_getaffinity(0))
