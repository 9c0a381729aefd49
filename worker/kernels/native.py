"""Operations as the native library takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import pairwise

import torch
from torch import Tensor

from paged import kernels as library
from paged.attention.cpu import pages_of, sequences_of
from worker import kernels
from worker.kernels import Frame, Operation

_pointer, _int32, _int64, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_ROWS = 512  # packed at a time; a multiple of a panel's
_PLAIN, _NORMED, _GATED = 0, 1, {"silu": 2, "gelu_tanh": 3}


class _Embed(library.Operation):
    _fields_ = (("table", _pointer), ("out", _pointer), ("n", _int64), ("format", _int32), ("scale", _float))


class _Norm(library.Operation):
    _fields_ = (
        ("x", _pointer),
        ("weight", _pointer),
        ("out", _pointer),
        ("n", _int64),
        ("eps", _float),
    )


class _Linear(library.Operation):
    _fields_ = (
        ("x", _pointer),
        ("weight", _pointer),
        ("out", _pointer),
        ("n", _int64),
        ("k", _int64),
        ("format", _int32),
        ("add", _int32),
        ("input", _int32),
        ("eps", _float),
        ("norm", _pointer),
        ("bias", _pointer),
        ("scale", _float),
    )


class _Rotary(library.Operation):
    _fields_ = (
        ("qkv", _pointer),
        ("cos", _pointer),
        ("sin", _pointer),
        ("q_norm", _pointer),
        ("k_norm", _pointer),
        ("pages", library.Pages),
        ("heads", _int64),
        ("group", _int64),
        ("half", _int64),
        ("norm_all", _int32),
        ("eps", _float),
    )


class _SoftCap(library.Operation):
    _fields_ = (("x", _pointer), ("n", _int64), ("cap", _float))


class _Rows(library.Operation):  # Gather and Argmax
    _fields_ = (("x", _pointer), ("out", _pointer), ("n", _int64))


class Program:
    """Operations, ready to be run by a team. Keeps every tensor that they point to.

    cuts: numbers of operations, ascending, before which `run` calls something; the number of all means after the last.
    """

    def __init__(self, operations: SequenceOf[Operation], team: library.Team, cuts: SequenceOf[int] = ()) -> None:
        self.operations = tuple(operations)
        plans: dict[int, tuple[int | None, int, int]] = {}  # a group's sequences are cut into work once for all layers
        for it in operations:
            if isinstance(it, kernels.Attention):
                shape = it.window, it.kv.k.shape[1], it.heads // it.kv.k.shape[2]
                assert it.kv.group < team.groups
                assert plans.setdefault(it.kv.group, shape) == shape
        self._team = team
        self._structures = [_structure(operation) for operation in operations]
        self._pieces = [
            (first, library.pointers_to(self._structures[first:end]))
            for first, end in pairwise((0, *cuts, len(operations)))
        ]

    def run(
        self, frame: Frame, seconds: Tensor | None = None, at_cut: Callable[[int], None] = lambda number: None
    ) -> None:
        """Run all. seconds: float64 [operations], to which the time of each is added. at_cut: is given 0, 1, ..."""
        for rows in (frame.token_ids, frame.positions, frame.sampled):
            assert rows.dtype == torch.int64
            assert rows.is_contiguous()
        assert len(frame.metas) == self._team.groups
        groups = [sequences_of(meta) for meta in frame.metas]
        kept = [tensor for _, tensors in groups for tensor in tensors]
        sequences = (library.Sequences * len(groups))(*(structure for structure, _ in groups))
        slots = (_pointer * len(groups))(*(tensors[-1].data_ptr() for _, tensors in groups))
        structure = library.Frame(
            len(frame.token_ids),
            frame.token_ids.data_ptr(),
            frame.positions.data_ptr(),
            len(frame.sampled),
            frame.sampled.data_ptr(),
            sequences,
            slots,
        )
        for number, (first, pointers) in enumerate(self._pieces):
            if number:
                at_cut(number - 1)
            if len(pointers):
                self._team.run(pointers, structure, seconds=None if seconds is None else seconds[first:].data_ptr())
        del kept  # until here


def pack(weight: Tensor, format_: str, instructions: str | None = None) -> kernels.Matrix:
    """weight [n, k] of any float dtype, packed."""
    found = library.library()
    assert found is not None, library.why_not()
    n, k = weight.shape
    packed = torch.empty(found.packed_bytes(format_, n, k), dtype=torch.uint8)
    for first in range(0, n, _ROWS):  # so that no whole matrix is there in float32
        wide = weight[first : first + _ROWS].float().contiguous()
        place = packed.data_ptr() + found.packed_bytes(format_, first, k)
        found.pack(format_, wide.data_ptr(), len(wide), k, place, instructions)
    return kernels.Matrix(packed, format_, n, k)


def _format(tensor: Tensor) -> int:
    return library.FORMATS[str(tensor.dtype).removeprefix("torch.")]


def _address(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def _structure(it: Operation) -> library.Operation:
    match it:
        case kernels.Embed():
            n, format_ = it.table.shape[1], _format(it.table)
            return _Embed(library.EMBED, 0, _address(it.table), _address(it.out), n, format_, it.scale)
        case kernels.Norm():
            x, weight, out = _address(it.x), _address(it.weight), _address(it.out)
            return _Norm(library.NORM, 0, x, weight, out, len(it.weight), it.eps)
        case kernels.Linear():
            x, out, matrix = _address(it.x), _address(it.out), it.matrix
            assert (it.x.shape[1], it.out.shape[1]) == (matrix.k * (2 if it.gated else 1), matrix.n)
            assert not (it.gated and it.norm is not None)
            sizes, format_ = (matrix.n, matrix.k), library.FORMATS[matrix.format]
            packed, norm = _address(matrix.packed), _address(it.norm)
            input_ = _GATED[it.gated] if it.gated else _PLAIN if norm is None else _NORMED
            more = input_, it.eps, norm, _address(it.bias), it.scale
            return _Linear(library.LINEAR, it.few, x, packed, out, *sizes, format_, it.add, *more)
        case kernels.Rotary():
            pages, kv = pages_of(it.kv.k, it.kv.v), it.kv
            tables = map(_address, (it.qkv, it.cos, it.sin, it.q_norm, it.k_norm))
            half = 0 if it.cos is None else it.cos.shape[1]
            return _Rotary(library.ROTARY, 0, *tables, pages, it.heads, kv.group, half, it.norm_all, it.eps)
        case kernels.Attention():
            pages, q, out = pages_of(it.kv.k, it.kv.v), _address(it.qkv), _address(it.out)
            stride, group, window = it.qkv.shape[1], it.kv.group, it.window or 0
            return library.Attention(
                library.ATTENTION, 0, q, out, stride, pages, it.heads, it.scale, it.soft_cap, group, window
            )
        case kernels.Gather():
            return _Rows(library.GATHER, 1, _address(it.x), _address(it.out), it.x.shape[1])
        case kernels.SoftCap():
            return _SoftCap(library.SOFT_CAP, 1, _address(it.x), it.x.shape[1], it.cap)
        case kernels.Argmax():
            return _Rows(library.ARGMAX, 1, _address(it.x), _address(it.out), it.x.shape[1])
