"""Placement on Ray: room, versions, and which devices a worker sees. Nodes are Ray's own fakes, of any size."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from marked import make_tiny_model

from paged import EngineConfig
from paged.errors import ClusterError
from scheduler import cli, cluster_state, placement
from scheduler.cluster import Cluster
from scheduler.placement import Need
from worker import head
from worker.head import ensure_token

pytestmark = pytest.mark.ray
ONE = Need(cpus=1, gpus=0, memory=0, workers=1)
UUIDS = "GPU-aa,GPU-bb"
REQUESTS = str(Path(__file__).parents[2] / "examples" / "requests.jsonl")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A Ray of one node with one CPU."""
    from ray._private.authentication import authentication_token_setup as tokens
    from ray.cluster_utils import Cluster

    ensure_token()
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as who joins does
    size = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def home(nodes: Any) -> Iterator[placement.Home]:
    home = placement.join(nodes.address, "paged-test")
    yield home
    home.leave()


def left() -> list[str]:
    """Placement groups and actors that are there."""
    import ray

    groups = ray.util.placement_group_table().values()
    found = [group["name"] for group in groups if group["state"] != "REMOVED"]
    return found + [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]


def actor(**options: Any) -> Any:
    """An actor that says what it sees."""
    import ray

    class Seer:
        def sees(self) -> tuple[str | None, bool]:
            import torch

            return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_available()

    return ray.remote(Seer).options(**options).remote()


SEES = """
import sys
import paged, ray
from scheduler import placement
home = placement.start("paged-test")
where = ray.remote(lambda: (__import__("paged").__file__, __import__("scheduler").__file__))
import scheduler
print(ray.get(where.remote()) == (paged.__file__, scheduler.__file__))
home.end()
"""


