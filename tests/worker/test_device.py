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


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("max 100000\n", 4),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("1000 100000\n", 1),
        ("800000 100000\n", 4),
        ("400000 100000\n", 4),
    ],
)
def test_threads_are_the_affinity_cut_to_the_quota(tmp_path: Path, cpu_max: str, expected: int) -> None:
    threads, reason = pick_threads(None, file(tmp_path, cpu_max))
    assert threads == expected
    assert reason == ("the cgroup's CPU quota" if expected < 4 else "CPUs that this process may run on")


@pytest.mark.usefixtures("four_cpus")
def test_threads_without_a_cgroup_are_the_affinity(tmp_path: Path) -> None:
    assert pick_threads(None, tmp_path / "absent")[0] == 4


def test_threads_where_affinity_is_unknown_are_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, expected in ((3, 3), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert pick_threads(None, tmp_path / "absent")[0] == expected
