"""`paged batch` as a stranger runs it: stopped and gone on with, over pipes and URLs, on a cluster, and only tried."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import fsspec
import pytest
from job_fakes import FakeAnswerer, request, write

from scheduler import cli
from scheduler.batch_cli import local_output
from scheduler.cost import CostModel
from scheduler.dry_run import Work
from scheduler.policy import Limits

HOME = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model of 300,000 parameters."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    command = [sys.executable, str(HOME / "examples" / "make_random_model.py"), "--params", "300K", "-o", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return str(folder)


def start(*arguments: str, **environ: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from scheduler.cli import main; main()", "batch", *arguments]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env={**os.environ, **environ}, **pipes)


def ended(process: subprocess.Popen[bytes], given: bytes | None = None) -> tuple[int, str, str]:
    output, errors = process.communicate(given, timeout=120)
    return process.returncode, output.decode(), errors.decode()


def ids(text: str) -> list[str]:
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def test_a_job_is_stopped_by_ctrl_c_and_by_sigterm_and_goes_on(tiny: str, tmp_path: Path) -> None:
    lines = [request(f"{i}", f"{i}", max_tokens=200, ignore_eos=True) for i in range(120)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments, seen = (str(source), "-o", str(target), "--model", tiny, "--max-num-seqs", "2", "--seed", "3"), 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = start(*arguments)
        while not target.exists() or target.stat().st_size <= seen:
            assert process.poll() is None, ended(process)
            time.sleep(0.005)
        process.send_signal(number)
        found, output, errors = ended(process)
        assert (found, output) == (code, ""), errors
        text = target.read_text()
        assert text.endswith("\n")
        whole = len(ids(text))
        assert errors.splitlines()[-1] == f"paged: stopped after {whole} of 120 lines; the same command goes on"
        assert whole < 120
        before, seen = text, len(text.encode())
    code, _, errors = ended(start(*arguments))
    assert code == 0, errors
    assert errors.startswith(f"paged: going on: {whole} of 120 lines are answered already\n")
    assert f"120 ok, 0 failed, {whole} of them before" in errors
    assert target.read_text().startswith(before)
    assert sorted(ids(target.read_text()), key=int) == [f"{i}" for i in range(120)]
    code, output, errors = ended(start(*arguments, "--model", tiny))
    assert (code, output, errors) == (0, "", "paged: all lines (120) are answered already: 120 ok, 0 failed\n")


def test_answers_of_a_pipe_go_to_a_pipe_and_nothing_else_does(tiny: str, tmp_path: Path) -> None:
    process = start("-", "-o", "-", "--model", tiny, "--ordered")
    code, output, errors = ended(process, b"\n".join([request("a", max_tokens=3), b"[]", request("c", max_tokens=2)]))
    assert code == 3, errors
    assert ids(output) == ["a", None, "c"]
    assert "2 ok, 1 failed" in errors


def test_a_full_device_is_one_line(tiny: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request("a", max_tokens=2)])
    code, _, errors = ended(start(str(source), "-o", "/dev/full", "--model", tiny))
    assert (code, errors.splitlines()[-1]) == (2, "paged: error: /dev/full: No space left on device")


def test_a_pipe_that_nobody_reads_any_more_is_one_line(tiny: str, tmp_path: Path) -> None:
    process = start(str(write(tmp_path / "in.jsonl", [request("a", max_tokens=2)])), "-o", "-", "--model", tiny)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    code, errors = process.wait(120), process.stderr.read().decode()  # type: ignore[union-attr]
    assert (code, errors.splitlines()[-1]) == (2, "paged: error: output - was closed by who reads it")
    process.stdin.close()  # type: ignore[union-attr]
    process.stderr.close()  # type: ignore[union-attr]


def test_a_url_is_uploaded_to_when_the_job_has_finished(tiny: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request("a", max_tokens=2), request("b", max_tokens=2)])
    target = tmp_path / "there" / "out.jsonl.gz"
    target.parent.mkdir()
    arguments = (f"file://{source}", "-o", f"file://{target}", "--model", tiny)
    code, _, errors = ended(start(*arguments, XDG_CACHE_HOME=str(tmp_path / "cache")))
    assert code == 0, errors
    assert f"paged: uploaded to file://{target}; {tmp_path}/cache/paged/jobs/" in errors
    with fsspec.open(str(target), "rt", compression="gzip") as file:
        assert sorted(ids(file.read())) == ["a", "b"]
    target.unlink()
    code, _, errors = ended(start(*arguments, XDG_CACHE_HOME=str(tmp_path / "cache")))
    assert (code, target.exists()) == (0, True)
    assert errors.startswith("paged: all lines (2) are answered already")
    code, _, errors = ended(start(*arguments, XDG_CACHE_HOME=str(tmp_path / "other")))
    assert code == 2
    assert f"output file://{target} exists" in errors


def test_where_an_output_is_kept_is_told_by_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, again, other = (local_output(f"memory://{name}/out.jsonl.zst", False) for name in ("a", "a", "b"))
    assert first == again != other
    assert first.name.endswith("-out.jsonl.zst")


def test_a_dry_run_checks_every_line_and_writes_nothing(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scheduler.calibrate.calibrate", lambda llm: CostModel(step=0.5))
    lines = [request(f"{i}", "x" * 9, max_tokens=7) for i in range(20)]
    lines[3], lines[4], lines[5] = b"{", request("0"), request("5", "x" * 5000)
    lines[6], lines[7] = request("6", temperature=-1), request("7", "y" * 100, n=2, max_tokens=29)
    lines[8], lines[9] = request("8", max_tokens=10**6), request("9", nonsense=1)
    source = write(tmp_path / "in.jsonl", lines)
    assert cli.run(["batch", str(source), "--dry-run", "--model", tiny, "--max-num-seqs", "4"]) == 3
    output = capsys.readouterr().out.splitlines()
    assert [text.split(": ")[0] for text in output[:6]] == [
        *(f"refused        line {number}" for number in (4, 5, 6, 7, 9)),
        "refused        and 1 more",
    ]
    assert "custom_id '0' is that of line 1 already" in output[1]
    assert "temperature" in output[3]
    assert output[6] == "lines          20, of which 6 would be refused"
    assert output[7:9] == [f"prompt tokens  {13 * 9 + 100}", f"output tokens  {13 * 7 + 58} at most"]
    # 100 and 28 tokens are 8 pages of 16; the second sequence shares the 6 that hold the first 96.
    assert output[9].startswith("largest        10 pages (line 8); the pool has ")
    assert output[10].startswith("time           about 19 s")  # 149 tokens by 4 sequences a step of half a second
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    write(source, [b"{"])
    assert cli.run(["batch", str(source), "--dry-run", "--model", tiny]) == 3
    assert "time" not in capsys.readouterr().out
    write(source, [b"  "])
    assert cli.run(["batch", str(source), "--dry-run", "--model", tiny]) == 2
    assert f"input {source} has no request" in capsys.readouterr().err


def test_an_estimate_is_that_of_steps_as_full_as_the_pages_allow() -> None:
    limits = Limits(4096, num_pages=100, page_size=16, max_num_seqs=64, max_num_batched_tokens=64)
    work = Work()
    for line in range(40):
        work.add(line, prompt=100, output=61, n=1, limits=limits)  # 160 tokens: 10 pages, so 10 at once
    assert work.seconds(CostModel(step=1.0), limits) == pytest.approx(40 * 61 / 10)
    assert work.seconds(CostModel(step=1e-9, token=1.0), limits) == pytest.approx(40 * 161, rel=1e-3)
    assert work.seconds(CostModel(step=1e-9, sample=1.0), limits) == pytest.approx(40 * 61, rel=1e-3)


# On a cluster, which is not ours to test here


class FakeCluster(FakeAnswerer):
    calls: ClassVar[list[Any]] = []
    breaks = False

    @classmethod
    def connect(cls, name: str, address: str | None = None) -> FakeCluster:
        cls.calls.append((name, address))
        return cls()

    @classmethod
    def launch_config(cls, config: Any, *, replicas: int, address: str | None = None) -> FakeCluster:
        cls.calls.append((config.model, replicas, address))
        return cls()

    def take(self, timeout: float) -> Any:
        self.broken = "cluster_lost" if self.breaks else None
        return super().take(timeout)

    def close(self) -> None:
        self.calls.append("closed")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> type[FakeCluster]:
    module: Any = ModuleType("scheduler.cluster")
    module.Cluster = FakeCluster
    monkeypatch.setitem(sys.modules, "scheduler.cluster", module)
    monkeypatch.setattr(FakeCluster, "calls", [])
    return FakeCluster


def test_a_job_is_sent_to_a_cluster_and_no_model_is_loaded(
    cluster: type[FakeCluster], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", [request("a"), request("b")])
    for more in (["--cluster", "mine"], ["--replicas", "2", "--address", "host:1", "--model", "org/model"]):
        assert cli.run(["batch", str(source), "-o", str(tmp_path / f"{more[0]}.jsonl"), *more]) == 0
        assert "2 ok, 0 failed" in capsys.readouterr().err
    assert cluster.calls == [("mine", None), "closed", ("org/model", 2, "host:1"), "closed"]
    monkeypatch.setattr(FakeCluster, "breaks", True)
    assert cli.run(["batch", str(source), "-o", str(tmp_path / "lost.jsonl"), "--cluster", "mine"]) == 3
    assert [json.loads(text)["error"]["code"] for text in (tmp_path / "lost.jsonl").read_text().splitlines()] == [
        "cluster_lost",
        "cluster_lost",
    ]


BAD = [
    (["--cluster", "x", "--dtype", "float32", "--page-size", "8"], "--dtype, --page-size: settings are those that"),
    (["--cluster", "x", "--replicas", "2"], "give one of them"),
    (["--address", "host:1"], "give --cluster NAME or --replicas N"),
    (["--cluster", "x", "--metrics", "m.prom"], "--metrics are those of an engine in this process"),
    (["--output", "none/out.jsonl"], "in a folder that does not exist"),
]


@pytest.mark.parametrize(("more", "text"), BAD, ids=[text for _, text in BAD])
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [request("a")])
    assert cli.run(["batch", "in.jsonl", "-o", "out.jsonl", *more]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
