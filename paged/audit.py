"""The auditor: proves a manager's invariants from scratch, and shows who holds what.

It looks at everything and changes nothing, so it may be called at any moment. What it finds wrong it names: the
invariant, the page, and the sequences that hold it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal

from paged.block_table import first_page
from paged.errors import InvariantError

if TYPE_CHECKING:
    from paged.manager import KVCacheManager, _Held


Broken = Callable[[str, int, str], InvariantError]


@dataclass(frozen=True, slots=True)
class Holder:
    """One reference to a page: by the table of a sequence, or by a move under way (index None)."""

    seq_id: int | None
    label: str | None
    group: int | None
    index: int | None

    def __str__(self) -> str:
        if self.seq_id is None:
            return "a move"
        name = _sequence(self.seq_id, self.label)
        return f"{name} (page {self.index}" + (f" of group {self.group})" if self.group else ")")


@dataclass(frozen=True, slots=True)
class PageUse:
    """What one page is used for."""

    page: int
    state: Literal["free", "cached", "referenced"]
    holders: tuple[Holder, ...]
    findable: bool  # by a prompt that begins alike
    pinned: bool


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Every page but the null page, in order of id. `text` and `svg` draw it."""

    page_size: int
    pages: tuple[PageUse, ...]

    def held_by(self) -> dict[str, list[int]]:
        """Pages by what holds them: `req-1 (sequence 4)`, or `moves`."""
        result: dict[str, list[int]] = {}
        for use in self.pages:
            for holder in use.holders:
                result.setdefault(_owner(holder), []).append(use.page)
        return result

    def text(self, width: int = 64) -> str:
        """A letter a page, a line of totals, and the pages of every owner."""
        counts = Counter(use.state for use in self.pages)
        marks = "".join(_mark(use) for use in self.pages)
        lines = [
            f"{len(self.pages)} pages of {self.page_size} tokens: {counts['referenced']} referenced, "
            f"{counts['cached']} cached, {counts['free']} free"
        ]
        lines += [f"{i + 1:>6} {marks[i : i + width]}" for i in range(0, len(marks), width)]
        lines.append("       . free   c cached   p pinned   # held   2-8 held by so many   9 by nine or more")
        lines += [f"{owner}: {_ranges(pages)}" for owner, pages in self.held_by().items()]
        return "\n".join(lines)

    def svg(self, columns: int = 32) -> str:
        """A square a page: white is free, grey cached, brown cached and pinned, any other colour is its owner's.

        A page of several owners has a stripe for each.
        """
        size, gap, top = 18, 2, 30
        colours = {owner: f"hsl({i * 137 % 360},60%,{55 + i % 3 * 8}%)" for i, owner in enumerate(self.held_by())}
        rows = -(-len(self.pages) // columns)
        legend = top + rows * (size + gap) + 12
        names = [*colours.items(), ("cached, free to be taken", "#bbb")]
        if any(use.pinned and not use.holders for use in self.pages):
            names.append(("cached and pinned, the last to be taken", "#8a6d3b"))
        height = legend + 18 * len(names)
        width = max(columns * (size + gap), 420) + 16
        counts = Counter(use.state for use in self.pages)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
            f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
            f'<text x="8" y="18">{len(self.pages)} pages of {self.page_size} tokens: {counts["referenced"]} '
            f"referenced, {counts['cached']} cached, {counts['free']} free</text>",
        ]
        for i, use in enumerate(self.pages):
            x, y = 8 + i % columns * (size + gap), top + i // columns * (size + gap)
            title = f"page {use.page}: {use.state}" + "".join(f", {holder}" for holder in use.holders)
            fills = [colours[_owner(holder)] for holder in use.holders] or [
                "white" if use.state == "free" else "#8a6d3b" if use.pinned else "#bbb"
            ]
            step = size / len(fills)
            bars = "".join(
                f'<rect x="{x}" y="{y + n * step:.2f}" width="{size}" height="{step:.2f}" fill="{fill}"/>'
                for n, fill in enumerate(fills)
            )
            frame = f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="none" stroke="#777"/>'
            parts.append(f"<g><title>{_escaped(title)}</title>{bars}{frame}</g>")
        for n, (name, fill) in enumerate(names):
            y = legend + n * 18
            parts.append(f'<rect x="8" y="{y}" width="12" height="12" fill="{fill}"/>')
            parts.append(f'<text x="26" y="{y + 11}">{_escaped(name)}</text>')
        return "".join([*parts, "</svg>"])


