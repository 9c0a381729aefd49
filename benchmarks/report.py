"""What every benchmark writes beside its figures: the command, the commit, the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def write(output: Path, **figures: Any) -> None:
    """The report as JSON."""
    about = {"command": " ".join(["python", *sys.argv]), "commit": commit(), "machine": machine()}
    output.parent.mkdir(exist_ok=True)
    text = json.dumps(about | figures, indent=1)
    flat = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)
    output.write_text(flat + "\n")


def workload(name: str) -> list[dict[str, Any]]:
    """Requests of workloads/workload_smollm2.json."""
    requests: list[dict[str, Any]] = json.loads((FOLDER / "workloads" / "workload_smollm2.json").read_text())[name]
    return requests


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=FOLDER, check=False)
    return done.stdout.strip() or "not a checkout"


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "cpu": names[0].split(":")[1].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }
