"""Placement: where replicas are. Starts Ray or joins it, compares versions, and asks for room by need.

    start, join -> Home     a Ray below a head of ours (head.py), or somebody else's
    need_of -> Need         what a worker of a replica takes: CPUs (its threads), GPUs, memory
    place -> placement groups, one for each replica, a bundle for each worker, all of a replica on one node

Ray knows what is free and where; nothing of that is reckoned here.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paged.errors import ClusterError, ConfigError
from paged.sizing import parse_memory
from scheduler.config import EngineConfig
from scheduler.replica import PACKAGES
from worker.head import Head, end_head, join_ray, silence, start_head, use_token

PLACING = 15.0  # seconds
RELEASING = 10.0  # seconds
SEES_NONE = {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}  # else who asks for no GPU sees all, as Ray changes nothing then


@dataclass(frozen=True, slots=True)
class Need:
    """What one replica takes. cpus, gpus, memory (bytes): of each of its workers."""

    cpus: float
    gpus: float
    memory: int
    workers: int

    @property
    def bundle(self) -> dict[str, float]:
        all_ = {"CPU": float(self.cpus), "GPU": float(self.gpus), "memory": float(self.memory)}
        return {name: value for name, value in all_.items() if value}

    def __str__(self) -> str:
        each = ", ".join(_amount(name, value) for name, value in self.bundle.items())
        return each if self.workers == 1 else f"{self.workers} workers of {each} on one node"


@dataclass(frozen=True, slots=True)
class Placement:
    """Room for one replica: a placement group."""

    need: Need
    group: Any


@dataclass(slots=True)
class Home:
    """A Ray that this process is connected to. head: of one that was started for a cluster; it may be another's."""

    address: str
    connected: bool  # by us: else it was the caller's before
    head: Head | None = None

    def leave(self) -> None:
        """Let go of it. What was started here and not told to stay ends."""
        if self.connected:
            import ray

            self.connected = False
            ray.shutdown()
        if self.head is not None and self.head.pipe is not None:
            self.head.let_go()
            self._end_head()

    def end(self) -> None:
        """Let go of it, and end the head where there is one."""
        self.leave()
        self._end_head()

    def _end_head(self) -> None:
        if self.head is not None:
            self.head = None
            end_head(self.address)