def explain(manager: KVCacheManager) -> MemoryMap:
    """Who holds what, at this moment."""
    holders = _holders(manager)
    idle = set(manager.prefix_cache.idle_pages())
    uses = []
    for page in range(1, manager.allocator.num_pages):
        entry = manager.prefix_cache.entry(page)
        held = tuple(holders.get(page, ()))
        state: Literal["free", "cached", "referenced"] = "referenced" if held else "cached" if page in idle else "free"
        pinned = entry is not None and manager.prefix_cache.is_pinned(entry)
        uses.append(PageUse(page, state, held, entry is not None, pinned))
    return MemoryMap(manager.page_size, tuple(uses))


def check(manager: KVCacheManager, idle: bool = False) -> None:
    """Prove P1 to P4 from scratch; with `idle` also that nothing is held. Raises InvariantError, which says who.

    Of P3 what can be known here: a sequence's pages are those of its entries, these are one history in its namespace,
    and their digests follow from their tokens. That these are the tokens of the sequence, only the caller knows.
    """
    holders = _holders(manager)

    def broken(invariant: str, page: int, what: str) -> InvariantError:
        held = ", ".join(map(str, holders.get(page, ()))) or "nobody"
        return InvariantError(f"{invariant}: page {page} {what}; held by {held}")

    _check_store(manager)
    counts = {page: len(held) for page, held in holders.items()}
    allocator, cache = manager.allocator, manager.prefix_cache
    for page in sorted({*counts, *range(1, allocator.num_pages)}):
        counted = allocator.ref_count(page) if 0 <= page < allocator.num_pages else 0
        if counts.get(page, 0) != counted:
            raise broken("P1", page, f"is referenced {counts.get(page, 0)} times, its count is {counted}")
    allocator.check()
    cache.check()
    unowned = set(cache.idle_pages())
    if len(unowned) != allocator.num_cached:
        raise InvariantError(f"P1: {len(unowned)} pages are evictable, {allocator.num_cached} are cached")
    for page in range(1, allocator.num_pages):
        if page in unowned and page in counts:
            raise broken("P1", page, "is evictable with an owner")
        if page not in counts and page not in unowned and cache.entry(page) is not None:
            raise broken("P3", page, "can be found, but nobody keeps it")
    moved = Counter(manager._pages.held_by_moves())
    if moved != manager._pages._moved:
        raise InvariantError(f"P1: moves hold pages {dict(moved)}, counted are {manager._pages._moved}")
    promised = Counter((digest, seq_id) for digest, owners in manager._promised.items() for seq_id in owners)
    promises = Counter((held.promise, seq_id) for seq_id, held in manager._held.items() if held.promise is not None)
    if promised != promises or not all(manager._promised.values()):
        wrong = sorted({seq_id for _, seq_id in (promised - promises) + (promises - promised)})
        raise InvariantError(f"P3: pages are awaited from other sequences than compute them: {wrong}")
    for seq_id, held in manager._held.items():
        _check_sequence(manager, seq_id, held, broken)
    if idle and holders:
        leaks = explain(manager).held_by()
        pages = "; ".join(f"{owner} holds pages {_ranges(pages)}" for owner, pages in leaks.items())
        raise InvariantError(f"P1: at idle nothing is referenced, but {pages}")


def _check_store(manager: KVCacheManager) -> None:
    store = manager._store
    rows = [held.row for held in manager._held.values()]
    if manager._row_of != {seq_id: held.row for seq_id, held in manager._held.items()}:
        raise InvariantError("P1: the rows of the sequences are noted otherwise than they are")
    if manager._last_rows is not None and [manager._row_of.get(i) for i in manager._last_rows[0]] != list(
        manager._last_rows[1]
    ):
        raise InvariantError("P1: the rows of the last batch are others now")
    if sorted(rows + store._unused) != list(range(len(store.num_pages))):
        raise InvariantError("P1: the rows of the tables are not each one sequence's, or unused")
    for row in range(len(store.num_pages)):
        if store.pages[:, row, store.num_pages[row] :].any():
            raise InvariantError(f"P1: row {row} has pages beyond the end of its table")
    for what in ("num_pages", "num_computed", "frozen"):
        if getattr(store, what)[store._unused].any():
            raise InvariantError(f"P1: {what} of an unused row is not 0")


