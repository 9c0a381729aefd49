"""Which way imports point, what is imported when, and the public face of `paged`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import paged

HOME = Path(paged.__file__).parent.parent
HEAVY = {"torch", "transformers", "ray", "xformers"}
MEMORY = [
    f"paged.{name}" for name in ("errors", "allocator", "block_table", "prefix_cache", "manager", "layout", "sizing")
]
# Of the packages above, those that a package may not know; and of those from outside, the files that may.
ABOVE = {"paged": {"worker", "scheduler"}, "worker": {"scheduler"}, "scheduler": set[str]()}
ONLY_IN = {
    "xformers": {"paged/attention/xformers.py"},
    "prometheus_client": {"scheduler/prometheus.py"},
    "ray": {
        "worker/head.py",
        "worker/ray_executor.py",
        *(f"scheduler/{name}.py" for name in ("actors", "cluster", "placement", "ray_data")),
    },
}
BY_NAME = {"paged/attention/xformers.py"}  # import it by its name as text, which the scan does not see


def files(package: str) -> list[Path]:
    return sorted((HOME / package).rglob("*.py"))


def module(file: Path) -> str:
    return ".".join(file.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__")


LIGHT = ["paged", *MEMORY, *map(module, files("scheduler"))]


def python(code: str, *first_on_path: Path, cwd: Path = HOME) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*first_on_path, HOME)))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", LIGHT)
def test_memory_half_and_scheduler_import_nothing_heavy(name: str) -> None:
    done = python(f"import sys, {name}; print(*sorted({HEAVY!r} & {{*sys.modules}}))")
    assert (done.stdout.split(), done.stderr) == ([], "")


def imported(file: Path) -> Iterator[str]:
    """Every package that a file imports, in functions too; not what only type checkers read."""
    stack: list[ast.AST] = [ast.parse(file.read_text())]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield module(file).partition(".")[0] if node.level else (node.module or "").partition(".")[0]
        stack += ast.iter_child_nodes(node)


@pytest.mark.parametrize("package", ["paged", "worker"])
def test_imports_point_one_way(package: str) -> None:
    """scheduler -> worker -> paged. `paged` forwards some names from above it, by name only."""
    wrong = {module(file): found for file in files(package) if (found := ABOVE[package] & set(imported(file)))}
    assert wrong == {}


@pytest.mark.parametrize("heavy", ONLY_IN)
def test_what_is_optional_is_imported_in_its_own_files_only(heavy: str) -> None:
    everywhere = [file for package in ABOVE for file in files(package)]
    found = {file.relative_to(HOME).as_posix() for file in everywhere if heavy in imported(file)}
    assert found == ONLY_IN[heavy] - BY_NAME


def test_the_scan_sees_imports_in_functions_and_not_those_for_type_checkers(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text("""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import scheduler.llm
def f():
    try:
        from worker.step import Step
    except ImportError:
        import ray.data as data
""")
    assert set(imported(file)) == {"typing", "worker", "ray"}


# The public face


def test_every_public_name_is_there() -> None:
    assert [name for name in paged.__all__ if getattr(paged, name, None) is None] == []


def test_no_name_is_public_twice() -> None:
    assert len(set(paged.__all__)) == len(paged.__all__)


def test_all_is_what_is_exported() -> None:
    """What the module defines or forwards, but for what it only uses, and its submodules."""
    defined = {
        name for name, value in vars(paged).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    used = {"annotations", "Any", "Path", "TYPE_CHECKING", "find_spec"}
    assert (defined - used) | paged._FORWARDED.keys() == set(paged.__all__)


def test_public_classes_say_paged_as_their_module() -> None:
    public = [getattr(paged, name) for name in paged.__all__]
    assert [cls for cls in public if isinstance(cls, type) and cls.__module__ != "paged"] == []


def test_what_type_checkers_see_is_what_is_forwarded() -> None:
    tree = ast.parse((HOME / "paged" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == paged._FORWARDED


def test_dir_lists_every_public_name() -> None:
    assert set(paged.__all__) <= set(dir(paged))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'paged' has no attribute 'LMM'"):
        _ = paged.LMM


@pytest.mark.parametrize("name", ["scheduler", "worker"])
@pytest.mark.parametrize("kind", ["package", "module", "namespace"])
def test_another_package_of_our_name_is_refused_with_both_places(tmp_path: Path, kind: str, name: str) -> None:
    if kind == "module":
        (tmp_path / f"{name}.py").touch()
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / ("__init__.py" if kind == "package" else "data.txt")).touch()
    done = python("from paged import LLM", tmp_path, cwd=tmp_path)
    if kind == "namespace":  # a folder without a Python file, such as one with somebody's data, hides nothing
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode != 0
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith(f"ImportError: paged needs its own package {name!r} beside it, in {HOME}, and found ")
        assert str(tmp_path) in last


def test_the_memory_half_does_not_mind_another_scheduler(tmp_path: Path) -> None:
    (tmp_path / "scheduler.py").touch()
    done = python("from paged import KVCacheManager, KVPool", tmp_path, cwd=tmp_path)
    assert done.stderr == ""
