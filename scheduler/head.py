"""Head: a Ray on this machine in processes of its own, which outlives who started it. One for each detached cluster.

All its files are in a folder of its own, whose path is in the command lines of its processes. From before it begins
until it has ended a note of it lies among the clusters' states, so that a head whose launcher was killed before the
cluster had its state is found, and ended by the next `launch --detach` or `stop`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from paged.errors import ClusterError
from scheduler import cluster_state

OBJECTS = 200 * 2**20  # bytes of Ray's object store, which holds next to nothing of ours
STARTING = 60.0  # seconds until a head must answer
ENDING = 10.0  # seconds in which it ends by itself
LOOPBACK = "127.0.0.1"
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_PLACE = Path("/tmp")  # as Ray's own: sockets' paths may have 107 bytes, and TMPDIR is another for who stops it


def start_head(cpus: int) -> tuple[int, str]:
    """Start one. Its process, with which all others end, and its address. Raises ClusterError."""
    port, client_port = _free_ports(2)
    address = f"{LOOPBACK}:{port}"
    _folder(address).mkdir(mode=0o700)  # of a name that nobody else has
    ensure_token()
    command = [*_RAY, "start", "--head", "--block", f"--port={port}", f"--ray-client-server-port={client_port}"]
    command += ["--min-worker-port=0", "--max-worker-port=0"]  # any, as there may be other heads on this machine
    command += [f"--node-ip-address={LOOPBACK}", "--include-dashboard=false", "--disable-usage-stats"]
    command += [f"--num-cpus={cpus}", f"--object-store-memory={OBJECTS}", f"--temp-dir={_folder(address)}"]
    us = {"pid": os.getpid(), "born": cluster_state.born(os.getpid())}
    _note(address).write_text(json.dumps(us) + "\n")
    try:
        return _wait(command, _folder(address) / "head.log"), address
    except BaseException:
        end_head(address)
        raise


def ensure_token() -> None:
    """Who connects must have it; without one Ray would let in everybody."""
    if not any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        # Makes one, or finds the one there.
        subprocess.run([*_RAY, "get-auth-token", "--generate"], capture_output=True, check=True)


def _wait(command: list[str], log: Path) -> int:
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={"RAY_AUTH_MODE": "token"} | environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + STARTING
    while "Ray runtime started" not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > end:
            said = " ".join(log.read_text(errors="replace").split())
            raise ClusterError(f"Ray could not be started: {said[-400:]}")
        time.sleep(0.1)
    return process.pid


def end_head(address: str) -> None:
    """End the head of this address, every process below it, and its files."""
    import psutil

    folder = _folder(address)
    option = re.compile(rf"--[\w-]+={re.escape(str(folder))}(/.*)?")  # not any mention: of an editor, say
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(map(option.fullmatch, process.cmdline())):
                processes += [process, *process.children(recursive=True)]
    processes = list(dict.fromkeys(processes))
    for process in processes[:1]:  # the oldest, which ends the others
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, ENDING)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, ENDING)
    shutil.rmtree(folder, ignore_errors=True)
    _note(address).unlink(missing_ok=True)


def sweep() -> int:
    """End heads that no cluster has and whose launcher is gone; how many there were."""
    found = 0
    states = [state for name in cluster_state.names() if (state := cluster_state.read(name)) is not None]
    taken = {state.address for state in states if state.head}
    for note in cluster_state.folder().glob("*.head"):
        address = f"{LOOPBACK}:{note.stem}"
        try:
            launcher = json.loads(note.read_text())
            starting = cluster_state.born(launcher["pid"]) == launcher["born"]
        except (OSError, ValueError):
            starting = False
        if address not in taken and not starting:
            end_head(address)
            found += 1
    return found


def _note(address: str) -> Path:
    return cluster_state.folder() / f"{address.rpartition(':')[2]}.head"


def _folder(address: str) -> Path:
    return _PLACE / f"paged-ray-{address.rpartition(':')[2]}"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
