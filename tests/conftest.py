"""What tests share: the hypothesis profile, and the real model, fetched once."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import paged
import scheduler  # noqa: F401  before its tests, see below
from paged import KVCacheManager
from worker.checkpoints import Checkpoint, resolve

# Machines are shared, so no example has a deadline; CI must not fail on a lucky draw that nobody can repeat.
settings.register_profile(
    "paged", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("paged")

# Only now, that they are imported: the tests' folders paged, scheduler and worker must not stand for the packages.
sys.path.insert(0, str(Path(__file__).parent))

# Processes that tests start use the same paged as they, not what lies in the folder where they are started.
os.environ["PYTHONSAFEPATH"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(paged.__file__).parents[1]), os.environ.get("PYTHONPATH")))
)

# Freed pages are filled with NaN, and what can be found is sealed: a stale read or stray write is seen in any test.
KVCacheManager.poison_by_default = True


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny models, over which several only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """SmolLM2-135M-Instruct in the user's cache; downloaded by whichever test asks first."""
    return resolve("smollm2")


@pytest.fixture(scope="session")
def transformers_smollm2(smollm2: Checkpoint) -> Any:
    """The same weights in transformers, float32: the oracle."""
    return _in_transformers(smollm2)


@pytest.fixture(scope="session")
def gemma3() -> Checkpoint:
    """Gemma 3 270M in the user's cache, as `smollm2`."""
    return resolve("gemma3")


@pytest.fixture(scope="session")
def transformers_gemma3(gemma3: Checkpoint) -> Any:
    """The same weights in transformers, float32, with the attention that its authors wrote down."""
    return _in_transformers(gemma3, attn_implementation="eager")


def _in_transformers(checkpoint: Checkpoint, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(checkpoint.path, **settings).eval()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The largest of each figure that tests have recorded."""
    figures: dict[str, float] = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            figures[name] = max(value, figures.get(name, 0.0))
    for name, value in sorted(figures.items()):
        terminalreporter.write_line(f"{name}: {value:.2e}")
