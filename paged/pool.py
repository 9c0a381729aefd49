"""KVPool: the K and V tensors themselves, page by page, layer by layer.

All groups share it: the i-th layer of every group uses the i-th pair of tensors, each in the group's own pages.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from paged.errors import InvariantError
from paged.layout import KVLayout
from paged.pages import Mark, Move


class KVPool:
    """K and V of a group's i-th layer: `k[i]` and `v[i]` are [num_pages, page_size, kv_heads, head_dim].

    `num_pages` counts the null page, to which nothing is ever written. The tensors are not initialised, so on a CPU
    memory is taken as pages are first written. dtype is the layout's: float32, bfloat16 or float16.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.num_pages = num_pages
        shape = (num_pages, layout.page_size, layout.kv_heads, layout.head_dim)
        dtype = getattr(torch, layout.dtype)
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]
        self._seals: dict[int, int] = {}  # poison mode: page -> checksum of what it must hold

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k and v [tokens, kv_heads, head_dim] to `slots`, int64 [tokens], in one layer."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.v[layer].flatten(0, 1).index_copy_(0, slots, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at `slots`, int64 [tokens], each [tokens, kv_heads, head_dim]."""
        return self.k[layer].flatten(0, 1)[slots], self.v[layer].flatten(0, 1)[slots]

    def apply(self, moves: Iterable[Move | Mark]) -> None:
        """Copy pages, in the order of the moves, in every layer; see to the marks of poison mode.

        Raises InvariantError for a page that does not hold what it held when it was sealed.
        """
        for move in moves:
            if isinstance(move, Move):
                for tensor in (*self.k, *self.v):
                    tensor[move.target] = tensor[move.source]
            elif move.what == "poison":
                self._seals.pop(move.page, None)
                for tensor in (*self.k, *self.v):
                    tensor[move.page] = float("nan")
            elif move.what == "seal":
                self._seals[move.page] = self._checksum(move.page)
            elif self._seals.get(move.page, found := self._checksum(move.page)) != found:
                raise InvariantError(f"P2: page {move.page} was written after it was full and others could find it")

    def forget_seals(self) -> None:
        """After a step that failed, pages may have been written whose marks never came."""
        self._seals.clear()

    def _checksum(self, page: int) -> int:
        """Of the bits of a page in all layers."""
        return hash(tuple(zlib.crc32(t[page].cpu().view(torch.uint8).numpy().tobytes()) for t in (*self.k, *self.v)))
