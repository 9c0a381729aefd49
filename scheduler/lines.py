"""Lines of a job's input: where they come from, how they are cut, and in which order they are handed over.

An input is a file, `-` (stdin), or a URL that fsspec knows; gzip and zstd are told by their first bytes. A pipe is read
in a thread of its own, so that who waits for an answer never waits for a line.
"""

from __future__ import annotations

import gzip
import io
import json
import threading
import zlib
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, cast

from paged.errors import ConfigError, RequestError, shown

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # how such files begin
_BOM = b"\xef\xbb\xbf"
_MOST_NESTED = 100  # lists and objects in one another; Python's own limit depends on who calls, and where
_AHEAD = 512  # lines of a pipe that are read before they are asked for
_AHEAD_BYTES = 8 << 20
_BLOCK = 1 << 18


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank. number: from 1, blank ones counted. raw: without a byte order mark and line end."""

    number: int
    raw: bytes

    @property
    def digest(self) -> str:
        """16 hex digits of blake2b."""
        return blake2b(self.raw, digest_size=8).hexdigest()


def request_of(raw: bytes) -> dict[str, Any]:
    """The object that a line holds. Raises RequestError for anything else."""
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise RequestError(f"nested deeper than {_MOST_NESTED} levels") from None
    except ValueError as error:
        raise RequestError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"must be a JSON object, not {type(value).__name__}")
    if raw.count(b"[") + raw.count(b"{") > _MOST_NESTED:  # else it cannot be
        level: list[Any] = [value]
        for _ in range(_MOST_NESTED):
            held = (part for one in level for part in (one.values() if isinstance(one, dict) else one))
            level = [part for part in held if isinstance(part, dict | list)]
        if level:
            raise RequestError(f"nested deeper than {_MOST_NESTED} levels")
    return value


def no_request(name: str) -> ConfigError:
    """What is to be raised for an input without one."""
    return ConfigError(f"input {name} has no request: write one JSON object a line, in OpenAI's batch format")


class CustomIds:
    """Those of the lines before, as digests: some 130 bytes a line."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # line, by digest

    def check(self, custom_id: object, number: int) -> None:
        """Note that of line `number`. Raises RequestError for what is none, and for one that came before."""
        if not isinstance(custom_id, str) or not custom_id:
            raise RequestError(f"custom_id must be a text, not {shown(custom_id)}", "custom_id")
        digest = blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
        first = self._first.setdefault(int.from_bytes(digest, "big"), number)
        if first != number:
            raise RequestError(f"custom_id {shown(custom_id)} is that of line {first} already", "custom_id")


def prefix_key(request: dict[str, Any]) -> str:
    """A text that begins as the request's prompt begins, so that in sorted order shared prefixes are neighbours.

    Of what is no prompt it is empty: somebody else says what is wrong with it.
    """
    body = request.get("body")
    if not isinstance(body, dict):
        return ""
    given = body.get("messages") if "messages" in body else body.get("prompt")
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str):
        given = given[0]
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        return ""
    try:
        if given and isinstance(given[0], int):
            return "".join(map(chr, given))  # an id is a character: both are below 1,114,112
        return "\0".join(f"{one['role']}\0{_content(one['content'])}" for one in given)
    except (TypeError, ValueError, KeyError, OverflowError):
        return ""


