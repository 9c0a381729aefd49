"""benchmarks/bench_cache.py: operations against a count by hand, the integral, and both sides on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from oracles import tiny_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from paged import kernels
from worker.model_config import ModelConfig

HOME = Path(__file__).parents[1]
SMALL = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "rope_theta": 100.0,
    }
)


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME / "benchmarks"))
        yield import_module("bench_cache")


def test_operations_are_those_counted_by_hand(bench: ModuleType) -> None:
    """Of a token: q 8x4, k and v 4x4 each, out 4x8, gate and up 6x4 each, down 4x6. Of a key seen: 2 x 2 x 4."""
    token = 2 * (32 + 16 + 16 + 32 + 24 + 24 + 24)
    seen, head = 2 * (2 * 2 * 4), 4 * 10
    assert bench.forward(SMALL, 0, 3) == 3 * token + (1 + 2 + 3) * seen + head
    assert bench.forward(SMALL, 3, 4) == token + 4 * seen + head
    # A prompt of 3 and 2 new tokens: the prompt gives the first, one more step the second.
    assert bench.operations_with(SMALL, (3, 2)) == 4 * token + 10 * seen + 2 * head
    assert bench.operations_without(SMALL, (3, 2)) == 7 * token + (6 + 10) * seen + 2 * head


def test_a_window_bounds_what_a_query_sees(bench: ModuleType) -> None:
    one = replace(SMALL, layer_windows=(None, 2))
    pair = 2 * 2 * 4
    assert bench.forward(SMALL, 0, 4) - bench.forward(one, 0, 4) == pair * ((1 + 2 + 3 + 4) - (1 + 2 + 2 + 2))
    assert bench.forward(SMALL, 3, 4) - bench.forward(one, 3, 4) == pair * (4 - 2)


def test_a_row_is_timed_at_eight_lengths_and_rows_share_them(bench: ModuleType) -> None:
    assert bench.lengths((7, 7)) == list(range(7, 15))
    rows = [(context * bench.UNIT, new * bench.UNIT) for context, new in bench.ROWS]
    assert rows == [(512, 512), (512, 1024), (512, 1536), (1024, 512), (1024, 1024), (1536, 512)]
    for row in rows:
        points = bench.lengths(row)
        assert len(set(points)) == 8
        assert (points[0], points[-1]) == (row[0], sum(row))
    assert len({length for row in rows for length in bench.lengths(row)}) == 22


@pytest.mark.parametrize("row", [(512, 512), (512, 1536), (8, 24)])
def test_the_integral_is_exact_for_lines_and_as_far_off_for_squares_as_is_said(
    bench: ModuleType, row: tuple[int, int]
) -> None:
    needed = range(row[0], sum(row))
    line = {length: 0.25 + 0.5 * length for length in bench.lengths(row)}
    assert bench.integrate(line, row) == pytest.approx(sum(0.25 + 0.5 * length for length in needed), rel=1e-12)
    squares = {length: 3.0 * length**2 for length in bench.lengths(row)}
    excess = bench.integrate(squares, row) - sum(3.0 * length**2 for length in needed)
    assert excess == pytest.approx(7 * 3.0 * (row[1] / 7) ** 3 / 6, rel=0.2)


def test_the_integral_is_exact_for_what_bends_at_the_lengths_alone(bench: ModuleType) -> None:
    row = (7, 14)  # timed at every other length
    bent = {length: 1.0 + abs(length - 13) for length in bench.lengths(row)}
    assert bench.integrate(bent, row) == pytest.approx(sum(1.0 + abs(length - 13) for length in range(7, 21)))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HOME / "benchmarks" / "bench_cache.py"), *arguments]
    beside = {**os.environ, "PYTHONSAFEPATH": ""}  # it imports what lies beside it
    return subprocess.run(command, capture_output=True, text=True, check=False, env=beside)


def model(folder: Path) -> None:
    """A tiny one with any tokenizer, as token ids go in and come out."""
    tiny_llama(folder)
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b")).save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_sides_give_the_same_tokens_and_all_samples_are_kept(tmp_path: Path, dtype: str) -> None:
    assert kernels.library() is not None, kernels.why_not()
    model(tmp_path / "model")
    output = tmp_path / "cache.json"
    done = run("--quick", "--model", str(tmp_path / "model"), "--dtype", dtype, "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].startswith("| 8 | 8 | ")
    found = json.loads(output.read_text())
    assert found["dtype"] == dtype
    assert [(it["context"], it["new"]) for it in found["rows"]] == [
        (8, 8),
        (8, 16),
        (8, 24),
        (16, 8),
        (16, 16),
        (24, 8),
    ]
    for it in found["rows"]:
        assert len(it["with_samples"]) == found["turns"] == 2
        assert it["with_s"] == pytest.approx(sum(it["with_samples"]) / 2)
        assert it["gain"] == pytest.approx(1 - 1 / it["times_faster"])
        assert 1 < it["operations_ratio"] == it["operations_without"] / it["operations"] < it["context"] + it["new"]
    assert len(found["forward_s"]) == 22
    assert all(len(samples) == 2 for samples in found["forward_s"].values())
    full = found["in_full"]
    assert full["must_agree"]
    assert full["agrees"] == full["tokens"] == len(full["forward_s"]) == 8
    assert full["without_s"] == pytest.approx(sum(full["forward_s"]))
    assert full["integrated_s"] == found["rows"][0]["without_s"]


def test_sides_that_differ_and_may_not_end_the_run(bench: ModuleType) -> None:
    full = {"agrees": 7, "tokens": 8, "must_agree": True}
    figures = {"dtype": "float32", "backend": "sdpa", "in_full": full}
    with pytest.raises(SystemExit, match=r"only 7 of 8 tokens are the same .* float32 on sdpa"):
        bench.require_same_tokens(figures)
    bench.require_same_tokens(figures | {"in_full": full | {"agrees": 8}})
    bench.require_same_tokens(figures | {"in_full": full | {"must_agree": False}})


def test_what_cannot_be_run_is_one_clear_error(tmp_path: Path) -> None:
    model(tmp_path / "model")
    for arguments, message in {
        ("--turns", "0"): "--turns must be at least 1, not 0",
        ("--model", str(tmp_path / "nothing")): "nothing",
        ("--model", str(tmp_path / "model")): "max_model_len is 2049, and the model's positions end at 512",
    }.items():
        done = run(*arguments)
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
