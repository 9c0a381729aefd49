"""PrefixCache: finds the pages that already hold the K and V of a prompt's beginning.

It owns the map from a page's digest to the page, and the order in which pages without an owner are given up. It does
not know reference counts, tables or requests: the manager tells it when a page loses its last owner and gains one.

A full page's digest is sha256 over the digest of the page before it and its own tokens (int32, little-endian), so it
stands for the page's whole history. A digest alone is never trusted: a hit must also have the same tokens and the same
parent entry, which by induction is the same history, whatever the digest function does.

    root <- [t0..t3] <- [t4..t7] <- [t8..t11]      an entry knows its parent; a prompt is matched from the root down
                     <- [t4'..t7']

Eviction is by least recent use. Whoever uses an entry uses its ancestors after it, so of a chain the tail goes first.

Invariants, which `check()` proves from scratch:

    INV-1  an entry's parent is an entry (or the root), and knows it as a child
    INV-2  map, pages and children name the same entries; no page belongs to two
    INV-3  in the eviction order an entry comes before its parent
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from paged.errors import InvariantError

Tokens = npt.NDArray[np.int32]


class Entry:
    """One page that can be found again. `live` turns false when it is forgotten."""

    __slots__ = ("children", "digest", "live", "page", "parent", "tokens")

    def __init__(self, digest: bytes, page: int, tokens: bytes, parent: Entry | None) -> None:
        self.digest = digest
        self.page = page
        self.tokens = tokens
        self.parent = parent
        self.children: set[Entry] = set()
        self.live = True

    def __repr__(self) -> str:
        return f"Entry(page={self.page}, digest={self.digest.hex()[:8]})"


def sha256_digest(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(parent + tokens).digest()


class PrefixCache:
    """Pages by the digest of their history. `digest` may be replaced in tests only: any function is safe."""

    def __init__(self, page_size: int, digest: Callable[[bytes, bytes], bytes] = sha256_digest) -> None:
        self.page_size = page_size
        self._digest = digest
        self._root = Entry(hashlib.sha256(b"paged").digest(), 0, b"", None)
        self._entries: dict[bytes, Entry] = {}
        self._by_page: dict[int, Entry] = {}
        self._idle: OrderedDict[int, Entry] = OrderedDict()  # pages without an owner, least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, page: int) -> Entry | None:
        """What the page is found by; None if it cannot be found."""
        return self._by_page.get(page)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def match(self, tokens: Tokens) -> list[Entry]:
        """The entries of the longest cached prefix of `tokens`, int32 [n], never its last token. Changes nothing."""
        found: list[Entry] = []
        parent = self._root
        for chunk in self._full_pages(tokens, 0, len(tokens) - 1):
            entry = self._entries.get(self._digest(parent.digest, chunk))
            if entry is None or entry.tokens != chunk or entry.parent is not parent:
                break
            found.append(entry)
            parent = entry
        return found

    def publish(self, tokens: Tokens, pages: list[int], chain: list[Entry], num_computed: int) -> None:
        """Make the full pages among the first `num_computed` tokens findable, and add their entries to `chain`.

        tokens: int32 [n >= num_computed]; pages: the sequence's block table; chain: the entries of its first
        len(chain) pages. A page whose content is cached already in another page stays private, and the chain goes on
        with that other one. Where an ancestor was forgotten, or a digest collides, nothing more can be found by a
        prompt, so nothing more is published.
        """
        first = len(chain)
        if chain and not chain[-1].live:
            return
        for i, chunk in enumerate(self._full_pages(tokens, first * self.page_size, num_computed), first):
            parent = chain[-1] if chain else self._root
            digest = self._digest(parent.digest, chunk)
            entry = self._entries.get(digest)
            if entry is None:
                entry = Entry(digest, pages[i], chunk, parent)
                self._entries[digest] = self._by_page[pages[i]] = entry
                parent.children.add(entry)
            elif entry.tokens != chunk or entry.parent is not parent:
                return
            chain.append(entry)

    def park(self, page: int) -> None:
        """The page has lost its last owner: it may be evicted, after all that were parked before.

        Whoever parks pages of a sequence, the last first, touches the last one's entry afterwards.
        """
        self._idle[page] = self._by_page[page]

    def unpark(self, page: int) -> None:
        """The page has an owner (again)."""
        self._idle.pop(page, None)

    def touch(self, entry: Entry | None) -> None:
        """Count a use of the entry, then of each of its ancestors: without an owner they are the last to go."""
        while entry is not None and entry.live:
            if entry.page in self._idle:
                self._idle.move_to_end(entry.page)
            entry = entry.parent

    def evict(self) -> list[int]:
        """Forget the least recently used page without an owner, and what only it leads to.

        Returns the pages that are nobody's now: that page first. Raises KeyError if every page has an owner.
        """
        page = next(iter(self._idle), None)
        if page is None:
            raise KeyError("no page without an owner")
        return self._forget(self._by_page[page])

    def check(self) -> None:
        """Prove INV-1 to INV-3 from scratch. Raises InvariantError, which names the invariant and the page."""
        for key, entry in self._entries.items():
            parent = entry.parent
            if parent is None or (parent is not self._root and self._entries.get(parent.digest) is not parent):
                raise InvariantError(f"prefix cache INV-1: the parent of page {entry.page} is not an entry")
            if entry not in parent.children or not entry.live:
                raise InvariantError(f"prefix cache INV-1: page {entry.page} is not a child of its parent")
            if self._by_page.get(entry.page) is not entry:
                raise InvariantError(f"prefix cache INV-2: page {entry.page} leads to another entry")
            if not key == entry.digest == self._digest(parent.digest, entry.tokens):
                raise InvariantError(f"prefix cache INV-2: page {entry.page} is not under the digest of its tokens")
        known = {self._root, *self._entries.values()}
        children = sum(len(entry.children) for entry in known)
        if not len(self._by_page) == len(self._entries) == children:
            raise InvariantError(
                f"prefix cache INV-2: {len(self._entries)} entries, {len(self._by_page)} pages, {children} children"
            )
        order = {entry: i for i, entry in enumerate(self._idle.values())}
        for page, entry in self._idle.items():
            if self._by_page.get(page) is not entry:
                raise InvariantError(f"prefix cache INV-2: idle page {page} has no entry")
            if entry.parent in order and order[entry.parent] < order[entry]:
                raise InvariantError(f"prefix cache INV-3: idle page {page} would outlive its parent")

    def idle_pages(self) -> Iterator[int]:
        """Pages without an owner, the next to be evicted first."""
        return iter(self._idle)

    def _full_pages(self, tokens: Tokens, start: int, stop: int) -> Iterator[bytes]:
        """The bytes of each full page between `start` (a multiple of the page size) and `stop`."""
        raw = np.ascontiguousarray(tokens[: max(stop, 0)], dtype="<i4").tobytes()
        size = self.page_size * 4
        for begin in range(start * 4, len(raw) - size + 1, size):
            yield raw[begin : begin + size]

    def _forget(self, entry: Entry) -> list[int]:
        """Drop the entry and its descendants; the pages among them that had no owner, its own first."""
        nobodys = []
        stack = [entry]
        while stack:
            gone = stack.pop()
            gone.live = False
            assert gone.parent is not None
            gone.parent.children.discard(gone)
            stack.extend(gone.children)
            del self._entries[gone.digest], self._by_page[gone.page]
            if self._idle.pop(gone.page, None) is not None:
                nobodys.append(gone.page)
        return nobodys
