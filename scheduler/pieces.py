"""Pieces: what an output file is made of, so that its end can be cut where something is whole.

A plain output has a piece for each record, its line. A gzip or zstd output has a member or frame for what was written
at once, some records; such files may be put one after another, and any reader reads them as one.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from scheduler.lines import GZIP, ZSTD, zstandard

_BLOCK = 1 << 18
RECORD = b'{"id": "batch_req_'  # how every record of ours begins


class DamagedPiece(ValueError):
    """What lies there is no piece, nor the beginning of one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """end: its last byte's offset in the file, plus 1. crc: zlib's crc32 of its bytes."""

    end: int
    length: int
    crc: int
    records: list[bytes]  # each with its newline


@dataclass(frozen=True, slots=True)
class Format:
    """name: plain, gzip or zstd."""

    name: str

    @classmethod
    def of(cls, path: Path) -> Format:
        """By the suffix. Raises ConfigError where zstandard is not installed."""
        name = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}.get(path.suffix.lower(), "plain")
        if name == "zstd":
            zstandard(f"output {path}")
        return cls(name)

    @property
    def packed(self) -> bool:
        """Whether a piece holds more than one record."""
        return self.name != "plain"

    @property
    def begin(self) -> bytes:
        """How every piece begins."""
        return {"plain": RECORD, "gzip": GZIP, "zstd": ZSTD}[self.name]

    def pack(self, records: list[bytes]) -> list[bytes]:
        """The pieces of these records: as many, or one."""
        if not self.packed:
            return records
        content = b"".join(records)
        if self.name == "gzip":
            return [gzip.compress(content, mtime=0)]
        return [zstandard("zstd output").ZstdCompressor(write_checksum=True).compress(content)]

    def pieces(self, file: BinaryIO, start: int) -> Iterator[Piece]:
        """The whole pieces from an offset on; the file may end in a part of one. Raises DamagedPiece."""
        file.seek(start)
        if self.packed:
            yield from self._unpacked(file, start)
            return
        for raw in file:
            if raw.endswith(b"\n"):
                start += len(raw)
                yield Piece(start, len(raw), zlib.crc32(raw), [raw])

    def unpack(self, packed: bytes) -> list[bytes]:
        """The records of one piece."""
        if not self.packed:
            return [packed]
        content = gzip.decompress(packed) if self.name == "gzip" else self._decompressor().decompress(packed)
        return bytes(content).splitlines(keepends=True)

    def _decompressor(self) -> Any:
        if self.name == "gzip":
            return zlib.decompressobj(wbits=31)
        return zstandard("zstd output").ZstdDecompressor().decompressobj()

    def _unpacked(self, file: BinaryIO, start: int) -> Iterator[Piece]:
        errors = (zlib.error,) if self.name == "gzip" else (zstandard("zstd output").ZstdError,)
        data = file.read(_BLOCK)
        while data:
            one, content, length, crc = self._decompressor(), list[bytes](), 0, 0
            while True:
                try:
                    content.append(one.decompress(data))
                except errors as error:
                    rest = data + file.read()
                    if not rest.strip(b"\0") or rest.endswith(bytes(8)):
                        return  # room that was never written; of what is whole no end is 8 zeros
                    raise DamagedPiece(f"the {self.name} data from byte {start:,} on are damaged ({error})") from None
                rest = one.unused_data if one.eof else b""
                used = data[: len(data) - len(rest)]
                length, crc = length + len(used), zlib.crc32(used, crc)
                data = rest or file.read(_BLOCK)
                if one.eof:
                    break
                if not data:
                    return  # it is torn
            start += length
            yield Piece(start, length, crc, b"".join(content).splitlines(keepends=True))
