"""Group: the workers of one replica, for sums over all of them. On torch.distributed: gloo on a CPU, nccl on CUDA."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

TIMEOUT = 60.0  # seconds that a worker waits for the others in a sum; one that ended is noticed at once


class Group:
    """A group of its own, which leaves torch's default group to the user; all workers are on one machine.

    store: a file that all of them see, and nobody else; it may go once every group is made. Raises RuntimeError if not
    all are there within the time.
    """

    def __init__(self, store: Path, rank: int, size: int, device: str = "cpu", timeout: float = TIMEOUT) -> None:
        self._size = size
        self._room = torch.empty(0, device=device)
        self._group = _made(store, rank, size, device, timedelta(seconds=timeout))

    def total(self, part: Tensor) -> Tensor:
        """The sum over all workers of `part`, [rows, n], added in order of rank; good until the next call.

        Every worker gets the same bits, and a row's do not depend on the others: a ring would cut the tensor, and add
        each piece in another order. Sums of 16 bit formats are rounded once, at the end. Raises RuntimeError if a
        worker is gone or late.
        """
        if self._room.dtype != part.dtype or len(self._room) < self._size * part.numel():
            self._room = torch.empty(self._size * part.numel(), dtype=part.dtype, device=part.device)
        parts = list(self._room[: self._size * part.numel()].view(self._size, *part.shape))
        self._group.allgather([parts], [part.contiguous()]).wait()
        total: Tensor = parts[0].float()
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)

    def close(self) -> None:
        """Break the connections: who waits for this worker gets an error."""
        self._group.abort()


def _made(store: Path, rank: int, size: int, device: str, timeout: timedelta) -> Any:
    """A group of torch.distributed, of whose classes the stubs know only a part."""
    kinds: Any = distributed
    shared = kinds.FileStore(str(store), size)
    if device.startswith("cuda"):
        options = kinds.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return kinds.ProcessGroupNCCL(shared, rank, size, options)
    options = kinds.ProcessGroupGloo._Options()
    options._timeout = timeout
    # Nothing listens beyond this machine.
    options._devices = [kinds.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return kinds.ProcessGroupGloo(shared, rank, size, options)
