"""benchmarks/bench_sweep.py: what it reckons and draws, and that contenders give equal tokens."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from paged.errors import ConfigError

HOME = Path(__file__).parents[1]


def load(name: str) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME / "benchmarks"))
        yield importlib.import_module(name)


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    yield from load("bench_sweep")


@pytest.fixture(scope="module")
def sides() -> Iterator[ModuleType]:
    yield from load("sweep_sides")


@pytest.fixture(scope="module")
def plots() -> Iterator[ModuleType]:
    yield from load("sweep_plots")


def entry(contender: str, sweep: str, batch: int, prompt: int, **other: Any) -> dict[str, Any]:
    rest = {"token_s": [0.02 * batch, 0.03], "peak_bytes": 2**20 * batch, "kv_empty_bytes": 1000 * batch} | other
    return {"contender": contender, "sweep": sweep, "batch": batch, "prompt": prompt, "new": 4} | rest


def made_up(plots: ModuleType) -> dict[str, Any]:
    """A report as bench_sweep.py writes it, of figures that nobody measured."""
    points = [
        entry(name, sweep, batch, prompt, **({"kv_empty_bytes": 0} if name == "DynamicCache" else {}))
        for name in plots.STYLES
        for sweep, batch, prompt in [("batch", 1, 8), ("batch", 2, 8), ("prompt", 1, 8), ("prompt", 1, 64)]
    ]
    points[1] = {key: points[1][key] for key in ("contender", "sweep", "batch", "prompt", "new")}
    points[1] |= {"token_s": [], "prefill_s": [], "not_finished": "more than 3 s"}
    machine = {"cpu": "a CPU", "cores": 2}
    head = {"machine": machine, "commit": "0123456789abcdef", "command": "python bench_sweep.py", "threads": 2}
    return head | {"model": "made up", "default_dtype": "bfloat16", "points": points}


def test_plots_of_both_sweeps_carry_the_description_and_come_out_the_same(plots: ModuleType, tmp_path: Path) -> None:
    results = made_up(plots)
    written = plots.draw(results, tmp_path / "one" / "sweep.svg", "what is seen < here")
    assert sorted(path.name for path in written) == sorted(
        f"sweep-{sweep}{theme}.{ending}"
        for sweep in ("batch", "prompt") for theme in ("", "-dark") for ending in ("svg", "png")
    )  # fmt: skip
    again = plots.draw(results, tmp_path / "two" / "sweep.svg", "what is seen < here")
    for first, second in zip(written, again, strict=True):
        assert first.read_bytes() == second.read_bytes()
    for path in written:
        if path.suffix == ".svg":
            texts = [element.text for element in ElementTree.parse(path).iter()]
            assert "what is seen < here" in texts
            assert not [element for element in ElementTree.parse(path).iter() if element.tag.endswith("}date")]


def test_plots_are_of_what_there_is(plots: ModuleType, tmp_path: Path) -> None:
    results = made_up(plots)
    results["points"] = [it for it in results["points"] if it["sweep"] == "prompt" and it["contender"] == "paged"]
    assert {path.name for path in plots.draw(results, tmp_path / "few")} == {
        "few-prompt.svg", "few-prompt.png", "few-prompt-dark.svg", "few-prompt-dark.png"
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"sweep\.pdf ends in \.pdf"):
        plots.draw(results, tmp_path / "sweep.pdf")


def test_without_matplotlib_it_says_how_to_get_it(plots: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        plots.check()


def test_every_contender_has_a_line(plots: ModuleType, sides: ModuleType) -> None:
    assert list(plots.STYLES) == list(sides.SIDES)
    assert sides.ORACLE in sides.SIDES


def test_what_is_held_but_empty(sides: ModuleType) -> None:
    """Of two rows with 33 tokens, 10 bytes each: in pages of 16 three each, in a fixed shape 40 slots each."""
    run = sides.Run()
    run.hold(2 * 3 * 160, 66, 10)
    run.hold(2 * 40 * 10, 66, 10)
    assert run.held_bytes == [960, 800]
    assert run.empty_bytes == [300, 140]


def test_a_point_of_both_sweeps_is_done_once(bench: ModuleType) -> None:
    args = bench.parse(["--batches", "1,2", "--prompts", "8,16", "--prompt", "8", "--new", "3"])
    assert bench.points(args) == [
        bench.Point(("batch", "prompt"), 1, 8, 3),
        bench.Point(("batch",), 2, 8, 3),
        bench.Point(("prompt",), 1, 16, 3),
    ]


def test_prompts_are_different_pieces_of_one_length(bench: ModuleType) -> None:
    for batch, length in ((128, 128), (1, 6400), (5, 20_000)):
        rows = bench.prompts(bench.Point((), batch, length, 4), 1000)
        assert [len(row) for row in rows] == [length] * batch
        assert len({tuple(row) for row in rows}) == batch
        assert max(map(max, rows)) < 1000
    with pytest.raises(ConfigError, match="lower --prompts"):
        bench.prompts(bench.Point((), 1, 10**6, 4), 1000)


def test_rows_that_part_are_shown_with_the_gap_where_they_do(bench: ModuleType, sides: ModuleType) -> None:
    oracle = sides.Run(tokens=[[1, 2, 3], [4, 5, 6]], gaps=[[3.0, 2.0, 1.0], [0.3, 0.2, 0.1]])
    assert bench.agreement([[1, 2, 3], [4, 9, 6]], oracle) == {"rows": 1, "of": 2, "gaps_where_not": [0.2]}
    assert bench.agreement(oracle.tokens, oracle) == {"rows": 2, "of": 2, "gaps_where_not": []}


def test_the_first_run_only_warms_up_and_what_gave_nothing_has_no_figures(bench: ModuleType, sides: ModuleType) -> None:
    point = bench.Point(("batch",), 1, 8, 3)
    runs = [sides.Run(t, [t, t], [100, 300], [10, 50], [[1, 2, 3]], [], int(1000 / t)) for t in (5.0, 1.0, 2.0)]
    found = bench.entry(runs, point, None)
    assert found["token_s"] == [1.0, 1.0, 2.0, 2.0]
    assert found["prefill_s"] == [1.0, 2.0]
    assert (found["peak_bytes"], found["kv_held_bytes"], found["kv_empty_bytes"]) == (1000, 200, 30)
    assert bench.entry(runs[:1], point, None)["token_s"] == []


@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_contenders_agree_on_a_random_model(tmp_path: Path) -> None:
    """What needs no compiler, in processes of their own; pages have empty slots, DynamicCache has none."""
    output = tmp_path / "sweep.json"
    names = ["paged", "PagedCache", "DynamicCache", "StaticCache", "append-last"]
    command = [sys.executable, str(HOME / "benchmarks" / "bench_sweep.py"), "--quick", "--output", str(output)]
    command += ["--batches", "3", "--prompts", "21", "--prompt", "21", "--plot", str(tmp_path / "sweep.svg")]
    command += [word for name in names for word in ("--only", name)]
    beside = {**os.environ, "PYTHONSAFEPATH": ""}  # it imports what lies beside it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=beside)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    assert len(list(tmp_path.glob("sweep-*.png"))) == 4
    batch = {it["contender"]: it for it in results["points"] if it["sweep"] == "batch"}
    assert list(batch) == names
    token = batch["DynamicCache"]["kv_held_bytes"] / (3 * (21 + 2))  # after 1, 2 and 3 steps: 2 in the middle
    assert {name: it["kv_empty_bytes"] / token for name, it in batch.items() if name != "paged"} == {
        "PagedCache": 3 * 9, "DynamicCache": 0, "StaticCache": 3 * 2, "append-last": 3 * 2
    }  # fmt: skip
    assert batch["paged"]["kv_empty_bytes"] == 3 * 9 * token
    for it in results["points"]:
        assert it["agrees"]["rows"] + sum(gap < 1e-4 for gap in it["agrees"]["gaps_where_not"]) == it["batch"]
        assert len(it["token_s"]) == it["new"] - 1
        assert it["peak_bytes"] > 0
    assert results["compiled_engine"]["recompiles"] == 0
    assert results["compiled_engine"]["agrees"] == results["compiled_engine"]["batch"]
    assert results["compiled_engine"]["page_boundaries"] > 0