def need_ray() -> Any:
    """The module. Raises ConfigError where it is missing."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"a cluster needs Ray: pip install 'paged-kv[ray]' ({error})") from None
    return ray


def start(namespace: str) -> Home:
    """Start Ray on this machine; it ends with this process, however that ends, until its head is told to stay.

    A process that is connected already stays so, and what is there is not ours.
    """
    ray = need_ray()
    if ray.is_initialized():
        return Home(ray.get_runtime_context().gcs_address, connected=False)
    head = start_head(node_cpus())
    try:
        return replace(join(head.address, namespace), head=head)
    except BaseException:
        head.let_go()
        end_head(head.address)
        raise


def join(address: str, namespace: str) -> Home:
    """Connect to the Ray at `address` (host:port). Raises ClusterError where there is none, or versions differ."""
    ray = need_ray()
    if ray.is_initialized():
        ours = ray.get_runtime_context().gcs_address
        if ours != address:
            raise ClusterError(f"this process is connected to the Ray at {ours}, not {address}: call ray.shutdown()")
        return Home(address, connected=False)
    if (error := silence(address)) is not None:
        raise ClusterError(f"no Ray answers at {address} ({error}): give the host:port of its head")
    use_token()
    _compare(cluster_versions(address), address)
    _connect(address, namespace)
    return Home(address, connected=True)


def cluster_versions(address: str) -> tuple[str, str] | None:
    """Ray's and Python's version of a cluster, without connecting to it; None where this Ray cannot tell."""
    try:
        from ray import _raylet
        from ray._common.usage.usage_lib import get_cluster_metadata

        found = get_cluster_metadata(_raylet.GcsClient(address=address))  # type: ignore[attr-defined]
        return str(found["ray_version"]), str(found["python_version"])
    except Exception:  # noqa: BLE001  these are Ray's own: it compares for itself when it connects, and says so
        return None


def our_versions() -> tuple[str, str]:
    return version("ray"), ".".join(map(str, sys.version_info[:3]))


def _compare(theirs: tuple[str, str] | None, address: str) -> None:
    ours = our_versions()
    if theirs is not None and theirs != ours:
        raise ClusterError(
            f"versions differ: the cluster at {address} has Ray {theirs[0]} and Python {theirs[1]}, this process on "
            f"{socket.gethostname()} has Ray {ours[0]} and Python {ours[1]}: install the same here or there"
        )


def differences(name: str, theirs: dict[str, str | None]) -> str | None:
    """One line on packages of a replica that are not those of this process; None if there are none."""
    ours: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            ours[package] = version(package)
        except PackageNotFoundError:
            ours[package] = None
    found = [
        f"{package} {theirs[package]}, here {ours[package]}"
        for package in PACKAGES
        if package in theirs and theirs[package] != ours[package]
    ]
    return f"{name} has {'; '.join(found)}" if found else None


def node_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve(config: EngineConfig, replicas: int) -> EngineConfig:
    """The settings of one of so many replicas on the nodes that there are.

    Threads that are not given are a node's CPUs, divided by the workers that come to it; a share of memory is divided
    by its replicas.
    """
    ray = need_ray()
    useful = [cpus for cpus in (node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]) if cpus >= 1]
    per_node = -(-replicas // max(1, len(useful)))
    threads = config.threads or max(1, int(max(useful, default=1)) // (per_node * config.tensor_parallel_size))
    memory = parse_memory(config.kv_memory)
    kv_memory = config.kv_memory if isinstance(memory, int) else f"{100 * memory / per_node:.4f}%"
    return replace(config, threads=threads, kv_memory=kv_memory)


def need_of(config: EngineConfig, weights: int = 0) -> Need:
    """What a replica of these settings takes. weights: bytes of the model, which count where kv_memory is in bytes."""
    assert config.threads is not None
    memory, workers = parse_memory(config.kv_memory), config.tensor_parallel_size
    return Need(
        cpus=config.threads,
        gpus=1 if config.device == "cuda" else 0,
        memory=weights // workers + memory if isinstance(memory, int) else 0,
        workers=workers,
    )


def place(needs: list[Need], timeout: float, names: list[str], detached: bool) -> list[Placement]:
    """Room for replicas of these names and needs.

    Waits for resources that come late. Raises ClusterError when there is not enough after `timeout` seconds, with what
    was asked, what is available, and where; nothing is kept then.
    """
    ray = need_ray()
    end = time.monotonic() + timeout
    placed: list[Placement] = []
    try:
        for name, need in zip(names, needs, strict=True):
            bundles, lifetime = [need.bundle] * need.workers, "detached" if detached else None
            try:
                group = ray.util.placement_group(bundles, "STRICT_PACK", name, lifetime=lifetime)
            except ray.exceptions.RaySystemError:
                raise ClusterError(f"somebody else is making room for {name}: look at the status first") from None
            placed.append(Placement(need, group))
        missing = _wait(placed, end)
        if missing:
            raise ClusterError(_no_room(placed, missing, timeout))  # noqa: TRY301  what was placed is given up
    except BaseException:
        for one in placed:
            ray.util.remove_placement_group(one.group)
        raise
    return placed


def _wait(placed: list[Placement], end: float) -> list[Placement]:
    """Those for which there is no room until then."""
    import ray

    waiting = {one.group.ready(): one for one in placed}
    while waiting and (left := end - time.monotonic()) > 0:
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(left, 0.5))  # a signal is seen between
        for one in ready:
            del waiting[one]
    return list(waiting.values())


def release(names: Collection[str]) -> None:
    """Give up the room of these names, whoever made it, in whichever of Ray's namespaces.

    The names are free then. Raises ClusterError if that takes too long.
    """
    ray = need_ray()
    end = time.monotonic() + RELEASING
    asked = set[str]()
    while left := {key: name for key, name in _groups().items() if name in names}:
        for key in left.keys() - asked:
            ray.util.remove_placement_group(_group(key))
        asked |= left.keys()
        if time.monotonic() > end:
            raise ClusterError(f"Ray does not give up the room of {', '.join(sorted(left.values()))}")
        time.sleep(0.05)


def rooms(namespace: str) -> list[str]:
    """The names of all room in it, also of replicas that have ended."""
    return [name for name in _groups().values() if name.startswith(f"{namespace}/")]


def _groups() -> dict[str, str]:
    """Names of placement groups by id."""
    table = need_ray().util.placement_group_table()
    return {key: one["name"] for key, one in table.items() if one["state"] != "REMOVED"}


def _group(key: str) -> Any:
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(key)))


def options(placement: Placement, bundle: int) -> dict[str, Any]:
    """Of an actor that takes this bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    need = placement.need
    return {
        "num_cpus": need.cpus,
        "num_gpus": need.gpus,
        "memory": need.memory or None,
        "runtime_env": None if need.gpus else SEES_NONE,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement.group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
        ),
    }


def _no_room(placed: list[Placement], missing: list[Placement], timeout: float) -> str:
    """Asked, available, per node."""
    ray = need_ray()
    with suppress(Exception):  # so that those that found room do not count as taken
        for one in placed:
            ray.util.remove_placement_group(one.group)
        time.sleep(1.0)
    free = _free_per_node()
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            there = free.get(node["NodeID"], {})
            kinds = [name for name in ("CPU", "GPU", "memory") if node["Resources"].get(name)]
            what = ", ".join(f"{_amount(n, there.get(n, 0))} of {_amount(n, node['Resources'][n])}" for n in kinds)
            nodes.append(f"{node['NodeManagerAddress']} has {what or 'no CPU'} free")
    each = ", ".join(sorted({str(one.need) for one in placed}))
    return (
        f"no room for {len(missing)} of {len(placed)} replicas after {timeout:g} s: each asks for {each}; "
        f"{'; '.join(nodes)}: ask for fewer replicas or threads, or add nodes"
    )


def _free_per_node() -> dict[str, dict[str, float]]:
    from ray._private.state import available_resources_per_node

    return dict(available_resources_per_node())


def _amount(name: str, value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if name == "memory" else f"{value:g} {name}"


def _connect(address: str, namespace: str) -> None:
    """Raises ClusterError."""
    import ray

    try:
        join_ray(address, namespace=namespace)
    except Exception as error:  # noqa: BLE001  some are of no class of their own
        with suppress(Exception):
            ray.shutdown()
        raise ClusterError(f"Ray cannot be joined at {address}: {error}") from None
