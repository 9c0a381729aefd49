"""The build of the library: without a compiler that works, and under sanitizers (slow)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged import kernels
from paged.kernels import build

HOME = Path(__file__).parents[3]  # the checkout, which has the sources
# Ragged attention, linears of all formats and a whole model, on two threads, each against its reference.
EXERCISE = """
import random, sys, torch
from pathlib import Path
sys.path[:0] = [HOME, HOME + "/tests", HOME + "/tests/paged/kernels", HOME + "/tests/worker/kernels"]
from paged import kernels
kernels.library.cache_clear()
kernels.digest_of_sources = str  # whatever it was built from
kernels._HERE = Path(LIBRARY).parent
torch.set_num_threads(2)
import test_attention, test_operations
test_attention.check_random_cases(seed=100, cases=CASES)
for name in kernels.library().sets:
    for format_ in kernels.FORMATS:
        for i in range(CASES):
            test_operations.random_linear(random.Random(i), format_, name, threads=3)
    for check in (
        test_operations.test_norms_agree, test_operations.test_activations_agree, test_operations.test_soft_caps_agree
    ):
        check(37, name)
    for dtype in (torch.float32, torch.bfloat16):
        for turned, norms in ((36, "head"), (10, "all"), (0, "none")):
            test_operations.test_rotation_and_writing_agree(4, 4, 36, turned, norms, dtype, name)
    test_operations.test_rows_are_looked_up_and_gathered(name)
    test_operations.test_the_greatest_is_found_of_equals_the_first(1001, name)
print("done")
"""


@pytest.fixture(autouse=True)
def sources_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "HERE", HOME / "paged" / "kernels")


def test_a_library_of_other_sources_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of sources without a build: its structures may differ."""
    target = tmp_path / build.LIBRARY
    build.build(target, extra=("-O0",))
    monkeypatch.setattr(kernels, "_HERE", tmp_path)
    loaded = kernels.Library(target)
    assert loaded.sets
    monkeypatch.setattr(kernels, "digest_of_sources", lambda: "0123")
    with pytest.raises(OSError, match="other sources"):
        kernels.Library(target)
    assert kernels.library.__wrapped__() is None
    assert "does not fit these sources" in kernels.why_not()


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler", "g++ -fno-such-flag"])
def test_without_a_compiler_that_works_the_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    target = tmp_path / "kernels" / build.LIBRARY
    target.parent.mkdir()
    target.write_text("of other sources")
    build.build_or_explain(target)
    assert not target.exists()
    reason = (target.parent / build.REASON).read_text()
    assert compiler.split()[0] in reason
    assert len(reason.splitlines()) == 1
    assert "native kernels were not built" in capsys.readouterr().err


def test_no_compiler_at_all_is_said_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"neither c\+\+, g\+\+ nor clang\+\+"):
        build.build(tmp_path / build.LIBRARY)


def test_a_build_takes_the_place_of_the_last_and_of_its_reason(tmp_path: Path) -> None:
    target = tmp_path / build.LIBRARY
    (tmp_path / build.REASON).write_text("no compiler")
    target.write_text("old")
    build.build(target, extra=("-O0",))
    assert sorted(path.name for path in tmp_path.iterdir()) == [build.LIBRARY]
    assert target.read_bytes()[:4] == b"\x7fELF"


def exercise(tmp_path: Path, sanitizer: str, cases: int, **environ: str) -> subprocess.CompletedProcess[str]:
    """The exercise on a library built with a sanitizer, whose runtime has to be loaded before all else."""
    target = tmp_path / build.LIBRARY
    build.build(target, extra=(f"-fsanitize={sanitizer}", "-g", "-O1"))
    compiler = os.environ.get("CXX", "g++").split()[0]
    names = {"address": "libasan.so", "thread": "libtsan.so"}
    runtime = subprocess.run(
        [compiler, f"-print-file-name={names[sanitizer]}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    code = f"HOME, LIBRARY, CASES = {str(HOME)!r}, {str(target)!r}, {cases}\n{EXERCISE}"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_PRELOAD": runtime, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_kernels_run_clean_under_address_sanitizer(tmp_path: Path) -> None:
    done = exercise(tmp_path, "address", 200, ASAN_OPTIONS="detect_leaks=0")
    assert "AddressSanitizer" not in done.stderr
    assert done.stdout.split() == ["done"], done.stderr[-3000:]


@pytest.mark.slow
def test_the_team_runs_clean_under_thread_sanitizer(tmp_path: Path) -> None:
    """Reports about our library count; Python and PyTorch are not built for this sanitizer."""
    done = exercise(tmp_path, "thread", 20, TSAN_OPTIONS="report_bugs=1 exitcode=0 ignore_noninstrumented_modules=1")
    assert done.stdout.split() == ["done"], done.stderr[-3000:]
    assert "WARNING: ThreadSanitizer" not in done.stderr, done.stderr[:3000]


@pytest.mark.slow
def test_address_sanitizer_would_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the exercise is one: a kernel that writes one row too many is caught."""
    sources = tmp_path / "src"
    for folder in ("paged/kernels", "worker/kernels"):
        (sources / folder).mkdir(parents=True)
        for file in (HOME / folder).iterdir():
            if file.suffix in (".cpp", ".h", ".inc", ".py"):
                (sources / folder / file.name).write_bytes(file.read_bytes())
    norm = sources / "worker" / "kernels" / "norm.inc"
    broken = norm.read_text().replace("phases[0].each(rows,", "phases[0].each(rows + 1,")
    assert broken != norm.read_text()
    norm.write_text(broken)
    monkeypatch.setattr(build, "HERE", sources / "paged" / "kernels")
    done = exercise(tmp_path, "address", 1, ASAN_OPTIONS="detect_leaks=0")
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
