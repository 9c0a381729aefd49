"""`paged bench cache`, `sweep`, `peers`: the scripts benchmarks/bench_NAME.py of a checkout, under the command's name.

They are no part of the package, as they compare with programs that it does not need and read files that lie beside
them. `paged bench offline`, which measures paged alone, is in bench.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paged.errors import ConfigError

OURS = Path(__file__).parents[1]


def find(name: str) -> Path:
    """The script, of the checkout that is the current folder, else of the one that this package lies in.

    Raises ConfigError where neither is one.
    """
    homes = (Path.cwd(), OURS)
    scripts = [home / "benchmarks" / f"bench_{name}.py" for home in homes]
    for script in scripts:
        if script.is_file():
            return script
    raise ConfigError(
        f"paged bench {name} needs a checkout of the project, and neither this folder nor the one that paged is "
        f"installed in has benchmarks/bench_{name}.py: run it in a checkout"
    )


def run(name: str, arguments: Sequence[str]) -> NoReturn:
    """Become the script: its output, its exit code, and whoever stops this process stops it."""
    command = [sys.executable, str(find(name)), *arguments]
    # Python would not look for what they import beside them.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)
