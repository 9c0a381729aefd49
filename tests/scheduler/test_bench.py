"""`paged bench offline`: what it prints and writes, what it compares with, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paged import ConfigError
from scheduler.bench import read_reference, read_workloads

WORKLOADS: dict[str, list[dict[str, Any]]] = {
    "WARM": [{"prompt": [5, 6], "out": 2}],
    "A": [{"prompt": [504, 3575, 282, 4649, 314], "out": 6}, {"prompt": [19, 20, 21], "out": 1}],
    "B": [{"prompt": list(range(100, 140)), "out": 3}],
}


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from scheduler.cli import main; main()"
    command = [sys.executable, "-c", code, "bench", "offline", "--workload", "workload.json", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("smollm2")
def test_figures_of_every_workload_are_printed_and_written(tmp_path: Path) -> None:
    (tmp_path / "workload.json").write_text(json.dumps(WORKLOADS))
    settings = ("--repeat", "2", "--kv-memory", "64MiB", "--dtype", "float32")
    first = bench(tmp_path, *settings, "--profile", "--json", "out.json")
    assert first.returncode == 0, first.stderr
    assert "float32 multiply" in first.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.keys() == {"machine", "commit", "command", "ceilings", "results"}
    assert found["results"].keys() == {"A", "B"}
    for name, it in found["results"].items():
        assert it["wall_s"] == min(it["samples"]) > it["first_token_s"] > 0
        assert len(it["samples"]) == 2
        assert it["output_tokens"] == sum(request["out"] for request in WORKLOADS[name])
        assert 0 < it["share_of_ceiling"] < 1.5
        assert it["peak_memory_bytes"] > 100 * 2**20
        assert it["agrees"] is None
        assert sum(it["parts_s"].values()) == pytest.approx(it["wall_s"])
        assert all(seconds >= 0 for seconds in it["parts_s"].values())


@pytest.mark.usefixtures("smollm2")
def test_tokens_are_compared_with_a_reference(tmp_path: Path) -> None:
    """The real reference beside the real workload: W3's single request agrees, and one that is changed does not."""
    folder = Path(__file__).parents[2] / "benchmarks" / "workloads"
    request = json.loads((folder / "workload_smollm2.json").read_text())["W3"][0]
    tokens = json.loads((folder / "reference_smollm2_fp32.json").read_text())["W3"][0][:8]
    (tmp_path / "workload.json").write_text(json.dumps({"W3": [request | {"out": 8}] * 2}))
    (tmp_path / "reference_fp32.json").write_text(json.dumps({"W3": [tokens, [*tokens[:-1], tokens[-1] + 1]]}))
    done = bench(tmp_path, "--repeat", "1", "--kv-memory", "64MiB", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert "1 of 2" in done.stdout


@pytest.mark.parametrize(
    "content", ["", "[]", '{"A": []}', '{"A": [{"prompt": "x", "out": 1}]}', '{"A": [{"prompt": [1]}]}', '{"A": 5}']
)
def test_a_file_that_holds_no_workloads_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "workload.json").write_text(content)
    with pytest.raises(ConfigError, match=r"workload\.json"):
        read_workloads(tmp_path / "workload.json")


def test_what_cannot_be_run_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "workload.json").write_text(json.dumps(WORKLOADS))
    (tmp_path / "short.json").write_text('{"A": [[1]]}')
    (tmp_path / "odd.json").write_text("[1, 2]")
    wrong: dict[str, Any] = {
        "has no workload C: it has WARM, A, B": ("--only", "C"),
        "reference.json cannot be read": ("--reference", "reference.json"),
        "short.json has 1 answers to the 2 requests of A": ("--reference", "short.json"),
        "odd.json must hold": ("--reference", "odd.json"),
        "nothing to measure": ("--only", "WARM"),
        "cannot be written": ("--json", "nowhere/out.json"),
    }
    for message, arguments in wrong.items():
        done = bench(tmp_path, *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("smollm2")
def test_a_request_that_cannot_run_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    long = {"prompt": [5] * 9000, "out": 2}
    (tmp_path / "workload.json").write_text(json.dumps(WORKLOADS | {"C": [WORKLOADS["A"][0], long]}))
    done = bench(tmp_path, "--kv-memory", "64MiB", "--dtype", "float32")
    assert done.returncode == 2
    assert "request 2 of workload C cannot be run: the prompt has 9000 tokens" in done.stderr
    assert done.stdout == ""


def test_the_reference_is_the_file_beside_the_workload_if_there_is_one(tmp_path: Path) -> None:
    workload = tmp_path / "workload_x.json"
    assert read_reference(workload, None, WORKLOADS) == {}
    (tmp_path / "reference_x_fp32.json").write_text('{"A": [[1], [2]]}')
    assert read_reference(workload, None, WORKLOADS) == {"A": [[1], [2]]}
