"""What a job reads and writes, and what it is: checked before anything is opened or loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged.errors import ConfigError
from scheduler.config import EngineConfig
from scheduler.journal import Index
from scheduler.lines import is_url
from worker.checkpoints import BUILTIN

# Settings on which the tokens of an answer may depend.
SETTINGS = ("dtype", "quantization", "max_model_len", "device", "attention_backend", "tensor_parallel_size", "seed")


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What a job reads and writes. Raises ConfigError for what cannot work, before anything is opened.

    input: a path, `-` for stdin, or a URL. output: a path, or `-` for stdout; what is no file (a pipe, a device) has no
    journal. retry_failed: an output of the same input, whose answers are taken over.
    """

    input: str
    output: str
    overwrite: bool = False
    ordered: bool = False
    group: bool = True
    retry_failed: str | None = None

    def __post_init__(self) -> None:
        target = Path(self.output)
        if self.output != "-":
            if target.is_dir() or not target.parent.is_dir():
                raise ConfigError(f"output {target} is a folder, or in a folder that does not exist")
            if not os.access(target if target.exists() else target.parent, os.W_OK):
                raise ConfigError(f"output {target} may not be written by this user: name another place")
        for what, name in (("input", self.input), ("output to retry", self.retry_failed)):
            if name is None or (what == "input" and (name == "-" or is_url(name))):
                continue
            path = Path(name)
            if not path.exists() or path.is_dir():
                raise ConfigError(f"{what} {path} {'is no file' if path.exists() else 'does not exist'}")
            if not os.access(path, os.R_OK):
                raise ConfigError(f"{what} {path} may not be read by this user")
            if self.output != "-" and target.exists() and target.samefile(path):
                raise ConfigError(f"output {target} is the {what}: name another file")

    @property
    def streams(self) -> bool:
        """Whether the output is a stream, which nothing can be read from again."""
        path = Path(self.output)
        return self.output == "-" or (path.exists() and not path.is_file())


class Stream:
    """An output without a journal."""

    def __init__(self, name: str, about: dict[str, Any]) -> None:
        self.index, self.about, self.rebuilt = Index(), about, False
        self._name, self._waiting = name, list[bytes]()
        self._file = 1 if name == "-" else os.open(name, os.O_WRONLY)

    def start(self) -> None: ...

    def add(self, line: int, digest: str, status: int | str, record: bytes) -> None:
        self._waiting.append(record)

    def flush(self, force: bool = False) -> None:
        left, self._waiting = memoryview(b"".join(self._waiting)), []
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except BrokenPipeError:  # of which click would make an exit code of its own, and say nothing
            raise ConfigError(f"output {self._name} was closed by who reads it") from None
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), self._name) from None

    def close(self) -> None:
        if self._name != "-":
            os.close(self._file)


def about(config: EngineConfig) -> dict[str, Any]:
    """What the tokens of a job with these settings depend on. The name of a model is that which answers have."""
    path = Path(config.model).expanduser()
    name, place = config.model, None
    if config.model not in BUILTIN and path.exists():
        name, place = path.stem if path.is_file() else path.resolve().name, str(path.resolve())
    return {"model": name, "model_path": place} | {name: getattr(config, name) for name in SETTINGS}
