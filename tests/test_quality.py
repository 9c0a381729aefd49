"""How far the formats may be from float32's logits on real text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged import kernels

HOME = Path(__file__).parent.parent


@pytest.mark.usefixtures("smollm2")
def test_formats_stay_as_near_to_float32_as_the_docs_say(tmp_path: Path) -> None:
    """Divergence in nats, over a few prompts. int4 is far off, which shows that the others are not just all alike."""
    assert kernels.library() is not None, kernels.why_not()
    output = tmp_path / "quality.json"
    command = [sys.executable, str(HOME / "benchmarks" / "bench_quality.py"), "--quick", "--output", str(output)]
    beside = {**os.environ, "PYTHONSAFEPATH": ""}  # it imports what lies beside it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=beside)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    mean = {name: it["kl_mean"] for name, it in found["results"].items()}
    assert found["positions"] > 500
    assert 0 < mean["float16"] < mean["bfloat16"] < 0.003
    assert mean["bfloat16"] < mean["int8"] < 0.006
    assert mean["int4"] > 0.05
