"""Rows of a batch, each a sequence in pages: what programs that compute whole batches need of manager and pool.

Tokens are not known here, so no page is ever found by its content: rows share pages where one was forked from another.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged.attention import AttentionMetadata, PagedAttention, cpu
from paged.attention.backends import BACKENDS
from paged.block_table import Windows
from paged.errors import ConfigError
from paged.kernels import library
from paged.layout import DTYPE_BYTES, KVLayout
from paged.manager import KVCacheManager
from paged.pages import Move
from paged.pool import KVPool
from paged.sizing import cuda_memory, host_memory, pool_bytes


class RowPages:
    """Pages, and the sequences in them. A row is a sequence's id.

    windows: of each layer. memory: as `pool_bytes` takes it. key, value: the first that will be written,
    [rows, kv_heads, tokens, head_dim]. Raises ConfigError for what pages cannot hold.
    """

    def __init__(
        self, windows: Windows, memory: int | float, page_size: int, backend: str, key: Tensor, value: Tensor
    ) -> None:
        dtype = str(key.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"K and V are {dtype}, and pages hold {', '.join(DTYPE_BYTES)}")
        if backend == "auto":
            backend = "native" if key.device.type == "cpu" and library() is not None else "sdpa"
        # Block tables and slots are our own, so nothing is left to check.
        self.attention: PagedAttention = cpu.attend if backend == "native" else BACKENDS[backend]
        self.layout = KVLayout.of(windows, key.shape[1], key.shape[3], dtype, page_size)
        self._dtype = key.dtype
        self.fits(key, value, 0)
        available = cuda_memory() if key.device.type == "cuda" else host_memory()
        num_pages = self.layout.pages_in(pool_bytes(memory, available, 0))
        self.manager = KVCacheManager(num_pages, page_size, enable_prefix_caching=False, windows=self.layout.windows)
        with torch.inference_mode(False):  # or it could be written in inference mode only
            self.pool = KVPool(self.layout, num_pages, key.device)
        self._ids = itertools.count()

    def fits(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Raises ConfigError for K or V of another shape or format than the pages'."""
        wanted = self.layout.kv_heads, self.layout.head_dim
        for name, tensor in (("K", key), ("V", value)):
            if (found := (tensor.shape[1], tensor.shape[3])) != wanted:
                raise ConfigError(
                    f"{name} of layer {layer} has {found[0]} heads of {found[1]}, pages have {wanted[0]} of "
                    f"{wanted[1]}: K and V of all layers must be alike"
                )
            if torch.promote_types(tensor.dtype, self._dtype) != self._dtype:
                raise ConfigError(
                    f"{name} of layer {layer} is {tensor.dtype}, and the pages of this cache hold {self._dtype}: "
                    "make another"
                )

    def new(self, count: int) -> list[int]:
        rows = list(itertools.islice(self._ids, count))
        for seq_id in rows:
            self.manager.allocate(seq_id, unknown(0), 0)
        return rows

    def fork(self, rows: list[int]) -> list[int]:
        forks = list(itertools.islice(self._ids, len(rows)))
        for seq_id, fork in zip(rows, forks, strict=True):
            self.manager.fork(seq_id, fork)
        return forks

    def free(self, rows: list[int]) -> None:
        """Give back what these hold, and empty the list."""
        while rows:
            self.manager.free(rows.pop())

    def commit(self, rows: list[int], lengths: npt.NDArray[np.int64]) -> None:
        tokens = unknown(int(lengths.max(initial=0)))
        self.manager.commit_all(rows, [tokens] * len(rows), lengths)

    def extend(self, rows: list[int], lengths: npt.NDArray[np.int64]) -> int:
        """Room for so many tokens; how many pages were copied. Raises OutOfPages, and nothing has changed."""
        self.manager.extend_all(rows, lengths)
        moves = self.manager.take_moves()
        self.pool.apply(moves)
        self.manager.confirm_moves(moves)
        for i in self.manager.changed(rows):
            self.manager.take_changes(rows[i])  # nobody keeps a table of his own
        return sum(isinstance(move, Move) for move in moves)


@dataclass(slots=True)
class RowStep:
    """The tokens of one forward: where they go, and who sees what."""

    metas: list[AttentionMetadata]  # of each group
    taken: Tensor | None  # [tokens] int64: which of [rows * count] are no padding; None is all
    count: int  # tokens of each row, padding counted
    device: torch.device
    padding: Tensor | None = None  # bool [rows, keys] as it was given, False is padding
    has_holes: bool = False  # tokens that nobody may see, elsewhere than on the left
    layers: int = 0  # that have been written

    @classmethod
    def of(
        cls,
        store: RowPages,
        rows: list[int],
        before: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        count: int,
        device: torch.device,
    ) -> RowStep:
        """before, lengths: int64 [rows], tokens of each row without and with the new ones."""
        new, size = lengths - before, store.manager.page_size
        ends = np.cumsum(new)
        owners = np.repeat(np.arange(len(rows)), new)  # [tokens]: the row of each
        positions = np.arange(len(owners)) + (lengths - ends)[owners]

        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        starts, lens = tensor(np.concatenate(([0], ends)).astype(np.int32)), tensor(lengths.astype(np.int32))
        metas = []
        for group in range(len(store.layout.windows)):
            tables = store.manager.tables(rows, group)
            slots = tables[owners, positions // size].astype(np.int64) * size + positions % size
            metas.append(AttentionMetadata(starts, lens, tensor(tables), tensor(slots)))
        kept = np.arange(count)[None, :] >= (count - new)[:, None]  # [rows, count]
        return cls(metas, None if kept.all() else tensor(np.flatnonzero(kept)), count, device)

    def has_padding(self, padding: Tensor | None) -> bool:
        """Whether another layer's padding is that of the step."""
        if padding is self.padding:
            return True
        if padding is None or self.padding is None:
            some = self.padding if padding is None else padding
            return some is not None and bool(some.all())
        return torch.equal(padding, self.padding)

    def packed(self, tensor: Tensor) -> Tensor:
        """[rows, heads, count, head_dim] as [tokens, heads, head_dim], without padding."""
        flat = tensor.transpose(1, 2).flatten(0, 1)
        return flat if self.taken is None else flat[self.taken]


def unknown(count: int) -> npt.NDArray[np.int32]:
    """Tokens, as the manager wants them, of a row that is not told its own."""
    return np.zeros(count, dtype=np.int32)
