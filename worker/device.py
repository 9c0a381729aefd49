"""What this machine has for a worker: device, number format, threads. Each answer comes with its reason.

Only `pick_device` looks at torch, and only when asked for anything but a CPU.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from paged.errors import ConfigError
from paged.kernels import library, why_not
from paged.sizing import ROOT, cgroup_folders, read


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


def pick_backend(wanted: str, quantization: str | None, device: str) -> tuple[str, str]:
    """What computes, and why: for `auto` on a CPU the native kernels, else PyTorch.

    Raises ConfigError where native kernels are asked for, or needed by the quantization, and not here.
    """
    found = library() if device == "cpu" else None
    missing = why_not() if device == "cpu" else "they run on CPUs only"
    if found is not None and wanted in ("auto", "native"):
        return "native", f"native kernels, {found.sets[-1]}"
    if wanted == "native":
        raise ConfigError(f"attention_backend is native, and native kernels are not here: {missing}")
    if quantization is not None:
        reason = missing if found is None else f"attention_backend is {wanted}"
        raise ConfigError(f"quantization {quantization} needs the native kernels, which are not used here: {reason}")
    if wanted != "auto":
        return wanted, "as set"
    return "sdpa", "PyTorch" if device == "cuda" else f"PyTorch, slower than native kernels: {missing}"


def head_format(dtype: str, quantization: str | None) -> str:
    """The head is what int4 hurts most: it keeps int8."""
    return dtype if quantization is None else "int8"


def pick_threads(wanted: int | None, root: Path = ROOT) -> tuple[int, str]:
    """CPU threads, and why: by default the affinity of this process, cut to the quotas of the groups around it."""
    if wanted is not None:
        return wanted, "as set"
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    reason = "CPUs that this process may run on"
    for folder in cgroup_folders("cpu", root):
        quota = read(folder / "cpu.max") or f"{read(folder / 'cpu.cfs_quota_us')} {read(folder / 'cpu.cfs_period_us')}"
        match quota.split():
            case [limit, period] if limit.isdigit():  # else it is max, or -1
                cpus = -(-int(limit) // int(period))
                if cpus < threads:
                    threads, reason = cpus, "the cgroup's CPU quota"
    return max(1, threads), reason
