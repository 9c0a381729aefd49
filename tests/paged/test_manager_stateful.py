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
from paged.prefix_cache import Entry, Tokens

PLAIN = settings(max_examples=250, stateful_step_count=50)
LONG = settings(max_examples=4000, stateful_step_count=80)


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
            self.refused(PageStateError, lambda: self.allocator.share(page))
            return
        self.allocator.share(page)
        self.cached.discard(page)
        self.counts[page] = self.counts.get(page, 0) + 1

    @rule(page=st.integers(-1, 12), park=st.booleans())
    def drop(self, page: int, park: bool) -> None:
        call = self.allocator.park if park else self.allocator.release
        if page not in self.counts:
            self.refused(PageStateError, lambda: call(page))
            return
        last = self.counts[page] == 1
        assert call(page) == (last if park else None)
        self.counts[page] -= 1
        if last:
            del self.counts[page]
            if park:
                self.cached.add(page)

    @rule(page=st.integers(-1, 12))
    def reclaim(self, page: int) -> None:
        if page not in self.cached:
            self.refused(PageStateError, lambda: self.allocator.reclaim(page))
            return
        self.allocator.reclaim(page)
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

    def __init__(self, tokens: list[int], computed: int, pages: list[int]) -> None:
        self.tokens = tokens
        self.computed = computed
        self.pages = pages

    @property
    def array(self) -> Tokens:
        return np.array(self.tokens, dtype=np.int32)


History = tuple[int, ...]


