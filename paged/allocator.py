"""BlockAllocator: which page ids are free, and how many references each of the others has.

It owns the free list and the reference counts. It does not know tokens, digests, tensors, sequences or requests.

A page is in one of three states:

    free        on the free list, no reference; its content is worth nothing
    referenced  one or more block tables (or moves under way) count it
    cached      no reference, not on the free list: its content may be found again by the prefix cache

    free --allocate--> referenced --release--> free
                       referenced --park-----> cached --share----> referenced
                       referenced --share----> referenced
                                               cached --reclaim--> free

Page 0 is the null page: it pads block tables, is never handed out, and is in none of the states.

Invariants, which `check()` proves from scratch:

    INV-1  free + referenced + cached = num_pages - 1
    INV-2  a free or cached page has no reference, a referenced page has at least one
    INV-3  no page is on the free list twice, and the null page never is
    INV-4  a call that raises has changed nothing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from paged.errors import InvariantError, OutOfPages, PageStateError

NULL_PAGE = 0

_FREE, _REFERENCED, _CACHED = 0, 1, 2
_STATE_NAMES = ("free", "referenced", "cached")


class BlockAllocator:
    """Hands out page ids from 1 to num_pages - 1. `num_pages` counts the null page."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}, but the null page and one more are the least: 2")
        self.num_pages = num_pages
        # A stack: the page released last is handed out first, while it is warm; at first in order of id.
        self._free = list(range(num_pages - 1, 0, -1))
        self._counts = [0] * num_pages
        self._states = [_FREE] * num_pages
        self._num_cached = 0

    def __repr__(self) -> str:
        return f"BlockAllocator({self.num_free} free, {self.num_used} referenced, {self.num_cached} cached)"

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Pages with at least one reference."""
        return self.num_pages - 1 - len(self._free) - self._num_cached

    def ref_count(self, page: int) -> int:
        """References to the page; the null page has none. Raises PageStateError for a page outside of the pool."""
        if not 0 <= page < self.num_pages:
            raise PageStateError(f"page {page} is not one of 0 to {self.num_pages - 1}")
        return self._counts[page]

    def allocate(self, n: int) -> list[int]:
        """Take `n` free pages, each with one reference. Raises OutOfPages when there are fewer, ValueError below 0."""
        if n > len(self._free):
            raise OutOfPages(n, len(self._free), self.num_pages - 1)
        if n <= 0:
            if n < 0:
                raise ValueError(f"a number of pages must not be negative, and is {n}")
            return []
        pages = self._free[: -n - 1 : -1]
        del self._free[-n:]
        for page in pages:
            self._counts[page] = 1
            self._states[page] = _REFERENCED
        return pages

    def share(self, pages: Collection[int]) -> None:
        """Add a reference to each of these referenced or cached pages. Raises PageStateError for a free one."""
        self._need(pages, _FREE, False, "not referenced or cached")
        counts, states = self._counts, self._states
        for page in pages:
            if states[page] == _CACHED:
                states[page] = _REFERENCED
                self._num_cached -= 1
            counts[page] += 1

    def release(self, pages: Collection[int]) -> list[int]:
        """Drop a reference to each; those that have lost their last become free, and are returned.

        Raises PageStateError if one has none, or is named twice.
        """
        gone = self._drop(pages, _FREE)
        self._free += gone
        return gone

    def park(self, pages: Collection[int]) -> list[int]:
        """Drop a reference to each; those that have lost their last become cached, and are returned.

        Raises PageStateError if one has none, or is named twice.
        """
        gone = self._drop(pages, _CACHED)
        self._num_cached += len(gone)
        return gone

    def reclaim(self, pages: Collection[int]) -> None:
        """Make cached pages free. Raises PageStateError if one is not cached, or is named twice."""
        self._need(pages, _CACHED, True, "not cached")
        for page in pages:
            self._states[page] = _FREE
        self._num_cached -= len(pages)
        self._free += pages

    def check(self, references: Iterable[int] | None = None) -> None:
        """Prove INV-1 to INV-3 from scratch, and the counts against `references` (one page id for each) if given.

        Raises InvariantError, which names the invariant and the page.
        """
        counts = [0] * self.num_pages
        for page in self._free:
            if not 0 < page < self.num_pages:
                raise InvariantError(f"INV-3: page {page} is on the free list, and never to be handed out")
            if counts[page]:
                raise InvariantError(f"INV-3: page {page} is on the free list twice")
            counts[page] = 1
        for page in range(1, self.num_pages):
            state, refs = self._states[page], self._counts[page]
            if (state == _FREE) != bool(counts[page]):
                raise InvariantError(f"INV-1: page {page} is {_STATE_NAMES[state]}, the free list says otherwise")
            if (state == _REFERENCED) != (refs > 0) or refs < 0:
                raise InvariantError(f"INV-2: page {page} is {_STATE_NAMES[state]} with {refs} references")
        cached = self._states[1:].count(_CACHED)
        if cached != self._num_cached:
            raise InvariantError(f"INV-1: {cached} pages are cached, the counter says {self._num_cached}")
        if self._counts[NULL_PAGE] or self._states[NULL_PAGE] != _FREE:
            raise InvariantError("INV-3: the null page is in use")
        if references is not None:
            self._check_references(references)

    def _check_references(self, references: Iterable[int]) -> None:
        found = Counter(references)
        for page in sorted({*found, *range(self.num_pages)}):
            counted = self._counts[page] if 0 <= page < self.num_pages else 0
            if found[page] != counted:
                raise InvariantError(f"P1: page {page} is referenced {found[page]} times, its count is {counted}")

    def _need(self, pages: Collection[int], state: int, wanted: bool, what: str) -> None:
        """Refuse a page outside of the pool, and one that is (or with `wanted` is not) in a state."""
        if not pages:
            return
        states = self._states
        if not 0 < min(pages) <= max(pages) < self.num_pages:
            page = next(page for page in pages if not 0 < page < self.num_pages)
            raise PageStateError(f"page {page} is not one of 1 to {self.num_pages - 1}")
        if wrong := [page for page in pages if (states[page] == state) != wanted]:
            raise PageStateError(f"page {wrong[0]} is {_STATE_NAMES[states[wrong[0]]]}, {what}")
        if wanted and len(pages) > 1 and len(set(pages)) < len(pages):
            raise PageStateError(f"a page is named twice: {list(pages)}")

    def _drop(self, pages: Collection[int], state: int) -> list[int]:
        self._need(pages, _REFERENCED, True, "not referenced")
        counts, states, gone = self._counts, self._states, list[int]()
        for page in pages:
            counts[page] -= 1
            if not counts[page]:
                states[page] = state
                gone.append(page)
        return gone
