"""PrefixCache: finds the pages that already hold the K and V of a prompt's beginning.

It owns the map from the digest of a page's tokens to its pages, one in each group, and the order in which pages without
an owner are given up. It does not know reference counts, tables or requests: the manager tells it when a page loses its
last owner and gains one.

The digest of a full page is sha256 over the digest of the page before it and its own tokens (int32, little-endian), so
it stands for the whole history; the first page follows the digest of its namespace. A digest alone is never trusted: a
hit must also have the same tokens and the same parent entry, which by induction is the same history, whatever the
digest function does.

    namespace <- [t0..t3] <- [t4..t7] <- [t8..t11]      an entry knows its parent; a prompt is matched from its
                          <- [t4'..t7']                 namespace on

A hit needs every page of it in groups of full attention, in a windowed group only those that the next token sees.

Eviction is by least recent use, page by page. Of a chain the tail is parked first, so it goes first. When a page of a
group of full attention goes, nothing after it can be hit, so all of that goes too. Pinned pages go after all others.

Invariants, which `check()` proves from scratch:

    INV-1  an entry's parent is an entry, or it is a namespace; the parent knows it as a child
    INV-2  map, pages and children name the same entries; no page belongs to two; no entry has neither page nor child
    INV-3  in a group of full attention a page goes before that of the entry's parent
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from paged.block_table import Windows, first_page
from paged.errors import InvariantError

Tokens = npt.NDArray[np.int32]


def namespace(salt: str | int | None = None, adapter: str | int | None = None, weights: int = 0) -> bytes:
    """What must be equal, besides the tokens, for pages to be shared: a salt, an adapter, the version of the weights.

    The encoding is unambiguous: -1, "-1", 1, "1" and True are five different salts.
    """
    # Escapes would make half a surrogate pair, and another, what the whole character is.
    return json.dumps([salt, adapter, weights], ensure_ascii=False).encode("utf-8", "surrogatepass")


DEFAULT = namespace()


class Entry:
    """One page of a history in every group: what it holds, and where. `live` turns false when it is forgotten.

    Children are a linked list of siblings: a container in each of a million entries would keep the garbage collector
    busy (docs/log.md).
    """

    __slots__ = ("child", "digest", "left", "live", "pages", "parent", "right", "tokens")

    def __init__(self, digest: bytes, tokens: bytes, parent: Entry | None, pages: tuple[int, ...]) -> None:
        self.digest = digest
        self.tokens = tokens  # of a namespace, its encoding
        self.pages = pages  # of each group; the null page where there is none
        self.parent = parent  # of a namespace, None
        self.child: Entry | None = None  # the first
        self.left: Entry | None = None  # siblings
        self.live = True
        if parent is None:
            self.right: Entry | None = None
            return
        self.right = right = parent.child
        if right is not None:
            right.left = self
        parent.child = self

    def __repr__(self) -> str:
        return f"Entry(pages={self.pages}, digest={self.digest.hex()[:8]})"

    @property
    def children(self) -> Iterator[Entry]:
        child = self.child
        while child is not None:
            yield child
            child = child.right

    def leave_parent(self) -> None:
        """Out of the parent's children, the parent of which it still knows."""
        assert self.parent is not None
        if self.left is None:
            self.parent.child = self.right
        else:
            self.left.right = self.right
        if self.right is not None:
            self.right.left = self.left
        self.left = self.right = None


