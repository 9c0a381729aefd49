"""`paged launch`, `status`, `scale` and `stop` as people run them: what is said, how they end, and what is left.

One detached cluster serves most tests; launches in the foreground run beside it, three at once.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from marked import make_tiny_model, marked, none_left, paged, shared_files, until

from scheduler import cli, cluster_state, placement

pytestmark = pytest.mark.ray
# No Ray is there. A local start and a cluster by its name must not care.
ELSEWHERE = {"RAY_ADDRESS": "127.0.0.1:9"}
NONE = (dict[int, str](), set[Path]())  # of processes and shared memory
HEADER = ["replica", "state", "node", "pid", "threads", "running", "waiting", "pages", "used", "tokens", "restarts"]


@dataclass(frozen=True)
class Place:
    """Where a cluster runs: its model, its mark, the cache folder of its user."""

    model: Path
    mark: str
    cache: Path

    def start(self, *arguments: str, mark: str = "") -> subprocess.Popen[str]:
        return paged(mark or self.mark, *arguments, XDG_CACHE_HOME=str(self.cache), **ELSEWHERE)

    def run(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        """Standard output and error of a command that ends with this code."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        return out, err

    @property
    def settings(self) -> list[str]:
        return ["--model", str(self.model), "--threads", "1", "--kv-memory", "8MiB"]

    @property
    def files(self) -> set[str]:
        return {file.name for file in (self.cache / "paged" / "clusters").glob("*")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("clusters")
    mark = f"cli-{time.time_ns()}"
    yield Place(make_tiny_model(folder / "model"), mark, folder / "cache")
    for pid in marked(mark):  # of a test that failed
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


@pytest.fixture(scope="module")
def detached(place: Place) -> Iterator[Place]:
    out, err = place.run("launch", *place.settings, "--replicas", "1", "--detach")
    header, row = out.splitlines()
    assert header.split() == HEADER
    assert row.split()[:2] == ["0", "warm"]
    assert re.search(r"cluster default is up at 127\.0\.0\.1:\d+: `paged batch --cluster default`, `paged stop`", err)
    yield place
    shared = shared_files(place.mark)
    (state,) = [json.loads((place.cache / "paged" / "clusters" / name).read_text()) for name in place.files]
    files = Path(f"/tmp/paged-ray-{state['address'].rpartition(':')[2]}")
    assert stat.S_IMODE(files.stat().st_mode) & 0o077 == 0
    below = psutil.Process(state["pid"]).children(recursive=True)
    _, err = place.run("stop")
    assert err == "paged: cluster default is stopped: 1 replica has ended, Ray\n"
    assert none_left(place.mark, 15, shared) == NONE
    assert place.files == set()
    assert not files.exists()
    assert psutil.wait_procs(below, 0)[1] == []


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The same user's commands in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.cache))
    return place


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


# A job with a cluster of its own


def test_a_job_whose_ray_ends_has_a_record_for_every_line(place: Place, tmp_path: Path) -> None:
    """All of it is killed; nothing could start a replica again. The job ends in order, as it says."""
    body = {"prompt": "a b", "max_tokens": 300, "ignore_eos": True}
    lines: list[dict[str, Any]] = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(400)
    ]
    source, output, mark = tmp_path / "in.jsonl", tmp_path / "out.jsonl", f"{place.mark}-ray-ends"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = place.start("batch", str(source), "-o", str(output), *place.settings, "--replicas", "1", mark=mark)
    for _ in until(90):
        if output.exists() and output.read_bytes().count(b"\n"):
            break
    for pid in marked(mark).keys() - {job.pid}:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
    _, err = job.communicate(timeout=60)
    assert job.returncode == 3, err
    answers = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(line["custom_id"] for line in lines)
    codes = [answer["error"]["code"] for answer in answers if answer["error"] is not None]
    assert set(codes) == {"cluster_lost"}
    assert 0 < len(codes) < len(lines)
    assert f"{len(lines) - len(codes)} ok, {len(codes)} failed" in err
    assert none_left(mark, 15) == NONE


def test_a_launch_that_stays_ends_when_its_ray_has(place: Place) -> None:
    mark = f"{place.mark}-launch-ray-ends"
    process = place.start("launch", *place.settings, "--name", "bereft", mark=mark)
    assert process.stdout is not None
    assert process.stdout.readline().split() == HEADER
    for pid in marked(mark).keys() - {process.pid}:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(r"paged: Ray's head at 127\.0\.0\.1:\d+ has ended, and the cluster with it\n", err)
    assert none_left(mark, 15) == NONE
    assert "bereft.json" not in place.files


# A detached cluster