def _content(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


class Source:
    """The lines of an input, from its beginning. Raises ConfigError for what cannot be read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = False  # and all lines were taken
        self._stream, self.live = open_input(name), is_pipe(name)
        self._lines = _filled(self._stream, name)
        self._pump = _Pump(self._lines) if self.live else None

    def take(self, count: int, num_bytes: int, wait: float) -> list[Line]:
        """Lines until there are `count`, or so many bytes. Of a pipe those that are there: if none is, waits so long
        (seconds) for the first."""
        if self._pump is not None:
            lines, self.ended = self._pump.take(count, num_bytes, wait)
            return lines
        lines, size = list[Line](), 0
        for line in self._lines:
            lines.append(line)
            size += len(line.raw)
            if len(lines) >= count or size >= num_bytes:
                return lines
        self.ended = True
        return lines

    def close(self) -> None:
        """Of a pipe its thread goes on to the end."""
        if not self.live:
            self._lines.close()
            self._stream.close()  # lines that were never begun do not


class _Pump:
    """Reads lines in a thread, some ahead of who takes them."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._read: deque[Line] = deque()
        self._size = 0
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="paged-input", daemon=True).start()

    def _run(self) -> None:
        try:
            for line in self._lines:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._read) < _AHEAD and self._size < _AHEAD_BYTES)
                    self._read.append(line)
                    self._size += len(line.raw)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  whoever takes lines gets it
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, count: int, num_bytes: int, wait: float) -> tuple[list[Line], bool]:
        """And whether these are the last."""
        lines, size = list[Line](), 0
        with self._changed:
            self._changed.wait_for(lambda: self._read or self._ended, wait)
            while self._read and len(lines) < count and size < num_bytes:
                lines.append(self._read.popleft())
                size += len(lines[-1].raw)
            self._size -= size
            self._changed.notify_all()
            if not lines and self._error is not None:
                raise self._error
            return lines, self._ended and not self._read and self._error is None


def is_url(name: str) -> bool:
    return "://" in name


def filesystem(url: str) -> tuple[Any, str]:
    """Of fsspec, and the path in it. Raises ConfigError where it is not installed or does not know the URL."""
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f"{url} needs the package fsspec: pip install 'paged-kv[urls]'") from None
    try:
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
    except (ImportError, ValueError) as error:  # it names the package that this kind of URL needs
        raise ConfigError(f"{url} cannot be used: {error}") from None


def is_pipe(name: str) -> bool:
    """Whether it gives its lines only once, and maybe slowly."""
    return name == "-" or (not is_url(name) and not Path(name).is_file())


def open_input(name: str) -> BinaryIO:
    """Its bytes, packed as they may be."""
    raw: Any
    if name == "-":
        raw = open(0, "rb", closefd=False)  # noqa: SIM115  not sys.stdin, which is closed at exit
    elif is_url(name):
        files, place = filesystem(name)
        try:
            raw = files.open(place, "rb")
        except OSError as error:
            raise ConfigError(f"input {name} cannot be opened: {error or type(error).__name__}") from None
    else:
        raw = Path(name).open("rb")  # noqa: SIM115  Source closes it
    return cast("BinaryIO", raw if hasattr(raw, "peek") else io.BufferedReader(raw))


def _unpacked(raw: BinaryIO) -> BinaryIO:
    begin = cast("io.BufferedReader", raw).peek(4)
    if begin.startswith(GZIP):
        return cast("BinaryIO", gzip.GzipFile(fileobj=raw))
    return cast("BinaryIO", io.BufferedReader(_Zstd(raw), _BLOCK)) if begin.startswith(ZSTD) else raw


def zstandard(name: str) -> Any:
    """The library. Raises ConfigError where it is not installed."""
    try:
        import zstandard as library
    except ImportError:
        raise ConfigError(f"{name} needs the package zstandard: pip install 'paged-kv[zstd]'") from None
    return library


class _Zstd(io.RawIOBase):
    """Frames, one after another. Unlike the library's own reader it does not take half a frame for the end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._library = zstandard("zstd input")
        self._raw = raw
        self._frame: Any = None
        self._left = b""  # read, and not unpacked
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._left or self._raw.read(_BLOCK)
            self._left = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except self._library.ZstdError as error:
                raise zlib.error(str(error)) from None
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        target = memoryview(buffer).cast("B")
        size = min(len(target), len(self._ready))
        target[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _filled(stream: BinaryIO, name: str) -> Generator[Line, None, None]:
    number = 0
    try:
        with stream:
            for raw in _unpacked(stream):  # only now: the first bytes of a pipe may have to be waited for
                number += 1
                content = raw.removeprefix(_BOM).rstrip(b"\r\n")  # of files put one after another any may have it
                if content and not content.isspace():
                    yield Line(number, content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"input {name} is damaged after line {number}: {error}") from None
