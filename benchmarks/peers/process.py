"""A peer's child process, seen from bench_peers.py: started, asked with a deadline, and ended with all that it started.

A child leads a process group of its own, so that Ctrl-C reaches the parent alone, which then ends the group by its id.
child.py says what is spoken.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LAST_LINES = 5  # of its stderr, of a child that died
LOAD_S = 900  # longest that loading may take: vLLM compiles


@dataclass(frozen=True, slots=True)
class Peer:
    """What is run against the others."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str] | None = None  # None: as ours


class PeerError(Exception):
    """A peer did not answer: why."""


class Child:
    """Loads at once; raises PeerError if that fails. Whatever else is raised, nothing is left behind."""

    def __init__(self, peer: Peer, load_s: float = LOAD_S) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the child
        try:
            self._process = subprocess.Popen(
                peer.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=peer.environ,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise PeerError(f"cannot be started: {error}") from None
        self._read = b""
        start = time.perf_counter()
        try:
            ready = self._answer(load_s, "load")["ready"]
        except BaseException:
            self.close()
            raise
        self.about: dict[str, Any] = ready | {"load_s": time.perf_counter() - start}

    def run(self, requests: list[dict[str, Any]], timeout_s: float, renew: bool = False) -> dict[str, Any]:
        """The answer. Raises PeerError, after which there is nothing to do with the child but to close it."""
        line = json.dumps({"requests": requests, "renew": renew}).encode() + b"\n"
        # In a thread, for it may be longer than a pipe holds, and a child that hangs reads nothing.
        threading.Thread(target=self._write, args=(line,), daemon=True).start()
        answer = self._answer(timeout_s, "finish")
        for i, (request, tokens) in enumerate(zip(requests, answer["tokens"], strict=True)):
            if len(tokens) != request["out"]:
                raise PeerError(f"gave {len(tokens)} tokens to request {i + 1}, not {request['out']}")
        return answer

    def close(self) -> None:
        """End the child and all in its group; no error if it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # what it did not read
            self._process.stdin.close()
        self._process.stdout.close()
        self._stderr.close()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it ended, or was closed: who waits for its answer says so
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _answer(self, timeout_s: float, what: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        end = time.monotonic() + timeout_s
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._read:
            left = end - time.monotonic()
            if left <= 0:
                raise PeerError(f"did not {what} in {timeout_s:g} s")
            # Its end is looked for too: what it has started may hold the pipe open.
            if select.select([pipe], [], [], min(left, 1.0))[0]:
                data = os.read(pipe, 1 << 20)
                self._read += data
            elif self._process.poll() is None:
                continue
            else:
                data = b""
            if not data:
                raise PeerError(self._death())
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _death(self) -> str:
        with suppress(subprocess.TimeoutExpired):  # it closed its stdout, and lives
            self._process.wait(timeout=5)
        self._stderr.seek(0)
        lines = [line for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        return "\n".join([f"died with exit code {self._process.returncode}", *lines[-LAST_LINES:]])
