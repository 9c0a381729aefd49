"""Head: a process of ours that has a Ray below it, on the loopback interface of this machine. One for each cluster.

It ends Ray in order and then itself when whoever started it ends, however that is, unless it was told to stay: so a
killed job leaves nothing, and a detached cluster is one that was told. All its files are in a folder of its own, whose
path is in the command lines of the processes below it.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paged.errors import ClusterError

OBJECTS = 200 * 2**20  # bytes of Ray's object store, which holds next to nothing of ours
ENDING = 10.0  # seconds in which it ends by itself
LOOPBACK = "127.0.0.1"
_PLACE = Path("/tmp")  # as Ray's own: sockets' paths may have 107 bytes, and TMPDIR is another for who stops it
# For how long Ray waits for its head before it ends a process, and what it takes for the raylet that started this one.
_ALONE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600", "RAY_RAYLET_PID": str(os.getpid())}
_READY, _STAY = b"ready\n", b"stay\n"


@dataclass(slots=True)
class Head:
    """A head that runs. pipe: to the one that we started, as long as it ends with us."""

    pid: int
    address: str
    pipe: IO[bytes] | None = None

    def stay(self) -> None:
        """Let it outlive this process."""
        if self.pipe is not None:
            self.pipe.write(_STAY)
            self.pipe.flush()
            self.let_go()

    def let_go(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None


def start_head(cpus: int) -> Head:
    """Start one; it ends with this process until it is told to stay. Raises ClusterError.

    `join_ray` connects to it.
    """
    while True:
        port = _free_port()
        address = f"{LOOPBACK}:{port}"
        with suppress(FileExistsError):  # of one that was killed, which nobody has cleared away yet
            _folder(address).mkdir(mode=0o700)  # of a name that nobody else has
            break
    ensure_token()
    log = _folder(address) / "head.log"
    call = f"from worker.head import run_head; run_head({port}, {cpus}, {os.getpid()})"
    environ = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", *_ALONE)}
    environ |= {"PYTHONPATH": os.pathsep.join(_search_path()), "RAY_GCS_SERVER_PORT": str(port)}
    try:
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", call, f"--folder={_folder(address)}"],  # by which it is found
                env={"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"} | environ,
                cwd=_folder(address),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for whoever started it
            )
        process.returncode = 0  # it may outlive this object
        assert process.stdin is not None
        assert process.stdout is not None
        head = Head(process.pid, address, process.stdin)
        with process.stdout as out:
            if out.readline() != _READY:
                head.let_go()
                said = " ".join(log.read_text(errors="replace").split())
                raise ClusterError(f"Ray could not be started: {said[-400:]}")  # noqa: TRY301  its files go too
    except BaseException:
        end_head(address)
        raise
    return head


def run_head(port: int, cpus: int, starter: int) -> None:
    """The process of a head. It says on stdout when Ray is up, and is told on stdin to stay when its starter ends."""
    import ray

    folder, is_up = _folder(f"{LOOPBACK}:{port}"), False
    try:
        with on_loopback():
            ray.init(
                "local",
                num_cpus=cpus,
                object_store_memory=OBJECTS,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder / "ray"),  # which it opens to everybody: so it lies in one of ours
            )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        sys.stdout.buffer.write(_READY)
        sys.stdout.buffer.flush()
        is_up = True
        node: Any = ray._private.worker._global_node
        listens, told = True, False
        while not node.dead_processes() and (told or os.getppid() == starter):
            time.sleep(0.2)
            if listens and select.select([0], [], [], 0)[0]:
                listens, told = False, os.read(0, len(_STAY)) == _STAY  # else the pipe was closed
    finally:
        ray.shutdown()
        if is_up or os.getppid() != starter:  # else it reads in the log what was wrong
            shutil.rmtree(folder, ignore_errors=True)


def join_ray(address: str, **options: Any) -> None:
    """ray.init, so that a worker finds the modules that this process finds, and Ray leaves this process alone.

    Ray would put the current folder in front of a worker's path, and a checkout there, in which nothing is built, would
    hide what is installed. It takes SIGTERM for itself: who had a handler keeps it. And it would end this process, with
    exit code 1, a minute after its head has ended: now an hour. options: of ray.init.
    """
    os.environ |= _ALONE
    import ray
    from ray.job_config import JobConfig

    use_token()
    handler = signal.getsignal(signal.SIGTERM)

    class Job(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:  # such a one has folders of its own
            return True

    job = Job(_py_driver_sys_path=_search_path()[::-1])  # a worker puts each in front of those before it
    with on_loopback() if is_on_loopback(address) else nullcontext():
        ray.init(address, job_config=job, log_to_driver=False, logging_level=logging.ERROR, **options)
    if handler not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _search_path() -> list[str]:
    """Where this process finds modules."""
    return list(dict.fromkeys(map(os.path.abspath, sys.path)))


@contextmanager
def on_loopback() -> Iterator[None]:
    """Within, Ray takes 127.0.0.1 for the address of a node, and then listens nowhere else.

    It does so on systems where it has no clusters, and can be told that this is one; else it would take the address of
    the outer interface, whatever it is given, and listen on all.
    """
    from ray._private import ray_constants as constants

    name, enabled = constants.ENABLE_RAY_CLUSTERS_ENV_VAR, constants.ENABLE_RAY_CLUSTER
    before = os.environ.get(name)
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False  # for what is started now, and for this process
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def is_on_loopback(address: str) -> bool:
    """Whether a Ray listens there alone: one at 127.0.0.1 that does not answer on the outer interface."""
    from ray._private.services import get_node_ip_address

    host, _, port = address.rpartition(":")
    return host == LOOPBACK and silence(f"{get_node_ip_address()}:{port}") is not None


def use_token() -> None:
    """Let this process show Ray's token where it joins: Ray does so unasked only where it starts. Old ones don't."""
    with suppress(ImportError):
        from ray._private.authentication import authentication_token_setup as tokens

        logging.getLogger(tokens.__name__).setLevel(logging.ERROR)  # that it is on need not be said at every start
        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def silence(address: str, seconds: float = 5.0) -> Exception | None:
    """Why nobody answers there; None if somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), seconds).close()
    except (OSError, ValueError, OverflowError) as error:
        return error
    return None


def ensure_token() -> None:
    """Who connects must have it; without one Ray would let in everybody. Ray's own would be for all users to read."""
    if not any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        file = Path.home() / ".ray" / "auth_token"
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            descriptor, part = tempfile.mkstemp(dir=file.parent)  # for this user alone
            with os.fdopen(descriptor, "w") as out:
                out.write(secrets.token_hex(32))
            with suppress(FileExistsError):
                os.link(part, file)  # whole, as others may read it at this moment
            Path(part).unlink()


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


def _folder(address: str) -> Path:
    return _PLACE / f"paged-ray-{address.rpartition(':')[2]}"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        return int(one.getsockname()[1])
