"""benchmarks/bench_peers.py with children that only pretend: turns, deadlines, deaths, comparisons, what is absent."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from paged.errors import ConfigError

HOME = Path(__file__).parents[1]
WARM = [{"prompt": [9], "out": 1}]
WORKLOADS = {"A": [{"prompt": [1, 2], "out": 3}, {"prompt": [5], "out": 2}], "B": [{"prompt": [7], "out": 1}]}
REFERENCE = {"A": [[1, 1, 1], [5, 5]], "B": [[7]]}  # what a right fake answers: the first token again and again

# argv: name, log file, what goes wrong, in a run of so many requests, and seconds to claim
FAKE = """
import json, subprocess, sys, time
name, log, wrong, when, seconds = sys.argv[1:]
def say(text):
    with open(log, "a") as file: print(text, file=file)
def fail(kind):
    if kind == "die": sys.exit("first line\\n\\nlast line")
    if kind == "hang":
        say(f"child {subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid}")
        time.sleep(600)
say(f"{name} starts")
if when == "load": fail(wrong)
print(json.dumps({"ready": {"version": name}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    requests = asked["requests"]
    say(f"{name} {'renews' if asked['renew'] else len(requests)}")
    if str(len(requests)) == when and not asked["renew"]: fail(wrong)
    tokens = [[r["prompt"][0]] * (r["out"] - (wrong == "short")) for r in requests]
    if wrong == "other": tokens[0][-1] += 1
    print(json.dumps({"wall_s": float(seconds), "tokens": tokens, "first_token_s": None}), flush=True)
"""


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The script as a module; what it imports beside it lies in benchmarks/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME / "benchmarks"))
        yield importlib.import_module("bench_peers")


@pytest.fixture
def turns(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module("peers.turns")
    monkeypatch.setattr(module, "REST_S", 0.0)
    return module


class Fakes:
    """Peers that run FAKE, and what they have written."""

    def __init__(self, folder: Path, turns: Any) -> None:
        self.log, self._turns = folder / "log", turns
        self._script = folder / "fake.py"
        self._script.write_text(FAKE)

    def peer(self, name: str, wrong: str = "", when: str = "", seconds: float = 1.0) -> Any:
        words = (sys.executable, str(self._script), name, str(self.log), wrong, when, str(seconds))
        return self._turns.Peer(name, words)

    def measure(self, *peers: Any, repeat: int = 2, timeout_s: float = 30.0) -> dict[str, Any]:
        found: dict[str, Any] = self._turns.measure(peers, WORKLOADS, WARM, REFERENCE, repeat, timeout_s)
        return found

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def fakes(tmp_path: Path, turns: Any) -> Fakes:
    return Fakes(tmp_path, turns)


def gone(pid: int) -> bool:
    """Whether a process ends within some seconds; one that nobody waits for counts too."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def seconds(found: dict[str, Any], peer: str, workload: str) -> list[float | None]:
    return [sample["seconds"] for sample in found[peer]["workloads"][workload]["samples"]]


def test_peers_take_turns_and_load_once(fakes: Fakes) -> None:
    found = fakes.measure(fakes.peer("a"), fakes.peer("b", seconds=3.0))
    started = [line for line in fakes.lines() if "starts" in line]
    asked = [line for line in fakes.lines() if "starts" not in line]
    assert started == ["a starts", "b starts"]
    of_a_workload = [["a renews", f"a {n}", "b renews", f"b {n}"] * 2 for n in (2, 1)]
    assert asked == [*of_a_workload[0], *of_a_workload[1]]
    assert seconds(found, "b", "A") == [3.0, 3.0]
    assert found["b"]["workloads"]["A"]["times_paged"] == 3.0
    assert found["a"]["ran_with"]["version"] == "a"
    assert found["a"]["ran_with"]["load_s"] > 0


def test_one_that_dies_is_reported_and_comes_back_for_the_next_workload(fakes: Fakes, bench: ModuleType) -> None:
    found = fakes.measure(fakes.peer("a"), fakes.peer("b", "die", "2"), fakes.peer("c"))
    samples = found["b"]["workloads"]["A"]["samples"]
    assert samples[0]["why"] == "died with exit code 1\nfirst line\nlast line"
    assert samples[1]["why"] == "left out: died with exit code 1"
    assert seconds(found, "b", "A") == [None, None]
    assert seconds(found, "b", "B") == seconds(found, "c", "A") == [1.0, 1.0]
    assert fakes.lines().count("b starts") == 2
    assert found["b"]["workloads"]["A"]["times_paged"] is None
    lines = bench.table("float32", found, {})
    assert lines[3].split() == ["b", "-", "1.00", "1.00", "1/1"]
    assert "  b, A: died with exit code 1\nfirst line\nlast line" in lines


def test_one_that_hangs_is_ended_with_all_that_it_started(fakes: Fakes) -> None:
    found = fakes.measure(fakes.peer("a"), fakes.peer("b", "hang", "2"), timeout_s=2)
    why = [sample["why"] for sample in found["b"]["workloads"]["A"]["samples"]]
    assert why == ["did not finish in 2 s", "left out: did not finish in 2 s"]
    assert seconds(found, "b", "B") == [1.0, 1.0]
    pids = [int(line.split()[1]) for line in fakes.lines() if line.startswith("child")]
    assert len(pids) == 1
    assert gone(pids[0])


def test_one_that_cannot_be_loaded_is_tried_once(fakes: Fakes, turns: Any) -> None:
    nothing = turns.Peer("c", ("/no/such/python",))
    found = fakes.measure(fakes.peer("a"), fakes.peer("b", "die", "load"), nothing)
    assert fakes.lines().count("b starts") == 1
    assert seconds(found, "b", "B") == seconds(found, "c", "B") == [None, None]
    assert found["b"]["ran_with"] is None
    assert found["b"]["workloads"]["B"]["samples"][0]["why"] == "could not be loaded: died with exit code 1"
    assert "cannot be started" in found["c"]["workloads"]["A"]["samples"][0]["why"]
    assert seconds(found, "a", "B") == [1.0, 1.0]


def test_tokens_are_counted_against_the_reference_and_paged(fakes: Fakes, bench: ModuleType) -> None:
    peers = fakes.peer("paged"), fakes.peer("transformers", "other"), fakes.peer("vllm", "other")
    found = fakes.measure(*peers, repeat=1)
    sample = found["transformers"]["workloads"]["A"]["samples"][0]
    assert (sample["agrees"], sample["agrees_with_paged"]) == (1, 1)
    assert found["paged"]["workloads"]["A"]["samples"][0]["agrees"] == 2
    assert bench.differing({"bfloat16": found}) == []
    assert bench.differing({"float32": found}) == [
        "A: transformers and paged agree on 1 of 2 outputs in float32",
        "B: transformers and paged agree on 0 of 1 outputs in float32",
    ]


def test_one_that_gives_too_few_tokens_has_no_figure(fakes: Fakes) -> None:
    found = fakes.measure(fakes.peer("a"), fakes.peer("b", "short"), repeat=1)
    assert found["b"]["workloads"]["A"]["samples"][0]["why"] == "gave 0 tokens to request 1, not 1"


def test_ratios_pair_the_turns_that_both_have(turns: Any) -> None:
    def samples(*times: float | None) -> list[dict[str, float | None]]:
        return [{"seconds": one} for one in times]

    assert turns.ratio(samples(2, 9, 8), samples(1, 3, 2)) == 3  # of 2, 3 and 4, not 8 / 2
    assert turns.ratio(samples(2, None, 8), samples(1, 3, None)) == 2
    assert turns.ratio(samples(None), samples(1)) is None


def test_ctrl_c_leaves_no_child_behind(fakes: Fakes, tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.append({str(HOME / "benchmarks")!r})
from peers.turns import Peer, measure
peer = Peer("b", (sys.executable, {str(tmp_path / "fake.py")!r}, "b", {str(fakes.log)!r}, "hang", "1", "1"))
measure([peer], {WORKLOADS!r}, {WARM!r}, {{}}, 1, 60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as parent:
        end = time.monotonic() + 30
        while not (fakes.log.exists() and "child" in fakes.log.read_text()):
            assert time.monotonic() < end
            time.sleep(0.05)
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 2
        parent.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in parent.communicate(timeout=30)[1]
    assert all(gone(child.pid) for child in children)


def test_what_libraries_print_is_not_among_the_answers(tmp_path: Path) -> None:
    script = tmp_path / "noisy.py"
    script.write_text(f"""
import os, sys; sys.path.append({str(HOME / "benchmarks")!r})
from peers.child import parser, serve
class Peer:
    about = {{"version": "1"}}
    def renew(self): os.write(1, b"renewed\\n")
    def prepare(self, requests):
        print("prepared")
        return lambda: ([[0] * r["out"] for r in requests], [3.0, 1.0, 2.0])
parser("").parse_args()
serve(Peer)
""")
    asked = [{"requests": WARM, "renew": True}, {"requests": WORKLOADS["A"]}]
    command = [sys.executable, str(script), "model", "--threads", "1", "--max-len", "9"]
    text = "".join(json.dumps(one) + "\n" for one in asked)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    ready, warm, answer = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": {"version": "1"}}
    assert (warm["tokens"], answer["tokens"]) == ([[0]], [[0, 0, 0], [0, 0]])
    assert answer["first_token_s"] == 2.0
    assert sorted(done.stderr.split()) == ["prepared", "prepared", "renewed"]


def test_peers_that_are_absent_are_listed_with_how_to_give_them(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(bench.shutil, "which", lambda name: None)
    for dtype, missing in (("float32", "--env transformers=PATH"), ("int8", "has no int8")):
        peers, absent = bench.find(list(bench.KNOWN), dtype, [], {"paged": Path(sys.executable)}, None, None)
        assert [peer.name for peer in peers] == ["paged"]
        assert missing in absent["transformers"]
        assert {"vllm", "openvino", "llama.cpp"} < absent.keys()
    assert bench.table("float32", {"paged": {"workloads": {}}}, absent)[-1] == (
        "  llama.cpp is absent: give its program by --env llama.cpp=/path/llama-server, and a model by --gguf FILE"
    )
    (tmp_path / "bin").mkdir()
    for program in ("python", "llama-server"):
        (tmp_path / "bin" / program).touch()
    given = bench.read_environments([f"{name}={tmp_path}" for name in ("openvino", "llama.cpp")])
    gguf = tmp_path / "bin" / "python"
    peers, absent = bench.find(["openvino", "llama.cpp"], "float32", [], given, None, gguf)
    assert [peer.command[0] for peer in peers] == [str(tmp_path / "bin" / "python"), sys.executable]
    assert str(tmp_path / "bin" / "llama-server") in peers[1].command
    assert "PYTHONPATH" in os.environ
    assert "PYTHONPATH" not in peers[0].environ
    assert absent == {}


def test_what_cannot_be_run_is_one_clear_error(bench: ModuleType, tmp_path: Path) -> None:
    for one, message in {
        "vllm": "give NAME=PATH",
        "sglang=x": "one of paged, transformers",
        f"vllm={tmp_path}": "there is no file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            bench.read_environments([one])
    with pytest.raises(ConfigError, match="there is no workload W9: there are W1, W2, W3, W4"):
        bench.requests_of(False, ["W9"])
    with pytest.raises(SystemExit, match="--repeat 0 and --timeout 300 must be above 0"):
        bench.main(["--repeat", "0"])


def test_quick_requests_have_the_first_tokens_of_their_reference(bench: ModuleType) -> None:
    workloads, warm, reference = bench.requests_of(True, None)
    assert len(warm) == 1
    assert [len(tokens) for tokens in reference["quick"]] == [r["out"] for r in workloads["quick"]]
    whole, _, answers = bench.requests_of(False, ["W1"])
    assert whole.keys() == {"W1"}
    for request, tokens in zip(workloads["quick"], reference["quick"], strict=True):
        at = [r["prompt"] for r in whole["W1"]].index(request["prompt"])
        assert answers["W1"][at][: len(tokens)] == tokens
