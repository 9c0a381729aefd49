"""Which clusters there are: a file for each name, so that other processes of this user find them.

A cluster that was launched here is gone when the process that it lives and dies with is: its state is forgotten then.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paged.errors import ClusterError
from worker.checkpoints import default_cache
from worker.head import end_head


@dataclass(frozen=True, slots=True)
class ClusterState:
    """pid: of the process that holds a cluster up, the head that was started for it or the one that launched it; None
    where it is somebody else's Ray. born: when that process began, as a process id may come again."""

    name: str
    address: str
    pid: int | None
    born: int | None
    head: bool  # whether pid is a head of ours, which `stop` ends
    host: str = field(default_factory=socket.gethostname)  # of that process; the folder may be that of several

    @property
    def alive(self) -> bool:
        """Whether that process still is."""
        return self.pid is None or not self.here or born(self.pid) == self.born

    @property
    def here(self) -> bool:
        """Whether that process is, or was, on this machine."""
        return self.host == socket.gethostname()

    def save(self) -> None:
        """Raises ClusterError where there is one of this name, who may have been launched this moment."""
        file = path_of(self.name)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(self)) + "\n")
        try:
            os.link(part, file)
        except FileExistsError:
            raise ClusterError(taken(self.name)) from None
        finally:
            part.unlink()


def folder() -> Path:
    """Where the files are."""
    path = default_cache().parent / "clusters"
    path.mkdir(parents=True, exist_ok=True)
    return path


def read(name: str) -> ClusterState | None:
    """The cluster of this name; None if there is none, or none any more. Raises ClusterError for no name."""
    state = _read(name)
    if state is not None and not state.alive:
        if state.head:
            end_head(state.address)  # what a head that was killed has left
        forget(name, state.address)
        return None
    return state


def _read(name: str) -> ClusterState | None:
    file = path_of(name)
    try:
        return ClusterState(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # of another version, or no state at all
        file.unlink(missing_ok=True)
        return None


def forget(name: str, address: str) -> None:
    """Unless another cluster has the name now."""
    state = _read(name)
    if state is not None and state.address == address:
        path_of(name).unlink(missing_ok=True)


def taken(name: str) -> str:
    """What is wrong with launching one of this name."""
    state = _read(name)
    where = "" if state is None else f", at {state.address}"
    return f"cluster {name} is there already{where}: stop it, or take another name for this one"


def names() -> list[str]:
    """Of all clusters that are known."""
    return sorted(file.stem for file in folder().glob("*.json") if read(file.stem) is not None)


def born(pid: int) -> int | None:
    """When a process began, in ticks since the machine did: of the clock, which is set now and then, nothing depends.

    None if there is none. Of two with the same id it tells which one is meant.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def path_of(name: str) -> Path:
    """The file of a name. Raises ClusterError for no name."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) is None:
        raise ClusterError(f"a cluster's name has letters, digits, - and _, and no more than 64, not {name!r:.80}")
    return folder() / f"{name}.json"
