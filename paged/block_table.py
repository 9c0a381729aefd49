"""BlockTable: the page ids of one sequence, in order of position, and where a position lies.

    position   0 1 2 3 | 4 5 6 7 | 8 9        page_size 4
    page         7     |    3    |  12        table [7, 3, 12]
    slot      28 .. 31 | 12 ..15 | 48 49      slot = page * page_size + position % page_size

It does not know who else uses its pages, nor what is in them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class BlockTable:
    """The pages of one sequence."""

    __slots__ = ("page_size", "pages")

    def __init__(self, page_size: int, pages: Iterable[int] = ()) -> None:
        self.page_size = page_size
        self.pages = list(pages)

    def __len__(self) -> int:
        return len(self.pages)

    def __repr__(self) -> str:
        return f"BlockTable(page_size={self.page_size}, pages={self.pages})"

    @property
    def capacity(self) -> int:
        """Tokens that its pages have room for."""
        return len(self.pages) * self.page_size

    def slot(self, position: int) -> int:
        """Where the token at `position` lies in the pool. Raises IndexError past the capacity."""
        if position < 0:
            raise IndexError(f"position {position} is negative")
        return self.pages[position // self.page_size] * self.page_size + position % self.page_size

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The slots of positions start to stop - 1, int64 [stop - start]. Raises IndexError past the capacity."""
        if not 0 <= start <= stop <= self.capacity:
            raise IndexError(f"positions {start} to {stop} are not all within the capacity of {self.capacity}")
        positions = np.arange(start, stop, dtype=np.int64)
        pages = np.asarray(self.pages, dtype=np.int64)[positions // self.page_size]
        return pages * self.page_size + positions % self.page_size


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens of one sequence take."""
    return -(-num_tokens // page_size)
