"""What this machine has for a worker: device, number format, threads. Each answer comes with its reason.

Only `pick_device` looks at torch, and only when asked for anything but a CPU.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from paged.errors import ConfigError


def pick_device(wanted: str) -> str:
    """`cpu` or `cuda` for `auto`, `cpu` or `cuda`. Raises ConfigError where CUDA is asked for and absent."""
    if wanted == "cpu":
        return "cpu"
    import torch  # 1.2 s

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise ConfigError("device is cuda, but torch finds no CUDA device here: leave device out, or give cpu")
    return "cpu"


def pick_dtype(wanted: str, device: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, str]:
    """The number format, and why: for `auto` bfloat16 where the device multiplies it natively, else float32."""
    if wanted != "auto":
        return wanted, "as set"
    if device == "cuda":
        import torch

        native, unit = torch.cuda.get_device_capability() >= (8, 0), "this GPU"
    else:
        text = cpuinfo.read_text() if cpuinfo.exists() else ""
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
        native, unit = bool(flags and {"avx512_bf16", "amx_bf16", "bf16"} & set(flags[1].split())), "this CPU"
    if native:
        return "bfloat16", f"{unit} multiplies it natively"
    return "float32", f"{unit} does not multiply bfloat16 natively"


def pick_threads(wanted: int | None, cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> tuple[int, str]:
    """CPU threads, and why: by default the affinity of this process, cut to the quota of its cgroup (version 2)."""
    if wanted is not None:
        return wanted, "as set"
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    reason = "CPUs that this process may run on"
    if cpu_max.exists():
        limit, period = cpu_max.read_text().split()
        if limit != "max" and -(-int(limit) // int(period)) < threads:
            threads, reason = -(-int(limit) // int(period)), "the cgroup's CPU quota"
    return max(1, threads), reason
