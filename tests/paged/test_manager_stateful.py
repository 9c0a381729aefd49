"""Allocator and manager under random use, against plain dicts that a worker and a scheduler would keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import snapshot
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from strategies import new_tokens, page_sizes, prompts

from paged import BlockAllocator, KVCacheManager, Move, OutOfPages, PageStateError, pages_for
from paged.block_table import Windows
from paged.prefix_cache import Entry, Tokens, namespace

PLAIN = settings(max_examples=250, stateful_step_count=50)
LONG = settings(max_examples=4000, stateful_step_count=80)


SALTS = ["", "other"]
salts = st.sampled_from(["", "", "", "other"])


class AllocatorMachine(RuleBasedStateMachine):
    """The model: a count for each referenced page, and the set of cached ones."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}
        self.cached: set[int] = set()

    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.allocator = BlockAllocator(num_pages)

    @property
    def num_free(self) -> int:
        return self.num_pages - 1 - len(self.counts) - len(self.cached)

    @rule(n=st.integers(0, 6))
    def allocate(self, n: int) -> None:
        if n > self.num_free:
            self.refused(OutOfPages, lambda: self.allocator.allocate(n))
            return
        pages = self.allocator.allocate(n)
        assert len(set(pages)) == n
        assert not {0, *self.counts, *self.cached} & set(pages)
        self.counts.update(dict.fromkeys(pages, 1))

    @rule(page=st.integers(-1, 12))
    def share(self, page: int) -> None:
        if page not in self.counts and page not in self.cached:
            self.refused(PageStateError, lambda: self.allocator.share([page]))
            return
        self.allocator.share([page])
        self.cached.discard(page)
        self.counts[page] = self.counts.get(page, 0) + 1

    @rule(page=st.integers(-1, 12), park=st.booleans())
    def drop(self, page: int, park: bool) -> None:
        call = self.allocator.park if park else self.allocator.release
        if page not in self.counts:
            self.refused(PageStateError, lambda: call([page]))
            return
        last = self.counts[page] == 1
        assert call([page]) == ([page] if last else [])
        self.counts[page] -= 1
        if last:
            del self.counts[page]
            if park:
                self.cached.add(page)

    @rule(page=st.integers(-1, 12))
    def reclaim(self, page: int) -> None:
        if page not in self.cached:
            self.refused(PageStateError, lambda: self.allocator.reclaim([page]))
            return
        self.allocator.reclaim([page])
        self.cached.discard(page)

    def refused(self, error: type[Exception], call: Callable[[], object]) -> None:
        before = snapshot.of_allocator(self.allocator)
        with pytest.raises(error):
            call()
        assert snapshot.of_allocator(self.allocator) == before

    @invariant()
    def the_numbers_are_the_models(self) -> None:
        self.allocator.check([page for page, count in self.counts.items() for _ in range(count)])
        found = (self.allocator.num_free, self.allocator.num_used, self.allocator.num_cached)
        assert found == (self.num_free, len(self.counts), len(self.cached))
        assert all(self.allocator.ref_count(page) == count for page, count in self.counts.items())


class Sequence:
    """What the model knows of one: all its tokens, how many are computed, and the pages that it should have."""

    def __init__(self, salt: str, tokens: list[int], computed: int, pages: list[list[int]]) -> None:
        self.salt = salt
        self.tokens = tokens
        self.computed = computed
        self.pages = pages  # of each group; 0 where the page has left the window
        self.worker: list[list[int]] | None = None  # a worker's copy of them, which only ever hears of changes

    @property
    def array(self) -> Tokens:
        return np.array(self.tokens, dtype=np.int32)


History = tuple[int | str, ...]  # group, salt, and the tokens up to one


