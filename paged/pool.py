"""KVPool: the K and V tensors themselves, page by page, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paged.layout import KVLayout
from paged.manager import Move


class KVPool:
    """K and V of every layer: `k[i]` and `v[i]` are [num_pages, page_size, kv_heads, head_dim].

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

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k and v [tokens, kv_heads, head_dim] to `slots`, int64 [tokens], in one layer."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.v[layer].flatten(0, 1).index_copy_(0, slots, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at `slots`, int64 [tokens], each [tokens, kv_heads, head_dim]."""
        return self.k[layer].flatten(0, 1)[slots], self.v[layer].flatten(0, 1)[slots]

    def apply(self, moves: Iterable[Move]) -> None:
        """Copy pages, in the order of the moves, in every layer."""
        for move in moves:
            for tensor in (*self.k, *self.v):
                tensor[move.target] = tensor[move.source]
