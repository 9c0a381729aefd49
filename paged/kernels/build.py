"""Builds the one shared library of native kernels with the system's C++ compiler: run by pip, or by hand in a checkout.

    python paged/kernels/build.py         # the library beside this file

Needs a compiler that knows C++20 and vector extensions (GCC 12 or Clang 15), and no headers but its own. The compiler
is what CXX says, else c++, g++ or clang++. This file imports nothing of the project: it runs before that is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence as SequenceOf
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = "libpaged.so"
REASON = "not_built.txt"  # beside where the library would be
# Sums keep their order (simd.h): no contraction, no reordering.
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
BASELINE = ("baseline", ())
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
X86 = (
    ("avx2", _AVX2),  # native.cpp asks the processor for just these
    (
        "avx512",
        (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "bf16")), "-mprefer-vector-width=512"),
    ),
)


def build(target: Path, extra: SequenceOf[str] = ()) -> None:
    """Compile and link the library to `target`. `extra` flags, such as sanitizers, go to every call.

    Raises OSError where there is no compiler, and CalledProcessError, which has its messages, where that fails.
    """
    compiler = _compiler()
    sets = (BASELINE, *(X86 if platform.machine().lower() in ("x86_64", "amd64") else ()))
    # What is compiled for every processor comes first: of inline functions that several objects have, the linker takes
    # the first.
    known = (f'-DPAGED_SOURCES="{digest_of_sources()}"',)
    units = [(name, HERE / f"{name}.cpp", known) for name in ("native", "plan", "team")]
    units += [(name, HERE / "instructions.cpp", (f"-DPAGED_ISA={name}", *flags)) for name, flags in sets]
    with tempfile.TemporaryDirectory() as work:
        objects = [Path(work) / f"{name}.o" for name, _, _ in units]
        calls = [
            [*compiler, *FLAGS, *extra, *flags, "-c", str(source), "-o", str(output)]
            for (_, source, flags), output in zip(units, objects, strict=True)
        ]
        _run_all(calls)
        library = Path(work) / LIBRARY
        _run_all([[*compiler, *extra, "-shared", "-pthread", *map(str, objects), "-o", str(library)]])
        target.parent.mkdir(parents=True, exist_ok=True)
        (target.parent / REASON).unlink(missing_ok=True)
        # A process that has the old one mapped keeps it.
        shutil.copy2(library, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)


def build_or_explain(target: Path) -> None:
    """`build`, or without a compiler that works a file that says why: everything else works without the library."""
    try:
        build(target)
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", None) or ""
        first = next((line for line in output.splitlines() if "error" in line), "")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # of other sources
        what = str(error)
        if isinstance(error, subprocess.CalledProcessError):  # the command itself is long
            what = f"{error.cmd[0]} ended with exit code {error.returncode}"
        (target.parent / REASON).write_text(f"{what}{': ' if first else ''}{first}\n")
        print(f"paged: native kernels were not built: {error}\n{output}", file=sys.stderr)


def digest_of_sources() -> str:
    """Of all that the library is compiled from; of nothing, where the sources are not here."""
    folders = (HERE, HERE.parents[1] / "worker" / "kernels")
    found = [path for folder in folders for path in folder.glob("*") if path.suffix in (".cpp", ".h", ".inc")]
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest() if found else ""


def _compiler() -> list[str]:
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise FileNotFoundError("there is no C++ compiler: neither c++, g++ nor clang++ is on the path")


def _run_all(calls: list[list[str]]) -> None:
    """Run commands, as many at once as there are processors. The first failure is raised once all have ended."""
    waiting, running, failed = list(calls), list[subprocess.Popen[str]](), None
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(subprocess.Popen(waiting.pop(0), stderr=subprocess.PIPE, text=True))
        process = running.pop(0)
        _, errors = process.communicate()
        if process.returncode and failed is None:
            failed = subprocess.CalledProcessError(process.returncode, process.args, stderr=errors)
            waiting.clear()
    if failed is not None:
        raise failed


if __name__ == "__main__":
    try:
        build(HERE / LIBRARY)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stderr}")
    print(HERE / LIBRARY)
