"""What every benchmark writes beside its figures, and what of it the documents show.

    python benchmarks/report.py            write tables and drawings anew from benchmarks/results/*.json
    python benchmarks/report.py --check    change nothing; exit 1, and say what, where one is not that of the results

README.md and docs/benchmarks.md have marks, and what is between them is made here (tables.py has the names):

    <!-- table: speed -->
    <!-- /table -->

A drawing has the digest of its results in its metadata. It is drawn where there are results for it.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tables

from paged.errors import ConfigError
from scheduler.bench import about, command

FOLDER = Path(__file__).parent
HOME = FOLDER.parent
RESULTS = FOLDER / "results"
DOCUMENTS = ("README.md", "docs/benchmarks.md")
# Of results: the module whose `draw` draws them, and what it adds to the name, in docs/.
DRAWINGS = {"sweep": ("sweep_plots", ("-batch", "-batch-dark", "-prompt", "-prompt-dark"))}
_OPENED, _CLOSED = re.compile(r"^<!-- table:", re.MULTILINE), re.compile(r"^<!-- /table -->$", re.MULTILINE)
_MARKED = re.compile(r"^<!-- table: (\S+) -->\n(.*?)^<!-- /table -->$", re.DOTALL | re.MULTILINE)


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """The option --output of a benchmark whose quick run, if it is not given, leaves the results of the last honest."""
    parser.add_argument("--output", type=Path, help=f"[results/{name}.json; with --quick none]")


def output(args: argparse.Namespace, name: str) -> Path | None:
    """Where figures go, by --output and --quick."""
    given: Path | None = args.output
    return given if given is not None or args.quick else RESULTS / f"{name}.json"


def write(output: Path | None, **figures: Any) -> dict[str, Any]:
    """The whole report, and written as JSON if that is wanted."""
    it = about() | {"command": command("python", *sys.argv)} | figures
    if output is not None:
        output.parent.mkdir(exist_ok=True)
        text = json.dumps(it, indent=1)
        flat = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)
        output.write_text(flat + "\n")
    return it


def workload(name: str) -> list[dict[str, Any]]:
    """Requests of workloads/workload_smollm2.json."""
    requests: list[dict[str, Any]] = json.loads((FOLDER / "workloads" / "workload_smollm2.json").read_text())[name]
    return requests


def digest(results: Path | dict[str, Any]) -> str:
    """Of what a results file says, however it is laid out; also of its content as it was read."""
    content = json.loads(results.read_text()) if isinstance(results, Path) else results
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    only_check = parser.parse_args().check
    problems = list(check(HOME) if only_check else update(HOME))
    for problem in problems:
        print(f"report: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


def update(home: Path) -> Iterator[str]:
    """Write the tables and drawings; what could not be written."""
    for name in DOCUMENTS:
        text, wrong = rendered(home, name)
        yield from wrong
        (home / name).write_text(text)
    for name, (module, _) in DRAWINGS.items():
        results = _results(home) / f"{name}.json"
        if results.is_file():
            importlib.import_module(module).draw(_read(results), home / "docs" / name, digest(results))
        yield from _drawing(home, name)


def check(home: Path) -> Iterator[str]:
    """What is not as `update` would leave it."""
    for name in DOCUMENTS:
        text, wrong = rendered(home, name)
        yield from wrong
        old = (home / name).read_text()
        for there, made in zip(_MARKED.finditer(old), _MARKED.finditer(text), strict=True):
            if there[2] != made[2]:
                differ = difflib.ndiff(there[2].splitlines(), made[2].splitlines())
                lines = "\n".join(f"  {line}" for line in differ if line[0] in "-+")
                yield f"{name}, table {there[1]}: - stands there, + is what the results say\n{lines}"
    for name in DRAWINGS:
        yield from _drawing(home, name)


def rendered(home: Path, name: str) -> tuple[str, list[str]]:
    """A document with its tables as they should be, and what is wrong with it; those stay as they are."""
    text, wrong = (home / name).read_text(), list[str]()

    def made(found: re.Match[str]) -> str:
        try:
            lines = table(home, found[1])
        except ConfigError as error:
            wrong.append(f"{name}, table {found[1]}: {error}")
            return found[0]
        return f"<!-- table: {found[1]} -->\n" + "".join(f"{line}\n" for line in lines) + "<!-- /table -->"

    opened, closed, pairs = (len(kind.findall(text)) for kind in (_OPENED, _CLOSED, _MARKED))
    if not opened == closed == pairs:
        wrong.append(f"{name}: {opened} marks that begin a table and {closed} that end one make {pairs} pairs")
    return _MARKED.sub(made, text), wrong


def table(home: Path, name: str) -> list[str]:
    """Its lines. Raises ConfigError where there is no such table, or its results are not there or are others."""
    if name not in tables.TABLES:
        raise ConfigError(f"there is none of this name, only {', '.join(tables.TABLES)}")
    it = tables.TABLES[name]
    results = [_read(_results(home) / file) for file in it.files]
    try:
        return it.lines(*results)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{', '.join(it.files)} do not hold what it is made of: {error}") from error


def _drawing(home: Path, name: str) -> Iterator[str]:
    """What is wrong with a drawing."""
    results, there = _results(home) / f"{name}.json", sorted((home / "docs").glob(f"{name}*.svg"))
    if not results.is_file():
        yield from (f"docs/{file.name} is drawn from {results.name}, which is not there" for file in there)
        return
    wanted = digest(results)
    for file in (f"{name}{part}.svg" for part in DRAWINGS[name][1]):
        path = home / "docs" / file
        if not path.is_file():
            yield f"docs/{file} is not there, and {results.name} is: python benchmarks/report.py draws it"
        elif wanted not in path.read_text():
            yield f"docs/{file} was drawn from another {results.name}: python benchmarks/report.py draws it anew"


def _results(home: Path) -> Path:
    return home / RESULTS.relative_to(HOME)


def _read(path: Path) -> dict[str, Any]:
    """Raises ConfigError for a file that is not there, or is no JSON."""
    if not path.is_file():
        raise ConfigError(
            f"results/{path.name} is not there: run benchmarks/bench_{path.stem}.py, or take the mark away"
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"results/{path.name} cannot be read: {error}") from None
    return content


if __name__ == "__main__":
    main()