class ManagerMachine(RuleBasedStateMachine):
    """The model: the tables, the moves, and for each slot the whole history of the token whose K and V lie there.

    It plays scheduler and worker: `step` extends some sequences, applies the moves, writes, and commits. Which prefixes
    hit is the manager's answer, held to the content; everything else is predicted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seqs: dict[int, Sequence] = {}
        self.content: dict[int, list[History | None]] = {}
        self.sealed: dict[int, list[History | None]] = {}
        self.waiting: list[Move] = []  # emitted, not yet taken
        self.under_way: list[Move] = []
        self.next_id = 0
        self.now = 0

    @initialize(
        page_size=page_sizes(),
        num_usable=st.sampled_from(range(3, 25)),
        caching=st.sampled_from([True] * 3 + [False]),
        windows=st.sampled_from([(None,), (None,), (None, 6), (5,), (1, None, 20)]),
    )
    def start(self, page_size: int, num_usable: int, caching: bool, windows: Windows) -> None:
        self.page_size = page_size
        self.num_usable = num_usable * len(windows)
        self.caching = caching
        self.windows = windows
        self.manager = KVCacheManager(self.num_usable + 1, page_size, caching, windows, poison=True)

    # The model's own accounts

    @property
    def references(self) -> Counter[int]:
        held = [page for seq in self.seqs.values() for table in seq.pages for page in table if page]
        return Counter(held + [move.source for move in (*self.waiting, *self.under_way)])

    @property
    def owners(self) -> Counter[int]:
        return Counter(page for seq in self.seqs.values() for table in seq.pages for page in table if page)

    @property
    def available(self) -> int:
        return self.num_usable - len(self.references)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.seqs)), label="sequence")

    def has_room(self) -> bool:
        return len(self.seqs) < 8

    def tables(self, seq_id: int) -> list[list[int]]:
        return [self.manager.table(seq_id, group).pages for group in range(len(self.windows))]

    def handed_out(self, pages: list[int], before: Counter[int]) -> None:
        """Pages that were just taken: nobody's, each once, never the null page. A mark says when content is lost."""
        assert not ({0} | before.keys()) & set(pages)
        assert len(set(pages)) == len(pages)
        for page in pages:
            self.content.setdefault(page, [None] * self.page_size)

    def refused(self, error: type[Exception], call: Callable[[], object]) -> Any:
        """The call raises, and changes nothing (P5)."""
        before = snapshot.of_manager(self.manager)
        with pytest.raises(error) as caught:
            call()
        assert snapshot.of_manager(self.manager) == before
        return caught.value

    def first_seen(self, computed: int, group: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, computed - window + 1)

    # Rules

    @precondition(has_room)
    @rule(data=st.data(), room=st.sampled_from([0, 0, 0, 2, 6]), spare=st.sampled_from([0, 0, 0, 1, 3]))
    def allocate(self, data: st.DataObject, room: int, spare: int) -> None:
        tokens = data.draw(prompts(self.page_size), label="prompt")
        num_new = data.draw(st.integers(1, 2 * self.page_size + 1), label="num_new")
        most = data.draw(st.one_of(st.none(), st.integers(0, len(tokens) + 1)), label="most_cached")
        self.begin(data.draw(salts, label="salt"), tokens, num_new, room, spare, most)

    @precondition(has_room)
    @rule(data=st.data(), together=st.sampled_from([1, 1, 2]))
    def serve(self, data: st.DataObject, together: int) -> None:
        """A prompt begins and is computed whole; by two at once, who then compute the same pages (case A13)."""
        tokens, salt = data.draw(prompts(self.page_size), label="prompt"), data.draw(salts, label="salt")
        ids = [self.next_id - 1 for _ in range(together) if self.begin(salt, list(tokens), len(tokens))]
        self.forward({seq_id: len(tokens) for seq_id in ids})

    def begin(
        self, salt: str, tokens: list[int], num_new: int, room: int = 0, spare: int = 0, most: int | None = None
    ) -> bool:
        seq_id, size, references, groups = self.next_id, self.page_size, self.references, len(self.windows)
        seq = Sequence(salt, tokens, 0, [])
        hit = self.manager.prefix_cache.match(seq.array, namespace(salt))
        assert self.manager.match(seq.array, namespace(salt)) == len(hit) * size < len(tokens), "a hit covers the last"
        if most is not None:
            hit = self.manager.prefix_cache.match(seq.array[: most + 1], namespace(salt))
            assert len(hit) * size <= most
        cached = len(hit) * size
        first = [self.first_seen(cached, group) // size for group in range(groups)]
        shared = [[entry.pages[g] if i >= first[g] else 0 for i, entry in enumerate(hit)] for g in range(groups)]
        self.assert_content(salt, shared, tokens[:cached])  # P3
        found = {page for table in shared for page in table if page}
        wanted = (pages_for(min(len(tokens), cached + num_new), size) - len(hit)) * groups
        least = max(wanted, room - len(found)) + spare
        available = self.available - len(found - references.keys())

        def call() -> int:
            label = f"r{seq_id}"
            return self.manager.allocate(seq_id, seq.array, num_new, room, spare, namespace(salt), label, most)

        if least > available:
            error = self.refused(OutOfPages, call)
            assert (error.wanted, error.available, error.total) == (least, available, self.num_usable)
            return False
        assert call() == cached
        seq.computed, seq.pages = cached, self.tables(seq_id)
        assert [table[: len(hit)] for table in seq.pages] == shared
        new = [page for table in seq.pages for page in table[len(hit) :]]
        assert len(new) == wanted
        self.handed_out(new, references + Counter(found))
        self.seqs[seq_id] = seq
        self.next_id += 1
        return True

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        self.seqs[self.pick(data)].tokens += data.draw(new_tokens(self.page_size), label="tokens")

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def make_room_for_nothing(self, data: st.DataObject) -> None:
        """Room for what is computed already changes nothing, now or later."""
        seq_id = self.pick(data)
        self.manager.extend(seq_id, data.draw(st.integers(0, self.seqs[seq_id].computed), label="tokens"))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), confirm=st.booleans(), fails=st.sampled_from([False] * 7 + [True]), at_once=st.booleans())
    def step(self, data: st.DataObject, confirm: bool, fails: bool, at_once: bool) -> None:
        """Some sequences compute some of their tokens in one forward pass, which may fail."""
        ids = st.sampled_from(sorted(self.seqs))
        chosen = data.draw(st.lists(ids, min_size=1, max_size=4, unique=True), label="sequences")
        stops = {}
        for seq_id in chosen:
            seq = self.seqs[seq_id]
            if seq.computed < len(seq.tokens):
                stops[seq_id] = data.draw(st.integers(seq.computed + 1, len(seq.tokens)), label="computed")
        self.forward(stops, confirm, fails, at_once)

    def forward(self, stops: dict[int, int], confirm: bool = True, fails: bool = False, at_once: bool = False) -> None:
        """One step: sequences by id, and how many tokens of each are computed after it."""
        if at_once:
            rows = stops if self.extend_all(stops) else {}
        else:
            rows = {seq_id: stop for seq_id, stop in stops.items() if self.extend(seq_id, stop)}
        ends = np.array(list(rows.values()), dtype=np.int64)
        self.take_moves(fails)
        moves = self.under_way[len(self.under_way) - len(self.waiting) :]
        self.waiting.clear()
        if fails:  # K and V are lost; who took part begins anew
            self.confirm(list(moves))
            for seq_id in rows:
                self.free(seq_id)
            return
        for seq_id, stop in rows.items():
            self.write(seq_id, stop)
        if at_once:
            self.manager.commit_all(list(rows), [self.seqs[seq_id].array for seq_id in rows], ends)
        for seq_id, stop in rows.items():
            if not at_once:
                self.manager.commit(seq_id, self.seqs[seq_id].array, stop)
            self.committed(seq_id, stop)
        if confirm:
            self.confirm(list(moves))

    def take_moves(self, fails: bool = False) -> None:
        """Apply what the manager emitted, in order."""
        emitted = self.manager.take_moves()
        assert [move for move in emitted if isinstance(move, Move)] == self.waiting
        self.under_way += self.waiting
        for move in emitted:
            if isinstance(move, Move):
                if not fails:
                    self.content[move.target] = list(self.content[move.source])
            elif move.what == "poison":
                self.sealed.pop(move.page, None)
                self.content[move.page] = [None] * self.page_size
            elif move.what == "seal":
                self.sealed[move.page] = list(self.content[move.page])
                assert None not in self.content[move.page]
            else:
                assert self.sealed.get(move.page) == self.content[move.page], f"page {move.page} was written"

    def to_copy(self, seq: Sequence) -> list[tuple[int, int]]:
        """Group and page: what must be copied before the sequence writes."""
        index, owners = seq.computed // self.page_size, self.owners
        if seq.computed % self.page_size == 0:
            return []
        pages = [(group, table[index]) for group, table in enumerate(seq.pages)]
        return [(g, page) for g, page in pages if owners[page] > 1 or self.manager.prefix_cache.entry(page) is not None]

    def extend(self, seq_id: int, stop: int) -> bool:
        seq = self.seqs[seq_id]
        copies = self.to_copy(seq)
        new = max(0, pages_for(stop, self.page_size) - len(seq.pages[0]))
        wanted = new * len(self.windows) + len(copies)
        if wanted > self.available:
            error = self.refused(OutOfPages, lambda: self.manager.extend(seq_id, stop))
            assert (error.wanted, error.available, error.total) == (wanted, self.available, self.num_usable)
            return False
        references = self.references
        self.manager.extend(seq_id, stop)
        self.extended(seq_id, copies, new, references)
        return True

    def extend_all(self, stops: dict[int, int]) -> bool:
        """All or none. What is copied is predicted one after another, as the last of several sharers keeps its page."""
        size, before, wanted = self.page_size, {i: [list(t) for t in s.pages] for i, s in self.seqs.items()}, 0
        plan: list[tuple[int, list[tuple[int, int]], int]] = []
        for number, (seq_id, stop) in enumerate(stops.items()):
            seq = self.seqs[seq_id]
            plan.append((seq_id, self.to_copy(seq), max(0, pages_for(stop, size) - len(seq.pages[0]))))
            wanted += len(plan[-1][1]) + plan[-1][2] * len(self.windows)
            for group, _ in plan[-1][1]:
                seq.pages[group][seq.computed // size] = -number - 1  # some page of its own
        for seq_id, tables in before.items():
            self.seqs[seq_id].pages = tables
        ids, ends = list(stops), np.array(list(stops.values()), dtype=np.int64)
        if wanted > self.available:
            error = self.refused(OutOfPages, lambda: self.manager.extend_all(ids, ends))
            assert (error.wanted, error.available, error.total) == (wanted, self.available, self.num_usable)
            return False
        references = self.references
        self.manager.extend_all(ids, ends)
        for seq_id, copies, new in plan:
            self.extended(seq_id, copies, new, references)
        return True

    def extended(self, seq_id: int, copies: list[tuple[int, int]], new: int, references: Counter[int]) -> None:
        """A sequence has its copies and new pages; `references` are those before."""
        seq, tables = self.seqs[seq_id], self.tables(seq_id)
        index = seq.computed // self.page_size
        expected, taken = [list(table) for table in seq.pages], list[int]()
        for group, page in copies:
            taken.append(tables[group][index])
            self.waiting.append(Move(page, taken[-1]))
            expected[group][index] = taken[-1]
        for group, table in enumerate(tables):
            assert table[: len(seq.pages[0])] == expected[group]
            assert len(table) == len(seq.pages[0]) + new
            taken += table[len(seq.pages[0]) :]
        self.handed_out(taken, references)
        seq.pages = tables

    def write(self, seq_id: int, stop: int) -> None:
        seq, size = self.seqs[seq_id], self.page_size
        changes = self.manager.take_changes(seq_id)
        if seq.worker is None:
            seq.worker = [list(table) for table in seq.pages]
        else:
            for group, index, page in changes:
                seq.worker[group] += [0] * (index + 1 - len(seq.worker[group]))
                seq.worker[group][index] = page
        assert seq.worker == seq.pages, "a worker that heard of every change has other tables"
        owners = self.owners
        for group in range(len(self.windows)):
            slots = self.manager.table(seq_id, group).slots(seq.computed, stop).tolist()
            for position, slot in zip(range(seq.computed, stop), slots, strict=True):
                page, offset = divmod(slot, size)
                assert page == seq.pages[group][position // size]
                assert owners[page] == 1, f"P2: page {page} of {owners[page]} sequences is written"
                assert self.manager.prefix_cache.entry(page) is None, f"P3: page {page} is written, and can be found"
                self.content[page][offset] = (group, seq.salt, *seq.tokens[: position + 1])
        self.assert_content(seq.salt, seq.pages, seq.tokens[:stop], seq.computed)

    def committed(self, seq_id: int, stop: int) -> None:
        """Pages may have given way to equal ones, or left their window; all that is still seen is there."""
        seq, tables = self.seqs[seq_id], self.tables(seq_id)
        for group, table in enumerate(tables):
            gone = self.first_seen(stop, group) // self.page_size
            assert not any(table[:gone])
            for before, page in zip(seq.pages[group][gone:], table[gone:], strict=True):
                if before != page:
                    assert self.caching
                    assert self.content[before] == self.content[page]
                    assert None not in self.content[page]
        seq.computed, seq.pages = stop, tables
        self.assert_content(seq.salt, seq.pages, seq.tokens[:stop])

    def assert_content(self, salt: str, tables: list[list[int]], tokens: list[int], seen_by: int | None = None) -> None:
        """What the token at `seen_by` (by default the next one) sees is in the pages."""
        for group, pages in enumerate(tables):
            first = self.first_seen(len(tokens) if seen_by is None else seen_by, group)
            for position in range(first, len(tokens)):
                page, offset = pages[position // self.page_size], position % self.page_size
                history = (group, salt, *tokens[: position + 1])
                assert self.content[page][offset] == history, f"P3: page {page}, offset {offset}"

    @precondition(lambda self: self.seqs and self.has_room())
    @rule(data=st.data(), branches=st.integers(1, 3), go_on=st.booleans(), at_once=st.booleans())
    def fork(self, data: st.DataObject, branches: int, go_on: bool, at_once: bool) -> None:
        """Branches of a sequence, which all go on at once or later."""
        seq_id = self.pick(data)
        seq = self.seqs[seq_id]
        for _ in range(branches):
            self.manager.fork(seq_id, self.next_id)
            pages = [table[: pages_for(seq.computed, self.page_size)] for table in seq.pages]
            assert self.tables(self.next_id) == pages
            # A branch goes on with tokens of its own.
            tokens = seq.tokens[: seq.computed] + data.draw(new_tokens(self.page_size), label="tokens")
            self.seqs[self.next_id] = Sequence(seq.salt, tokens, seq.computed, pages)
            self.next_id += 1
        if go_on:
            seq.tokens += data.draw(new_tokens(self.page_size), label="tokens")
            ids = [seq_id, *range(self.next_id - branches, self.next_id)]
            confirm = data.draw(st.booleans(), label="confirm")
            self.forward({i: len(self.seqs[i].tokens) for i in ids}, confirm=confirm, at_once=at_once)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Back to fewer tokens, and on with others. Only a window's lost pages may cost more than was asked for."""
        seq_id = self.pick(data)
        seq = self.seqs[seq_id]
        wanted = data.draw(st.integers(0, seq.computed), label="tokens kept")
        kept = self.manager.truncate(seq_id, wanted)
        assert kept == wanted or (kept < wanted and kept % self.page_size == 0 and self.windows != (None,))
        gone = [self.first_seen(seq.computed, group) // self.page_size for group in range(len(self.windows))]
        assert kept == wanted or any(gone), "nothing had left its window"
        seq.tokens = seq.tokens[:kept] + data.draw(new_tokens(self.page_size), label="tokens")
        seq.computed, seq.pages, seq.worker = kept, self.tables(seq_id), None
        assert len(seq.pages[0]) == pages_for(kept, self.page_size)
        self.assert_content(seq.salt, seq.pages, seq.tokens[:kept])

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        assert len(self.manager.prefix_cache) == 0
        assert self.manager.allocator.num_cached == 0

    @rule(data=st.data(), seconds=st.integers(0, 3))
    def pin(self, data: st.DataObject, seconds: int) -> None:
        """It changes when pages go, never what they hold; time goes on."""
        tokens = np.array([*data.draw(prompts(self.page_size), label="prompt"), 0], dtype=np.int32)
        self.manager.pin(tokens, self.now + seconds, namespace(data.draw(salts, label="salt")))
        self.manager.expire(self.now)
        self.now += 1

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), number=st.integers(1, 4))
    def end(self, data: st.DataObject, number: int) -> None:
        for _ in range(min(number, len(self.seqs))):
            self.free(self.pick(data))

    def free(self, seq_id: int) -> None:
        self.manager.free(seq_id)
        del self.seqs[seq_id]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def confirm_some(self, data: st.DataObject) -> None:
        self.confirm(data.draw(st.permutations(self.under_way), label="moves")[:2])

    def confirm(self, moves: list[Move]) -> None:
        self.manager.confirm_moves(moves)
        for move in moves:
            self.under_way.remove(move)

    @rule(data=st.data())
    def what_makes_no_sense_is_refused(self, data: st.DataObject) -> None:
        manager, unknown = self.manager, self.next_id
        tokens = np.array([1, 2], dtype=np.int32)
        calls: list[Callable[[], object]] = [
            lambda: manager.table(unknown),
            lambda: manager.extend(unknown, 1),
            lambda: manager.commit(unknown, tokens, 1),
            lambda: manager.fork(unknown, unknown + 1),
            lambda: manager.free(unknown),
            lambda: manager.truncate(unknown, 0),
            *(lambda f=f: f([*self.seqs, unknown]) for f in (manager.rooms, manager.num_held_each)),
            *(lambda f=f: f([*self.seqs, unknown]) for f in (manager.num_freed, manager.changed)),
            lambda: manager.confirm_moves([*self.under_way, Move(1, 1)]),
        ]
        negative: list[Callable[[], object]] = []
        if self.seqs:
            known = self.pick(data)
            seq = self.seqs[known]
            more = np.array([len(seq.tokens) + 1], dtype=np.int64)
            calls += [
                lambda: manager.allocate(known, tokens, 1),
                lambda: manager.fork(known, known),
                lambda: manager.commit(known, seq.array, len(seq.tokens) + 1),
                lambda: manager.commit_all([known], [seq.array], more + len(seq.pages[0]) * self.page_size),
                lambda: manager.truncate(known, seq.computed + 1),
            ]
            fewer = calls if seq.computed else negative
            fewer += [
                lambda: manager.commit(known, seq.array, seq.computed - 1),
                lambda: manager.commit_all([known], [seq.array], np.array([seq.computed - 1])),
            ]
            negative += [lambda: manager.truncate(known, -1), lambda: manager.extend_all([known], np.array([-1]))]
        call = data.draw(st.sampled_from([*calls, *negative]))
        self.refused(ValueError if call in negative else PageStateError, call)

    # What holds after every rule

    @invariant()
    def check_finds_nothing(self) -> None:
        self.manager.check()

    @invariant()
    def every_page_is_free_cached_or_referenced(self) -> None:
        allocator, references = self.manager.allocator, self.references
        assert {page: allocator.ref_count(page) for page in range(self.num_usable + 1)} == {
            page: references[page] for page in range(self.num_usable + 1)
        }
        assert allocator.num_free + allocator.num_cached + len(references) == self.num_usable
        assert (self.manager.num_used, self.manager.num_available) == (len(references), self.available)
        assert {seq_id: self.tables(seq_id) for seq_id in self.seqs} == {
            seq_id: seq.pages for seq_id, seq in self.seqs.items()
        }
        for use in self.manager.explain().pages:
            assert len(use.holders) == references[use.page]
            assert use.findable == (self.manager.prefix_cache.entry(use.page) is not None)

    @invariant()
    def answers_about_many_are_those_about_each(self) -> None:
        manager, owners = self.manager, Counter(move.source for move in (*self.waiting, *self.under_way)) + self.owners
        for ids in (list(self.seqs), list(self.seqs)[::2], []):
            tables = [self.seqs[seq_id].pages for seq_id in ids]
            held = [[page for table in pages for page in table if page] for pages in tables]
            assert manager.rooms(ids).tolist() == [len(pages[0]) * self.page_size for pages in tables]
            assert manager.num_held_each(ids).tolist() == list(map(len, held))
            together = Counter(page for pages in held for page in pages)
            assert manager.num_held(ids) == len(together)
            assert manager.num_freed(ids) == sum(owners[page] == count for page, count in together.items())
            changed = {ids[i] for i in manager.changed(ids)}
            behind = {i for i in ids if self.seqs[i].worker is not None and self.seqs[i].worker != self.seqs[i].pages}
            assert behind <= changed
            assert changed == {seq_id for seq_id in ids if manager._held[seq_id].changes}

    @invariant()
    def every_page_that_can_be_found_holds_what_it_is_found_by(self) -> None:
        """P3 and P4 for every prompt there is: a page's slots hold exactly the history that its entry stands for."""
        entries = self.manager.prefix_cache._by_page
        assert self.caching or not entries
        for page, entry in entries.items():
            history = (entry.pages.index(page), *self.history(entry))
            begin = len(history) - self.page_size
            assert self.content[page] == [history[: begin + i + 1] for i in range(self.page_size)], f"P4: page {page}"

    def history(self, entry: Entry) -> list[int | str]:
        chunks = []
        while entry.parent is not None:
            chunks.append(np.frombuffer(entry.tokens, dtype="<i4").tolist())
            entry = entry.parent
        salt = next(salt for salt in SALTS if namespace(salt) == entry.tokens)
        return [salt, *(token for chunk in reversed(chunks) for token in chunk)]

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.take_moves()
        self.confirm(list(self.under_way))
        for seq_id in list(self.seqs):
            self.free(seq_id)
        self.manager.check(idle=True)
        assert (self.manager.num_used, self.manager.num_available) == (0, self.num_usable)


def test_the_allocator_agrees_with_a_dict_of_counts() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=settings(PLAIN, max_examples=100))


def test_the_manager_agrees_with_a_model_of_every_slot() -> None:
    run_state_machine_as_test(ManagerMachine, settings=PLAIN)


@pytest.mark.slow
def test_the_allocator_agrees_with_a_dict_of_counts_for_long() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=LONG)


@pytest.mark.slow
def test_the_manager_agrees_with_a_model_of_every_slot_for_long() -> None:
    run_state_machine_as_test(ManagerMachine, settings=LONG)
