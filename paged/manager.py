"""KVCacheManager: who holds which pages. One block table a sequence, over one allocator and one prefix cache.

It owns the tables and the moves under way. It knows tokens and pages; of a sequence it knows only an id, and it never
sees a tensor: what must happen to the K and V themselves it emits as moves, in order, for the worker to apply.

    allocate   a new sequence: its cached prefix is shared, pages for what is computed next are taken
    extend     room for more tokens; a page that others share is copied before it is written (a move)
    commit     K and V of so many tokens are computed: full pages can be found by others from now on
    fork       a second sequence with the same pages; takes none
    free       all pages are given back; those that can be found again stay cached until the room is needed

A page that a move still reads is held until the move is confirmed.

Invariants, which `check()` proves from scratch, besides those of the parts:

    P1  each page but the null page is free, cached without an owner, or referenced by exactly the block tables (and
        moves under way) that count it
    P2  a page that more than one sequence references is not written: only `extend` makes room, and it copies first
    P4  only pages whose every token is computed can be found
    P5  a call that raises leaves every table and count as it was
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paged.allocator import BlockAllocator
from paged.block_table import BlockTable, pages_for
from paged.errors import InvariantError, OutOfPages, PageStateError
from paged.prefix_cache import Entry, PrefixCache, Tokens


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the K and V of page `source` to page `target`, in every layer."""

    source: int
    target: int


class _Held:
    """What one sequence holds: its table, the cache entries of its first pages, and how many tokens are computed."""

    __slots__ = ("chain", "num_computed", "table")

    def __init__(self, table: BlockTable, chain: list[Entry], num_computed: int) -> None:
        self.table = table
        self.chain = chain
        self.num_computed = num_computed


