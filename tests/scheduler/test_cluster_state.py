"""Files that say which clusters there are: names, and what is forgotten because it is no more."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from paged.errors import ClusterError
from scheduler import cluster_state
from scheduler.cluster_state import ClusterState
from worker import head

PID = os.getpid()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paged" / "clusters"


def state(name: str = "default", pid: int | None = PID, born: int | None = None) -> ClusterState:
    return ClusterState(name, "127.0.0.1:1", pid, cluster_state.born(PID) if born is None else born, head=False)


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_is_saved_is_read_and_listed() -> None:
    state("b").save()
    state("a.1", pid=None).save()
    assert cluster_state.read("b") == state("b")
    assert cluster_state.names() == ["a.1", "b"]
    assert cluster_state.read("c") is None


def test_a_cluster_whose_process_has_ended_is_forgotten(cache: Path) -> None:
    state(pid=ended_pid()).save()
    assert cluster_state.read("default") is None
    assert list(cache.iterdir()) == []


def test_a_process_that_has_the_id_of_one_that_ended_is_not_taken_for_it(cache: Path) -> None:
    state(born=1).save()
    assert cluster_state.names() == []
    assert list(cache.iterdir()) == []


def test_a_zombie_is_no_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()  # ends with it
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert cluster_state.born(process.pid) is None
    process.communicate()


def test_of_two_launches_of_one_name_the_first_has_it(cache: Path) -> None:
    state().save()
    with pytest.raises(ClusterError, match=r"cluster default is there already, at 127\.0\.0\.1:1: stop it, or"):
        replace(state(), address="127.0.0.1:2").save()
    assert cluster_state.read("default") == state()
    assert [file.name for file in cache.iterdir()] == ["default.json"]


def test_who_lost_a_name_does_not_forget_the_state_of_who_has_it() -> None:
    state().save()
    cluster_state.forget("default", "127.0.0.1:2")
    assert cluster_state.read("default") is not None
    cluster_state.forget("default", "127.0.0.1:1")
    assert cluster_state.read("default") is None
    cluster_state.forget("default", "127.0.0.1:1")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": "default"}'])
def test_a_file_that_is_no_state_is_no_cluster_and_does_not_keep_the_name(cache: Path, content: str) -> None:
    cluster_state.folder()
    (cache / "default.json").write_text(content)
    assert cluster_state.read("default") is None
    state().save()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "x" * 65, "a b", "ä", "a\n", "-x"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="a cluster's name has letters, digits"):
        cluster_state.read(name)
    with pytest.raises(ClusterError, match="a cluster's name has letters, digits"):
        state(name).save()


def test_what_a_head_that_was_killed_has_left_goes_with_its_name(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_PLACE", tmp_path)
    (tmp_path / "paged-ray-1" / "ray").mkdir(parents=True)
    replace(state(pid=ended_pid()), head=True).save()
    assert cluster_state.read("default") is None
    assert not (tmp_path / "paged-ray-1").exists()


def test_a_token_is_made_once_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(head.ensure_token) for _ in range(8)]:
            done.result()
    (file,) = (tmp_path / ".ray").iterdir()
    token = file.read_text()
    assert (file.name, len(token), file.stat().st_mode & 0o777) == ("auth_token", 64, 0o600)
    head.ensure_token()
    assert file.read_text() == token


def test_the_end_of_a_head_is_for_its_own_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known by an option with its folder, not by any mention of that."""
    monkeypatch.setattr(head, "_PLACE", tmp_path)
    (tmp_path / "paged-ray-2").mkdir()
    sleeper = [sys.executable, "-c", "import time; time.sleep(99)"]
    options = [f"--temp-dir={tmp_path}/paged-ray-2", f"--temp-dir={tmp_path}/paged-ray-20", f"{tmp_path}/paged-ray-2/x"]
    ours, other, reader = (subprocess.Popen([*sleeper, option]) for option in options)
    try:
        head.end_head("127.0.0.1:2")
        assert ours.wait(10) is not None
        assert (other.poll(), reader.poll()) == (None, None)
    finally:
        for process in (ours, other, reader):
            process.kill()
            process.wait()
    assert list(tmp_path.iterdir()) == []
