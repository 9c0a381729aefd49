"""What the machine can do at most: reading memory, and multiplying on registers."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

import torch

from paged import kernels

MATRIX, BYTES, REPEATS = 1536, 256 * 2**20, 150_000


class _Multiplied(ctypes.Structure):
    _fields_: ClassVar = [("operations", ctypes.c_int64), ("result", ctypes.c_float)]


class _Multiply(kernels.Operation):
    _fields_ = (
        ("repeats", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("value", ctypes.c_float),
        ("done", ctypes.c_void_p),
    )


def measure(threads: int, formats: Iterable[str], repeat: int = 7) -> dict[str, float]:
    """Bytes a second read from memory, and of each format operations a second, two in a multiply-add: the best of some.

    Without the native kernels every format has the rate of a product of large float32 matrices.
    """
    torch.set_num_threads(threads)
    numbers = torch.ones(BYTES // 4)
    rates = {"read_bytes_per_s": BYTES / _best(numbers.sum, repeat)}
    if kernels.library() is None:
        a, b = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
        rate = 2 * MATRIX**3 / _best(lambda: torch.mm(a, b), repeat)
        return rates | {f"{format_}_operations_per_s": rate for format_ in formats}
    team = kernels.Team(threads)
    for format_ in formats:
        done = (_Multiplied * threads)()
        operation = _Multiply(kernels.MULTIPLY, 0, REPEATS, kernels.FORMATS[format_], 1e-9, ctypes.addressof(done))
        seconds = _best(partial(team.run, [operation], kernels.Frame()), 10 * repeat)
        rates[f"{format_}_operations_per_s"] = sum(part.operations for part in done) / seconds
    return rates


def _best(run: Callable[[], object], repeat: int) -> float:
    run()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