class KVCacheManager:
    """Pages of one group of layers. `num_pages` counts the null page; sequence ids are the caller's."""

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True) -> None:
        if not 1 <= page_size <= 256 or page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of two from 1 to 256, not {page_size}")
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.allocator = BlockAllocator(num_pages)
        self.prefix_cache = PrefixCache(page_size)
        self._held: dict[int, _Held] = {}
        self._moves: list[Move] = []  # emitted, not yet taken
        self._under_way: list[Move] = []  # taken, not yet confirmed

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._held

    @property
    def num_usable(self) -> int:
        """Pages that can be handed out at all."""
        return self.allocator.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now: free ones, and cached ones without an owner."""
        return self.allocator.num_free + self.allocator.num_cached

    @property
    def num_used(self) -> int:
        """Pages that sequences (and moves under way) hold."""
        return self.allocator.num_used

    def table(self, seq_id: int) -> BlockTable:
        """The sequence's block table; to be read only. Raises PageStateError for an unknown id."""
        return self._get(seq_id).table

    def match(self, tokens: Tokens) -> int:
        """Tokens of the longest cached prefix of `tokens`, int32 [n]: full pages, never the last token.

        Changes nothing; the next call may evict what was found.
        """
        return len(self._match(tokens)) * self.page_size

    def allocate(self, seq_id: int, tokens: Tokens, num_new: int, room_for: int = 0, spare: int = 0) -> int:
        """Begin a sequence: share its cached prefix, take pages for the `num_new` tokens after it.

        tokens: int32 [n], all that is known of the sequence. Pages are taken only as needed, but the call is refused
        unless there would be room for `room_for` tokens of this sequence in all, and `spare` pages more. Returns the
        tokens of the cached prefix. Raises OutOfPages, and PageStateError for a known id.
        """
        if seq_id in self._held:
            raise PageStateError(f"sequence {seq_id} has pages already")
        chain = self._match(tokens)
        cached = len(chain) * self.page_size
        num_tokens = min(len(tokens), cached + num_new)
        wanted = pages_for(num_tokens, self.page_size) - len(chain)
        revived = sum(1 for entry in chain if self.allocator.ref_count(entry.page) == 0)
        least = max(wanted, pages_for(room_for, self.page_size) - len(chain)) + spare
        if least > self.num_available - revived:
            raise OutOfPages(least, self.num_available - revived, self.num_usable)
        for entry in chain:
            self.allocator.share(entry.page)
            self.prefix_cache.unpark(entry.page)
        pages = [entry.page for entry in chain] + self._take(wanted)
        self._held[seq_id] = _Held(BlockTable(self.page_size, pages), chain, cached)
        return cached

    def extend(self, seq_id: int, num_tokens: int) -> list[int]:
        """Make room for `num_tokens` tokens in all, of which those after the computed ones will be written.

        Returns the pages appended to the table. If the page that is written first is shared, the table gets a copy of
        it, by a move. Raises OutOfPages, and PageStateError for an unknown id.
        """
        held = self._get(seq_id)
        pages = held.table.pages
        wanted = pages_for(num_tokens, self.page_size) - len(pages)
        first = held.num_computed // self.page_size
        copies = first < len(pages) and num_tokens > held.num_computed and self.allocator.ref_count(pages[first]) > 1
        if wanted <= 0 and not copies:
            return []
        needed = max(wanted, 0) + copies
        if needed > self.num_available:
            raise OutOfPages(needed, self.num_available, self.num_usable)
        taken = self._take(needed)
        if copies:
            # The move takes over this sequence's reference to the source until it is confirmed.
            self._moves.append(Move(pages[first], taken[0]))
            pages[first] = taken.pop(0)
        pages.extend(taken)
        return taken

    def commit(self, seq_id: int, tokens: Tokens, num_computed: int) -> None:
        """K and V of the first `num_computed` of `tokens`, int32 [n], are computed: full pages can be found now.

        Raises PageStateError for an unknown id, fewer tokens than before, or more than there is room for.
        """
        held = self._get(seq_id)
        if not held.num_computed <= num_computed <= min(held.table.capacity, len(tokens)):
            raise PageStateError(
                f"sequence {seq_id}: {num_computed} tokens computed of {len(tokens)}, {held.num_computed} before, "
                f"room for {held.table.capacity}"
            )
        held.num_computed = num_computed
        if self.enable_prefix_caching and num_computed // self.page_size > len(held.chain):
            self.prefix_cache.publish(tokens, held.table.pages, held.chain, num_computed)

    def fork(self, seq_id: int, new_id: int) -> None:
        """A second sequence `new_id` with the same computed tokens, in the same pages. Takes no page.

        Room beyond the computed tokens stays `seq_id`'s alone. Both must `extend` before they write.

        Raises PageStateError for an unknown `seq_id` or a known `new_id`.
        """
        held = self._get(seq_id)
        if new_id in self._held:
            raise PageStateError(f"sequence {new_id} has pages already")
        table = BlockTable(self.page_size, held.table.pages[: pages_for(held.num_computed, self.page_size)])
        for page in table.pages:
            self.allocator.share(page)
        self._held[new_id] = _Held(table, list(held.chain), held.num_computed)

    def free(self, seq_id: int) -> None:
        """Give back the sequence's pages, the last first. Raises PageStateError for an unknown id."""
        held = self._get(seq_id)
        del self._held[seq_id]
        # Content of this sequence may live in a page of another, without an owner: that was used too, and what leads to
        # a cached page must outlast it.
        used = held.chain[-1] if held.chain else None
        parked = [page for page in reversed(held.table.pages) if self._drop(page)]
        self.prefix_cache.touch(used)
        if parked:
            self.prefix_cache.touch(self.prefix_cache.entry(parked[0]))

    def take_moves(self) -> tuple[Move, ...]:
        """The moves since the last call, in order. Their sources are held until `confirm_moves`."""
        moves = tuple(self._moves)
        self._under_way.extend(moves)
        self._moves.clear()
        return moves

    def confirm_moves(self, moves: Iterable[Move]) -> None:
        """The moves are done (or will never be): let go of their sources. Raises PageStateError for an unknown one."""
        done, under_way = tuple(moves), list(self._under_way)
        for move in done:
            if move not in under_way:
                raise PageStateError(f"{move} is not under way")
            under_way.remove(move)
        self._under_way = under_way
        for move in done:
            if self._drop(move.source):
                self.prefix_cache.touch(self.prefix_cache.entry(move.source))

    def check(self) -> None:
        """Prove the invariants from scratch. Raises InvariantError, which names the invariant, the page, and owners."""
        try:
            self.allocator.check(self._references())
        except InvariantError as error:
            raise InvariantError(f"{error}; held: {self._owners()}") from None
        self.prefix_cache.check()
        idle = set(self.prefix_cache.idle_pages())
        if len(idle) != self.allocator.num_cached:
            raise InvariantError(f"P1: {len(idle)} pages are evictable, {self.allocator.num_cached} are cached")
        for page in range(1, self.allocator.num_pages):
            owned = self.allocator.ref_count(page) > 0
            if page in idle and owned:
                raise InvariantError(f"P1: page {page} is evictable with an owner; held: {self._owners()}")
            if not owned and page not in idle and self.prefix_cache.entry(page) is not None:
                raise InvariantError(f"P3: page {page} can be found, but nobody keeps it; held: {self._owners()}")
        for seq_id, held in self._held.items():
            self._check_held(seq_id, held)

    def _check_held(self, seq_id: int, held: _Held) -> None:
        if held.num_computed > held.table.capacity:
            raise InvariantError(f"P1: sequence {seq_id} has computed {held.num_computed} tokens without pages")
        if len(held.chain) * self.page_size > held.num_computed:
            raise InvariantError(f"P4: sequence {seq_id} has published tokens that are not computed")
        entry, lineage = held.chain[-1] if held.chain else None, list[Entry]()
        while entry is not None and entry.parent is not None:  # up to the root, which has none
            lineage.append(entry)
            entry = entry.parent
        if lineage[::-1] != held.chain:
            raise InvariantError(f"P3: the entries of sequence {seq_id} are not one history: {held.chain}")
        for i, page in enumerate(held.table.pages):
            entry = self.prefix_cache.entry(page)
            # Another may have published a page that was computed before a fork.
            known = held.chain[i] if i < len(held.chain) else None
            computed = (i + 1) * self.page_size <= held.num_computed
            if entry is not None and not (entry is known or (known is None and computed)):
                raise InvariantError(f"P3: page {page} is found by other tokens than sequence {seq_id} has there")

    def _references(self) -> Iterator[int]:
        for held in self._held.values():
            yield from held.table.pages
        for move in (*self._moves, *self._under_way):
            yield move.source

    def _owners(self) -> dict[int, list[int]]:
        return {seq_id: held.table.pages for seq_id, held in self._held.items()}

    def _match(self, tokens: Tokens) -> list[Entry]:
        return self.prefix_cache.match(tokens) if self.enable_prefix_caching else []

    def _take(self, n: int) -> list[int]:
        """`n` pages with one reference each; the caller has made sure that they are there."""
        while self.allocator.num_free < n:
            for page in self.prefix_cache.evict():
                self.allocator.reclaim(page)
        return self.allocator.allocate(n)

    def _drop(self, page: int) -> bool:
        """Drop a reference; True if the page is cached without an owner now."""
        if self.prefix_cache.entry(page) is None:
            self.allocator.release(page)
            return False
        if not self.allocator.park(page):
            return False
        self.prefix_cache.park(page)
        return True

    def _get(self, seq_id: int) -> _Held:
        held = self._held.get(seq_id)
        if held is None:
            raise PageStateError(f"sequence {seq_id} has no pages")
        return held
