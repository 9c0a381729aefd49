"""The examples for Ray Data and Ray Serve, each in a process of its own: what they print, and that nothing is left."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
MARK = "PAGED_TEST_OF_EXAMPLE"  # in the environment of an example and of all that it starts

pytestmark = pytest.mark.ray


def processes(mark: str) -> list[str]:
    """The command lines of all processes with this mark, but those that have ended and wait for their parent."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # somebody else's, or it has just ended
    return found


def run(example: str, line_comes: Callable[[str], None] = lambda line: None) -> list[str]:
    """The lines that an example prints. It must end well, and with it all that it started."""
    mark = f"{example}-{os.getpid()}-{time.time_ns()}"
    command = [sys.executable, str(EXAMPLES / example)]
    environ, lines, most = {**os.environ, MARK: mark}, list[str](), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            most = max(most, len(processes(mark)))
            lines.append(line.rstrip("\n"))
            line_comes(line)
    assert process.returncode == 0, "\n".join(lines)
    assert not any("Traceback" in line for line in lines), "\n".join(lines)
    assert most > 1  # so Ray's processes have the mark
    until = time.monotonic() + 30
    while (left := processes(mark)) and time.monotonic() < until:
        time.sleep(0.2)
    assert left == []
    return lines


def test_the_code_in_the_docs_is_that_of_the_example() -> None:
    text = (EXAMPLES.parent / "docs" / "routing.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert code in (EXAMPLES / "ray_data.py").read_text()


def test_ray_data_answers_every_row_and_says_what_is_wrong_with_one() -> None:
    lines = [line for line in run("ray_data.py") if re.match(r"\d ", line)]
    assert len(lines) == 5
    for number, line in enumerate(lines):
        if number == 2:
            assert line == "2 (0 + 0 tokens, None): error: messages[1].content must be text, or a list of text parts"
        else:
            assert re.fullmatch(rf"""{number} \(4\d \+ [1-9]\d? tokens, (stop|length)\): ['"][A-Z].*['"]""", line)


def test_ray_serve_answers_on_loopback_only() -> None:
    places: dict[str, bool] = {}

    def line_comes(line: str) -> None:
        if found := re.match(r"serving on http://127\.0\.0\.1:(\d+)/", line):
            for host in ("127.0.0.1", "127.0.0.2"):  # the other is this machine's too, where all addresses are bound
                with socket.socket() as one:
                    places[host] = one.connect_ex((host, int(found[1]))) == 0

    lines = [line for line in run("ray_serve.py", line_comes) if re.match(r"\d{3} ", line)]
    assert places == {"127.0.0.1": True, "127.0.0.2": False}
    assert [line[:3] for line in lines] == ["200", "200", "200", "400"]
    assert lines[0].startswith("200 'The capital of France is' {'text': ' Paris.")
    assert lines[3] == "400 None {'error': 'a prompt is text or a list of token ids, not None'}"
