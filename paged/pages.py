"""Pages: allocator and prefix cache together, and the moves under way. Who holds a page is for the manager to know.

    take      pages that nobody has; cached ones are given up for them, the least recently used first
    acquire   one more reference to pages that can be found
    copy      a page in place of one that others hold too: emits a move
    drop      one reference less; a page that can be found stays cached after its last, any other is free

A page that a move still reads is held until the move is confirmed. In poison mode marks go with the moves, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paged.allocator import BlockAllocator
from paged.errors import OutOfPages, PageStateError
from paged.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the K and V of page `source` to page `target`, in every layer of its group."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Poison mode only, in order with the moves: what is to be noticed about a page.

    poison: it is free, fill it with NaN. seal: it can be found from now on, note what it holds. verify: prove that it
    still holds that.
    """

    page: int
    what: Literal["poison", "seal", "verify"]


class Pages:
    """The pages of one pool, over an allocator and a prefix cache that nobody else changes."""

    def __init__(self, allocator: BlockAllocator, prefix_cache: PrefixCache, poison: bool) -> None:
        self.allocator = allocator
        self.prefix_cache = prefix_cache
        self._poison = poison
        self._moves: list[Move | Mark] = []  # emitted, not yet taken
        self._under_way: list[Move] = []  # taken, not yet confirmed
        self._moved: dict[int, int] = {}  # page -> moves (of both lists) that hold it

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now: free ones, and cached ones without an owner."""
        return self.allocator.num_free + self.allocator.num_cached

    def need(self, n: int, of: int | None = None) -> None:
        """Raise OutOfPages unless `n` pages can be taken (of those `of` that are left)."""
        available = self.num_available if of is None else of
        if n > available:
            raise OutOfPages(n, available, self.allocator.num_pages - 1)

    def take(self, n: int) -> list[int]:
        """`n` pages with one reference each; the caller has made sure that they are there."""
        short = n - self.allocator.num_free
        if short > 0:
            self.reclaim(self.prefix_cache.evict(short))
        return self.allocator.allocate(n)

    def reclaim(self, pages: list[int]) -> None:
        """Pages that the cache has given up are free."""
        self.allocator.reclaim(pages)
        if self._poison:
            self._moves += [Mark(page, what) for page in pages for what in ("verify", "poison")]

    def acquire(self, pages: list[int]) -> None:
        """One more reference to pages that can be found."""
        if self._poison:
            self._moves += [Mark(page, "verify") for page in pages]
        self.allocator.share(pages)
        self.prefix_cache.unpark(pages)

    def drop(self, pages: list[int]) -> None:
        """Drop a reference to each; a page that can be found is cached after its last."""
        found = self.prefix_cache.findable(pages)
        self.prefix_cache.park(self.allocator.park(found))
        if len(found) < len(pages):
            known = set(found)
            freed = self.allocator.release([page for page in pages if page not in known])
            if self._poison:
                self._moves += [Mark(page, "poison") for page in freed]

    def published(self, pages: Iterable[int]) -> None:
        """Those of these pages that can be found, can be found since now."""
        if self._poison:
            self._moves += [Mark(page, "seal") for page in self.prefix_cache.findable(pages)]

    def must_copy(self, page: int) -> bool:
        """Whether writing to the page would change what another has, or finds."""
        return self.num_sharers(page) > 1 or self.prefix_cache.entry(page) is not None

    def num_sharers(self, page: int) -> int:
        """Tables that hold the page. A copy of it, emitted already, is made before anybody writes to it."""
        return self.allocator.ref_count(page) - self._moved.get(page, 0)

    def copy(self, page: int) -> int:
        """A page to hold what `page` does. The move takes over the caller's reference to that until it is confirmed."""
        (target,) = self.take(1)
        self._moves.append(Move(page, target))
        self._moved[page] = self._moved.get(page, 0) + 1
        return target

    def take_moves(self) -> tuple[Move | Mark, ...]:
        """The moves since the last call, in order. Their sources are held until `confirm_moves`."""
        moves, self._moves = tuple(self._moves), []
        self._under_way += [move for move in moves if isinstance(move, Move)]
        return moves

    def confirm_moves(self, moves: Iterable[Move | Mark]) -> None:
        """The moves are done (or will never be): let go of their sources. Raises PageStateError for an unknown one."""
        done, under_way = [move for move in moves if isinstance(move, Move)], list(self._under_way)
        for move in done:
            if move not in under_way:
                raise PageStateError(f"{move} is not under way")
            under_way.remove(move)
        self._under_way = under_way
        for move in done:
            self._moved[move.source] -= 1
            if not self._moved[move.source]:
                del self._moved[move.source]
            self.drop([move.source])
            # Its ancestors may have lost their owners before it.
            self.prefix_cache.touch(self.prefix_cache.entry(move.source))

    def held_by_moves(self) -> list[int]:
        """The source of every move that is not confirmed."""
        return [move.source for move in (*self._moves, *self._under_way) if isinstance(move, Move)]
