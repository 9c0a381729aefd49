"""examples/allocator.py as a newcomer runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paged

EXAMPLE = Path(__file__).parents[2] / "examples" / "allocator.py"
HEAVY = ["torch", "transformers", "ray", "xformers"]


@pytest.fixture(scope="module")
def output() -> str:
    """What it prints, and then what of `HEAVY` it has imported."""
    code = f"import runpy, sys; runpy.run_path({str(EXAMPLE)!r}); print('imported', {set(HEAVY)!r} & {{*sys.modules}})"
    environ = {**os.environ, "PYTHONPATH": str(Path(paged.__file__).parent.parent)}
    return subprocess.run([sys.executable, "-c", code], check=True, env=environ, capture_output=True, text=True).stdout


def test_the_second_prompt_finds_the_first_ones_full_pages(output: str) -> None:
    assert "B: 8 of 16 tokens were cached" in output
    assert "B     1:[once]  2:[ upo]  4:[n a ]  5:[hill]" in output


def test_slots_follow_the_table(output: str) -> None:
    assert "positions 2 to 5 lie in slots [6, 7, 8, 9]" in output


def test_a_fork_shares_and_then_copies_its_tail(output: str) -> None:
    assert "F     1:[once]  2:[ upo]  3:[n...]" in output
    assert "copy page 3 to 6" in output
    assert "F     1:[once]  2:[ upo]  6:[n,..]" in output


def test_cached_pages_are_found_after_their_sequence_has_ended(output: str) -> None:
    assert "pool  2 2 1 c c 1 - -" in output
    assert "would find 16 tokens" in output


def test_too_long_a_prompt_is_refused_with_the_numbers(output: str) -> None:
    assert "C: 7 pages wanted, 4 available of 8" in output


def test_at_the_end_nothing_is_referenced(output: str) -> None:
    assert "at the end: BlockAllocator(4 free, 0 referenced, 4 cached)" in output


def test_it_needs_no_torch(output: str) -> None:
    assert output.endswith("imported set()\n")
