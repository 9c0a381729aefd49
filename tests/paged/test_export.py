"""Exporters: the forms of a table that kernels take agree with the table, whatever its length and group."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paged import KVCacheManager, PageStateError, export
from paged.prefix_cache import Tokens

PAGE_SIZE = 4


def busy(windows: tuple[int | None, ...] = (None,)) -> tuple[KVCacheManager, dict[int, int]]:
    """Sequences of different lengths, some with more room than tokens; id -> tokens."""
    rng = random.Random(0)
    manager, lengths = KVCacheManager(200, PAGE_SIZE, windows=windows), dict[int, int]()
    for seq_id in range(7):
        length = rng.randint(1, 30)
        tokens: Tokens = np.array([rng.randint(0, 9) for _ in range(length)], dtype=np.int32)
        manager.allocate(seq_id, tokens, length)
        manager.commit(seq_id, tokens, length)
        manager.extend(seq_id, length + rng.randint(0, 9))
        lengths[seq_id] = length
    return manager, lengths


@pytest.mark.parametrize("group", [0, 1])
def test_padded_rows_are_the_tables_and_then_the_null_page(group: int) -> None:
    manager, lengths = busy((None, 6))
    ids = [3, 0, 6, 2]
    tables, seq_lens = export.padded(manager, ids, [lengths[i] for i in ids], group)
    assert {tables.dtype, seq_lens.dtype} == {np.dtype(np.int32)}
    for row, seq_id in zip(tables.tolist(), ids, strict=True):
        pages = manager.table(seq_id, group).pages[: -(-lengths[seq_id] // PAGE_SIZE)]
        assert row == pages + [0] * (tables.shape[1] - len(pages))
    assert seq_lens.tolist() == [lengths[i] for i in ids]


@pytest.mark.parametrize("group", [0, 1])
def test_csr_lists_the_pages_of_each_sequence_and_how_full_its_last_is(group: int) -> None:
    manager, lengths = busy((None, 6))
    ids = list(lengths)
    indptr, indices, last = export.csr(manager, ids, [lengths[i] for i in ids], group)
    assert {indptr.dtype, indices.dtype, last.dtype} == {np.dtype(np.int32)}
    for i, seq_id in enumerate(ids):
        pages = indices[indptr[i] : indptr[i + 1]].tolist()
        assert pages == manager.table(seq_id, group).pages[: len(pages)]
        assert (len(pages) - 1) * PAGE_SIZE + last[i] == lengths[seq_id]
        assert 1 <= last[i] <= PAGE_SIZE


def test_slots_are_those_of_each_position_one_sequence_after_another() -> None:
    manager, lengths = busy()
    ids = [5, 1]
    found = export.slots(manager, ids, [0, 0], [lengths[i] for i in ids])
    assert found.dtype == np.int64
    assert found.tolist() == [manager.table(i).slot(p) for i in ids for p in range(lengths[i])]


def test_what_was_exported_does_not_change_with_the_manager() -> None:
    manager, lengths = busy()
    tables, _ = export.padded(manager, [0], [lengths[0]])
    before = tables.tolist()
    manager.free(0)
    assert tables.tolist() == before


def test_arrays_are_contiguous_and_the_callers_own() -> None:
    manager, lengths = busy((None, 6))
    manager.extend(0, 90)  # room beyond its tokens, which is left out
    seq_lens = np.repeat(np.array([lengths[i] for i in (0, 3)], dtype=np.int32), 2)[::2]
    for group in range(2):
        tables = manager.tables([0, 3], group)
        arrays = (
            tables,
            *export.padded(manager, [0, 3], seq_lens, group),  # type: ignore[arg-type]  # lengths of NumPy
            *export.csr(manager, [0, 3], seq_lens, group),  # type: ignore[arg-type]  # lengths of NumPy
            export.slots(manager, [0], [lengths[0] - 1], [lengths[0]], group),
        )
        assert all(array.flags.c_contiguous for array in arrays)
        assert not any(np.shares_memory(array, manager._store.pages) for array in arrays)
        assert not any(np.shares_memory(array, seq_lens) for array in arrays)
        assert tables.dtype == np.int32
        assert tables.tolist()[0] == manager.table(0, group).pages


def test_no_sequence_gives_empty_arrays() -> None:
    manager, _ = busy()
    tables, seq_lens = export.padded(manager, [], [])
    indptr, indices, last = export.csr(manager, [], [])
    assert (tables.shape, seq_lens.shape, indices.shape, last.shape) == ((0, 0), (0,), (0,), (0,))
    assert indptr.tolist() == [0]
    assert export.slots(manager, [], [], []).shape == (0,)


@pytest.mark.parametrize("seq_len", [-1, 1000])
def test_more_tokens_than_there_is_room_for_are_refused(seq_len: int) -> None:
    manager, _ = busy()
    for call in (export.padded, export.csr):
        with pytest.raises(PageStateError, match=f"not .{seq_len}.$"):
            call(manager, [0], [seq_len])


def test_an_unknown_sequence_is_refused() -> None:
    manager, _ = busy()
    for call in (export.padded, export.csr):
        with pytest.raises(PageStateError, match="has no pages"):
            call(manager, [99], [1])
