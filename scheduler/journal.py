"""Journal: which lines of a job are answered, beside its output. It is why each is answered exactly once.

The file OUT.journal has a line of JSON that says what the job is, and then a line of text for each record:

    line  digest of the line  status  end, length and crc32 of the record's piece in the output

An entry is written before its record, each as a whole; so after a kill at any byte the journal names at most some
records that are not whole in the output, and both are cut there. Every record's id holds line and digest, so what a
journal lost is read from the output itself. The journal is locked while a job runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paged.errors import ConfigError
from scheduler.lines import request_of
from scheduler.pieces import RECORD, DamagedPiece, Format, Piece

VERSION = 1
HEADER = b'{"paged_job": '
_TORN = HEADER  # of a journal that is not begun yet: no job is held to it
SYNC_S = 1.0  # seconds between two times that the disk is told to keep what was written
_PACK_BYTES = 1 << 16  # a piece of a packed output has at least so many, or is _PACK_S old
_PACK_S = 1.0
_ENTRY = re.compile(rb"(\d{1,9}) ([0-9a-f]{16}) ([\w.-]{1,64}) (\d{1,18}) (\d{1,18}) ([0-9a-f]{8})\n")
_ID = re.compile(r"batch_req_(\d{1,9})-([0-9a-f]{16})")
_BEGIN = re.compile(RECORD + rb"(\d{1,9})-")


@dataclass(frozen=True, slots=True)
class Entry:
    """A record that is to be in the output. status: of HTTP, or a code where nobody answered."""

    line: int
    digest: str
    status: str
    end: int
    length: int
    crc: int

    @property
    def ok(self) -> bool:
        return self.status == "200"

    def __bytes__(self) -> bytes:
        return f"{self.line} {self.digest} {self.status} {self.end} {self.length} {self.crc:08x}\n".encode()


class Index:
    """Which lines have a record, and where; about 21 bytes a line."""

    def __init__(self) -> None:
        self._states = bytearray()  # of each line: 0 no record, 1 an answer, 2 a failure
        self._digests, self._ends, self._lengths = array("Q"), array("Q"), array("Q")
        self.ok = self.failed = 0

    def __len__(self) -> int:
        return self.ok + self.failed

    @property
    def last(self) -> int:
        """The last line that has a record; 0 without any."""
        return len(self._states.rstrip(b"\0")) - 1 if self else 0

    def add(self, entry: Entry) -> None:
        more = entry.line + 1 - len(self._states)
        if more > 0:
            self._states.extend(bytes(more))
            for column in (self._digests, self._ends, self._lengths):
                column.frombytes(bytes(8 * more))
        self._states[entry.line] = 1 if entry.ok else 2
        self._digests[entry.line] = int(entry.digest, 16)
        self._ends[entry.line], self._lengths[entry.line] = entry.end, entry.length
        self.ok, self.failed = self.ok + entry.ok, self.failed + (not entry.ok)

    def remove(self, entry: Entry) -> None:
        self._states[entry.line] = 0
        self.ok, self.failed = self.ok - entry.ok, self.failed - (not entry.ok)

    def __contains__(self, line: int) -> bool:
        return line < len(self._states) and self._states[line] != 0

    def is_ok(self, line: int) -> bool:
        return line in self and self._states[line] == 1

    def digest(self, line: int) -> str:
        return f"{self._digests[line]:016x}"

    def place(self, line: int) -> tuple[int, int]:
        """Beginning and length of the piece that holds the line's record."""
        return self._ends[line] - self._lengths[line], self._lengths[line]