def test_a_detached_cluster_outlives_its_launcher_and_is_found_by_its_name(detached: Place) -> None:
    out, err = detached.run("status")
    assert re.fullmatch(r"paged: cluster default at 127\.0\.0\.1:\d+, model model\n", err)
    (row,) = [line.split() for line in out.splitlines()[1:]]
    assert (row[1], row[4:7], row[8:]) == ("warm", ["1", "0", "0"], ["0", "0", "0"])
    assert "ray::PagedReplica" in marked(detached.mark)[int(row[3])]


def test_a_job_sent_to_it_is_answered(detached: Place, tmp_path: Path) -> None:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"prompt": "a b", "max_tokens": 3}}
        for i in range(5)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    detached.run("batch", str(source), "-o", str(tmp_path / "out.jsonl"), "--cluster", "default")
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == [str(i) for i in range(5)]
    assert {answer["response"]["status_code"] for answer in answers} == {200}


def test_a_name_that_is_taken_is_refused(detached: Place, here: Place, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(marked(detached.mark))
    assert cli.run(["launch", *here.settings]) == 2
    (line,) = lines(capsys)
    assert re.match(r"paged: error: cluster default is there already, at 127.*: stop it, or take another name", line)
    assert before <= set(marked(detached.mark))


def test_the_status_of_a_replica_that_is_not_warm_is_told(detached: Place) -> None:
    (row,) = detached.run("status")[0].splitlines()[1:]
    psutil.Process(int(row.split()[3])).kill()
    out, err = detached.run("status")
    assert out.splitlines()[1].split()[:3] in (["0", "starting", "-"], ["0", "warm", row.split()[2]])
    assert "no replica is warm" in err or "model model" in err
    for _ in until(60):
        if detached.run("status")[0].splitlines()[1].split()[1] == "warm":
            break
    assert detached.run("status")[0].splitlines()[1].split()[-1] == "1"  # restarts
    address = re.findall(r"127\.0\.0\.1:\d+", err)[0]
    for command in ("status", "stop"):
        assert (
            "no replica of cluster nobody" in detached.run(command, "--name", "nobody", "--address", address, code=2)[1]
        )


def test_scaling_starts_a_replica_and_ends_it(detached: Place) -> None:
    out, _ = detached.run("scale", "2")
    assert len(out.splitlines()) == 3
    out, _ = detached.run("scale", "1")
    assert len(out.splitlines()) == 2
    for _ in until(15):
        if sum("PagedReplica" in line for line in marked(detached.mark).values()) == 1:
            break
    else:
        raise AssertionError(marked(detached.mark))


def test_other_packages_of_a_replica_are_one_warning_line(
    detached: Place, here: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R06"""
    real = importlib.metadata.version
    monkeypatch.setattr(placement, "version", lambda name: "2.1.0" if name == "torch" else real(name))
    assert cli.run(["status"]) == 0
    (line,) = [line for line in lines(capsys) if "warning" in line]
    assert line == f"paged: warning: replica 0 has torch {real('torch')}, here 2.1.0"


def test_a_cluster_that_joined_another_ray_ends_without_it(
    detached: Place, here: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    state = cluster_state.read("default")
    assert state is not None
    detached.run("launch", *detached.settings, "--address", state.address, "--name", "guest", "--detach")
    assert cluster_state.names() == ["default", "guest"]
    _, err = detached.run("stop", "--name", "guest")
    assert err == "paged: cluster guest is stopped: 1 replica has ended, not Ray, which was there before\n"
    assert cluster_state.names() == ["default"]
    home = placement.join(state.address, "paged-test")
    groups = ray.util.placement_group_table().values()
    actors = ray.util.list_named_actors(all_namespaces=True)
    home.leave()
    assert {group["name"] for group in groups if group["state"] != "REMOVED"} == {"paged-default/replica-0"}
    assert {actor["namespace"] for actor in actors} == {"paged-default"}


def test_a_ray_of_ours_listens_on_the_loopback_interface_alone(detached: Place, here: Place) -> None:
    state = cluster_state.read("default")
    assert state is not None
    assert state.pid is not None
    head = psutil.Process(state.pid)
    found = {
        one.laddr.ip for p in (head, *head.children(recursive=True)) for one in p.net_connections() if not one.raddr
    }
    assert found == {"127.0.0.1", "::ffff:127.0.0.1"}


# Launches that stay


def test_a_launch_that_stays_ends_by_ctrl_c_by_stop_and_when_killed(detached: Place) -> None:
    """R04 for a launch: 130 within 15 s, 143 within 15 s, all gone within 60 s. Others beside it do not notice."""
    before = set(marked(detached.mark))
    names = ("ctrl-c", "stop", "killed")
    marks = {name: f"{detached.mark}-{name}" for name in names}
    runs = {n: detached.start("launch", *detached.settings, "--name", n, mark=marks[n]) for n in names}
    for process in runs.values():
        assert process.stdout is not None
        assert process.stdout.readline().split() == HEADER
        assert process.stdout.readline().split()[:2] == ["0", "warm"]
    shared = {name: shared_files(marks[name]) for name in names}
    assert all("PagedReplica" in str(marked(mark)) for mark in marks.values())
    runs["ctrl-c"].send_signal(signal.SIGINT)
    runs["ctrl-c"].wait(15)
    assert none_left(marks["ctrl-c"], 15, shared["ctrl-c"]) == NONE
    _, err = detached.run("stop", "--name", "stop")
    pid = runs["stop"].pid
    assert err == f"paged: cluster stop is stopped, and process {pid}, which launched it, has ended\n"
    runs["stop"].wait(15)
    assert none_left(marks["stop"], 15, shared["stop"]) == NONE
    below = psutil.Process(runs["killed"].pid).children(recursive=True)  # some of them hide their marks
    assert {"ray::DashboardAgent", "ray::RuntimeEnvAgent"} <= {one.cmdline()[0].strip() for one in below}
    runs["killed"].kill()
    assert none_left(marks["killed"], 60, shared["killed"]) == NONE
    assert psutil.wait_procs(below, 60)[1] == []
    for process in runs.values():
        process.communicate()
    assert [process.returncode for process in runs.values()] == [130, 143, -signal.SIGKILL]
    _, err = detached.run("status", "--name", "killed", code=2)
    assert err.startswith("paged: error: no cluster killed; there are: default: ")
    assert before <= set(marked(detached.mark))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launch_that_ends_while_its_head_starts_leaves_nothing(
    place: Place, tmp_path: Path, number: signal.Signals
) -> None:
    """However it ends: its head ends by itself."""
    alone = Place(place.model, f"{place.mark}-start-{number.name}", tmp_path)
    process = alone.start("launch", *place.settings, "--detach")
    for _ in until(60):
        if any("ray/gcs/gcs_server" in line for line in marked(alone.mark).values()):
            break
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert none_left(alone.mark, 60) == NONE
    assert psutil.wait_procs(below, 60)[1] == []
    assert alone.files == set()


# Without a cluster


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("command", [["status"], ["stop"], ["scale", "2"]])
def test_commands_for_a_cluster_that_is_not_there_say_how_to_start_it(
    nobody: None, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert cli.run(command) == 2
    wanted = "paged: error: no cluster default; there are: none: start it by `paged launch --name default`"
    assert lines(capsys) == [wanted]


@pytest.mark.parametrize("command", [["launch"], ["status"], ["stop"], ["scale", "2"]])
def test_a_name_with_a_slash_is_refused(nobody: None, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert cli.run([*command, "--name", "../a"]) == 2
    assert lines(capsys) == [
        "paged: error: a cluster's name has letters, digits, - and _, and no more than 64, not '../a'"
    ]


@pytest.mark.parametrize("command", [["launch"], ["status"], ["stop"], ["scale", "2"]])
def test_an_address_where_no_ray_is_is_refused(
    nobody: None, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert cli.run([*command, "--address", "127.0.0.1:9"]) == 2
    assert lines(capsys)[0].startswith("paged: error: no Ray answers at 127.0.0.1:9 (")
    assert cluster_state.names() == []


def test_a_cluster_whose_ray_is_gone_can_be_stopped(nobody: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Else its name would be taken for ever: nobody else knows that the Ray which it had joined is gone."""
    cluster_state.ClusterState("default", "127.0.0.1:9", None, None, head=False).save()
    assert cli.run(["status"]) == 2
    assert cli.run(["stop"]) == 0
    assert "its replicas were gone or out of reach: no Ray answers at 127.0.0.1:9" in lines(capsys)[-1]
    assert cluster_state.names() == []


def test_a_cluster_that_is_there_and_cannot_be_joined_is_not_said_to_be_stopped(
    nobody: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.placement.cluster_versions", lambda address: ("2.0.0", "3.11.0"))
    with socket.create_server(("127.0.0.1", 0)) as ray:
        address = f"127.0.0.1:{ray.getsockname()[1]}"
        cluster_state.ClusterState("default", address, None, None, head=False).save()
        assert cli.run(["stop"]) == 2
    assert f"versions differ: the cluster at {address} has Ray 2.0.0" in lines(capsys)[-1]
    assert cluster_state.names() == ["default"]
    cluster_state.forget("default", address)


def test_a_cluster_of_another_machine_can_be_stopped_there_or_its_file_deleted(
    nobody: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster_state.ClusterState("default", "127.0.0.1:9", 1, 1, head=True, host="elsewhere").save()
    assert cli.run(["stop"]) == 2
    file = cluster_state.path_of("default")
    assert f"launched on elsewhere: stop it there, or delete {file} if" in lines(capsys)[-1]
    file.unlink()


def test_a_cache_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cli.run(["launch", "--detach"]) == 2
    assert lines(capsys) == [f"paged: error: {tmp_path}/file/paged/clusters: Not a directory"]
