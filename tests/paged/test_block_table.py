"""BlockTable: where the token at a position lies."""

from __future__ import annotations

import numpy as np
import pytest

from paged import BlockTable, pages_for


def test_a_slot_is_the_page_times_its_size_plus_the_offset() -> None:
    table = BlockTable(4, [7, 3, 12])
    assert [table.slot(position) for position in range(10)] == [28, 29, 30, 31, 12, 13, 14, 15, 48, 49]


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 256])
def test_slots_are_the_slots_of_each_position(page_size: int) -> None:
    table = BlockTable(page_size, [7, 3, 12])
    start, stop = page_size // 2, table.capacity
    assert table.slots(start, stop).tolist() == [table.slot(position) for position in range(start, stop)]


def test_slots_are_int64() -> None:
    assert BlockTable(256, [2**24]).slots(0, 256).dtype == np.int64


def test_slots_of_no_position_are_empty() -> None:
    assert BlockTable(4).slots(0, 0).shape == (0,)


@pytest.mark.parametrize("position", [-1, 12, 100])
def test_a_position_without_a_page_has_no_slot(position: int) -> None:
    with pytest.raises(IndexError, match=f"positions {position} to .* are not all within the capacity of 12"):
        BlockTable(4, [7, 3, 12]).slot(position)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 13), (5, 4), (13, 13)])
def test_positions_beyond_the_pages_have_no_slots(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=f"positions {start} to {stop} are not all within the capacity of 12"):
        BlockTable(4, [7, 3, 12]).slots(start, stop)


def test_positions_whose_page_has_left_the_window_have_no_slots() -> None:
    table = BlockTable(4, [0, 3])
    assert (table.slot(4), table.slots(4, 6).tolist(), table.slots(2, 2).tolist()) == (12, [12, 13], [])
    with pytest.raises(IndexError, match="positions 3 to 4 are not all in the window"):
        table.slot(3)
    with pytest.raises(IndexError, match="positions 2 to 6 are not all in the window"):
        table.slots(2, 6)


def test_a_table_does_not_change_with_the_list_it_was_made_from() -> None:
    pages = [7, 3]
    table = BlockTable(4, pages)
    pages.append(12)
    assert table.pages == [7, 3]


def test_capacity_is_the_room_of_all_pages() -> None:
    table = BlockTable(16, [5, 6])
    assert (len(table), table.capacity) == (2, 32)


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "pages"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (5, 1, 5), (257, 256, 2)]
)
def test_pages_for_rounds_up(num_tokens: int, page_size: int, pages: int) -> None:
    assert pages_for(num_tokens, page_size) == pages
