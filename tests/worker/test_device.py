"""Device, number format and threads, read from made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paged import ConfigError
from worker.device import pick_device, pick_dtype, pick_threads


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)


def file(folder: Path, text: str) -> Path:
    path = folder / "file"
    path.write_text(text)
    return path


def test_a_cpu_is_taken_as_asked() -> None:
    assert pick_device("cpu") == "cpu"


def test_auto_is_cuda_only_where_torch_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert pick_device("auto") == expected


def test_cuda_where_there_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device here: leave device out"):
        pick_device("cuda")


@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_a_format_that_is_set_stays(wanted: str) -> None:
    assert pick_dtype(wanted, "cpu") == (wanted, "as set")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 fma", "bfloat16"),
        ("flags\t\t: fpu amx_bf16 amx_tile", "bfloat16"),
        ("Features\t: fp asimd bf16 i8mm", "bfloat16"),
        ("flags\t\t: fpu avx2 avx512f avx512bw", "float32"),
        ("Features\t: fp asimd ebf16x", "float32"),
        ("bugs\t\t: bf16", "float32"),
        ("", "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_multiplies_it(tmp_path: Path, line: str, expected: str) -> None:
    cpuinfo = file(tmp_path, f"processor : 0\nmodel name : made up\n{line}\n")
    dtype, reason = pick_dtype("auto", "cpu", cpuinfo)
    assert dtype == expected
    assert reason == f"this CPU {'multiplies it' if expected == 'bfloat16' else 'does not multiply bfloat16'} natively"


def test_auto_without_cpuinfo_is_float32(tmp_path: Path) -> None:
    assert pick_dtype("auto", "cpu", tmp_path / "absent")[0] == "float32"


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), "bfloat16"), ((9, 0), "bfloat16"), ((7, 5), "float32")])
def test_auto_on_cuda_goes_by_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert pick_dtype("auto", "cuda")[0] == expected


def test_threads_that_are_set_stay() -> None:
    assert pick_threads(7) == (7, "as set")


QUOTAS = [("max", 4), (200000, 2), (150000, 2), (1000, 1), (800000, 4), (400000, 4)]  # of 100000, and threads


def quota(root: Path, group: str, limit: int | str, version: int = 2, mount: str = "cpu") -> None:
    if version == 2:
        files = {f"./{group}/cpu.max": f"{limit} 100000\n"}
    else:
        limit = -1 if limit == "max" else limit
        files = {f"{mount}/{group}/cpu.cfs_quota_us": f"{limit}\n", f"{mount}/{group}/cpu.cfs_period_us": "100000\n"}
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def join(root: Path, lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("limit", "expected"), QUOTAS)
def test_threads_are_the_affinity_cut_to_the_quota(
    tmp_path: Path, limit: int | str, expected: int, version: int
) -> None:
    join(tmp_path, "5:cpu:/job\n0::/job\n")
    quota(tmp_path, "job", limit, version)
    threads, reason = pick_threads(None, tmp_path)
    assert threads == expected
    assert reason == ("the cgroup's CPU quota" if expected < 4 else "CPUs that this process may run on")


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(("outer", "inner", "expected"), [(300000, 100000, 1), (100000, 300000, 1), ("max", 300000, 3)])
@pytest.mark.parametrize("version", [1, 2])
def test_threads_are_cut_to_the_tightest_of_nested_groups(
    tmp_path: Path, outer: int | str, inner: int, expected: int, version: int
) -> None:
    join(tmp_path, "5:cpu:/slice/job\n0::/slice/job\n")
    quota(tmp_path, "slice", outer, version)
    quota(tmp_path, "slice/job", inner, version)
    assert pick_threads(None, tmp_path)[0] == expected


@pytest.mark.usefixtures("four_cpus")
def test_threads_by_the_quota_at_the_top_where_the_own_group_is_not_to_be_seen(tmp_path: Path) -> None:
    quota(tmp_path, "", 300000)
    assert pick_threads(None, tmp_path)[0] == 3
    join(tmp_path, "5:cpu,cpuacct:/docker/0123\n0::/\n")
    quota(tmp_path, "", 200000, version=1, mount="cpu,cpuacct")
    assert pick_threads(None, tmp_path)[0] == 2


@pytest.mark.usefixtures("four_cpus")
def test_a_quota_of_another_group_is_not_ours(tmp_path: Path) -> None:
    join(tmp_path, "5:memory:/other\n0::/job\n")
    quota(tmp_path, "other", 100000)
    quota(tmp_path, "other", 100000, version=1)
    assert pick_threads(None, tmp_path)[0] == 4


@pytest.mark.usefixtures("four_cpus")
def test_threads_without_a_cgroup_are_the_affinity(tmp_path: Path) -> None:
    assert pick_threads(None, tmp_path)[0] == 4


def test_threads_where_affinity_is_unknown_are_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, expected in ((3, 3), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert pick_threads(None, tmp_path)[0] == expected
