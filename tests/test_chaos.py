"""benchmarks/chaos.py: that it notices what it is there for, and one kill of each kind in jobs of a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

HOME = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def chaos() -> Iterator[ModuleType]:
    """The script as a module; it imports its sibling `report`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME / "benchmarks"))
        spec = importlib.util.spec_from_file_location("chaos", HOME / "benchmarks" / "chaos.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "chaos", module)  # where its dataclasses look for their names
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def work(chaos: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A job of a random model with one layer: short answers, then long ones, so that a kill has room between them."""
    folder = tmp_path_factory.mktemp("chaos")
    command = [sys.executable, str(HOME / "examples" / "make_random_model.py"), "--params", "200K"]
    subprocess.run([*command, "-o", str(folder / "tiny")], check=True, capture_output=True)
    lines = []
    for i in range(24):
        body = {"prompt": f"{i} is", "max_tokens": 100 + 50 * i, "temperature": 1, "ignore_eos": True}
        lines.append({"custom_id": f"line-{i}", "method": "POST", "url": "/v1/completions", "body": body})
    lines[5]["body"] = {"prompt": "x", "max_tokens": 4, "logprobs": 2}
    lines[9]["url"] = "/v1/nothing"
    requests = folder / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = ("--model", str(folder / "tiny"), "--dtype", "float32", "--seed", "7", "--kv-memory", "64MiB")
    return chaos.Work(requests, settings)


@pytest.fixture(scope="module")
def kills(chaos: ModuleType, work: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By kind, what came of one."""
    found = chaos.chaos(work, chaos.KINDS, len(chaos.KINDS), 0, tmp_path_factory.mktemp("kills"))
    return {kill["kind"]: kill for kill in found["kills"]}


@pytest.mark.ray
@pytest.mark.parametrize("kind", ["driver", "replica", "worker", "node"])
def test_a_kill_between_two_answers_loses_none_and_leaves_nothing(kills: dict[str, dict[str, Any]], kind: str) -> None:
    log = kills[kind]
    assert "broken" not in log, log
    assert 1 <= log["answers_before"] < 24, log
    assert log["whom"] in {"worker": ("rank 0", "rank 1")}.get(kind, (kind,))
    assert 0 < log["recovered_s"] <= log["end_s"]


def record(name: str, text: str = "a", status: int = 200) -> dict[str, Any]:
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": random.randrange(3)},
    }
    body = {"id": "x", "created": random.random(), "choices": [{"text": text, "finish_reason": "stop"}], "usage": usage}
    return {"custom_id": name, "response": {"status_code": status, "body": body}, "error": None}


def lost(name: str) -> dict[str, Any]:
    return {"custom_id": name, "response": None, "error": {"code": "cluster_lost", "message": "it was lost"}}


def written(tmp_path: Path, *records: dict[str, Any]) -> Path:
    output = tmp_path / "out.jsonl"
    output.write_text("".join(json.dumps(one) + "\n" for one in records))
    return output


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([record("a"), record("b"), record("a")], "answered more than once: a"),
        ([record("b")], "not answered: a"),
        ([record("a", "other"), record("b")], "answered differently: a"),
        ([record("a"), record("b", status=400)], "answered differently: b"),
        ([record("a"), lost("b")], "answered differently: b"),
        ([record("a"), record("b"), record("c")], "answered, and in no input: c"),
        (
            [record("c"), record("c", "x")],
            "answered more than once: c; not answered: a, b; answered, and in no input: c",
        ),
    ],
)
def test_comparing_notices_a_doubled_a_missing_and_a_changed_answer(
    chaos: ModuleType, tmp_path: Path, records: list[dict[str, Any]], said: str
) -> None:
    wanted = dict(chaos.answers(written(tmp_path, record("a"), record("b"))))
    with pytest.raises(chaos.Broken, match=f"^{said}$"):
        chaos.compare(wanted, chaos.answers(written(tmp_path, *records)))


def test_comparing_allows_another_order_time_and_share_of_the_cache(chaos: ModuleType, tmp_path: Path) -> None:
    wanted = dict(chaos.answers(written(tmp_path, record("a"), record("b"))))
    chaos.compare(wanted, chaos.answers(written(tmp_path, record("b"), record("a"))))


def test_a_process_and_a_shared_file_that_are_left_are_noticed(chaos: ModuleType) -> None:
    shared = Path(f"/dev/shm/paged-test-{os.getpid()}")
    code = f"import mmap; f = open({str(shared)!r}, 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)"
    code += "; print('ready', flush=True); input()"
    environ = {**os.environ, chaos.MARK: "left"}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        there = chaos.marked("left")
        assert there == [psutil.Process(child.pid)]
        files = chaos.shared_files(there)
        assert files == {shared}
        with pytest.raises(chaos.Broken, match=f"processes of it: {child.pid} "):
            chaos.all_gone(lambda: chaos.marked("left"), files, 0.2, "the test")
        child.wait(10)  # it was ended
        with pytest.raises(chaos.Broken, match=f"files of it: {shared}"):
            chaos.all_gone(lambda: chaos.marked("left"), files, 10.0, "the test")
        shared.unlink()
        chaos.all_gone(lambda: chaos.marked("left"), files, 10.0, "the test")
