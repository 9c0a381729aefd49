"""BlockAllocator: every transition, every refusal, and that check() sees each planted fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import snapshot

from paged import NULL_PAGE, BlockAllocator, InvariantError, OutOfPages, PageStateError

FREE, REFERENCED, CACHED = 0, 1, 2  # as in _states
OPERATIONS: dict[str, Callable[[BlockAllocator, list[int]], object]] = {
    "share": BlockAllocator.share,
    "release": BlockAllocator.release,
    "park": BlockAllocator.park,
    "reclaim": BlockAllocator.reclaim,
}
PAGES = {"null": NULL_PAGE, "referenced": 1, "cached": 3, "free": 7, "negative": -1, "past the end": 8}
ALLOWED = {("share", "referenced"), ("release", "referenced"), ("park", "referenced")} | {
    ("share", "cached"),
    ("reclaim", "cached"),
}


def pool() -> BlockAllocator:
    """8 pages: 1 referenced once, 2 twice, 3 cached, the others free."""
    allocator = BlockAllocator(8)
    allocator.allocate(3)
    allocator.share([2])
    allocator.park([3])
    return allocator


REFERENCES = [1, 2, 2]  # what pool() has handed out


def numbers(allocator: BlockAllocator) -> tuple[int, int, int]:
    return allocator.num_free, allocator.num_used, allocator.num_cached


def test_a_fresh_pool_is_all_free_but_for_the_null_page() -> None:
    allocator = BlockAllocator(8)
    allocator.check([])
    assert numbers(allocator) == (7, 0, 0)


def test_every_page_but_the_null_page_is_handed_out_in_order_of_id() -> None:
    assert BlockAllocator(8).allocate(7) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_without_a_page_to_hand_out_is_refused(num_pages: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages is {num_pages}"):
        BlockAllocator(num_pages)


def test_the_smallest_pool_has_one_page() -> None:
    assert BlockAllocator(2).allocate(1) == [1]


def test_allocating_none_changes_nothing() -> None:
    allocator = pool()
    before = snapshot.of_allocator(allocator)
    assert allocator.allocate(0) == []
    assert snapshot.of_allocator(allocator) == before


def test_allocated_pages_have_one_reference() -> None:
    allocator = BlockAllocator(8)
    assert [allocator.ref_count(page) for page in allocator.allocate(3)] == [1, 1, 1]


def test_the_page_released_last_is_handed_out_first() -> None:
    allocator = BlockAllocator(8)
    allocator.allocate(3)
    allocator.release([2])
    allocator.release([1])
    assert allocator.allocate(2) == [1, 2]


def test_share_adds_a_reference_to_a_referenced_page() -> None:
    allocator = pool()
    allocator.share([1])
    assert allocator.ref_count(1) == 2
    assert numbers(allocator) == (4, 2, 1)


def test_share_gives_a_cached_page_its_first_reference() -> None:
    allocator = pool()
    allocator.share([3])
    assert allocator.ref_count(3) == 1
    assert numbers(allocator) == (4, 3, 0)


def test_release_keeps_a_page_that_others_reference() -> None:
    allocator = pool()
    allocator.release([2])
    assert allocator.ref_count(2) == 1
    assert numbers(allocator) == (4, 2, 1)


def test_release_frees_a_page_with_its_last_reference() -> None:
    allocator = pool()
    allocator.release([1])
    assert allocator.ref_count(1) == 0
    assert numbers(allocator) == (5, 1, 1)


def test_park_keeps_a_page_that_others_reference() -> None:
    allocator = pool()
    assert allocator.park([2]) == []
    assert allocator.ref_count(2) == 1
    assert numbers(allocator) == (4, 2, 1)


def test_park_caches_a_page_with_its_last_reference() -> None:
    allocator = pool()
    assert allocator.park([1]) == [1]
    assert allocator.ref_count(1) == 0
    assert numbers(allocator) == (4, 1, 2)


def test_reclaim_frees_a_cached_page() -> None:
    allocator = pool()
    allocator.reclaim([3])
    assert numbers(allocator) == (5, 2, 0)


def test_cached_pages_are_never_handed_out() -> None:
    assert 3 not in pool().allocate(4)


@pytest.mark.parametrize(("operation", "state"), sorted(ALLOWED))
def test_an_allowed_transition_leaves_a_sound_pool(operation: str, state: str) -> None:
    allocator = pool()
    OPERATIONS[operation](allocator, [PAGES[state]])
    allocator.check()


@pytest.mark.parametrize("state", PAGES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_other_transition_is_refused_and_changes_nothing(operation: str, state: str) -> None:
    if (operation, state) in ALLOWED:
        return  # the test above
    allocator = pool()
    before = snapshot.of_allocator(allocator)
    with pytest.raises(PageStateError, match=f"page {PAGES[state]} is "):
        OPERATIONS[operation](allocator, [PAGES[state]])
    assert snapshot.of_allocator(allocator) == before


@pytest.mark.parametrize("operation", ["share", "release", "park"])
@pytest.mark.parametrize("state", sorted(PAGES.keys() - {"referenced"}))
def test_one_wrong_page_among_several_changes_nothing(operation: str, state: str) -> None:
    if (operation, state) in ALLOWED:
        return  # not wrong
    allocator = pool()
    before = snapshot.of_allocator(allocator)
    with pytest.raises(PageStateError, match=f"page {PAGES[state]} is "):
        OPERATIONS[operation](allocator, [1, 2, PAGES[state]])
    assert snapshot.of_allocator(allocator) == before


@pytest.mark.parametrize(("operation", "page"), [("release", 2), ("park", 2), ("reclaim", 3)])
def test_a_page_named_twice_is_refused_and_changes_nothing(operation: str, page: int) -> None:
    allocator = pool()
    before = snapshot.of_allocator(allocator)
    with pytest.raises(PageStateError, match="named twice"):
        OPERATIONS[operation](allocator, [page, page])
    assert snapshot.of_allocator(allocator) == before


def test_a_page_may_be_shared_twice_at_once() -> None:
    allocator = pool()
    allocator.share([1, 1])
    assert allocator.ref_count(1) == 3


def test_a_double_release_raises_and_names_page_and_state() -> None:
    allocator = pool()
    allocator.release([1])
    with pytest.raises(PageStateError, match="page 1 is free, not referenced"):
        allocator.release([1])


def test_out_of_pages_carries_the_numbers_and_changes_nothing() -> None:
    allocator = pool()
    before = snapshot.of_allocator(allocator)
    with pytest.raises(OutOfPages, match="5 pages wanted, 4 available of 7") as caught:
        allocator.allocate(5)
    assert (caught.value.wanted, caught.value.available, caught.value.total) == (5, 4, 7)
    assert snapshot.of_allocator(allocator) == before


def test_the_repr_says_how_many_pages_are_in_each_state() -> None:
    assert repr(pool()) == "BlockAllocator(4 free, 2 referenced, 1 cached)"


# What is planted, in which attribute, and the invariant that check() must name.
Fault = tuple[str, str, Callable[[BlockAllocator], object], str]
FAULTS: list[Fault] = [
    ("_free", "a page twice", lambda a: a._free.append(a._free[-1]), "INV-3"),
    ("_free", "the null page", lambda a: a._free.append(NULL_PAGE), "INV-3"),
    ("_free", "a page past the end", lambda a: a._free.append(8), "INV-3"),
    ("_free", "a negative page", lambda a: a._free.__setitem__(0, -1), "INV-3"),
    ("_free", "a page lost", lambda a: a._free.pop(), "INV-1"),
    ("_free", "a referenced page", lambda a: a._free.append(1), "INV-1"),
    ("_free", "a cached page", lambda a: a._free.append(3), "INV-1"),
    ("_counts", "one too many", lambda a: plus(a, 1, 1), "P1"),
    ("_counts", "one too few of two", lambda a: plus(a, 2, -1), "P1"),
    ("_counts", "one too few of one", lambda a: plus(a, 1, -1), "INV-2"),
    ("_counts", "a free page counted", lambda a: plus(a, 7, 1), "INV-2"),
    ("_counts", "a free page below zero", lambda a: plus(a, 7, -1), "INV-2"),
    ("_counts", "a cached page counted", lambda a: plus(a, 3, 1), "INV-2"),
    ("_counts", "the null page counted", lambda a: plus(a, NULL_PAGE, 1), "INV-3"),
    ("_states", "referenced becomes free", lambda a: a._states.__setitem__(1, FREE), "INV-1"),
    ("_states", "referenced becomes cached", lambda a: a._states.__setitem__(1, CACHED), "INV-2"),
    ("_states", "cached becomes free", lambda a: a._states.__setitem__(3, FREE), "INV-1"),
    ("_states", "cached becomes referenced", lambda a: a._states.__setitem__(3, REFERENCED), "INV-2"),
    ("_states", "free becomes referenced", lambda a: a._states.__setitem__(7, REFERENCED), "INV-1"),
    ("_states", "free becomes cached", lambda a: a._states.__setitem__(7, CACHED), "INV-1"),
    ("_states", "the null page in use", lambda a: a._states.__setitem__(NULL_PAGE, REFERENCED), "INV-3"),
    ("_num_cached", "one too many", lambda a: setattr(a, "_num_cached", 2), "INV-1"),
    ("_num_cached", "one too few", lambda a: setattr(a, "_num_cached", 0), "INV-1"),
]


def plus(allocator: BlockAllocator, page: int, n: int) -> None:
    allocator._counts[page] += n


@pytest.mark.parametrize(("attribute", "what", "plant", "invariant"), FAULTS, ids=[f"{f[0]}-{f[1]}" for f in FAULTS])
def test_check_names_the_invariant_of_a_planted_fault(
    attribute: str, what: str, plant: Callable[[BlockAllocator], object], invariant: str
) -> None:
    allocator = pool()
    allocator.check(REFERENCES)
    plant(allocator)
    with pytest.raises(InvariantError, match=f"^{invariant}: "):
        allocator.check(REFERENCES)


def test_a_fault_is_planted_in_every_attribute_that_holds_state() -> None:
    assert {fault[0] for fault in FAULTS} == set(vars(pool())) - {"num_pages"}


@pytest.mark.parametrize("references", [[1, 2], [1, 2, 2, 3], [1, 1, 2, 2], [1, 2, 2, NULL_PAGE], [1, 2, 2, 8]])
def test_check_compares_the_counts_with_the_references_it_is_given(references: list[int]) -> None:
    with pytest.raises(InvariantError, match=r"^P1: page"):
        pool().check(references)


def test_out_of_pages_survives_pickling() -> None:
    """With its numbers and its message: it may come from another process."""
    import pickle

    error = pickle.loads(pickle.dumps(OutOfPages(3, 2, 8)))
    assert (error.wanted, error.available, error.total) == (3, 2, 8)
    assert str(error).startswith("3 pages wanted, 2 available of 8")
