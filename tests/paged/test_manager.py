"""KVCacheManager: hits, refusals, forks and moves, publishing, and that check() sees each planted fault."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import snapshot

from paged import InvariantError, KVCacheManager, Move, OutOfPages, PageStateError
from paged.manager import _Held
from paged.prefix_cache import Entry, Tokens

PAGE_SIZE = 4


def tokens(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


def ramp(length: int, start: int = 1) -> Tokens:
    return np.arange(start, start + length, dtype=np.int32)


def run(manager: KVCacheManager, seq_id: int, prompt: Tokens) -> int:
    """Begin a sequence and compute its whole prompt. Returns the tokens that were cached."""
    cached = manager.allocate(seq_id, prompt, len(prompt))
    manager.commit(seq_id, prompt, len(prompt))
    return cached


def grow(manager: KVCacheManager, seq_id: int, history: Tokens) -> tuple[Move, ...]:
    """Compute the rest of `history`. Returns the moves, which are confirmed."""
    manager.extend(seq_id, len(history))
    moves = take_moves(manager)
    manager.commit(seq_id, history, len(history))
    manager.confirm_moves(moves)
    return moves


def pages(manager: KVCacheManager, seq_id: int) -> list[int]:
    return manager.table(seq_id).pages


def take_moves(manager: KVCacheManager) -> tuple[Move, ...]:
    """Without the marks of poison mode."""
    return tuple(move for move in manager.take_moves() if isinstance(move, Move))


def counts(manager: KVCacheManager, seq_id: int) -> list[int]:
    return [manager.allocator.ref_count(page) for page in manager.table(seq_id).pages]


def assert_refused(manager: KVCacheManager, error: type[Exception], call: Callable[[], object], match: str) -> None:
    """The call raises, and changes nothing (P5)."""
    before = snapshot.of_manager(manager)
    with pytest.raises(error, match=match):
        call()
    assert snapshot.of_manager(manager) == before
    manager.check()


# Hits


@pytest.mark.parametrize(
    ("length", "hit"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32)]
)
def test_a01_the_same_prompt_hits_all_full_pages_but_never_its_last_token(length: int, hit: int) -> None:
    manager = KVCacheManager(16, 16)
    run(manager, 1, ramp(length))
    manager.free(1)
    assert run(manager, 2, ramp(length)) == hit
    assert manager.match(ramp(length)) == hit
    manager.check()


def test_a12_a_preempted_sequence_finds_its_own_full_pages_again() -> None:
    manager = KVCacheManager(8, PAGE_SIZE)
    run(manager, 1, ramp(9))
    manager.free(1)
    assert manager.allocate(1, ramp(9), 9) == 8
    assert len(manager.table(1)) == 3


def test_a12_a_page_evicted_between_look_up_and_allocation_is_computed_again() -> None:
    manager = KVCacheManager(6, PAGE_SIZE)
    run(manager, 1, ramp(9))
    manager.free(1)
    assert manager.match(ramp(9)) == 8
    run(manager, 2, ramp(13, start=100))  # takes the three free pages and evicts the tail
    manager.free(2)
    assert manager.allocate(1, ramp(9), 9) == 4
    assert len(manager.table(1)) == 3
    manager.check()


def test_a_cached_prefix_is_shared_with_the_sequence_that_computed_it() -> None:
    manager = KVCacheManager(8, PAGE_SIZE)
    run(manager, 1, ramp(10))
    run(manager, 2, ramp(10))
    assert manager.table(2).pages[:2] == manager.table(1).pages[:2]
    assert manager.table(2).pages[2] != manager.table(1).pages[2], "a page that is not full is never found (A10)"
    assert counts(manager, 2) == [2, 2, 1]


def test_a_prefix_ends_at_the_first_page_that_is_missing() -> None:
    manager = KVCacheManager(16, PAGE_SIZE)
    run(manager, 1, ramp(12))
    assert manager.match(tokens(1, 2, 3, 4, 0, 6, 7, 8, 9, 10, 11, 12, 13)) == 4


def test_pages_are_taken_only_for_the_tokens_computed_next() -> None:
    manager = KVCacheManager(16, PAGE_SIZE)
    manager.allocate(1, ramp(40), 5)
    assert len(manager.table(1)) == 2


def test_num_new_beyond_the_last_token_takes_no_page_more() -> None:
    manager = KVCacheManager(16, PAGE_SIZE)
    manager.allocate(1, ramp(9), 512)
    assert len(manager.table(1)) == 3


def test_a13_two_sequences_that_compute_the_same_page_at_once_share_it_from_then_on() -> None:
    manager = KVCacheManager(8, PAGE_SIZE)
    manager.allocate(1, ramp(5), 5)
    manager.allocate(2, ramp(5), 5)
    kept, given_back = pages(manager, 1)[0], pages(manager, 2)[0]
    manager.commit(1, ramp(5), 5)
    assert manager.take_changes(1) == ()
    manager.commit(2, ramp(5), 5)
    assert (pages(manager, 1)[0], pages(manager, 2)[0]) == (kept, kept)
    assert pages(manager, 1)[1] != pages(manager, 2)[1], "tails that are not full stay apart"
    assert manager.take_changes(2) == ((0, 0, kept),), "a worker must hear of it"
    assert manager.allocator.ref_count(given_back) == 0
    manager.check()
    manager.free(1)
    manager.free(2)
    assert (manager.num_used, manager.allocator.num_cached, manager.allocator.num_free) == (0, 1, 6)
    manager.check()


def test_a13_a_page_computed_again_while_the_first_is_idle_gives_way_to_it() -> None:
    manager = KVCacheManager(8, PAGE_SIZE)
    manager.allocate(1, ramp(5), 5)
    manager.allocate(2, ramp(5), 5)
    kept = pages(manager, 1)[0]
    manager.commit(1, ramp(5), 5)
    manager.free(1)
    before = manager.num_available
    manager.commit(2, ramp(5), 5)
    assert pages(manager, 2)[0] == kept
    assert manager.num_available == before
    manager.check()


def test_without_prefix_caching_nothing_ever_hits() -> None:
    manager = KVCacheManager(8, PAGE_SIZE, enable_prefix_caching=False)
    run(manager, 1, ramp(9))
    assert (run(manager, 2, ramp(9)), manager.match(ramp(9))) == (0, 0)
    manager.free(1)
    manager.free(2)
    assert manager.allocator.num_free == manager.num_usable
    manager.check()


# P4


def test_p4_pages_are_not_found_before_they_are_committed() -> None:
    manager = KVCacheManager(8, PAGE_SIZE)
    manager.allocate(1, ramp(9), 9)
    assert manager.match(ramp(9)) == 0


@pytest.mark.parametrize(("computed", "hit"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 8)])
def test_p4_only_pages_full_of_committed_tokens_are_found(computed: int, hit: int) -> None:
    manager = KVCacheManager(8, PAGE_SIZE)
    manager.allocate(1, ramp(9), 9)
    manager.commit(1, ramp(9), computed)
    assert manager.match(ramp(9)) == hit


def test_p4_a_sequence_freed_before_it_was_computed_leaves_nothing_to_find() -> None:
    manager = KVCacheManager(8, PAGE_SIZE)
    manager.allocate(1, ramp(9), 9)
    manager.free(1)
    assert manager.match(ramp(9)) == 0
    assert manager.allocator.num_free == manager.num_usable


# Refusals


@pytest.mark.parametrize("page_size", [-1, 0, 3, 12, 24, 257, 512])
def test_a_page_size_that_is_not_a_power_of_two_up_to_256_is_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"not {page_size}"):
        KVCacheManager(8, page_size)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_power_of_two_up_to_256_is_a_page_size(page_size: int) -> None:
    manager = KVCacheManager(8, page_size)
    run(manager, 1, ramp(2 * page_size + 1))
    assert manager.match(ramp(2 * page_size + 1)) == 2 * page_size


def full() -> KVCacheManager:
    """7 pages: sequence 1 holds 3 of 9 tokens, 2 pages of another prompt are cached, 2 free."""
    manager = KVCacheManager(8, PAGE_SIZE)
    run(manager, 1, ramp(9))
    run(manager, 2, ramp(8, start=100))
    manager.free(2)
    return manager


def test_a_prompt_longer_than_the_pool_is_refused_with_the_numbers() -> None:
    manager = full()
    assert_refused(
        manager, OutOfPages, lambda: manager.allocate(3, ramp(20, start=50), 20), "5 pages wanted, 4 available of 7"
    )


def test_cached_pages_without_an_owner_are_there_to_be_taken() -> None:
    manager = full()
    manager.allocate(3, ramp(16, start=50), 16)
    assert (manager.num_available, manager.num_used) == (0, 7)
    manager.check()


def test_a_cached_prefix_that_is_revived_is_not_counted_as_available_too() -> None:
    manager = full()
    prompt = tokens(*range(100, 108), *range(60, 72))  # 2 cached pages, 3 more wanted, 2 free
    assert_refused(manager, OutOfPages, lambda: manager.allocate(3, prompt, 20), "3 pages wanted, 2 available of 7")


def test_a_prefix_shared_with_a_running_sequence_takes_nothing() -> None:
    manager = full()
    assert manager.allocate(3, tokens(*range(1, 9), *range(60, 76)), 16) == 8
    assert manager.num_available == 0


@pytest.mark.parametrize(("room", "fits"), [(0, True), (4, True), (5, False)])
def test_a_sequence_is_refused_that_would_have_no_room_for_so_many_pages(room: int, fits: bool) -> None:
    manager = full()
    if fits:
        manager.allocate(3, ramp(5, start=50), 5, room=room)
        assert len(manager.table(3)) == 2, "the room is asked for, not taken"
    else:
        assert_refused(
            manager,
            OutOfPages,
            lambda: manager.allocate(3, ramp(5, start=50), 5, room=room),
            "5 pages wanted, 4 available of 7",
        )


@pytest.mark.parametrize(("spare", "fits"), [(2, True), (3, False)])
def test_a_sequence_is_refused_that_would_leave_fewer_than_spare_pages(spare: int, fits: bool) -> None:
    manager = full()
    if fits:
        manager.allocate(3, ramp(5, start=50), 5, spare=spare)
        assert manager.num_available == 2
    else:
        assert_refused(
            manager,
            OutOfPages,
            lambda: manager.allocate(3, ramp(5, start=50), 5, spare=spare),
            "5 pages wanted, 4 available of 7",
        )


def test_room_counts_the_cached_prefix() -> None:
    manager = full()
    prompt = tokens(*range(1, 9), 60)
    assert manager.allocate(3, prompt, 1, room=6) == 8  # of the 6 pages 2 are shared, and 4 are there


def test_extend_beyond_the_pool_is_refused_with_the_numbers() -> None:
    manager = full()
    assert_refused(manager, OutOfPages, lambda: manager.extend(1, 29), "5 pages wanted, 4 available of 7")


def test_a_batch_that_is_refused_says_how_many_pages_it_wanted() -> None:
    manager = KVCacheManager(6, PAGE_SIZE, windows=(None, None))
    manager.allocate(1, ramp(3), 3)
    for lengths, wanted in (([17], 8), ([2**63 - 1], 2 * (2**61 - 1))):
        with pytest.raises(OutOfPages) as error:
            manager.extend_all([1], np.array(lengths))
        assert (error.value.wanted, error.value.available, error.value.total) == (wanted, 3, 5)
        with pytest.raises(OutOfPages, match=str(error.value)):
            manager.extend(1, lengths[0])


def test_extend_takes_only_the_pages_that_are_missing() -> None:
    manager = full()
    manager.extend(1, 12)
    assert manager.take_changes(1) == ()
    manager.extend(1, 17)
    new = pages(manager, 1)[3:]
    assert manager.take_changes(1) == ((0, 3, new[0]), (0, 4, new[1]))
    assert manager.take_changes(1) == ()


UNKNOWN: dict[str, Callable[[KVCacheManager], object]] = {
    "table": lambda m: m.table(9),
    "tables": lambda m: m.tables([1, 9]),
    "num_computed": lambda m: m.num_computed(9),
    "extend_all": lambda m: m.extend_all([1, 9], np.array([20, 4])),
    "commit_all": lambda m: m.commit_all([1, 9], [ramp(9), ramp(4)], np.array([9, 4])),
    "truncate": lambda m: m.truncate(9, 0),
    "take_changes": lambda m: m.take_changes(9),
    "extend": lambda m: m.extend(9, 4),
    "commit": lambda m: m.commit(9, ramp(4), 4),
    "fork": lambda m: m.fork(9, 10),
    "free": lambda m: m.free(9),
    "free twice": lambda m: m.free(2),
}


@pytest.mark.parametrize("call", UNKNOWN)
def test_an_unknown_sequence_is_refused(call: str) -> None:
    manager = full()
    assert_refused(manager, PageStateError, lambda: UNKNOWN[call](manager), "has no pages")


def test_a_known_sequence_cannot_begin_again() -> None:
    manager = full()
    assert_refused(manager, PageStateError, lambda: manager.allocate(1, ramp(4), 4), "sequence 1 has pages already")


def test_a_fork_needs_an_id_of_its_own() -> None:
    manager = full()
    assert_refused(manager, PageStateError, lambda: manager.fork(1, 1), "sequence 1 has pages already")


@pytest.mark.parametrize(("length", "computed"), [(9, 8), (9, 0), (9, 10), (20, 13)])
def test_commit_refuses_fewer_tokens_than_before_more_than_there_are_and_more_than_there_is_room_for(
    length: int, computed: int
) -> None:
    manager = full()
    assert_refused(
        manager, PageStateError, lambda: manager.commit(1, ramp(length), computed), f"{computed} tokens computed"
    )


def test_a_move_that_is_not_under_way_cannot_be_confirmed() -> None:
    manager = full()
    assert_refused(manager, PageStateError, lambda: manager.confirm_moves([Move(1, 2)]), "is not under way")


def test_confirming_one_good_and_one_unknown_move_confirms_neither() -> None:
    manager = forked()
    manager.extend(2, 11)
    (move,) = take_moves(manager)
    assert_refused(manager, PageStateError, lambda: manager.confirm_moves([move, Move(1, 2)]), "is not under way")


def test_a_move_cannot_be_confirmed_twice_in_one_call() -> None:
    manager = forked()
    manager.extend(2, 11)
    (move,) = take_moves(manager)
    assert_refused(manager, PageStateError, lambda: manager.confirm_moves([move, move]), "is not under way")


# Fork and copy on write


def forked() -> KVCacheManager:
    """Case A10: sequence 1 has computed 10 tokens, pages of 4, and 2 is its fork."""
    manager = KVCacheManager(10, PAGE_SIZE)
    run(manager, 1, ramp(10))
    manager.fork(1, 2)
    return manager


def test_a10_a_fork_shares_every_page_and_takes_none() -> None:
    manager = forked()
    assert manager.table(2).pages == manager.table(1).pages
    assert counts(manager, 1) == [2, 2, 2]
    assert manager.num_used == 3
    manager.check()


def test_a10_a_fork_has_a_table_of_its_own() -> None:
    manager = forked()
    manager.extend(1, 13)
    assert len(manager.table(2)) == 3


def test_a10_the_first_writer_gets_a_copy_of_the_tail_by_a_move() -> None:
    manager = forked()
    tail = manager.table(1).pages[2]
    manager.extend(2, 11)
    (move,) = take_moves(manager)
    assert move == Move(tail, manager.table(2).pages[2])
    assert manager.table(1).pages[2] == tail
    assert manager.table(2).pages[:2] == manager.table(1).pages[:2]
    manager.check()


def test_a10_the_source_of_a_move_is_held_until_the_move_is_confirmed() -> None:
    manager = forked()
    manager.extend(2, 11)
    (move,) = take_moves(manager)
    manager.free(1)
    source = move.source
    assert manager.allocator.ref_count(source) == 1
    manager.allocate(3, ramp(20, start=50), 20)  # every page that there is
    assert (manager.num_available, source in manager.table(3).pages) == (0, False)
    manager.confirm_moves([move])
    assert (manager.num_available, manager.allocator.ref_count(source)) == (1, 0)
    manager.check()


def test_a10_after_the_move_each_tail_has_one_owner() -> None:
    manager = forked()
    grow(manager, 2, tokens(*range(1, 11), 77))
    assert counts(manager, 1) == counts(manager, 2) == [2, 2, 1]


def test_a10_the_last_one_left_writes_into_the_tail_itself() -> None:
    manager = forked()
    grow(manager, 2, tokens(*range(1, 11), 77))
    before = list(manager.table(1).pages)
    assert grow(manager, 1, ramp(11)) == ()
    assert manager.table(1).pages == before


def test_a10_after_both_end_every_page_is_free_or_cached() -> None:
    manager = forked()
    grow(manager, 2, tokens(*range(1, 11), 77))
    manager.free(1)
    manager.free(2)
    assert (manager.num_used, manager.num_available) == (0, manager.num_usable)
    manager.check()


def test_a10_each_branch_is_found_by_its_own_tokens() -> None:
    manager = forked()
    branch = tokens(*range(1, 11), 77, 78, 79)
    grow(manager, 2, branch)
    grow(manager, 1, ramp(13))
    assert [entry.pages[0] for entry in manager.prefix_cache.match(branch)] == manager.table(2).pages[:3]
    assert [entry.pages[0] for entry in manager.prefix_cache.match(ramp(13))] == manager.table(1).pages[:3]
    manager.check()


def test_a_fork_at_the_end_of_a_page_needs_no_move() -> None:
    manager = KVCacheManager(10, PAGE_SIZE)
    run(manager, 1, ramp(8))
    manager.fork(1, 2)
    assert grow(manager, 1, ramp(9)) == grow(manager, 2, ramp(9)) == ()
    assert manager.table(1).pages[2] != manager.table(2).pages[2]


def test_a_fork_does_not_share_pages_that_are_still_to_be_written() -> None:
    """Room for 12 tokens is made before the fork, 5 are computed: the third page must not be written by both (P2)."""
    manager = KVCacheManager(12, PAGE_SIZE)
    manager.allocate(1, ramp(12), 12)
    manager.commit(1, ramp(12), 5)
    manager.fork(1, 2)
    for seq_id in (1, 2):
        manager.extend(seq_id, 12)
    assert manager.table(1).pages[0] == manager.table(2).pages[0]
    assert not {*manager.table(1).pages[1:]} & {*manager.table(2).pages[1:]}
    manager.check()


def test_making_room_without_writing_copies_nothing() -> None:
    manager = forked()
    manager.extend(2, 10)
    assert (take_moves(manager), manager.take_changes(2)) == ((), ())


def test_a_copy_is_a_change_in_the_middle_of_a_table() -> None:
    manager = forked()
    manager.extend(1, 14)  # room beyond the tail, which is the last of the copied ones
    manager.extend(2, 14)
    for seq_id in (1, 2):
        copy = [(0, i, page) for i, page in enumerate(pages(manager, seq_id)) if i >= 2]
        assert manager.take_changes(seq_id) == tuple(copy if seq_id == 1 else copy[1:])


@pytest.mark.parametrize("branches", [2, 3, 5])
def test_branches_that_go_on_in_one_step_copy_the_tail_for_all_but_one(branches: int) -> None:
    manager = KVCacheManager(12, PAGE_SIZE)
    run(manager, 1, ramp(10))
    for new_id in range(2, branches + 1):
        manager.fork(1, new_id)
    for seq_id in range(1, branches + 1):
        manager.extend(seq_id, 11)
    assert len(take_moves(manager)) == branches - 1
    assert len({pages(manager, seq_id)[2] for seq_id in range(1, branches + 1)}) == branches
    manager.check()


def test_a_copy_that_finds_no_page_is_refused() -> None:
    manager = forked()
    manager.allocate(3, ramp(24, start=50), 24)
    assert_refused(manager, OutOfPages, lambda: manager.extend(2, 11), "1 pages wanted, 0 available of 9")


def test_a_copy_and_the_pages_after_it_are_taken_together_or_not_at_all() -> None:
    manager = forked()
    manager.allocate(3, ramp(17, start=50), 17)
    assert manager.num_available == 1
    assert_refused(manager, OutOfPages, lambda: manager.extend(2, 13), "2 pages wanted, 1 available of 9")


def test_moves_are_taken_once_and_in_order() -> None:
    manager = forked()
    manager.fork(1, 3)
    manager.extend(2, 11)
    manager.extend(3, 11)
    targets = [manager.table(2).pages[2], manager.table(3).pages[2]]
    assert [move.target for move in take_moves(manager)] == targets
    assert take_moves(manager) == ()


def test_moves_give_each_branch_its_own_tokens() -> None:
    """Pages as plain lists of tokens, written as a worker would, for three branches that go on independently."""
    manager, content, rng = KVCacheManager(40, PAGE_SIZE), dict[int, list[int]](), random.Random(0)
    histories = {1: list(range(1, 11))}

    def compute(seq_id: int, start: int) -> None:
        history = histories[seq_id]
        moves = take_moves(manager)
        for move in moves:
            content[move.target] = list(content[move.source])
        for position in range(start, len(history)):
            page, offset = divmod(manager.table(seq_id).slot(position), PAGE_SIZE)
            assert manager.allocator.ref_count(page) == 1
            content.setdefault(page, [0] * PAGE_SIZE)[offset] = history[position]
        manager.commit(seq_id, tokens(*history), len(history))
        manager.confirm_moves(moves)

    manager.allocate(1, tokens(*histories[1]), 10)
    compute(1, 0)
    for new_id in (2, 3):
        manager.fork(1, new_id)
        histories[new_id] = list(histories[1])
    for _ in range(30):
        seq_id = rng.choice([1, 2, 3])
        start = len(histories[seq_id])
        histories[seq_id].append(100 * seq_id + start)
        manager.extend(seq_id, start + 1)
        compute(seq_id, start)
        manager.check()
    for seq_id, history in histories.items():
        slots = manager.table(seq_id).slots(0, len(history)).tolist()
        assert [content[slot // PAGE_SIZE][slot % PAGE_SIZE] for slot in slots] == history


# Promises


@pytest.mark.parametrize("gone", [1, 2, 3])
@pytest.mark.parametrize("how", ["free", "truncate"])
def test_a_page_that_several_compute_is_awaited_until_the_last_of_them_is_gone(gone: int, how: str) -> None:
    manager, prompt = KVCacheManager(40, PAGE_SIZE), ramp(12)
    for seq_id in (1, 2, 3):
        manager.allocate(seq_id, prompt, 12)
    order = [gone, *(i for i in (1, 2, 3) if i != gone)]
    for i, seq_id in enumerate(order):
        assert manager.computing(prompt) == min(order[i:])
        if how == "free":
            manager.free(seq_id)
        else:
            manager.truncate(seq_id, 0)
        manager.check()
    assert manager.computing(prompt) is None


def test_who_is_ahead_promises_the_next_page_and_who_is_behind_still_the_one_before() -> None:
    manager, prompt = KVCacheManager(40, PAGE_SIZE), ramp(12)
    manager.allocate(1, prompt, 12)
    manager.allocate(2, prompt, 12)
    manager.commit(2, prompt, 4)
    manager.check()
    assert manager.computing(prompt) == 2, "of the second page"
    manager.commit(1, prompt, 4)
    manager.free(2)
    assert manager.computing(prompt) == 1
    manager.check()


def test_a_forgotten_history_is_not_copied_at_each_page_that_follows_it() -> None:
    manager, history = KVCacheManager(30_002, 1, poison=False), ramp(30_000)
    manager.allocate(1, history, 1)
    manager.commit(1, history, 1)
    manager.reset()
    manager.extend(1, 30_000)
    manager.commit(1, history, 29_999)
    tracemalloc.start()
    manager.commit(1, history, 30_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30_000, "less than a byte a page"
    assert manager.match(history) == 0


def test_a_promise_ends_with_the_history_that_it_follows() -> None:
    """The only page leaves its window as soon as it is computed, and is given up for another sequence."""
    manager, history = KVCacheManager(4, PAGE_SIZE, windows=(1,)), ramp(12)
    manager.allocate(1, history, 4)
    manager.commit(1, history, 4)
    manager.allocate(2, ramp(12, start=50), 12)
    assert manager.match(history) == 0
    manager.free(2)
    manager.extend(1, 8)
    manager.commit(1, history, 8)
    assert not manager._promised
    manager.check()


def test_a_manager_knows_which_sequences_have_pages() -> None:
    manager = forked()
    assert (len(manager), 1 in manager, 2 in manager, 3 in manager) == (2, True, True, False)


# Planted faults


def busy() -> KVCacheManager:
    """Sequences 1 to 4, two of them forks, one move under way and one to come, cached pages of one that is gone."""
    manager = KVCacheManager(20, PAGE_SIZE)
    run(manager, 1, ramp(10))
    manager.fork(1, 2)
    manager.fork(1, 3)
    manager.extend(2, 11)
    take_moves(manager)
    manager.extend(3, 11)
    run(manager, 4, ramp(9, start=50))
    run(manager, 5, ramp(9, start=70))
    manager.free(5)
    manager.allocate(6, ramp(9, start=90), 9)
    return manager


def chain(manager: KVCacheManager, seq_id: int) -> list[Entry]:
    return manager._held[seq_id].chain


def row(manager: KVCacheManager, seq_id: int) -> int:
    return manager._held[seq_id].row


def swap(manager: KVCacheManager, one: tuple[int, int], other: tuple[int, int]) -> None:
    """Swap the pages at (sequence, index)."""
    table = manager._store.pages[0]
    a, b = (row(manager, one[0]), one[1]), (row(manager, other[0]), other[1])
    table[a], table[b] = int(table[b]), int(table[a])


def set_page(seq_id: int, index: int, page: int) -> Callable[[KVCacheManager], object]:
    return lambda m: m._store.pages[0, row(m, seq_id)].__setitem__(index, page)


def append(seq_id: int, page: Callable[[KVCacheManager], int]) -> Callable[[KVCacheManager], object]:
    return lambda m: m._store.append(row(m, seq_id), [[page(m)]])


def set_in(name: str, seq_id: int, value: int) -> Callable[[KVCacheManager], object]:
    return lambda m: getattr(m._store, name).__setitem__(row(m, seq_id), value)


def cached_page(manager: KVCacheManager) -> int:
    return next(manager.prefix_cache.idle_pages())


def free_a_cached_page(manager: KVCacheManager) -> None:
    """The stale entry of case A02: the page may be handed out and can still be found."""
    page = cached_page(manager)
    manager.allocator.reclaim([page])
    manager.prefix_cache.unpark([page])


def unfreeze(manager: KVCacheManager) -> None:
    manager.fork(4, 9)
    manager._store.frozen[:] = False


def lose_the_second_promise(manager: KVCacheManager) -> None:
    manager.allocate(7, ramp(9, start=90), 9)
    ((digest, owners),) = manager._promised.items()
    manager._promised[digest] = owners[:1]


def set_unused(name: str, value: int) -> Callable[[KVCacheManager], object]:
    return lambda m: getattr(m._store, name).__setitem__(m._store._unused[-1], value)


Fault = tuple[str, str, Callable[[KVCacheManager], object], str]
FAULTS: list[Fault] = [
    ("_store", "a page dropped", lambda m: m._store.cut(row(m, 1), 2), "P1"),
    ("_store", "a page twice", append(1, lambda m: pages(m, 1)[0]), "P1"),
    ("_store", "a page of another", append(4, lambda m: pages(m, 1)[0]), "P1"),
    ("_store", "the null page", set_page(1, 1, 0), "P1"),
    ("_store", "a page past the end", set_page(1, 1, 20), "P1"),
    ("_store", "a free page", lambda m: set_page(1, 1, m.allocator._free[0])(m), "P1"),
    ("_store", "a cached page", lambda m: set_page(1, 1, cached_page(m))(m), "P1"),
    ("_store", "a page beyond the end", set_page(1, 3, 7), "P1"),
    ("_store", "two pages swapped", lambda m: swap(m, (4, 0), (4, 1)), "P3"),
    ("_store", "swapped with another's", lambda m: swap(m, (1, 1), (4, 1)), "P3"),
    ("_store", "a full page swapped with the tail", lambda m: swap(m, (4, 1), (4, 2)), "P3"),
    ("_store", "more computed than there is room for", set_in("num_computed", 1, 13), "P1"),
    ("_store", "fewer computed than published", set_in("num_computed", 1, 7), "P4"),
    ("_store", "a shared tail not known as such", unfreeze, "P2"),
    ("_store", "a row used twice", lambda m: m._store._unused.append(row(m, 1)), "P1"),
    ("_store", "a new page said to be shared", set_in("frozen", 6, True), "P2"),
    ("_store", "an unused row with pages", set_unused("num_pages", 1), "P1"),
    ("_store", "an unused row with tokens", set_unused("num_computed", 1), "P1"),
    ("_store", "an unused row said to be shared", set_unused("frozen", True), "P1"),
    ("_row_of", "another's", lambda m: m._row_of.update({1: row(m, 4)}), "P1"),
    ("_last_rows", "of others", lambda m: setattr(m, "_last_rows", ([1], np.array([row(m, 4)]))), "P1"),
    ("held.row", "another's", lambda m: setattr(m._held[1], "row", row(m, 4)), "P1"),
    ("held.chain", "an entry too many", lambda m: chain(m, 4).append(chain(m, 1)[0]), "P4"),
    ("held.chain", "the wrong order", lambda m: chain(m, 4).reverse(), "P3"),
    ("held.chain", "an entry of another", lambda m: chain(m, 4).__setitem__(1, chain(m, 1)[1]), "P3"),
    ("held.chain", "the first entry lost", lambda m: chain(m, 4).pop(0), "P3"),
    ("held.namespace", "another", lambda m: setattr(m._held[4], "namespace", b"x"), "P3"),
    ("held.changes", "another page", lambda m: m._held[3].changes.append((0, 0, 7)), "P1"),
    ("held.changes", "past the end", lambda m: m._held[3].changes.append((0, 9, 7)), "P1"),
    ("held.promise", "lost", lambda m: setattr(m._held[6], "promise", None), "P3"),
    ("_promised", "by one that is gone", lambda m: m._promised.update({b"x": (9,)}), "P3"),
    ("_promised", "by nobody", lambda m: m._promised.update({b"x": ()}), "P3"),
    ("_promised", "lost", lambda m: m._promised.clear(), "P3"),
    ("_promised", "by one of two lost", lose_the_second_promise, "P3"),
    ("pages._moved", "a move too many", lambda m: m._pages._moved.update({pages(m, 4)[0]: 1}), "P1"),
    ("_held", "a sequence lost", lambda m: m._held.pop(4), "P1"),
    ("_held", "a sequence twice", lambda m: m._held.update({9: m._held[4]}), "P1"),
    ("pages._moves", "lost", lambda m: m._pages._moves.clear(), "P1"),
    ("pages._moves", "twice", lambda m: m._pages._moves.append(m._pages._moves[0]), "P1"),
    ("pages._moves", "another source", lambda m: m._pages._moves.__setitem__(0, Move(pages(m, 4)[0], 1)), "P1"),
    ("pages._under_way", "lost", lambda m: m._pages._under_way.clear(), "P1"),
    ("pages._under_way", "twice", lambda m: m._pages._under_way.append(m._pages._under_way[0]), "P1"),
    ("allocator", "a count too many", lambda m: m.allocator.share([pages(m, 1)[0]]), "P1"),
    ("allocator", "a page leaked", lambda m: m.allocator.allocate(1), "P1"),
    ("allocator", "a page released behind its owner", lambda m: m.allocator.release([pages(m, 1)[0]]), "P1"),
    ("allocator", "a cached page freed", lambda m: m.allocator.reclaim([cached_page(m)]), "P1"),
    ("allocator", "a page on the free list twice", lambda m: m.allocator._free.append(m.allocator._free[0]), "INV-3"),
    ("prefix_cache", "an owned page evictable", lambda m: m.prefix_cache.park([pages(m, 4)[1]]), "P1"),
    ("prefix_cache", "a cached page not evictable", lambda m: m.prefix_cache.unpark([cached_page(m)]), "P1"),
    ("prefix_cache", "a cached page forgotten", lambda m: m.prefix_cache.evict(), "P1"),
    ("prefix_cache", "a free page found", free_a_cached_page, "P3"),
    ("prefix_cache", "an entry lost", lambda m: m.prefix_cache._entries.popitem(), "prefix cache INV-2"),
    ("prefix_cache", "an order", lambda m: m.prefix_cache._idle.move_to_end(cached_page(m)), "prefix cache INV-3"),
]


@pytest.mark.parametrize(("attribute", "what", "plant", "invariant"), FAULTS, ids=[f"{f[0]}-{f[1]}" for f in FAULTS])
def test_check_names_the_invariant_of_a_planted_fault(
    attribute: str, what: str, plant: Callable[[KVCacheManager], object], invariant: str
) -> None:
    manager = busy()
    manager.check()
    plant(manager)
    with pytest.raises(InvariantError, match=f"^{invariant}: "):
        manager.check()


def test_check_names_the_owners_of_the_page_at_fault() -> None:
    manager = KVCacheManager(8, PAGE_SIZE)
    run(manager, 11, ramp(4))
    manager.allocator.share([1])
    with pytest.raises(InvariantError, match="page 1 is referenced 1 times, its count is 2; held by sequence 11 "):
        manager.check()


def test_a_fault_is_planted_in_every_attribute_that_holds_state() -> None:
    settings = {"page_size", "_shift", "windows", "_windowed", "enable_prefix_caching", "_pages"}
    state = set(vars(busy())) - settings | {f"held.{name}" for name in _Held.__slots__ if name != "label"}
    state |= {f"pages.{name}" for name in vars(busy()._pages) if name not in {"allocator", "prefix_cache", "_poison"}}
    assert {fault[0] for fault in FAULTS} | {"held.num_known"} == state


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([1, 2, 3], "list"),
        (np.arange(9), "int64"),
        (np.arange(8, dtype=np.int32).reshape(2, 4), r"int32 \[2, 4\]"),
        (np.arange(9, dtype=np.float32), "float32"),
        (None, "NoneType"),
    ],
)
def test_tokens_of_another_kind_are_refused_and_change_nothing(given: Any, found: str) -> None:
    manager = full()
    calls: list[Callable[[], object]] = [
        lambda: manager.match(given),
        lambda: manager.computing(given),
        lambda: manager.allocate(3, given, 1),
        lambda: manager.commit(1, given, 9),
        lambda: manager.commit_all([1], [given], np.array([12])),
        lambda: manager.pin(given, 1.0),
    ]
    manager.extend(1, 12)
    manager.allocate(4, ramp(9, start=60), 1)  # so that `computing` has something to compare with
    for call in calls:
        assert_refused(manager, TypeError, call, f"tokens must be a NumPy array int32 .n., not {found}")


@pytest.mark.parametrize("name", ["extend_all", "commit_all"])
def test_a_batch_that_makes_no_sense_is_refused_and_changes_nothing(name: str) -> None:
    manager = full()
    manager.allocate(4, ramp(9, start=60), 1)
    manager.extend(1, 12)

    def call(ids: list[int], lengths: Any) -> Callable[[], object]:
        if name == "extend_all":
            return lambda: manager.extend_all(ids, lengths)
        return lambda: manager.commit_all(ids, [ramp(40)] * len(ids), lengths)

    assert_refused(manager, PageStateError, call([1, 1], np.array([12, 12])), "named twice")
    assert_refused(manager, TypeError, call([1, 4], np.array([12])), r"2 sequences need lengths int64 \[2\]")
    assert_refused(manager, TypeError, call([1], np.array([12.0])), "not float64")
    call([], np.zeros(0, dtype=np.int64))()
    manager.extend_all(np.array([1]), np.array([13]))  # type: ignore[arg-type]  # ids of NumPy are ids too
    manager.check()


@pytest.mark.parametrize("how", ["fork", "truncate"])
def test_p2_tokens_written_without_extend_into_a_page_that_may_be_anothers_are_refused(how: str) -> None:
    manager = forked() if how == "fork" else KVCacheManager(10, PAGE_SIZE)
    if how == "truncate":
        run(manager, 1, ramp(12))
        manager.truncate(1, 10)
    history = ramp(11)
    for call in (
        lambda: manager.commit(1, history, 11),
        lambda: manager.commit_all([1], [history], np.array([11])),
    ):
        assert_refused(manager, PageStateError, call, "sequence 1 may share the page that was written: extend it first")
    grow(manager, 1, history)
    manager.check()