def sha256_digest(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(parent + tokens).digest()


def _namespace_digest(namespace: bytes) -> bytes:
    """What the first page of a namespace follows."""
    return hashlib.sha256(namespace).digest()


def as_tokens(tokens: Tokens) -> Tokens:
    """What was given as tokens. Raises TypeError if it is no array int32 [n]: another would never match, or wrap."""
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise TypeError(f"tokens must be a NumPy array int32 [n], not {found}: np.array(ids, dtype=np.int32) makes one")
    return tokens


def _bytes(tokens: Tokens) -> bytes:
    """Little-endian int32."""
    return (tokens if tokens.dtype == "<i4" else tokens.astype("<i4")).tobytes()


class PrefixCache:
    """Pages by the digest of their history. `digest` may be replaced in tests only: any function is safe."""

    def __init__(
        self,
        page_size: int,
        windows: Windows = (None,),
        digest: Callable[[bytes, bytes], bytes] = sha256_digest,
    ) -> None:
        self.page_size = page_size
        self.windows = windows
        self._digest = digest
        self._roots: dict[bytes, Entry] = {}  # those that have children
        self._entries: dict[bytes, Entry] = {}
        self._by_page: dict[int, Entry] = {}
        # Pages without an owner, the next to go first: those of unpinned entries, then those of pinned ones.
        self._idle: OrderedDict[int, Entry] = OrderedDict()
        self._pinned_idle: OrderedDict[int, Entry] = OrderedDict()
        self._pins: dict[Entry, float] = {}  # entry -> when it ends

    def __len__(self) -> int:
        """Pages that can be found."""
        return len(self._by_page)

    def entry(self, page: int) -> Entry | None:
        """What the page is found by; None if it cannot be found."""
        return self._by_page.get(page)

    def findable(self, pages: Iterable[int]) -> list[int]:
        """Those of the pages that can be found."""
        by_page = self._by_page
        return [page for page in pages if page in by_page]

    @property
    def num_idle(self) -> int:
        return len(self._idle) + len(self._pinned_idle)

    def match(self, tokens: Tokens, namespace: bytes = DEFAULT) -> list[Entry]:
        """The entries of the longest cached prefix of `tokens`, int32 [n], never its last token. Changes nothing."""
        parent = self._roots.get(namespace)
        if parent is None:
            return []
        found: list[Entry] = []
        entries, digest = self._entries, self._digest
        raw, size = _bytes(tokens[: max(len(tokens) - 1, 0)]), self.page_size * 4
        for begin in range(0, len(raw) - size + 1, size):
            chunk = raw[begin : begin + size]
            entry = entries.get(digest(parent.digest, chunk))
            if entry is None or entry.tokens != chunk or entry.parent is not parent:
                break
            found.append(entry)
            parent = entry
        return found[: self.usable(found)]

    def usable(self, chain: list[Entry]) -> int:
        """How many of the first entries of `chain` make the longest hit that is whole in every group."""
        if len(self.windows) == 1 and self.windows[0] is None:
            return len(chain)  # an entry of a group of full attention has its page
        best, runs = 0, [0] * len(self.windows)
        for length, entry in enumerate(chain, 1):
            whole = True
            for group, window in enumerate(self.windows):
                runs[group] = runs[group] + 1 if entry.pages[group] else 0
                seen = first_page(length * self.page_size, window, self.page_size)
                whole &= runs[group] >= length - seen
            best = length if whole else best
        return best

    def next_digest(self, tokens: Tokens, chain: list[Entry], namespace: bytes = DEFAULT) -> bytes | None:
        """The digest of the page of `tokens` after those of `chain`; None if they do not fill it."""
        size = self.page_size
        page = tokens[len(chain) * size : (len(chain) + 1) * size]
        if len(page) < size:
            return None
        return self._digest(chain[-1].digest if chain else _namespace_digest(namespace), _bytes(page))

    def publish(
        self, tokens: Tokens, pages: tuple[int, ...], chain: list[Entry], namespace: bytes = DEFAULT
    ) -> tuple[int, ...] | None:
        """Make the page after those of `chain` findable, and add its entry to `chain`.

        tokens: int32 [page_size], all computed; pages: of each group, the null page where it has left the window.
        Returns the pages where this content is cached now, in some group perhaps another than the one given: that one
        is to take its place. None, and nothing happens, where an ancestor was forgotten, a digest collides, or there is
        no page: then no prompt can find it. Raises ValueError for fewer or more tokens than a page's.
        """
        if len(tokens) != self.page_size:
            raise ValueError(f"a page has {self.page_size} tokens, not {len(tokens)}")
        parent = chain[-1] if chain else self._root(namespace)
        if not parent.live:
            return None
        chunk = _bytes(tokens)
        digest = self._digest(parent.digest, chunk)
        entry = self._entries.get(digest)
        if entry is None:
            if not any(pages):
                return None  # they have left their windows: nothing to be found
            entry = self._entries[digest] = Entry(digest, chunk, parent, pages)
            if parent.parent is None:
                self._roots[namespace] = parent
            for page in pages:
                if page:
                    self._by_page[page] = entry
        elif entry.tokens != chunk or entry.parent is not parent:
            return None
        elif entry.pages != pages:
            for have, page in zip(entry.pages, pages, strict=True):
                if page and not have:
                    self._by_page[page] = entry
            entry.pages = tuple(have or page for have, page in zip(entry.pages, pages, strict=True))
        chain.append(entry)
        return entry.pages

    def park(self, pages: Iterable[int]) -> None:
        """These pages have lost their last owner: they may be evicted, in this order, after all parked before.

        Whoever parks pages of a sequence parks the last first.
        """
        idle, by_page = self._idle, self._by_page
        for page in pages:
            entry = by_page[page]
            if self._pins and entry in self._pins:
                self._pinned_idle[page] = entry
            else:
                idle[page] = entry

    def unpark(self, pages: Iterable[int]) -> None:
        """These pages have an owner (again)."""
        for page in pages:
            if self._idle.pop(page, None) is None:
                self._pinned_idle.pop(page, None)

    def touch(self, entry: Entry | None) -> None:
        """Count a use of the entry, then of each of its ancestors: without an owner they are the last to go."""
        while entry is not None and entry.live:
            queue = self._pinned_idle if entry in self._pins else self._idle
            for page in entry.pages:
                if page in queue:
                    queue.move_to_end(page)
            entry = entry.parent

    def pin(self, chain: list[Entry], until: float) -> None:
        """Let the pages of `chain`, which begins at a namespace, go after all that are not pinned, until that time.

        Of two pins of an entry the later end counts. What the time is, only the caller of `expire` knows.
        """
        for entry in chain:
            self._pins[entry] = max(until, self._pins.get(entry, until))
        self._requeue(chain)

    def expire(self, now: float) -> None:
        """End the pins whose time has come."""
        over = [entry for entry, until in self._pins.items() if until <= now]
        for entry in over:
            del self._pins[entry]
        self._requeue(over)  # a pin names parents first, and they stand in the order in which they were first pinned

    def evict(self, least: int = 1) -> list[int]:
        """Give up the least recently used pages without an owner, and what only they lead to, until there are `least`.

        Returns the pages that are nobody's now. Raises KeyError, and gives up none, if fewer are without an owner.
        """
        if least > self.num_idle:
            raise KeyError(f"{self.num_idle} pages without an owner, {least} wanted")
        nobodys: list[int] = []
        one_group = len(self.windows) == 1
        while len(nobodys) < least:
            page, entry = (self._idle or self._pinned_idle).popitem(last=False)
            nobodys.append(page)
            del self._by_page[page]
            group = 0 if one_group else entry.pages.index(page)
            entry.pages = (0,) if one_group else tuple(0 if other == page else other for other in entry.pages)
            if self.windows[group] is None and not (one_group and entry.child is None):
                nobodys += self._forget(entry)
            else:
                self._prune(entry)
        return nobodys

    def reset(self) -> list[int]:
        """Forget everything. Returns the pages that had no owner, which are nobody's now."""
        first = [entry for root in self._roots.values() for entry in root.children]
        return [page for entry in first for page in self._forget(entry)]

    def check(self) -> None:
        """Prove INV-1 to INV-3 from scratch. Raises InvariantError, which names the invariant and the page."""
        found: dict[int, Entry] = {}
        parents = (*self._roots.values(), *self._entries.values())
        children = {(parent, child) for parent in parents for child in parent.children}
        for digest, entry in self._entries.items():
            parent = entry.parent
            if not entry.live or entry.digest != digest or parent is None or (parent, entry) not in children:
                raise InvariantError(f"prefix cache INV-1: {entry} is not a child of its parent {parent}")
            if digest != self._digest(parent.digest, entry.tokens):
                raise InvariantError(f"prefix cache INV-1: {entry} does not follow its parent {parent}")
            if parent.parent is None:
                if self._roots.get(parent.tokens) is not parent:
                    raise InvariantError(f"prefix cache INV-1: {entry} lies in a namespace that cannot be found")
            elif self._entries.get(parent.digest) is not parent:
                raise InvariantError(f"prefix cache INV-1: the parent of {entry} cannot be found")
            if entry.child is None and not any(entry.pages):
                raise InvariantError(f"prefix cache INV-2: {entry} holds nothing and leads nowhere")
            for page in entry.pages:
                if page and found.setdefault(page, entry) is not entry:
                    raise InvariantError(f"prefix cache INV-2: page {page} belongs to two entries")
        if not self._pins.keys() <= set(self._entries.values()):
            raise InvariantError("prefix cache INV-2: an entry is pinned that cannot be found")
        if found != self._by_page:
            page = min(page for page in {*found, *self._by_page} if found.get(page) is not self._by_page.get(page))
            raise InvariantError(f"prefix cache INV-2: pages and entries do not agree on page {page}")
        for parent in parents:
            left = None
            for child in parent.children:
                if child.left is not left:
                    raise InvariantError(f"prefix cache INV-2: {child} and its siblings do not agree on their order")
                left = child
                if self._entries.get(child.digest) is not child or child.parent is not parent:
                    raise InvariantError(f"prefix cache INV-2: {child} is a child, but cannot be found")
        self._check_order()

    def _check_order(self) -> None:
        """INV-3 of each page and its parent's; not of those further up, where the parent's has an owner."""
        gone: set[int] = set()
        for queue, pinned in ((self._idle, False), (self._pinned_idle, True)):
            for page, entry in queue.items():
                if self._by_page.get(page) is not entry or (entry in self._pins) != pinned:
                    raise InvariantError(f"prefix cache INV-2: page {page} is idle, and not where {entry} belongs")
                assert entry.parent is not None
                group = entry.pages.index(page)
                if self.windows[group] is None and entry.parent.pages[group] in gone:
                    raise InvariantError(f"prefix cache INV-3: idle page {page} would outlive its parent")
                gone.add(page)

    def is_pinned(self, entry: Entry) -> bool:
        return entry in self._pins

    def idle_pages(self) -> Iterator[int]:
        """Pages without an owner, the next to be evicted first."""
        yield from self._idle
        yield from self._pinned_idle

    def _root(self, namespace: bytes) -> Entry:
        """The entry of a namespace; a new one is not known before it has a child."""
        known = self._roots.get(namespace)
        return known or Entry(_namespace_digest(namespace), namespace, None, (0,) * len(self.windows))

    def _requeue(self, entries: list[Entry]) -> None:
        """Put the idle pages of entries, the parents first, where they belong now: as used last, the tail first."""
        for entry in reversed(entries):
            for page in entry.pages:
                if page in self._idle or page in self._pinned_idle:
                    self.unpark((page,))
                    self.park((page,))

    def _forget(self, entry: Entry) -> list[int]:
        """Drop the entry and its descendants; the pages among them that had no owner, its own first."""
        nobodys = []
        stack = [entry]
        while stack:
            gone = stack.pop()
            for page in gone.pages:
                if page:
                    del self._by_page[page]
                    if self._idle.pop(page, None) is not None or self._pinned_idle.pop(page, None) is not None:
                        nobodys.append(page)
            gone.pages = (0,) * len(gone.pages)
            stack.extend(gone.children)
            gone.child = None
            if gone is not entry:
                self._drop(gone)
        self._prune(entry)
        return nobodys

    def _prune(self, entry: Entry) -> None:
        """Drop an entry that holds nothing and leads nowhere, then its parent if that is so there too."""
        while entry.parent is not None and entry.child is None and not any(entry.pages):
            self._drop(entry)
            entry.leave_parent()
            entry = entry.parent
        if entry.parent is None and entry.child is None:
            self._roots.pop(entry.tokens, None)

    def _drop(self, entry: Entry) -> None:
        entry.live = False
        if self._pins:
            self._pins.pop(entry, None)
        del self._entries[entry.digest]
