"""Native kernels: the shared library, its instruction sets, and the two operations that know pages.

Operations are structures that the library reads (worker/kernels/operations.h has the same fields in the same order).
Tensors that they point to must be contiguous and outlive them. Where the library was not built, `library()` is None and
`why_not()` says why; everything works without it, on PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, ClassVar

from paged.kernels.build import LIBRARY, REASON, digest_of_sources

FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}
EMBED, NORM, LINEAR, ROTARY, ATTENTION, GATHER, ARGMAX, WRITE, MULTIPLY, SOFT_CAP = range(10)
_HERE = Path(__file__).parent
_pointer, _int32, _int64, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Sequences(ctypes.Structure):
    """The sequences of a step in one group, as AttentionMetadata has them."""

    _fields_ = (
        ("query_start", _pointer),
        ("lengths", _pointer),
        ("tables", _pointer),
        ("table_stride", _int64),
        ("count", _int64),
    )


class Frame(ctypes.Structure):
    """What changes from step to step."""

    _fields_ = (
        ("tokens", _int64),
        ("token_ids", _pointer),
        ("positions", _pointer),
        ("sampled", _int64),
        ("sampled_rows", _pointer),
        ("groups", ctypes.POINTER(Sequences)),
        ("slots", ctypes.POINTER(_pointer)),
    )


class Pages(ctypes.Structure):
    """K and V of one layer."""

    _fields_ = (
        ("k", _pointer),
        ("v", _pointer),
        ("format", _int32),
        ("page_size", _int64),
        ("kv_heads", _int64),
        ("head_dim", _int64),
    )


class Operation(ctypes.Structure):
    """What every operation begins with; `few`: its rows are the sampled ones, not all tokens."""

    _fields_: ClassVar[SequenceOf[tuple[str, type[Any]]]] = (("kind", _int32), ("few", _int32))


class Attention(Operation):
    _fields_ = (
        ("q", _pointer),
        ("out", _pointer),
        ("q_stride", _int64),
        ("pages", Pages),
        ("heads", _int64),
        ("scale", _float),
        ("soft_cap", _float),
        ("group", _int64),
        ("window", _int64),
    )


class Write(Operation):
    _fields_ = (("k", _pointer), ("v", _pointer), ("pages", Pages), ("group", _int64))


class Library:
    """The shared library. sets: the instruction sets that this processor has, the slowest first."""

    def __init__(self, path: Path) -> None:
        self._c = _declared(ctypes.CDLL(str(path)))
        sources = digest_of_sources()
        if sources and sources != self._c.paged_sources().decode():
            raise OSError(f"{path} was built from other sources")
        self.sets = [self._c.paged_instruction_set(i).decode() for i in range(self._c.paged_instruction_sets())]

    def packed_bytes(self, format_: str, n: int, k: int) -> int:
        """Bytes of a packed matrix [n, k]."""
        return int(self._c.paged_packed_bytes(FORMATS[format_], n, k))

    def pack(self, format_: str, weight: int, n: int, k: int, packed: int, instructions: str | None = None) -> None:
        """Pack float32 [n, k] at the address `weight` into `packed_bytes` at the address `packed`."""
        self._c.paged_pack(self._set(instructions), FORMATS[format_], weight, n, k, packed)

    def _set(self, name: str | None) -> int:
        return len(self.sets) - 1 if name is None else self.sets.index(name)


class Team:
    """Threads that stay, and the room that their runs share. Runs from several Python threads take turns.

    instructions: None is the best that the processor has. groups: of layers, with a block table each.
    """

    def __init__(self, threads: int, groups: int = 1, instructions: str | None = None) -> None:
        found = library()
        assert found is not None, why_not()
        self._c, self._set = found._c, found._set(instructions)
        self.threads, self.groups = threads, groups
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._team = self._c.paged_team(self.threads)
        self._shared = self._c.paged_shared(self.groups)

    def run(
        self,
        operations: SequenceOf[Operation] | ctypes.Array[Any],
        frame: Frame,
        share: bool = True,
        seconds: int | None = None,
    ) -> None:
        """Run operations in order. share: read pages that sequences share once for all of them; changes no bit.

        seconds: the address of a float64 for each operation, to which its time is added.
        """
        if self._process != os.getpid():
            self._start()  # a forked child has none of the threads; what they were is left alone
        pointers = operations if isinstance(operations, ctypes.Array) else pointers_to(operations)
        self._c.paged_run(
            self._set, self._team, self._shared, pointers, len(pointers), ctypes.byref(frame), share, seconds
        )

    def __del__(self) -> None:
        if os is not None and getattr(self, "_process", None) == os.getpid():  # os: Python may be at its end
            self._c.paged_end_team(self._team)
            self._c.paged_end_shared(self._shared)


def pointers_to(operations: SequenceOf[Operation]) -> ctypes.Array[Any]:
    """The operations as `run` takes them; they must outlive it."""
    return (_pointer * len(operations))(*(ctypes.addressof(operation) for operation in operations))


@functools.cache
def library() -> Library | None:
    """The library, or None where it was not built for this machine."""
    try:
        return Library(_HERE / LIBRARY)
    except (OSError, AttributeError):  # not here, of another machine, of other sources, without a function
        return None


def why_not() -> str:
    """Why `library()` is None."""
    reason, path = _HERE / REASON, _HERE / LIBRARY
    if reason.is_file():
        return f"they could not be built when paged was installed: {reason.read_text().strip()}"
    if not path.is_file():
        return f"{path} is missing: install paged again, or run python {_HERE / 'build.py'}"
    return f"{path} does not fit these sources or this machine: install paged again, or run python {_HERE / 'build.py'}"


def _declared(c: ctypes.CDLL) -> ctypes.CDLL:
    pointer_to_frame = ctypes.POINTER(Frame)
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "paged_sources": (ctypes.c_char_p, ()),
        "paged_instruction_sets": (_int64, ()),
        "paged_instruction_set": (ctypes.c_char_p, (_int64,)),
        "paged_team": (_pointer, (_int64,)),
        "paged_end_team": (None, (_pointer,)),
        "paged_packed_bytes": (_int64, (_int32, _int64, _int64)),
        "paged_pack": (None, (_int64, _int32, _pointer, _int64, _int64, _pointer)),
        "paged_shared": (_pointer, (_int64,)),
        "paged_end_shared": (None, (_pointer,)),
        "paged_run": (
            None,
            (_int64, _pointer, _pointer, _pointer, _int64, pointer_to_frame, _int64, _pointer),
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(c, name)
        function.restype, function.argtypes = result, arguments
    return c