def entry_of(record: bytes, piece: Piece) -> Entry | None:
    """The entry of a record, by its own id; None if it is none of ours."""
    try:
        value = json.loads(record)
        found = _ID.fullmatch(value["id"])
        status = value["response"]["status_code"] if value["response"] else value["error"]["code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if found is None:
        return None
    return Entry(int(found[1]), found[2], str(status), piece.end, piece.length, piece.crc)


def count(entry: Entry, index: Index, path: Path, way_out: str) -> None:
    """Raises ConfigError for the second one of a line."""
    if entry.line in index:
        raise ConfigError(f"output {path} has two records of line {entry.line}: {way_out}")
    index.add(entry)


def entries_of(pieces: Iterable[Piece], path: Path, index: Index, way_out: str) -> Iterator[Entry]:
    """Of every record in these pieces, added to `index`. Raises ConfigError for one that is none of ours, and for a
    second one of a line."""
    try:
        for piece in pieces:
            for record in piece.records:
                entry = entry_of(record, piece)
                if entry is None:
                    place = f"{piece.length:,} bytes before byte {piece.end:,}"
                    raise ConfigError(f"output {path} exists, and its {place} are no record of a job: {way_out}")
                count(entry, index, path, way_out)
                yield entry
    except DamagedPiece as error:
        raise ConfigError(f"output {path} exists, and {error}: {way_out}") from None


WAY_OUT = "name another file, or give --overwrite"


def _line(record: bytes, piece: Piece) -> int:
    """Of one of ours, which somebody else may have written in another way."""
    if (found := _BEGIN.match(record)) is not None:
        return int(found[1])
    entry = entry_of(record, piece)
    assert entry is not None
    return entry.line


class OldOutput:
    """The records of a job that has ended, by line. Nothing is changed."""

    def __init__(self, path: Path) -> None:
        self.index = Index()
        self._format = Format.of(path)
        self._file = path.open("rb")
        self._at, self._records = -1, dict[int, bytes]()  # the piece that was read last, by line
        try:
            deque(entries_of(self._format.pieces(self._file, 0), path, self.index, "take them out"), maxlen=0)
        except BaseException:
            self._file.close()
            raise

    def record(self, line: int) -> bytes:
        """As it lies there, newline included."""
        start, length = self.index.place(line)
        if self._at != start:
            self._file.seek(start)
            piece = Piece(start + length, length, 0, self._format.unpack(self._file.read(length)))
            self._at, self._records = start, {_line(record, piece): record for record in piece.records}
        return self._records[line]

    def close(self) -> None:
        self._file.close()


class Output:
    """An output and its journal, locked and recovered. `about` says what the job is.

    Raises ConfigError if the output is that of another job, or of none, or if another process is writing it.
    """

    def __init__(self, path: Path, about: dict[str, Any], overwrite: bool = False) -> None:
        real = path.resolve() if path.is_symlink() else path  # so that two names of it have one journal
        self.path, self.journal_path = path, real.with_name(f"{real.name}.journal")
        self.format = Format.of(path)
        self.index = Index()
        self.rebuilt = False  # whether there was an output, and no journal of it
        self._waiting: list[tuple[int, str, str, bytes]] = []  # to be written: line, digest, status, record
        self._size, self._since = 0, 0.0  # of those: bytes, and when the first came
        self._synced = time.monotonic()
        self._end = self._noted = self._before = 0  # what is whole, in bytes of the output and of the journal
        self._opening: bytes | None = None  # with which the journal is to be begun anew
        self._existed = path.exists()
        self._journal, made = _locked(self.journal_path)
        try:
            self._output = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._begin(about, overwrite)
            except BaseException:
                os.close(self._output)
                if not self._existed:
                    path.unlink()
                raise
        except BaseException:
            if made:
                self.journal_path.unlink()
            os.close(self._journal)
            raise

    def start(self) -> None:
        """Before anything is added: what is to be overwritten, or lacks a journal, is as it was until now."""
        if self._opening is not None:
            self._cut(0, self._end)
            self._note(self._opening)
            self._opening = None

    def add(self, line: int, digest: str, status: int | str, record: bytes) -> None:
        """Have a record written with the next flush."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append((line, digest, str(status), record))
        self._size += len(record)

    def flush(self, force: bool = False) -> None:
        """Write what waits; a packed output not before it is worth a piece, unless forced.

        If that fails, as on a full disk, both files are cut back to what was whole before, and OSError is raised.
        """
        now = time.monotonic()
        wait = self.format.packed and not force and self._size < _PACK_BYTES and now - self._since < _PACK_S
        if self._waiting and not wait:
            waiting, self._waiting, self._size = self._waiting, [], 0
            self._append(waiting)
        if now - self._synced >= SYNC_S:
            self.sync()

    def _append(self, waiting: list[tuple[int, str, str, bytes]]) -> None:
        pieces, end = self.format.pack([record for *_, record in waiting]), self._end
        places = []
        for piece in pieces:
            end += len(piece)
            places.append((end, len(piece), zlib.crc32(piece)))
        if self.format.packed:
            places *= len(waiting)
        noted = b"".join(bytes(Entry(*one[:3], *place)) for one, place in zip(waiting, places, strict=True))
        try:
            _write(self._journal, self._noted, noted)
            _write(self._output, self._end, b"".join(pieces))
        except OSError as error:
            self._cut(self._noted, self._end)
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno or 0)}; what is in it is whole: make room, and the same command goes on",
                str(self.path),
            ) from None
        self._noted, self._end = self._noted + len(noted), end

    def sync(self) -> None:
        """Return when the disk has all that was written."""
        os.fsync(self._output)
        os.fsync(self._journal)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Let go of the lock. What waits is not written. Of a job that wrote nothing nothing stays."""
        self.sync()
        if os.fstat(self._output).st_size == 0:
            self.journal_path.unlink(missing_ok=True)
            if not self._existed:
                self.path.unlink(missing_ok=True)
        os.close(self._output)
        os.close(self._journal)

    def _cut(self, noted: int, end: int) -> None:
        os.ftruncate(self._output, end)
        os.ftruncate(self._journal, noted)
        self._noted, self._end = noted, end

    def _begin(self, about: dict[str, Any], overwrite: bool) -> None:
        self.about = about
        with open(self._journal, "rb", closefd=False) as journal, open(self._output, "rb", closefd=False) as output:
            header = journal.readline()
            begin = HEADER[: len(header)]
            if header.strip(b"\0") and not header.startswith(begin):
                raise ConfigError(
                    f"{self.journal_path} is no journal of a job, and this job's would be there: rename it"
                )
            size = os.fstat(self._output).st_size
            opening = json.dumps({"paged_job": VERSION, **about}, ensure_ascii=False).encode() + _pid()
            if overwrite:
                noted = os.fstat(self._journal).st_size
                _write(self._journal, noted, _pid() if noted else _TORN + _pid())
                self._opening = opening
                return
            found = _header(header) if size else None
            if found is not None:
                self.about, self._noted = _same(found, about, self.path), len(header)
            adopted = self._recovered(journal, output) if size else []
        self._cut(self._noted, self._end)
        entries = b"".join(map(bytes, adopted))
        if found is None:
            self.rebuilt, self._opening = bool(adopted), opening + entries
        self._note(_TORN + _pid() if found is None else _pid() + entries)

    def _note(self, text: bytes) -> None:
        _write(self._journal, self._noted, text)
        self._noted += len(text)

    def _recovered(self, journal: BinaryIO, output: BinaryIO) -> list[Entry]:
        """Count what is whole in both, find where they are to be cut, and return entries that the journal lacks."""
        last = self._verified(journal, output) if self._noted else []
        if self.format.packed and last:  # of the records of one piece the journal may name a part
            for entry in last:
                self.index.remove(entry)
            self._noted, self._end = self._before, last[0].end - last[0].length
        adopted = []
        for entry in entries_of(self.format.pieces(output, self._end), self.path, self.index, WAY_OUT):
            adopted.append(entry)
            self._end = entry.end
        output.seek(self._end)
        rest = output.read(1 << 26)
        if not self.format.packed and rest:  # whole but for its newline?
            piece = Piece(self._end + len(rest) + 1, len(rest) + 1, zlib.crc32(rest + b"\n"), [rest])
            if entry_of(rest, piece) is not None:
                adopted += entries_of([piece], self.path, self.index, WAY_OUT)
                _write(self._output, piece.end - 1, b"\n")
                self._end = piece.end
                return adopted
        begin = self.format.begin
        if rest.strip(b"\0") and rest[: len(begin)] != begin[: len(rest)]:
            raise ConfigError(f"output {self.path} exists, and what is in it from byte {self._end:,} on is no "
                              f"record of a job: {WAY_OUT}")  # fmt: skip
        return adopted

    def _verified(self, journal: BinaryIO, output: BinaryIO) -> list[Entry]:
        """Follow the journal as far as it is whole and the output agrees; the entries of the last piece."""
        last: list[Entry] = []
        self._before = self._noted  # where the entries of the last piece begin
        for text in journal:
            found = _ENTRY.fullmatch(text)
            if found is None and re.fullmatch(rb"(pid \d+)?\n", text):
                self._noted += len(text)
                continue
            if found is None:
                break
            line, digest, status, end, length, crc = found.groups()
            entry = Entry(int(line), digest.decode(), status.decode(), int(end), int(length), int(crc, 16))
            if not last or entry.end != last[0].end:
                if entry.end - entry.length != self._end:
                    break
                piece = output.read(entry.length)
                if len(piece) < entry.length or not piece.rstrip(b"\0"):
                    break
                if zlib.crc32(piece) != entry.crc:
                    if bytes(8 if self.format.packed else 1) in piece:
                        break  # its end was never written, as after a power cut
                    raise ConfigError(
                        f"output {self.path} was changed since it was written: the record of line {entry.line}, "
                        f"{entry.length:,} bytes before byte {entry.end:,}, is another: {WAY_OUT}"
                    )
                self._end, self._before, last = entry.end, self._noted, []
            count(entry, self.index, self.path, WAY_OUT)
            last.append(entry)
            self._noted += len(text)
        return last


def _locked(path: Path) -> tuple[int, bool]:
    """The open file under a lock, and whether it was made. Raises ConfigError while somebody else holds the lock."""
    while True:
        existed = path.exists()
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pids = re.findall(rb"^pid (\d+)\n", os.pread(file, os.fstat(file).st_size, 0), re.MULTILINE)
            os.close(file)
            who = f"process {int(pids[-1])}" if pids else "another process"
            raise ConfigError(
                f"{who} is writing this output: wait for its end, or name another file ({path} is locked)"
            ) from None
        try:
            if os.path.samestat(os.fstat(file), path.stat()):
                return file, not existed
        except FileNotFoundError:
            pass  # who held the lock has removed it
        os.close(file)


def _pid() -> bytes:
    """A line that says who writes; its first newline ends a line that may be torn."""
    return f"\npid {os.getpid()}\n".encode()


def _header(text: bytes) -> dict[str, Any] | None:
    """None if it is torn, or none of ours."""
    try:
        header = request_of(text) if text.endswith(b"\n") else {}
    except ValueError:
        return None
    return header if header.get("paged_job") == VERSION else None


def _same(found: dict[str, Any], about: dict[str, Any], path: Path) -> dict[str, Any]:
    """What the job is, as it was begun. Raises ConfigError if it is another now. Names with `_` may differ."""
    for name, value in about.items():
        if not name.startswith("_") and name in found and found[name] != value:
            raise ConfigError(
                f"output {path} was begun with {name} {json.dumps(found[name])}, and now it is {json.dumps(value)}: "
                f"give the same, or {WAY_OUT}"
            )
    return about | found


def _write(file: int, offset: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written
