"""benchmarks/report.py: the documents say what the results say, and it is noticed where they do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paged import ConfigError

HOME = Path(__file__).parents[1]
ABOUT = {"machine": {"cpu": "A CPU", "cores": 2}, "commit": "0123456789abcdef"}
WASTE = ABOUT | {"rows": [{"cache": "pages of 16", "waste": 0.0293, "peak_bytes": 3 * 2**20}]}
WANTED = """\
| cache | waste, averaged over the steps | most held |
| --- | --- | --- |
| pages of 16 | 2.9 % | 3 MiB |

A CPU, 2 cores; commit 0123456.
"""


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME / "benchmarks"))
        yield import_module("report")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A project with one table, up to date."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text(f"Waste:\n\n<!-- table: waste -->\n{WANTED}<!-- /table -->\n\nEnd.\n")
    (tmp_path / "docs" / "benchmarks.md").write_text("Marks such as `<!-- table: NAME -->` begin a table.\n")
    put(tmp_path, "waste", WASTE)
    return tmp_path


def put(home: Path, name: str, results: Any) -> None:
    (home / "benchmarks" / "results" / f"{name}.json").write_text(json.dumps(results))


def test_the_projects_own_documents_are_those_of_its_results() -> None:
    beside = {**os.environ, "PYTHONSAFEPATH": ""}  # it imports what lies beside it
    command = [sys.executable, str(HOME / "benchmarks" / "report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=beside)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_table_is_written_between_its_marks_and_nowhere_else(report: ModuleType, home: Path) -> None:
    before = (home / "README.md").read_text()
    (home / "README.md").write_text("Waste:\n\n<!-- table: waste -->\n<!-- /table -->\n\nEnd.\n")
    assert list(report.update(home)) == []
    assert (home / "README.md").read_text() == before
    assert list(report.check(home)) == []


def test_a_wrong_figure_is_named_with_its_file_and_table_and_left_alone(report: ModuleType, home: Path) -> None:
    wrong = (home / "README.md").read_text().replace("2.9 %", "2.8 %")
    (home / "README.md").write_text(wrong)
    (problem,) = report.check(home)
    assert problem.splitlines() == [
        "README.md, table waste: - stands there, + is what the results say",
        "  - | pages of 16 | 2.8 % | 3 MiB |",
        "  + | pages of 16 | 2.9 % | 3 MiB |",
    ]
    assert (home / "README.md").read_text() == wrong


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (None, "waste.json is not there"),
        ("{", "waste.json cannot be read"),
        ('{"rows": [{"cache": "pages of 16"}]}', "waste.json do not hold what it is made of: 'waste'"),
    ],
)
def test_results_that_are_not_there_or_are_others_are_named(
    report: ModuleType, home: Path, results: str | None, message: str
) -> None:
    path = home / "benchmarks" / "results" / "waste.json"
    path.unlink() if results is None else path.write_text(results)
    before = (home / "README.md").read_text()
    for problems in (report.check(home), report.update(home)):
        (problem,) = problems
        assert problem.startswith("README.md, table waste: ")
        assert message in problem
    assert (home / "README.md").read_text() == before


def test_marks_that_make_no_pair_and_unknown_tables_are_named(report: ModuleType, home: Path) -> None:
    (home / "README.md").write_text("<!-- table: waste -->\n\n<!-- table: wast -->\n")
    (home / "docs" / "benchmarks.md").write_text("<!-- table: wast -->\n<!-- /table -->\n")
    unpaired, unknown = report.check(home)
    assert "README.md: 2 marks that begin a table and 0 that end one make 0 pairs" in unpaired
    assert "docs/benchmarks.md, table wast: there is none of this name, only speed" in unknown


def test_a_drawing_of_other_results_is_noticed(report: ModuleType, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("-batch", "-batch-dark", "-prompt", "-prompt-dark")

    def draw(results: dict[str, Any], output: Path, description: str) -> None:
        for part in parts:
            output.with_name(f"{output.name}{part}.svg").write_text(f"<svg>{description}</svg>")

    plots = ModuleType("sweep_plots")
    plots.draw = draw  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sweep_plots", plots)
    put(home, "sweep", {"points": [], "b": 0.1})
    missing = list(report.check(home))
    assert [problem.split(" is not there")[0] for problem in missing] == [f"docs/sweep{part}.svg" for part in parts]
    assert list(report.update(home)) == []
    assert list(report.check(home)) == []
    put(home, "sweep", {"points": [], "b": 0.2})
    assert [problem.split(",")[0] for problem in report.check(home)] == [
        f"docs/sweep{part}.svg was drawn from another sweep.json: python benchmarks/report.py draws it anew"
        for part in parts
    ]
    (home / "benchmarks" / "results" / "sweep.json").unlink()
    assert all("drawn from sweep.json, which is not there" in problem for problem in report.check(home))
    assert len(list(report.check(home))) == len(parts)


def test_a_digest_is_of_what_results_say_not_of_how_they_are_laid_out(report: ModuleType, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text('{"a": [1, 2], "b": 0.1}')
    other.write_text('{"b": 0.1,\n "a": [1,\n 2]}')
    assert report.digest(one) == report.digest(other) == report.digest({"a": [1, 2], "b": 0.1})
    assert report.digest(one) != report.digest({"a": [2, 1], "b": 0.1})


def table(report: ModuleType, home: Path, name: str, **results: Any) -> list[list[str]]:
    """Cells of all lines that have any."""
    for file, content in results.items():
        put(home, file, content)
    lines: list[str] = report.table(home, name)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_speed_is_the_best_run_of_each_side(report: ModuleType, home: Path) -> None:
    def side(first: float) -> dict[str, Any]:
        each = {"samples": [first + 1, first], "requests": 3, "output_tokens": 1234, "agrees": 2}
        return {"dtype": "bfloat16", "results": dict.fromkeys(("W1", "W2", "W3", "W4"), each)}

    names = ("workloads_float32", "workloads_bfloat16", "workloads_int8", "workloads_vllm_bfloat16")
    results = {name: side(first) for name, first in zip(names, (12.34, 4.999, 0.5, 5.0), strict=True)}
    header, _, first, *_ = table(report, home, "speed", **results)
    assert header == ["workload", "requests", "output tokens", "float32", "bfloat16", "int8", "vLLM, bfloat16"]
    assert first[1:] == ["3", "1,234", "12.3", "5.00", "0.50", "5.0"]
    assert table(report, home, "agreement")[2] == ["W1", "3", "2", "2", "2", "2"]


def test_offline_and_hit_rate(report: ModuleType, home: Path) -> None:
    offline = {
        "workload": {"name": "some", "prompt_tokens": 2551, "output_tokens": 455},
        "float32": {"seconds": {"transformers": [30.0, 10.0, 20.0], "paged": [2.0, 4.0, 3.0]}},
    }
    assert table(report, home, "offline", offline=offline)[2] == ["some", "2,551", "455", "20.0 s", "3.00 s", "6.7"]
    rows = [{"pages": 1000, "hit_rate": 0.04453, "seconds": 2}, {"pages": None, "hit_rate": 0.5, "seconds": 4}]
    found = table(report, home, "hit_rate", hit_rate={"trace": "x", "blocks": 300_000, "rows": rows})
    assert found[2:] == [["1,000", "4.45 %", "150,000"], ["no limit", "50.00 %", "75,000"]]


def test_sweep_has_a_column_for_each_size_and_leaves_out_what_was_not_measured(report: ModuleType, home: Path) -> None:
    def point(contender: str, sweep: str, batch: int, prompt: int, token: float) -> dict[str, Any]:
        return {
            "contender": contender,
            "sweep": sweep,
            "batch": batch,
            "prompt": prompt,
            "token_s": [token, token, 9.0],
            "peak_bytes": 2**20 * batch,
            "kv_empty_bytes": 2**19,
        }

    points = [
        point("pages", "batch", 1, 100, 0.01),
        point("pages", "batch", 16, 100, 0.1),
        point("static", "batch", 1, 100, 0.02),
        point("pages", "prompt", 1, 6400, 0.03),
    ]
    found = table(report, home, "sweep_batch", sweep={"points": points})
    assert found[::4] == [["batch", "1", "16"]] * 3
    assert found[2:4] == [["pages", "10.0", "100.0"], ["static", "20.0", ""]]
    assert found[6:8] == [["pages", "1", "16"], ["static", "1", ""]]
    assert found[10:] == [["pages", "0.5", "0.5"], ["static", "0.5", ""]]
    assert table(report, home, "sweep_prompt")[:3:2] == [["prompt", "6,400"], ["pages", "30.0"]]


def test_peers_are_medians_ratios_and_reasons(report: ModuleType, home: Path) -> None:
    def one(median: float | None, times: float | None, agrees: int) -> dict[str, Any]:
        sample = (
            {"seconds": median, "agrees": agrees} if median else {"seconds": None, "why": "no answer in 300 s\nmore"}
        )
        return {"median_s": median, "times_paged": times, "requests": 64, "samples": [sample]}

    sides = {"paged": {"workloads": {"W1": one(10.0, 1.0, 64), "W3": one(1.0, 1.0, 64)}}}
    sides["vllm"] = {"workloads": {"W1": one(20.0, 2.0, 26), "W3": one(None, None, 0)}}
    results = {"workloads": {"W1": {}, "W3": {}}, "peers": {"float32": sides}}
    assert table(report, home, "peers", peers=results)[-2:] == [
        ["paged", "10.0 (1.00), 64 of 64", "1.00 (1.00), 64 of 64"],
        ["vllm", "20.0 (2.00), 26 of 64", "no answer in 300 s"],
    ]
    assert report.table(home, "peers")[0] == "float32:"


def test_cache_shows_its_rows_the_row_in_full_and_what_open_lm_has(report: ModuleType, home: Path) -> None:
    row = {"context": 512, "new": 1536, "with_s": 12.0, "without_s": 600.0, "gain": 0.98, "times_faster": 50.0}
    row |= {"tokens_per_s": 128.0, "tokens_per_s_without": 2.56, "operations_ratio": 900.4}
    full = {"context": 512, "new": 512, "without_s": 100.0, "integrated_s": 99.0, "difference": -0.01}
    results = {
        "model": "smollm2",
        "dtype": "float32",
        "threads": 2,
        "turns": 5,
        "rows": [row],
        "in_full": full | {"agrees": 512, "tokens": 512},
        "theirs": {"gain": [0.4, 0.8], "model": "1 B", "device": "A6000", "source": "open_lm"},
    }
    cells = table(report, home, "cache", cache=results)
    assert cells[2] == ["512", "1,536", "12.0", "600.0", "98.0 %", "50.0", "900", "128.0", "2.56"]
    text = "\n".join(report.table(home, "cache"))
    assert "100.0 s, integrated 99.0 s, a difference of -1.0 %; 512 of 512 tokens are the same" in text
    assert "gains of 40 to 80 % (1 B, A6000; open_lm)" in text


def test_there_is_no_table_of_an_unknown_name(report: ModuleType, home: Path) -> None:
    with pytest.raises(ConfigError, match="only speed, agreement"):
        report.table(home, "swep")
