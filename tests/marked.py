"""Processes with a mark in their environment, which all that they start has too: whatever is left of a run is found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

MARK = "PAGED_TEST_RUN"
PAGED = (sys.executable, "-c", "from scheduler.cli import main; main()")


def make_tiny_model(folder: Path) -> Path:
    """Weights of about a megabyte, random."""
    script = Path(__file__).parent.parent / "examples" / "make_random_model.py"
    command = [sys.executable, str(script), "--params", "300K", "-o", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def paged(mark: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    """A `paged` command under way, in a session of its own."""
    return subprocess.Popen(
        [*PAGED, *arguments],
        env={**os.environ, MARK: mark, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def marked(mark: str) -> dict[int, str]:
    """Command line by id of every process with this mark, but those that have ended and wait for their parent."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # somebody else's, or it has just ended
    return found


def shared_files(mark: str) -> set[Path]:
    """Files of shared memory that processes with this mark have mapped and that still have a name."""
    found = set()
    for pid in marked(mark):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found |= {Path(name) for name in re.findall(r"/dev/shm/\S+", maps)}
    return {file for file in found if file.exists()}


def until(seconds: float) -> Iterator[None]:
    """Turns of a loop that waits."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.1)


def none_left(mark: str, seconds: float, shared: Iterable[Path] = ()) -> tuple[dict[int, str], set[Path]]:
    """Processes with this mark, and files of these, that are there in the end; waits until there are no processes.

    No longer than so many seconds.
    """
    found = marked(mark)
    for _ in until(seconds):
        found = marked(mark)
        if not found:
            break
    return found, {file for file in shared if file.exists()}
