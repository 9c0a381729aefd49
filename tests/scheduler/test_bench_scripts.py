"""`paged bench cache|sweep|peers`: the script of the right checkout, its arguments untouched, its exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paged import ConfigError
from scheduler import bench_scripts

COMMAND = [sys.executable, "-c", "from scheduler.cli import main; main()", "bench"]
SCRIPT = """\
import json, sys, time
import sibling
print(json.dumps([sibling.NAME, sys.executable, *sys.argv[1:]]), flush=True)
if "wait" in sys.argv:
    time.sleep(60)
sys.exit(7)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a script for each of the three, which import what lies beside them."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("cache", "sweep", "peers"):
        (folder / f"bench_{name}.py").write_text(SCRIPT)
    (folder / "sibling.py").write_text("NAME = 'sibling'\n")
    return tmp_path


@pytest.mark.parametrize("name", ["cache", "sweep", "peers"])
def test_arguments_and_exit_code_pass_through(checkout: Path, name: str) -> None:
    """Also those that typer would take, in their order, and where Python is told not to look beside scripts."""
    arguments = ["--quick", "--output", "a b.json", "-x", "--help", "word", "--n=3", "--", "--version"]
    done = subprocess.run([*COMMAND, name, *arguments], cwd=checkout, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")
    assert json.loads(done.stdout) == ["sibling", sys.executable, *arguments]


def test_who_stops_the_command_stops_the_script(checkout: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "sweep", "wait"], cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert "wait" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors


def test_the_current_folder_comes_before_the_one_that_paged_lies_in(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, nowhere = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("nowhere")
    monkeypatch.setattr(bench_scripts, "OURS", checkout)
    monkeypatch.chdir(here)
    assert bench_scripts.find("cache") == checkout / "benchmarks" / "bench_cache.py"
    (here / "benchmarks").mkdir()
    (here / "benchmarks" / "bench_cache.py").touch()
    assert bench_scripts.find("cache") == here / "benchmarks" / "bench_cache.py"
    assert bench_scripts.find("peers") == checkout / "benchmarks" / "bench_peers.py"
    monkeypatch.setattr(bench_scripts, "OURS", nowhere)
    with pytest.raises(ConfigError, match=r"needs a checkout .* benchmarks/bench_sweep\.py"):
        bench_scripts.find("sweep")


def test_without_a_checkout_it_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    code = "import pathlib; from scheduler import bench_scripts, cli; bench_scripts.OURS = pathlib.Path(); cli.main()"
    command = [sys.executable, "-c", code, "bench", "cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("paged: error: paged bench cache needs a checkout of the project")
    assert len(done.stderr.splitlines()) == 1
