"""KVCacheManager: who holds which pages. Block tables in every group, over one allocator and one prefix cache.

It owns the tables. It knows tokens and pages; of a sequence it knows only an id, and it never
sees a tensor: what must happen to the K and V themselves it emits as moves, in order, for the worker to apply.

    allocate   a new sequence: its cached prefix is shared, pages for what is computed next are taken
    extend     room for more tokens; a page that others share is copied before it is written (a move)
    commit     K and V of so many tokens are computed: full pages can be found by others from now on
    fork       a second sequence with the same pages; takes none
    truncate   back to fewer tokens
    free       all pages are given back; those that can be found again stay cached until the room is needed

A table changes by more than growth: a copy takes the place of a shared page, the cached page that of an equal one which
was computed at the same time, the null page that of one that has left the window. `take_changes` gives all of it in
order, so that a worker's own copy of the table follows. A page that a move still reads is held until it is confirmed.

Invariants, which `check()` proves from scratch, besides those of the parts:

    P1  each page but the null page is free, cached without an owner, or referenced by exactly the block tables (and
        moves under way) that count it
    P2  a page that more than one sequence references, or that can be found, is not written: only `extend` makes room,
        and it copies first
    P3  what a sequence shares has the tokens that it has there, in the same namespace (proven of the cache's entries,
        not of the caller's tokens, which nobody keeps here)
    P4  only pages whose every token is computed can be found
    P5  a call that raises leaves every table and count as it was
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from paged import audit
from paged.allocator import NULL_PAGE, BlockAllocator
from paged.block_table import BlockTable, TableStore, Windows, first_page, pages_for
from paged.errors import PageStateError
from paged.pages import Mark, Move, Pages
from paged.prefix_cache import DEFAULT, Entry, PrefixCache, Tokens, as_tokens

TableChange = tuple[int, int, int]  # group, index in the table, the page that stands there now


class _Held:
    """What one sequence holds, besides its row of the tables."""

    __slots__ = ("chain", "changes", "label", "namespace", "num_known", "promise", "row")

    def __init__(self, row: int, chain: list[Entry], namespace: bytes, label: str | None, num_known: int) -> None:
        self.row = row
        self.num_known = num_known  # tokens that were known when it began: what it is going to compute
        self.chain = chain  # the cache entries of its first pages
        self.namespace = namespace
        self.label = label
        self.changes: list[TableChange] = []  # since they were last taken
        self.promise: bytes | None = None  # digest of the known page that it computes next


class KVCacheManager:
    """Pages of all groups. `num_pages` counts the null page; sequence ids are the caller's.

    windows: for each group the tokens that a query sees, its own included; None is all. poison: emit marks by which the
    pool notices stale reads and stray writes; slow. Raises ValueError for a page_size that is no power of two from 1 to
    256, for windows that are not at least 1, and for fewer than 2 pages. Public calls raise PageStateError for an
    unknown sequence, TypeError for tokens that are not an array int32 [n], for a namespace that is not bytes and for a
    number that is not whole, and ValueError for a negative number and for a group that is not there.
    """

    poison_by_default = False  # the test suite sets it

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        windows: Windows = (None,),
        poison: bool | None = None,
    ) -> None:
        page_size = operator.index(page_size)
        if not 1 <= page_size <= 256 or page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of two from 1 to 256, not {page_size}")
        if not windows or any(
            window is not None and (type(window) is not int or not 1 <= window < 2**63) for window in windows
        ):
            raise ValueError(f"windows must hold None or a number from 1 to 2**63 - 1 for each group, not {windows}")
        self.page_size = page_size
        self._shift = page_size.bit_length() - 1  # tokens >> shift are full pages
        self.windows = windows
        self.enable_prefix_caching = enable_prefix_caching
        self.allocator = BlockAllocator(num_pages)
        self.prefix_cache = PrefixCache(page_size, windows)
        self._windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._store = TableStore(len(windows))
        self._held: dict[int, _Held] = {}
        self._row_of: dict[int, int] = {}  # of each sequence its row, for batches
        self._last_rows: tuple[list[int], npt.NDArray[np.int64]] | None = None  # of the same sequences, asked for again
        self._pages = Pages(self.allocator, self.prefix_cache, self.poison_by_default if poison is None else poison)
        # Digest of a page that is being computed -> the sequences that compute it, who began first first.
        self._promised: dict[bytes, tuple[int, ...]] = {}

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
        return self._pages.num_available

    @property
    def num_used(self) -> int:
        """Pages that sequences (and moves under way) hold."""
        return self.allocator.num_used

    @property
    def num_cached(self) -> int:
        """Pages without an owner that a prefix can find."""
        return self.allocator.num_cached

    def table(self, seq_id: int, group: int = 0) -> BlockTable:
        """The sequence's block table in a group, as it is now."""
        row = self._get(seq_id).row
        self._check_group(group)
        return BlockTable(self.page_size, self._store.pages[group, row, : self._store.num_pages[row]])

    def tables(self, seq_ids: SequenceOf[int], group: int = 0) -> npt.NDArray[np.int32]:
        """The block tables of several sequences, int32 [seqs, most pages], padded with the null page."""
        rows = self._rows(seq_ids)
        self._check_group(group)
        width = int(self._store.num_pages[rows].max(initial=0))
        return self._store.pages[group, rows, :width]  # a copy, row by row

    def num_computed(self, seq_id: int) -> int:
        """Tokens of the sequence whose K and V lie in its pages."""
        return int(self._store.num_computed[self._get(seq_id).row])

    def room(self, seq_id: int) -> int:
        """Tokens that the sequence's tables have room for."""
        return int(self._store.num_pages[self._get(seq_id).row]) * self.page_size

    def rooms(self, seq_ids: SequenceOf[int]) -> npt.NDArray[np.int64]:
        """`room` of several sequences, int64 [seqs]."""
        return self._store.num_pages[self._rows(seq_ids)] << self._shift

    def num_held_each(self, seq_ids: SequenceOf[int]) -> npt.NDArray[np.int64]:
        """Pages that each of several sequences holds in all groups, shared ones too, int64 [seqs]."""
        rows = self._rows(seq_ids)
        total, computed = self._store.num_pages[rows], self._store.num_computed[rows]
        result = total * len(self.windows)
        for _, window in self._windowed:
            result = result - (np.maximum(computed - window + 1, 0) >> self._shift)  # as first_page
        return result

    def num_freed(self, seq_ids: SequenceOf[int]) -> int:
        """Pages that would be nobody's if these sequences gave theirs back."""
        pages, held = np.unique(self._store.pages[:, self._rows(seq_ids)], return_counts=True)
        return sum(
            self.allocator.ref_count(page) == count
            for page, count in zip(pages.tolist(), held.tolist(), strict=True)
            if page
        )

    def changed(self, seq_ids: SequenceOf[int]) -> list[int]:
        """Which of several sequences `take_changes` has something for, as places in `seq_ids`."""
        held = self._held
        try:
            return [i for i, seq_id in enumerate(seq_ids) if held[seq_id].changes]
        except KeyError as error:
            raise PageStateError(f"sequence {error} has no pages") from None

    def num_held(self, seq_ids: SequenceOf[int]) -> int:
        """Pages that sequences hold, each counted once."""
        return int(np.count_nonzero(np.unique(self._store.pages[:, self._rows(seq_ids)])))

    def match(self, tokens: Tokens, namespace: bytes = DEFAULT) -> int:
        """Tokens of the longest cached prefix of `tokens`, int32 [n]: full pages, never the last token.

        Changes nothing; the next call may evict what was found.
        """
        return len(self._match(as_tokens(tokens), namespace)) * self.page_size

    def computing(self, tokens: Tokens, namespace: bytes = DEFAULT) -> int | None:
        """The sequence that is just computing the page after the cached prefix of `tokens`; None if there is none.

        Of several that do, the one that began first. Who waits until that is done, or no sequence does, finds a longer
        prefix.
        """
        tokens = as_tokens(tokens)
        _check_namespace(namespace)
        if not self._promised:
            return None
        chain = self._match(tokens, namespace)
        digest = self.prefix_cache.next_digest(tokens[:-1], chain, namespace)
        return None if digest is None else self._promised.get(digest, (None,))[0]

    def allocate(
        self,
        seq_id: int,
        tokens: Tokens,
        num_new: int,
        room: int = 0,
        spare: int = 0,
        namespace: bytes = DEFAULT,
        label: str | None = None,
        most_cached: int | None = None,
    ) -> int:
        """Begin a sequence: share its cached prefix, take pages for the `num_new` tokens after it.

        tokens: int32 [n], all that is known of the sequence. Pages are taken only as needed, but the call is refused
        unless this sequence could have `room` pages in all, and `spare` pages more were left. label names the owner in
        reports. Returns the tokens of the cached prefix, at most `most_cached`. Raises OutOfPages, and PageStateError
        for a known id.
        """
        if seq_id in self._held:
            raise PageStateError(f"sequence {seq_id} has pages already")
        tokens, num_new, room, spare = as_tokens(tokens), _count(num_new), _count(room), _count(spare)
        # A prompt of one token more has no longer prefix.
        chain = self._match(tokens if most_cached is None else tokens[: _count(most_cached) + 1], namespace)
        cached = len(chain) * self.page_size
        shared = [
            [page for entry in chain[first_page(cached, window, self.page_size) :] if (page := entry.pages[group])]
            for group, window in enumerate(self.windows)
        ]
        new = pages_for(min(len(tokens), cached + num_new), self.page_size) - len(chain)
        have = sum(map(len, shared))
        revived = sum(1 for pages in shared for page in pages if self.allocator.ref_count(page) == 0)
        least = max(new * len(self.windows), room - have) + spare
        self._pages.need(least, self.num_available - revived)
        for pages in shared:
            self._pages.acquire(pages)
        held = _Held(self._store.add(), chain, namespace, label, len(tokens))
        self._store.append(held.row, [[NULL_PAGE] * (len(chain) - len(pages)) + pages for pages in shared])
        self._store.num_computed[held.row] = cached
        self._append(held, new)
        held.changes.clear()
        self._held[seq_id], self._row_of[seq_id], self._last_rows = held, held.row, None
        self._make_promise(seq_id, held, tokens)
        return cached

    def extend(self, seq_id: int, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in all, of which those after the computed ones will be written.

        If the page that is written first is another's too, the table gets a copy of it, by a move. Raises OutOfPages.
        """
        held, num_tokens = self._get(seq_id), _count(num_tokens)
        store, row = self._store, held.row
        new = pages_for(num_tokens, self.page_size) - int(store.num_pages[row])
        writes_frozen = store.frozen[row] and num_tokens > store.num_computed[row]
        copies = self._to_copy(row) if writes_frozen else []
        self._pages.need(max(new, 0) * len(self.windows) + len(copies))
        self._extend(held, new, copies)
        if writes_frozen:
            store.frozen[row] = False

    def extend_all(self, seq_ids: SequenceOf[int], num_tokens: npt.NDArray[np.int64]) -> None:
        """`extend` for many sequences, num_tokens int64 [seqs], at once: of them all, or with OutOfPages of none.

        Raises PageStateError for a sequence named twice, TypeError for other lengths than one int64 for each sequence.
        """
        seq_ids = list(seq_ids)
        store, rows = self._store, self._rows(seq_ids, num_tokens)
        _count(int(num_tokens.min(initial=0)))
        new = -(-num_tokens >> self._shift) - store.num_pages[rows]  # rounded up, and no number wraps
        frozen = store.frozen[rows]
        if not frozen.any():
            self._append_all(seq_ids, rows, new)
            return
        busy = np.flatnonzero((new > 0) | (frozen & (num_tokens > store.num_computed[rows])))
        # Summed as Python's numbers, which do not wrap.
        needed, sharers = sum(new[new > 0].tolist()) * len(self.windows), dict[int, int]()
        for row in rows[busy][store.frozen[rows[busy]]].tolist():
            for _, page in self._to_copy(row):
                left = sharers.setdefault(page, self._pages.num_sharers(page))
                # The last one keeps it, unless it must stay as it is found.
                needed += left > 1 or self.prefix_cache.entry(page) is not None
                sharers[page] = left - 1
        self._pages.need(needed)
        for i in busy.tolist():
            held = self._held[seq_ids[i]]
            self._extend(held, int(new[i]), self._to_copy(held.row) if store.frozen[held.row] else [])
            store.frozen[held.row] = False

    def commit(self, seq_id: int, tokens: Tokens, num_computed: int) -> None:
        """K and V of the first `num_computed` of `tokens`, int32 [n], are computed: full pages can be found now.

        Raises PageStateError for fewer tokens than before, for more than there are or is room for, and where the page
        that was written may be another's, as nobody has called `extend`.
        """
        held, tokens, num_computed = self._get(seq_id), as_tokens(tokens), _count(num_computed)
        before = int(self._store.num_computed[held.row])
        room = int(self._store.num_pages[held.row]) * self.page_size
        if not before <= num_computed <= min(room, len(tokens)):
            raise PageStateError(
                f"sequence {seq_id}: {num_computed} tokens computed of {len(tokens)}, {before} before, room for {room}"
            )
        if self._store.frozen[held.row] and num_computed > before:
            raise PageStateError(f"sequence {seq_id} may share the page that was written: extend it first")
        self._store.num_computed[held.row] = num_computed
        if num_computed // self.page_size > before // self.page_size:
            self._publish(seq_id, held, tokens, num_computed)
        self._leave_windows(held, before, num_computed)

    def commit_all(
        self, seq_ids: SequenceOf[int], tokens: SequenceOf[Tokens], num_computed: npt.NDArray[np.int64]
    ) -> None:
        """`commit` for many sequences at once, num_computed int64 [seqs]; if it raises, none is changed.

        Tokens are looked at, and checked, only of sequences with pages that become full or leave a window. Raises as
        `commit`, PageStateError also for a sequence named twice, and TypeError for fewer or more arrays of tokens, or
        other lengths, than one for each sequence.
        """
        seq_ids = list(seq_ids)
        if len(tokens) != len(seq_ids):
            raise TypeError(f"{len(seq_ids)} sequences need as many arrays of tokens, not {len(tokens)}")
        store, rows, size, shift = self._store, self._rows(seq_ids, num_computed), self.page_size, self._shift
        before = store.num_computed[rows]
        wrong = (num_computed < before) | (num_computed > store.num_pages[rows] << shift)
        if wrong.any():
            i = int(wrong.argmax())
            raise PageStateError(
                f"sequence {seq_ids[i]}: {_count(num_computed[i])} tokens computed, {before[i]} before, "
                f"room for {store.num_pages[rows[i]] * size}"
            )
        if (unextended := store.frozen[rows] & (num_computed > before)).any():
            seq_id = seq_ids[int(unextended.argmax())]
            raise PageStateError(f"sequence {seq_id} may share the page that was written: extend it first")
        due = num_computed >> shift > before >> shift
        for _, window in self._windowed:
            first = np.maximum(before - window + 1, 0) >> shift  # as first_page
            due |= np.maximum(num_computed - window + 1, 0) >> shift > first
        filled = due.nonzero()[0].tolist()
        for i in filled:
            if len(as_tokens(tokens[i])) < num_computed[i]:
                raise PageStateError(f"sequence {seq_ids[i]}: {num_computed[i]} computed of {len(tokens[i])} tokens")
        store.num_computed[rows] = num_computed
        for i in filled:
            held, old, now = self._held[seq_ids[i]], int(before[i]), int(num_computed[i])
            if now // size > old // size:
                self._publish(seq_ids[i], held, tokens[i], now)
            if self._windowed:
                self._leave_windows(held, old, now)

    def fork(self, seq_id: int, new_id: int) -> None:
        """A second sequence `new_id` with the same computed tokens, in the same pages. Takes no page.

        Room beyond the computed tokens stays `seq_id`'s alone. Both must `extend` before they write. Raises
        PageStateError for a known `new_id`.
        """
        held = self._get(seq_id)
        if new_id in self._held:
            raise PageStateError(f"sequence {new_id} has pages already")
        store = self._store
        copy = _Held(store.add(), list(held.chain), held.namespace, held.label, 0)
        computed = int(store.num_computed[held.row])
        pages = store.pages[:, held.row, : pages_for(computed, self.page_size)].tolist()
        for table in pages:
            self.allocator.share([page for page in table if page])
        store.append(copy.row, pages)
        store.num_computed[copy.row] = computed
        store.frozen[copy.row] = computed % self.page_size > 0
        store.frozen[held.row] |= store.frozen[copy.row]
        self._held[new_id], self._row_of[new_id], self._last_rows = copy, copy.row, None

    def truncate(self, seq_id: int, num_tokens: int) -> int:
        """Forget all but the first `num_tokens` tokens; pages beyond them, and room, are given back.

        Returns how many tokens are computed still. Those are fewer where a window's earlier pages are gone: then as
        many as the cache still has, in full pages. What was published stays in the cache. A worker that knows the
        sequence needs its whole state again. Raises PageStateError for more tokens than are computed.
        """
        held, num_tokens = self._get(seq_id), _count(num_tokens)
        store, row, size = self._store, held.row, self.page_size
        computed = int(store.num_computed[row])
        if not 0 <= num_tokens <= computed:
            raise PageStateError(f"sequence {seq_id} has {computed} tokens computed, and cannot be cut to {num_tokens}")
        kept = num_tokens
        missing = self._missing(held, kept)
        if missing is None:
            kept = self.prefix_cache.usable(held.chain[: num_tokens // size]) * size
            missing = self._missing(held, kept) or []
        self._pages.acquire([page for _, _, page in missing])
        for group, index, page in missing:
            store.pages[group, row, index] = page
        self._drop_pages(held, pages_for(kept, size))
        del held.chain[kept // size :]
        store.num_computed[row] = kept
        store.frozen[row] = kept % size > 0
        self._break_promise(seq_id, held)
        held.num_known = 0
        held.changes.clear()
        return kept

    def free(self, seq_id: int) -> None:
        """Give back the sequence's pages, the last first."""
        held = self._get(seq_id)
        del self._held[seq_id], self._row_of[seq_id]
        self._last_rows = None
        self._drop_pages(held, 0)
        self._store.remove(held.row)
        self._break_promise(seq_id, held)

    def take_changes(self, seq_id: int) -> tuple[TableChange, ...]:
        """What has changed in the sequence's tables since the last call (at first: since `allocate` or `fork`)."""
        held = self._get(seq_id)
        if not held.changes:
            return ()
        changes, held.changes = tuple(held.changes), []
        return changes

    def take_moves(self) -> tuple[Move | Mark, ...]:
        """The moves since the last call, in order. Their sources are held until `confirm_moves`."""
        return self._pages.take_moves()

    def confirm_moves(self, moves: Iterable[Move | Mark]) -> None:
        """The moves are done (or will never be): let go of their sources. Raises PageStateError for an unknown one."""
        self._pages.confirm_moves(moves)

    def pin(self, tokens: Tokens, until: float, namespace: bytes = DEFAULT) -> int:
        """Let the cached prefix of `tokens` be evicted after all else, until `expire` is told that time.

        Returns the number of tokens pinned. Raises TypeError for a time that is no number, ValueError for NaN.
        """
        until = _time(until)
        chain = self._match(as_tokens(tokens), namespace)
        self.prefix_cache.pin(chain, until)
        return len(chain) * self.page_size

    def expire(self, now: float) -> None:
        """End the pins whose time has come. Raises TypeError for a time that is no number, ValueError for NaN."""
        self.prefix_cache.expire(_time(now))

    def reset(self) -> None:
        """Forget every cached prefix. Sequences keep their pages, but those are not found any more."""
        self._pages.reclaim(self.prefix_cache.reset())
        for seq_id, held in self._held.items():
            self._break_promise(seq_id, held)

    def check(self, idle: bool = False) -> None:
        """Prove the invariants from scratch; with `idle` also that nothing is held.

        Raises InvariantError, which names the invariant, the page, and who holds it.
        """
        audit.check(self, idle)

    def explain(self) -> audit.MemoryMap:
        """Who holds what, as data that can be drawn."""
        return audit.explain(self)

    def _extend(self, held: _Held, new: int, copies: list[tuple[int, int]]) -> None:
        """`new` pages more in every group, and copies of the pages that are not the sequence's alone."""
        store, row = self._store, held.row
        index = int(store.num_computed[row]) // self.page_size
        for group, page in copies:
            target = self._pages.copy(page)
            store.pages[group, row, index] = target
            held.changes.append((group, index, target))
        self._append(held, new)

    def _append(self, held: _Held, new: int) -> None:
        if new <= 0:
            return
        pages = self._pages.take(new * len(self.windows))
        tables = [pages[i : i + new] for i in range(0, len(pages), new)]
        first = int(self._store.num_pages[held.row])
        self._store.append(held.row, tables)
        held.changes += [(group, first + i, page) for group, table in enumerate(tables) for i, page in enumerate(table)]

    def _append_all(self, seq_ids: SequenceOf[int], rows: npt.NDArray[np.int64], new: npt.NDArray[np.int64]) -> None:
        """So many new pages for each sequence, in every group, or OutOfPages."""
        (busy,) = (new > 0).nonzero()
        if not busy.size:
            return
        groups, counts = len(self.windows), new[busy]
        total = sum(counts.tolist())  # as Python's number, which does not wrap
        self._pages.need(total * groups)
        if total > busy.size:  # some need several
            for i in busy.tolist():
                self._append(self._held[seq_ids[i]], int(new[i]))
            return
        pages = self._pages.take(total * groups)
        places = self._store.append_one(rows[busy], np.array(pages, dtype=np.int32).reshape(groups, total))
        held = [self._held[seq_ids[i]] for i in busy.tolist()]
        for group in range(groups):
            for one, index, page in zip(held, places, pages[group * total : (group + 1) * total], strict=True):
                one.changes.append((group, index, page))

    def _to_copy(self, row: int) -> list[tuple[int, int]]:
        """Group and page, where the page that is written next is not the sequence's alone."""
        store = self._store
        index = int(store.num_computed[row]) // self.page_size
        if index >= store.num_pages[row]:
            return []
        pages = enumerate(store.pages[:, row, index].tolist())
        return [(group, page) for group, page in pages if self._pages.must_copy(page)]

    def _publish(self, seq_id: int, held: _Held, tokens: Tokens, num_computed: int) -> None:
        """Pages have become full: let others find them, and share those that were found to be there already."""
        first, full, size = len(held.chain), num_computed // self.page_size, self.page_size
        if not self.enable_prefix_caching or full == first:
            return
        if held.chain and not held.chain[-1].live:  # it was forgotten: no prompt can find what follows
            self._break_promise(seq_id, held)
            return
        # [pages][groups]
        mine: list[list[int]] = self._store.pages[:, held.row, first:full].T.tolist()
        for index, pages in enumerate(map(tuple, mine), first):
            found = self.prefix_cache.publish(
                tokens[index * size : (index + 1) * size], pages, held.chain, held.namespace
            )
            if found is None:
                break
            if found != pages:
                self._replace(held, index, pages, found)
            self._pages.published(pages)
        if held.promise is not None:
            self._break_promise(seq_id, held)
            if len(held.chain) == full:
                self._make_promise(seq_id, held, tokens)

    def _replace(self, held: _Held, index: int, pages: tuple[int, ...], found: tuple[int, ...]) -> None:
        """Equal pages become one: those that were cached before take the place of the sequence's own."""
        for group, (own, cached) in enumerate(zip(pages, found, strict=True)):
            if own and own != cached:
                self._pages.acquire([cached])
                self._store.pages[group, held.row, index] = cached
                held.changes.append((group, index, cached))
                self._pages.drop([own])

    def _make_promise(self, seq_id: int, held: _Held, tokens: Tokens) -> None:
        """Let it be known which page the sequence computes next, as far as its tokens were known from the beginning."""
        if self.enable_prefix_caching and (len(held.chain) + 1) * self.page_size <= held.num_known:
            held.promise = self.prefix_cache.next_digest(tokens, held.chain, held.namespace)
            if held.promise is not None:
                self._promised[held.promise] = (*self._promised.get(held.promise, ()), seq_id)

    def _break_promise(self, seq_id: int, held: _Held) -> None:
        if held.promise is None:
            return
        owners = self._promised.pop(held.promise)
        if len(owners) > 1:
            i = owners.index(seq_id)
            self._promised[held.promise] = owners[:i] + owners[i + 1 :]
        held.promise = None

    def _leave_windows(self, held: _Held, before: int, computed: int) -> None:
        """Give back the pages that no token after the computed ones sees."""
        for group, window in self._windowed:
            first, last = (first_page(n, window, self.page_size) for n in (before, computed))
            if first < last:
                pages = self._store.pages[group, held.row, first:last].tolist()
                self._store.pages[group, held.row, first:last] = NULL_PAGE
                held.changes += [(group, index, NULL_PAGE) for index in range(first, last)]
                self._pages.drop(pages)

    def _missing(self, held: _Held, kept: int) -> list[tuple[int, int, int]] | None:
        """Group, index and cached page of what the window after `kept` tokens needs again; None if some is gone."""
        result = []
        for group, window in self._windowed:
            for index in range(first_page(kept, window, self.page_size), pages_for(kept, self.page_size)):
                if not self._store.pages[group, held.row, index]:
                    page = held.chain[index].pages[group] if index < len(held.chain) else NULL_PAGE
                    if not page:
                        return None
                    result.append((group, index, page))
        return result

    def _drop_pages(self, held: _Held, keep: int) -> None:
        """Give back all but the first `keep` pages of every group, the last first."""
        for table in self._store.pages[:, held.row, keep : self._store.num_pages[held.row]].tolist():
            self._pages.drop([page for page in reversed(table) if page])
        self._store.cut(held.row, keep)

    def _rows(self, seq_ids: SequenceOf[int], lengths: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """The row of each sequence; with `lengths`, which must be one for each, no sequence may come twice."""
        seq_ids = list(seq_ids)
        if self._last_rows is not None and self._last_rows[0] == seq_ids:
            rows = self._last_rows[1]
        else:
            row_of = self._row_of
            try:
                rows = np.array([row_of[seq_id] for seq_id in seq_ids], dtype=np.int64)
            except KeyError as error:
                raise PageStateError(f"sequence {error} has no pages") from None
            self._last_rows = (seq_ids, rows)
        if lengths is not None:
            if lengths.shape != rows.shape or lengths.dtype != np.int64:
                found = f"{lengths.dtype} {list(lengths.shape)}"
                raise TypeError(f"{len(rows)} sequences need lengths int64 [{len(rows)}], not {found}")
            if len(set(seq_ids)) < len(rows):
                raise PageStateError(f"a sequence is named twice: {seq_ids}")
        return rows

    def _check_group(self, group: int) -> None:
        if not 0 <= group < len(self.windows):
            raise ValueError(f"group {group} is not one of 0 to {len(self.windows) - 1}")

    def _match(self, tokens: Tokens, namespace: bytes) -> list[Entry]:
        _check_namespace(namespace)
        return self.prefix_cache.match(tokens, namespace) if self.enable_prefix_caching else []

    def _get(self, seq_id: int) -> _Held:
        held = self._held.get(seq_id)
        if held is None:
            raise PageStateError(f"sequence {seq_id} has no pages")
        return held


def _count(number: int) -> int:
    """As a Python int, which never wraps. Raises TypeError for what is no whole number, ValueError below 0."""
    result = operator.index(number)
    if result < 0:
        raise ValueError(f"a number of tokens or pages must not be negative, and is {result}")
    return result


def _time(moment: float) -> float:
    """As a Python float. Raises TypeError for what is no number, ValueError for NaN."""
    if not isinstance(moment, numbers.Real):
        raise TypeError(f"a time must be a number, not {type(moment).__name__}")
    if math.isnan(moment):
        raise ValueError(f"a time must be a number, not {moment}")
    return float(moment)


def _check_namespace(namespace: bytes) -> None:
    if not isinstance(namespace, bytes):
        raise TypeError(f"a namespace is bytes, as namespace() makes them, not {type(namespace).__name__}")
