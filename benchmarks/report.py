"""What every benchmark writes beside its figures: the command, the commit, the machine."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from scheduler.bench import about, command

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def write(output: Path, **figures: Any) -> None:
    """The report as JSON."""
    it = about() | {"command": command("python", *sys.argv)}
    output.parent.mkdir(exist_ok=True)
    text = json.dumps(it | figures, indent=1)
    flat = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)
    output.write_text(flat + "\n")


def workload(name: str) -> list[dict[str, Any]]:
    """Requests of workloads/workload_smollm2.json."""
    requests: list[dict[str, Any]] = json.loads((FOLDER / "workloads" / "workload_smollm2.json").read_text())[name]
    return requests