def _check_sequence(manager: KVCacheManager, seq_id: int, held: _Held, broken: Broken) -> None:
    store, size, cache = manager._store, manager.page_size, manager.prefix_cache
    computed, num_pages = int(store.num_computed[held.row]), int(store.num_pages[held.row])
    who = _sequence(seq_id, held.label)
    if computed > num_pages * size:
        raise InvariantError(f"P1: {who} has computed {computed} tokens, and has {num_pages} pages")
    if store.frozen[held.row] and computed % size == 0:
        raise InvariantError(f"P2: {who} writes next into a new page, which nobody shares, and is said to share it")
    if len(held.chain) * size > computed:
        raise InvariantError(f"P4: {who} has published tokens that are not computed")
    for parent, child in zip(held.chain, held.chain[1:], strict=False):
        if child.parent is not parent or (child.live and not parent.live):
            raise InvariantError(f"P3: the entries of {who} are not one history: {held.chain}")
    if held.chain and (root := held.chain[0].parent) is not None and root.tokens != held.namespace:
        raise InvariantError(f"P3: {who} shares pages of another namespace")
    for (group, index), page in {change[:2]: change[2] for change in held.changes}.items():
        if index >= num_pages or store.pages[group, held.row, index] != page:
            raise broken("P1", page, f"is said to stand at {index} of {who} now, and does not")
    for group, window in enumerate(manager.windows):
        table = store.pages[group, held.row, :num_pages].tolist()
        first = first_page(computed, window, size)
        for index, page in enumerate(table):
            if (page == 0) != (index < first):
                raise broken("P1", page, f"stands at {index} of {who}, whose window begins at {first}")
            entry = cache.entry(page) if page else None
            if index < len(held.chain):
                if page and held.chain[index].live and entry is not held.chain[index]:
                    raise broken("P3", page, f"is not where the tokens of {who} are found")
            elif entry is not None and index * size >= computed:
                raise broken("P4", page, f"can be found, and {who} has not computed it")
            written_next = index == computed // size and computed % size and not store.frozen[held.row]
            if written_next and manager._pages.must_copy(page):
                raise broken("P2", page, f"is written next by {who}, who does not know that it is shared")


def _holders(manager: KVCacheManager) -> dict[int, list[Holder]]:
    """The holders of every page that has some, from the tables and the moves alone."""
    result: dict[int, list[Holder]] = {}
    for seq_id, held in manager._held.items():
        num_pages = manager._store.num_pages[held.row]
        for group, table in enumerate(manager._store.pages[:, held.row, :num_pages].tolist()):
            for index, page in enumerate(table):
                if page:
                    result.setdefault(page, []).append(Holder(seq_id, held.label, group, index))
    for page in manager._pages.held_by_moves():
        result.setdefault(page, []).append(Holder(None, None, None, None))
    return result


def _owner(holder: Holder) -> str:
    if holder.seq_id is None:
        return "moves"
    return f"{_one_line(holder.label)} (sequence {holder.seq_id})" if holder.label else f"sequence {holder.seq_id}"


def _sequence(seq_id: int, label: str | None) -> str:
    return f"sequence {seq_id}" + (f" of {_one_line(label)}" if label else "")


def _one_line(label: str) -> str:
    """Control characters and ends of lines as escapes."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda match: ascii(match[0])[1:-1], f"{label}")


def _escaped(text: str) -> str:
    """As XML takes it, which knows no control characters and no halves of surrogate pairs."""
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\N{REPLACEMENT CHARACTER}", text))


def _mark(use: PageUse) -> str:
    if use.holders:
        return "#" if len(use.holders) == 1 else str(min(len(use.holders), 9))
    return "." if use.state == "free" else "p" if use.pinned else "c"


def _ranges(pages: list[int]) -> str:
    """`1-3, 7` for [1, 2, 3, 7]; pages in any order."""
    parts: list[list[int]] = []
    for page in sorted(set(pages)):
        if parts and parts[-1][1] == page - 1:
            parts[-1][1] = page
        else:
            parts.append([page, page])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