def test_workers_have_the_modules_of_the_driver_whatever_lies_in_the_folder_where_it_was_started(
    tmp_path: Path,
) -> None:
    """Such as a checkout without its native library, for all whose `paged` is an installed one."""
    for name in ("paged", "scheduler", "worker"):
        (tmp_path / "checkout" / name).mkdir(parents=True)
        (tmp_path / "checkout" / name / "__init__.py").write_text("raise RuntimeError('another one')")
    (tmp_path / "sees.py").write_text(SEES)
    environ = {"PYTHONPATH": str(Path(placement.__file__).parents[1])}
    said = subprocess.run(
        [sys.executable, str(tmp_path / "sees.py")],
        cwd=tmp_path / "checkout",
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert said.stdout == "True\n", said.stderr[-2000:]


# R06: versions, before anything else


@pytest.mark.parametrize("theirs", [("2.42.0", None), (None, "3.12.1"), ("2.42.0", "3.11.0")])
def test_other_versions_of_a_cluster_are_refused_before_anything_is_loaded(
    nodes: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    theirs: tuple[str | None, str | None],
) -> None:
    """R06: one line, with both versions and both places. The model is not looked for: there is none of this name."""
    import ray

    ours = placement.our_versions()
    monkeypatch.setattr(placement, "cluster_versions", lambda address: (theirs[0] or ours[0], theirs[1] or ours[1]))
    for command in (
        ["launch", "--model", "/no/model"],
        ["batch", REQUESTS, "--model", "/no/model", "--replicas", "1", "-o", str(tmp_path / "o")],
    ):
        assert cli.run([*command, "--address", nodes.address]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            f"the cluster at {nodes.address} has Ray {theirs[0] or ours[0]} and Python {theirs[1] or ours[1]}" in line
        )
        assert f"this process on {socket.gethostname()} has Ray {ours[0]} and Python {ours[1]}" in line
        assert not ray.is_initialized()
    monkeypatch.undo()
    home = placement.join(nodes.address, "paged-test")
    assert left() == []
    home.leave()


def test_what_a_cluster_says_of_its_versions_are_ours(nodes: Any) -> None:
    """So the comparison has something to compare; a Ray that tells nothing is taken, and compares for itself."""
    assert placement.cluster_versions(nodes.address) == placement.our_versions()
    placement._compare(None, nodes.address)


def test_other_packages_of_a_replica_are_one_line_with_names_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """R06"""
    monkeypatch.setattr(
        placement, "version", lambda package: {"torch": "2.12.0", "transformers": "5.30"}.get(package, "1")
    )
    theirs: dict[str, str | None] = {
        "torch": "2.10.0",
        "transformers": None,
        "ray": "1",
        "paged-kv": "1",
    }
    assert placement.differences("replica 3", theirs) == (
        "replica 3 has torch 2.10.0, here 2.12.0; transformers None, here 5.30"
    )
    assert placement.differences("replica 3", theirs | {"torch": "2.12.0", "transformers": "5.30"}) is None


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1", "nowhere.invalid:6379", "127.0.0.1:99999", "", "a:b"])
def test_an_address_where_no_ray_is_is_refused(address: str) -> None:
    with pytest.raises(ClusterError, match=r"no Ray answers at .*: give the host:port of its head"):
        placement.join(address, "paged-test")


def test_a_ray_that_does_not_start_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    port = head._free_port()
    monkeypatch.setattr(head, "_free_port", lambda: port)
    monkeypatch.setattr(placement, "node_cpus", lambda: -1)
    with pytest.raises(ClusterError, match=r"Ray could not be started: .*CPU"):
        placement.start("paged-test")
    assert not Path(f"/tmp/paged-ray-{port}").exists()


# R02: room


def test_two_workers_on_one_cpu_are_refused_with_asked_and_available(home: placement.Home) -> None:
    """R02"""
    with pytest.raises(ClusterError) as refused:
        placement.place([ONE, ONE], 2.0, ["t/a", "t/b"], detached=True)
    message = str(refused.value)
    assert "no room for 1 of 2 replicas after 2 s: each asks for 1 CPU; " in message
    assert " has 1 CPU of 1 CPU, " in message
    assert message.endswith(" free: ask for fewer replicas or threads, or add nodes")
    assert left() == []


def test_workers_of_a_replica_that_fit_on_no_node_are_refused(home: placement.Home) -> None:
    with pytest.raises(ClusterError, match=r"each asks for 2 workers of 1 CPU, 0.5 GiB on one node; "):
        placement.place([replace(ONE, workers=2, memory=2**29)], 1.0, ["t/a"], detached=False)
    assert left() == []


def test_a_gpu_on_a_machine_without_is_refused(home: placement.Home) -> None:
    """R02"""
    with pytest.raises(ClusterError, match=r"each asks for 1 CPU, 1 GPU; .* has 1 CPU of 1 CPU"):
        placement.place([replace(ONE, gpus=1)], 1.0, ["t/a"], detached=False)
    assert left() == []


def test_a_launch_without_room_leaves_nothing(nodes: Any, tmp_path: Path) -> None:
    """R02"""
    config = EngineConfig(model=str(make_tiny_model(tmp_path / "m")), kv_memory="16MiB", threads=64)
    with pytest.raises(ClusterError, match=r"each asks for 64 CPU, 0\.0 GiB"):
        Cluster.launch_config(config, address=nodes.address, name="r02", detach=True, placement_timeout=1.0)
    assert cluster_state.names() == []
    home = placement.join(nodes.address, "paged-test")
    assert left() == []
    home.leave()


def test_room_that_comes_late_is_taken(home: placement.Home) -> None:
    """R02"""
    import ray

    holder = actor(num_cpus=1)
    ray.get(holder.sees.remote())
    threading.Timer(3.0, ray.kill, [holder]).start()
    (placed,) = placement.place([ONE], 15.0, ["t/a"], detached=True)
    assert left() == ["t/a"]
    # R05: who has no GPU sees none, though this Ray was not started by us
    seer = actor(**placement.options(placed, 0))
    assert ray.get(seer.sees.remote()) == ("", False)
    ray.kill(seer)
    placement.release(["t/a", "t/unknown"])
    assert left() == []
    placement.place([ONE], 15.0, ["t/a"], detached=True)  # the name is free, and so is the room
    placement.release(placement.rooms("other"))
    assert left() == ["t/a"]
    placement.release(placement.rooms("t"))
    assert left() == []


# R05: devices


@pytest.mark.parametrize(
    ("visible", "workers", "wanted"),
    [("2,5", 2, ["2", "5"]), ("2,5", 1, ["2"]), (None, 2, ["0", "1"]), (UUIDS, 2, ["GPU-aa", "GPU-bb"])],
)
def test_each_worker_sees_a_device_of_its_own_of_those_that_the_node_may_use(
    nodes: Any,
    home: placement.Home,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    workers: int,
    wanted: list[str],
) -> None:
    """R05: both as the workers of one replica, and as replicas of one worker; beside them one without a device."""
    import ray

    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    node = nodes.add_node(num_cpus=3, num_gpus=2, object_store_memory=80 * 2**20)
    need = Need(cpus=1, gpus=1, memory=0, workers=workers)
    placed = placement.place([need], 15.0, ["t/a"], detached=False)
    seers = [actor(**placement.options(placed[0], rank)) for rank in range(workers)]
    seen = [mask for mask, _ in ray.get([seer.sees.remote() for seer in seers])]
    assert sorted(map(str, seen)) == wanted
    for seer in seers:
        ray.kill(seer)
    placement.release(["t/a"])
    nodes.remove_node(node)


# Settings and needs


def test_threads_and_shares_of_memory_are_divided_by_the_workers_of_a_node(home: placement.Home) -> None:
    config = EngineConfig(kv_memory="40%", tensor_parallel_size=2)
    resolved = placement.resolve(config, 2)
    assert (resolved.threads, resolved.kv_memory) == (1, "20.0000%")
    given = placement.resolve(EngineConfig(kv_memory="1GiB", threads=3), 2)
    assert (given.threads, given.kv_memory) == (3, "1GiB")
    assert placement.need_of(resolved) == Need(cpus=1, gpus=0, memory=0, workers=2)
    assert placement.need_of(given, 100) == Need(cpus=3, gpus=0, memory=2**30 + 100, workers=1)
    assert placement.need_of(replace(given, device="cuda")).gpus == 1


def test_a_process_that_is_connected_elsewhere_does_not_join(home: placement.Home) -> None:
    with pytest.raises(ClusterError, match=r"this process is connected to the Ray at .*: call ray\.shutdown"):
        placement.join("127.0.0.1:9", "paged-test")
    again = placement.join(home.address, "paged-test")
    again.leave()  # not ours to end
    assert left() == []
