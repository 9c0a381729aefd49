"""What the machine can do at most, measured by PyTorch's own kernels and not by ours."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

MATRIX, BYTES = 1536, 256 * 2**20


def measure(threads: int, repeat: int = 7) -> dict[str, float]:
    """Bytes a second read from memory, and float32 operations a second in a matrix product: the best of some."""
    torch.set_num_threads(threads)
    numbers = torch.ones(BYTES // 4)
    a, b = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    return {
        "read_bytes_per_s": BYTES / _best(numbers.sum, repeat),
        "float32_flops": 2 * MATRIX**3 / _best(lambda: torch.mm(a, b), repeat),
    }


def _best(run: Callable[[], object], repeat: int) -> float:
    run()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