class ManagerMachine(RuleBasedStateMachine):
    """The model: the tables, the moves, and for each slot the whole history of the token whose K and V lie there.

    It plays scheduler and worker: `step` extends some sequences, applies the moves, writes, and commits. Which prefixes
    hit is the manager's answer, held to the content; everything else is predicted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seqs: dict[int, Sequence] = {}
        self.content: dict[int, list[History | None]] = {}  # a page just handed out holds nothing of worth
        self.waiting: list[Move] = []  # emitted, not yet taken
        self.under_way: list[Move] = []
        self.next_id = 0

    @initialize(
        page_size=page_sizes(), num_usable=st.sampled_from(range(3, 25)), caching=st.sampled_from([True] * 3 + [False])
    )
    def start(self, page_size: int, num_usable: int, caching: bool) -> None:
        self.page_size = page_size
        self.num_usable = num_usable
        self.caching = caching
        self.manager = KVCacheManager(num_usable + 1, page_size, caching)

    # The model's own accounts

    @property
    def references(self) -> Counter[int]:
        held = [page for seq in self.seqs.values() for page in seq.pages]
        return Counter(held + [move.source for move in (*self.waiting, *self.under_way)])

    @property
    def available(self) -> int:
        return self.num_usable - len(self.references)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.seqs)), label="sequence")

    def has_room(self) -> bool:
        return len(self.seqs) < 8

    def handed_out(self, pages: list[int], before: Counter[int]) -> None:
        """Pages that were just taken: nobody's, each once, never the null page; their content is lost."""
        assert not ({0} | before.keys()) & set(pages)
        assert len(set(pages)) == len(pages)
        for page in pages:
            self.content[page] = [None] * self.page_size

    def refused(self, error: type[Exception], call: Callable[[], object]) -> Any:
        """The call raises, and changes nothing (P5)."""
        before = snapshot.of_manager(self.manager)
        with pytest.raises(error) as caught:
            call()
        assert snapshot.of_manager(self.manager) == before
        return caught.value

    # Rules

    @precondition(has_room)
    @rule(data=st.data(), room_pages=st.sampled_from([0, 0, 0, 2, 6]), spare=st.sampled_from([0, 0, 0, 1, 3]))
    def allocate(self, data: st.DataObject, room_pages: int, spare: int) -> None:
        tokens = data.draw(prompts(self.page_size), label="prompt")
        num_new = data.draw(st.integers(1, 2 * self.page_size + 1), label="num_new")
        self.begin(tokens, num_new, room_pages, spare)

    @precondition(has_room)
    @rule(data=st.data(), together=st.sampled_from([1, 1, 2]))
    def serve(self, data: st.DataObject, together: int) -> None:
        """A prompt begins and is computed whole; by two at once, who then compute the same pages (case A13)."""
        tokens = data.draw(prompts(self.page_size), label="prompt")
        ids = [self.next_id - 1 for _ in range(together) if self.begin(list(tokens), len(tokens))]
        self.forward({seq_id: len(tokens) for seq_id in ids})

    def begin(self, tokens: list[int], num_new: int, room_pages: int = 0, spare: int = 0) -> bool:
        seq_id, size, references = self.next_id, self.page_size, self.references
        seq = Sequence(tokens, 0, [])
        hit = [entry.page for entry in self.manager.prefix_cache.match(seq.array)]
        cached = len(hit) * size
        assert self.manager.match(seq.array) == cached
        assert cached < len(tokens), "a hit covers the last token"
        self.assert_content(hit, tokens[:cached])  # P3
        num_tokens = min(len(tokens), cached + num_new)
        wanted = pages_for(num_tokens, size) - len(hit)
        least = max(wanted, room_pages - len(hit)) + spare
        available = self.available - len(set(hit) - references.keys())

        def call() -> int:
            return self.manager.allocate(seq_id, seq.array, num_new, room_pages * size, spare)

        if least > available:
            error = self.refused(OutOfPages, call)
            assert (error.wanted, error.available, error.total) == (least, available, self.num_usable)
            return False
        assert call() == cached
        seq.computed, seq.pages = cached, list(self.manager.table(seq_id).pages)
        assert seq.pages[: len(hit)] == hit
        assert len(seq.pages) == len(hit) + wanted
        self.handed_out(seq.pages[len(hit) :], references + Counter(hit))
        self.seqs[seq_id] = seq
        self.next_id += 1
        return True

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        self.seqs[self.pick(data)].tokens += data.draw(new_tokens(self.page_size), label="tokens")

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), confirm=st.booleans(), fails=st.sampled_from([False] * 7 + [True]))
    def step(self, data: st.DataObject, confirm: bool, fails: bool) -> None:
        """Some sequences compute some of their tokens in one forward pass, which may fail."""
        ids = st.sampled_from(sorted(self.seqs))
        chosen = data.draw(st.lists(ids, min_size=1, max_size=4, unique=True), label="sequences")
        stops = {}
        for seq_id in chosen:
            seq = self.seqs[seq_id]
            if seq.computed < len(seq.tokens):
                stops[seq_id] = data.draw(st.integers(seq.computed + 1, len(seq.tokens)), label="computed")
        self.forward(stops, confirm, fails)

    def forward(self, stops: dict[int, int], confirm: bool = True, fails: bool = False) -> None:
        """One step: sequences by id, and how many tokens of each are computed after it."""
        rows = {seq_id: stop for seq_id, stop in stops.items() if self.extend(seq_id, stop)}
        moves = self.manager.take_moves()
        assert list(moves) == self.waiting
        self.waiting.clear()
        self.under_way += moves
        if fails:  # K and V are lost; who took part begins anew
            self.confirm(list(moves))
            for seq_id in rows:
                self.free(seq_id)
            return
        for move in moves:
            self.content[move.target] = list(self.content[move.source])
        for seq_id, stop in rows.items():
            self.write(seq_id, stop)
        for seq_id, stop in rows.items():
            self.manager.commit(seq_id, self.seqs[seq_id].array, stop)
            self.seqs[seq_id].computed = stop
        if confirm:
            self.confirm(list(moves))

    def extend(self, seq_id: int, stop: int) -> bool:
        seq, references, size = self.seqs[seq_id], self.references, self.page_size
        first = seq.computed // size
        copies = first < len(seq.pages) and references[seq.pages[first]] > 1
        wanted = max(0, pages_for(stop, size) - len(seq.pages)) + copies
        if wanted > self.available:
            error = self.refused(OutOfPages, lambda: self.manager.extend(seq_id, stop))
            assert (error.wanted, error.available, error.total) == (wanted, self.available, self.num_usable)
            return False
        new = self.manager.extend(seq_id, stop)
        table = list(self.manager.table(seq_id).pages)
        expected = list(seq.pages)
        if copies:
            self.waiting.append(Move(expected[first], table[first]))
            expected[first] = table[first]
        assert table == expected + new
        assert len(new) + copies == wanted
        self.handed_out([*new, *table[first : first + copies]], references)
        seq.pages = table
        return True

    def write(self, seq_id: int, stop: int) -> None:
        seq = self.seqs[seq_id]
        owners = Counter(page for other in self.seqs.values() for page in other.pages)
        for position, slot in zip(
            range(seq.computed, stop), self.manager.table(seq_id).slots(seq.computed, stop).tolist(), strict=True
        ):
            page, offset = divmod(slot, self.page_size)
            assert page == seq.pages[position // self.page_size]
            assert owners[page] == 1, f"P2: page {page} of {owners[page]} sequences is written"
            assert self.manager.prefix_cache.entry(page) is None, f"P3: page {page} is written, and can be found"
            self.content[page][offset] = tuple(seq.tokens[: position + 1])
        self.assert_content(seq.pages, seq.tokens[:stop])

    def assert_content(self, pages: list[int], tokens: list[int]) -> None:
        for position in range(len(tokens)):
            page, offset = pages[position // self.page_size], position % self.page_size
            assert self.content[page][offset] == tuple(tokens[: position + 1]), f"P3: page {page}, offset {offset}"

    @precondition(lambda self: self.seqs and self.has_room())
    @rule(data=st.data(), branches=st.integers(1, 3), go_on=st.booleans())
    def fork(self, data: st.DataObject, branches: int, go_on: bool) -> None:
        """Branches of a sequence, which all go on at once or later."""
        seq_id = self.pick(data)
        seq = self.seqs[seq_id]
        for _ in range(branches):
            self.manager.fork(seq_id, self.next_id)
            pages = seq.pages[: pages_for(seq.computed, self.page_size)]
            assert self.manager.table(self.next_id).pages == pages
            # A branch goes on with tokens of its own.
            tokens = seq.tokens[: seq.computed] + data.draw(new_tokens(self.page_size), label="tokens")
            self.seqs[self.next_id] = Sequence(tokens, seq.computed, pages)
            self.next_id += 1
        if go_on:
            seq.tokens += data.draw(new_tokens(self.page_size), label="tokens")
            ids = [seq_id, *range(self.next_id - branches, self.next_id)]
            self.forward({i: len(self.seqs[i].tokens) for i in ids}, confirm=data.draw(st.booleans(), label="confirm"))

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
            lambda: manager.confirm_moves([*self.under_way, Move(1, 1)]),
        ]
        if self.seqs:
            known = self.pick(data)
            seq = self.seqs[known]
            calls += [
                lambda: manager.allocate(known, tokens, 1),
                lambda: manager.fork(known, known),
                lambda: manager.commit(known, seq.array, seq.computed - 1),
                lambda: manager.commit(known, seq.array, len(seq.tokens) + 1),
            ]
        self.refused(PageStateError, data.draw(st.sampled_from(calls)))

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
        assert {seq_id: self.manager.table(seq_id).pages for seq_id in self.seqs} == {
            seq_id: seq.pages for seq_id, seq in self.seqs.items()
        }

    @invariant()
    def every_page_that_can_be_found_holds_what_it_is_found_by(self) -> None:
        """P3 and P4 for every prompt there is: a page's slots hold exactly the history that its entry stands for."""
        entries = self.manager.prefix_cache._by_page
        assert self.caching or not entries
        for page, entry in entries.items():
            history = tuple(self.history(entry))
            begin = len(history) - self.page_size
            assert self.content[page] == [history[: begin + i + 1] for i in range(self.page_size)], f"P4: page {page}"

    def history(self, entry: Entry) -> list[int]:
        chunks = []
        while entry.parent is not None:
            chunks.append(np.frombuffer(entry.tokens, dtype="<i4").tolist())
            entry = entry.parent
        return [token for chunk in reversed(chunks) for token in chunk]

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.under_way += self.manager.take_moves()
        self.confirm(list(self.under_way))
        for seq_id in list(self.seqs):
            self.free(seq_id)
        self.manager.check()
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
