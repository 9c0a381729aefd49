"""KVLayout: how many bytes a token's K and V take, and how many pages fit into how much memory."""

from __future__ import annotations

from dataclasses import dataclass

from paged.block_table import Windows
from paged.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of the pages, equal in every group. head_dim and kv_heads are the model's own, not hidden over heads.

    windows: for each group the tokens that a query sees, its own included; None is all. places: for each layer of the
    model its group and its index in it, which is the number of the K/V tensor pair that it uses.
    """

    num_layers: int  # of one group: K/V tensor pairs
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    windows: Windows = (None,)
    places: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.places:
            object.__setattr__(self, "places", tuple((0, i) for i in range(self.num_layers)))

    @classmethod
    def of(cls, layer_windows: Windows, kv_heads: int, head_dim: int, dtype: str, page_size: int) -> KVLayout:
        """The layout of a model whose layers have these windows, split into groups of as many layers.

        Layers of one window fill groups one after another. A group is as large as it can be while the layers that are
        wanting in the last groups of each window make no more than 5 % of all.
        """
        layers: dict[int | None, list[int]] = {}
        for layer, window in enumerate(layer_windows):
            layers.setdefault(window, []).append(layer)
        size = next(
            size
            for size in range(min(map(len, layers.values())), 0, -1)
            if sum(-len(kind) % size for kind in layers.values()) * 20 <= len(layer_windows)
        )
        places, windows = [(0, 0)] * len(layer_windows), list[int | None]()
        for window, kind in layers.items():
            for i, layer in enumerate(kind):
                places[layer] = (len(windows) + i // size, i % size)
            windows += [window] * -(-len(kind) // size)
        return cls(size, kv_heads, head_dim, dtype, page_size, tuple(windows), tuple(places))

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers, in every group."""
        return self.bytes_per_page // self.page_size * len(self.windows)

    @property
    def bytes_per_page(self) -> int:
        """A page holds the layers of one group."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype] * self.page_size

    def pages_in(self, num_bytes: int) -> int:
        """Pages, the null page counted, that fit into `num_bytes`. Raises ConfigError if no page is left to use."""
        pages = num_bytes // self.bytes_per_page
        if pages < 2:
            raise ConfigError(
                f"kv_memory of {num_bytes:,} bytes holds {pages} pages of {self.bytes_per_page:,} bytes, "
                "2 are the least: raise kv_memory, or lower page_size"
            )
        return pages
