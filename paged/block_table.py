"""Block tables: the page ids of each sequence, in order of position, and where a position lies.

    position   0 1 2 3 | 4 5 6 7 | 8 9        page_size 4
    page         7     |    3    |  12        table [7, 3, 12]
    slot      28 .. 31 | 12 ..15 | 48 49      slot = page * page_size + position % page_size

A sequence has one table in every group. Tables of a sequence are equally long; where a page has left the window of its
group, the null page stands. Nothing here knows who else uses a page, nor what is in it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Windows = tuple[int | None, ...]  # of each group, how many tokens a query sees, its own included; None is all


class BlockTable:
    """The pages of one sequence in one group. What `KVCacheManager.table` returns is as of that moment."""

    __slots__ = ("_pages", "page_size")

    def __init__(self, page_size: int, pages: Iterable[int] = ()) -> None:
        self.page_size = page_size
        self._pages = np.array(pages if isinstance(pages, np.ndarray) else list(pages), dtype=np.int32)

    def __len__(self) -> int:
        return len(self._pages)

    def __repr__(self) -> str:
        return f"BlockTable(page_size={self.page_size}, pages={self.pages})"

    @property
    def pages(self) -> list[int]:
        result: list[int] = self._pages.tolist()
        return result

    @property
    def capacity(self) -> int:
        """Tokens that its pages have room for."""
        return len(self._pages) * self.page_size

    def slot(self, position: int) -> int:
        """Where the token at `position` lies in the pool. Raises as `slots`."""
        return int(self.slots(position, position + 1)[0])

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The slots of positions start to stop - 1, int64 [stop - start].

        Raises IndexError for positions past the capacity, or whose page has left the window; TypeError for what is no
        whole number.
        """
        start, stop = operator.index(start), operator.index(stop)
        if not 0 <= start <= stop <= self.capacity:
            raise IndexError(f"positions {start} to {stop} are not all within the capacity of {self.capacity}")
        positions = np.arange(start, stop, dtype=np.int64)
        pages = self._pages[positions // self.page_size].astype(np.int64)
        if not pages.all():  # the null page
            raise IndexError(f"positions {start} to {stop} are not all in the window: pages of them have left it")
        return pages * self.page_size + positions % self.page_size


class TableStore:
    """The tables of all sequences as rows of one matrix, so that a batch of them is ready for a kernel by one gather.

    pages         [groups, rows, width] int32, the null page where there is none
    num_pages     [rows] int64, the length of a row's tables
    num_computed  [rows] int64, tokens of the row's sequence whose K and V lie in its pages
    frozen        [rows] bool, the page that is written next may be another's too: look before writing

    Rows and width double when they run out.
    """

    def __init__(self, num_groups: int, rows: int = 16, width: int = 16) -> None:
        self.pages = np.zeros((num_groups, rows, width), dtype=np.int32)
        self.num_pages = np.zeros(rows, dtype=np.int64)
        self.num_computed = np.zeros(rows, dtype=np.int64)
        self.frozen = np.zeros(rows, dtype=np.bool_)
        self._unused = list(range(rows - 1, -1, -1))

    def add(self) -> int:
        """An empty row."""
        if not self._unused:
            rows = len(self.num_pages)
            self.pages = np.concatenate((self.pages, np.zeros_like(self.pages)), axis=1)
            self.num_pages = np.concatenate((self.num_pages, np.zeros_like(self.num_pages)))
            self.num_computed = np.concatenate((self.num_computed, np.zeros_like(self.num_computed)))
            self.frozen = np.concatenate((self.frozen, np.zeros_like(self.frozen)))
            self._unused = list(range(2 * rows - 1, rows - 1, -1))
        return self._unused.pop()

    def remove(self, row: int) -> None:
        self.cut(row, 0)
        self.num_computed[row] = 0
        self.frozen[row] = False
        self._unused.append(row)

    def append(self, row: int, pages: list[list[int]]) -> None:
        """Add as many pages in every group: pages[group] is what the group gets."""
        first = int(self.num_pages[row])
        last = first + len(pages[0])
        width = self.pages.shape[2]
        if last > width:
            more = np.zeros((*self.pages.shape[:2], max(width, last - width)), dtype=np.int32)
            self.pages = np.concatenate((self.pages, more), axis=2)
        self.pages[:, row, first:last] = pages
        self.num_pages[row] = last

    def append_one(self, rows: npt.NDArray[np.int64], pages: npt.NDArray[np.int32]) -> list[int]:
        """Add a page to each of several rows, pages [groups, rows]. Returns the index that each has now."""
        places = self.num_pages[rows]
        if int(places.max()) >= self.pages.shape[2]:
            self.pages = np.concatenate((self.pages, np.zeros_like(self.pages)), axis=2)
        self.pages[:, rows, places] = pages
        self.num_pages[rows] = places + 1
        result: list[int] = places.tolist()
        return result

    def cut(self, row: int, num_pages: int) -> None:
        """Keep the first `num_pages`."""
        self.pages[:, row, num_pages : int(self.num_pages[row])] = 0
        self.num_pages[row] = num_pages


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens of one sequence take in one group without a window."""
    return -(-num_tokens // page_size)


def first_page(num_computed: int, window: int | None, page_size: int) -> int:
    """Index of the first page that the token at position `num_computed` still sees."""
    return 0 if window is None else max(0, num_computed - window + 1) // page_size


def peak_pages(num_tokens: int, page_size: int, windows: Windows, chunk: int) -> int:
    """Most pages that a sequence holds at once, over all groups, while it is computed up to `num_tokens` tokens.

    At most `chunk` tokens are computed at once, at least one; a windowed group then holds the window before them, and
    them: w - 1 + chunk tokens, of which the first may be the last of its page.
    """
    total = pages_for(num_tokens, page_size)
    return sum(total if w is None else min(total, 1 + pages_for(w - 2 + chunk, page_size)) for w in windows)
