"""What memory there is for this process, and how much of it a pool of pages may take.

Everything is read from a filesystem root, which tests make up. Groups of processes (cgroups) limit what this process
has, its own and every one above it, in version 2 and in version 1, which may both be mounted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path, PurePosixPath

from paged.errors import ConfigError

ROOT = Path("/")
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
# Of each version: the limit of a group, what it uses, and the part of that in memory.stat which the kernel would rather
# give back than kill anybody: file pages that nobody has touched for a while.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory as this process sees it, in bytes."""

    basis: int  # that there is: the host's, cut to the limits of the groups
    available: int  # that can still be had: what the host has free, and every group is below its limit
    own: int  # that this process holds already


def parse_memory(value: str | int) -> int | float:
    """`kv_memory`: bytes as an int, from a number with or without a unit (`512MiB`), or a share as a float (`30%`)."""
    text = value if isinstance(value, str) else format(value, "d") if type(value) is int and value < 2**63 else ""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*", text, re.ASCII)
    unit = match[2].upper() if match else "?"
    if match is None or (unit != "%" and unit not in _UNITS):
        given = repr(text)[:80] if text else type(value).__name__
        raise ConfigError(f"kv_memory {given} is not understood: give bytes as 2GiB or 512MiB, or a share as 30%")
    amount = Decimal(match[1]) * _UNITS.get(unit, 1)
    if unit == "%" and 0 < amount <= 100:
        return float(amount) / 100
    if unit == "%" or not 1 <= amount < 2**63:
        raise ConfigError(
            f"kv_memory must be at least a byte, or a share of more than nothing and at most 100%, not {value!r:.80}: "
            "give 2GiB, 512MiB or 30%"
        )
    return int(amount)


def pool_bytes(kv_memory: int | float, memory: Memory | None, weights: int) -> int:
    """Bytes that a pool may take, for `kv_memory` in bytes (int) or as a share (float), beside `weights` to be loaded.

    A share f gives f * basis - own, the same whatever else runs, but never more than available - weights, which is
    there. A number of bytes is taken as it is, or refused: a pool takes its memory as pages are first written, so
    one that is too large would be killed much later. `memory` is None where it is not known; then only bytes will do.
    """
    if memory is None:
        if isinstance(kv_memory, float):
            raise ConfigError("the memory of this machine is not known: give kv_memory in bytes, as 2GiB")
        return kv_memory
    left = memory.available - weights
    beside = f"{memory.available:,} bytes are available" + (f", and the model takes {weights:,}" if weights else "")
    if isinstance(kv_memory, int):
        if kv_memory > left:
            raise ConfigError(f"kv_memory of {kv_memory:,} bytes is too much, {beside}: lower it")
        return kv_memory
    share = int(kv_memory * memory.basis)
    result = min(share - memory.own, left)
    if result <= 0:
        raise ConfigError(
            f"kv_memory of {kv_memory:.0%} leaves no memory for pages: that is {share:,} bytes of {memory.basis:,}, "
            f"this process holds {memory.own:,}, {beside}: raise kv_memory, or free memory"
        )
    return result


def host_memory(root: Path = ROOT) -> Memory | None:
    """The memory of the CPU; None where the system does not say."""
    host = _numbers(root / "proc/meminfo")
    if "MemTotal" not in host or "MemAvailable" not in host:
        return None
    basis, available = host["MemTotal"] * 1024, host["MemAvailable"] * 1024
    for folder in cgroup_folders("memory", root):
        for limit_file, used_file, inactive in _FILES:
            text = read(folder / limit_file).strip()
            if text.isdigit():  # not "max", and version 1 says by a number that no host has that there is no limit
                limit, used = int(text), int(read(folder / used_file) or 0)
                used = max(0, used - _numbers(folder / "memory.stat").get(inactive, 0))
                basis, available = min(basis, limit), min(available, limit - used)
    process = _numbers(root / "proc/self/status")
    own = (process.get("RssAnon", 0) + process.get("RssShmem", 0)) * 1024
    return Memory(basis, max(0, available), own)


def cuda_memory() -> Memory:
    """The memory of the current CUDA device, which other processes may use too."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return Memory(total, free, torch.cuda.memory_reserved())


def cgroup_folders(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Where the groups are that may limit this process in memory or cpu: its own, and those above. They may not exist.

    In a container the groups above its own are often not to be seen, and its own is mounted at the top. Version 2 lies
    there too, or in `unified` where version 1 has the top.
    """
    top = root / "sys/fs/cgroup"
    for line in (read(root / "proc/self/cgroup") or "0::/").splitlines():
        _, names, group = line.split(":", 2)  # as 0::/job, 4:memory:/job, 3:cpu,cpuacct:/job
        if names and controller not in names.split(","):
            continue
        path = PurePosixPath(group.lstrip("/"))
        for mount in dict.fromkeys((top / controller, top / names) if names else (top, top / "unified")):
            yield from (mount / folder for folder in (path, *path.parents))


def read(file: Path) -> str:
    """The text of a file of the system; empty where it is missing or not for us."""
    try:
        return file.read_text(errors="surrogateescape")
    except OSError:
        return ""


def _numbers(file: Path) -> dict[str, int]:
    """Of the lines `name: number unit` or `name number`."""
    return {name: int(number) for name, number in re.findall(r"^(\w+):?\s+(\d+)", read(file), re.MULTILINE)}
