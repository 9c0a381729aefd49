"""A careless or hostile caller: odd numbers, names and containers are refused, and change nothing (P5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from paged import InvariantError, KVCacheManager, OutOfPages, PageStateError, export
from paged.prefix_cache import namespace

Call = Callable[[KVCacheManager], Any]


def ids(*tokens: int) -> Any:
    return np.array(tokens, dtype=np.int32)


def used(pages: int = 12) -> KVCacheManager:
    """A sequence of 6 tokens, a fork of it, and something cached without an owner."""
    manager = KVCacheManager(pages, 4, poison=False)
    manager.allocate(9, ids(*range(50, 59)), 9)
    manager.commit(9, ids(*range(50, 59)), 9)
    manager.free(9)
    manager.allocate(0, ids(*range(6)), 6)
    manager.commit(0, ids(*range(6)), 6)
    manager.fork(0, 1)
    return manager


def state(manager: KVCacheManager) -> Any:
    """All that a caller can see."""
    tables = {i: (manager.table(i).pages, manager.num_computed(i), manager.room(i)) for i in range(10) if i in manager}
    cached = manager.match(ids(*range(50, 59), 0)), manager.match(ids(*range(6), 0))
    return tables, cached, manager.num_used, manager.num_available, manager.explain().text()


WRONG: dict[str, tuple[type[Exception], Call]] = {
    "negative spare": (ValueError, lambda m: m.allocate(2, ids(*range(90)), 90, spare=-99)),
    "negative room": (ValueError, lambda m: m.allocate(2, ids(1), 1, room=-1)),
    "negative num_new": (ValueError, lambda m: m.allocate(2, ids(1), -1)),
    "negative most_cached": (ValueError, lambda m: m.allocate(2, ids(1), 1, most_cached=-1)),
    "most_cached of a float": (TypeError, lambda m: m.allocate(2, ids(1), 1, most_cached=1.5)),  # type: ignore[arg-type]
    "changes of one that is unknown": (PageStateError, lambda m: m.changed([0, 7])),
    "rooms of one that is unknown": (PageStateError, lambda m: m.rooms([0, 7])),
    "num_new of a float": (TypeError, lambda m: m.allocate(2, ids(1, 2), 1.0)),  # type: ignore[arg-type]  # the misuse
    "namespace of a text": (TypeError, lambda m: m.allocate(2, ids(1), 1, namespace="tenant")),  # type: ignore[arg-type]
    "namespace of a text in a pin": (TypeError, lambda m: m.pin(ids(1), 1.0, "tenant")),  # type: ignore[arg-type]
    "namespace of None in a match": (TypeError, lambda m: m.match(ids(1), None)),  # type: ignore[arg-type]
    "commit of a float": (TypeError, lambda m: m.commit(0, ids(*range(8)), 6.0)),  # type: ignore[arg-type]
    "extend to a float": (TypeError, lambda m: m.extend(1, 9.0)),  # type: ignore[arg-type]
    "extend to a float in a full pool": (TypeError, lambda m: m.extend(0, 400.0)),  # type: ignore[arg-type]
    "truncate to a float": (TypeError, lambda m: m.truncate(0, 1.5)),  # type: ignore[arg-type]
    "fewer arrays of tokens": (TypeError, lambda m: m.commit_all([0, 1], [ids(*range(6))], np.array([6, 6]))),
    "more tokens than numbers hold": (OutOfPages, lambda m: m.extend_all([0], np.array([2**63 - 1]))),
    "sums that numbers do not hold": (OutOfPages, lambda m: m.extend_all([0, 1], np.array([2**62, 2**62 + 2]))),
    "negative lengths": (ValueError, lambda m: m.extend_all([0, 1], np.array([8, -5]))),
    "negative number computed": (ValueError, lambda m: m.commit(0, ids(1), -1)),
    "negative numbers computed": (ValueError, lambda m: m.commit_all([0, 1], [ids(1)] * 2, np.array([6, -5]))),
    "computing of a text": (TypeError, lambda m: m.computing("nonsense")),  # type: ignore[arg-type]
    "namespace of a text in computing": (TypeError, lambda m: m.computing(ids(1), "tenant")),  # type: ignore[arg-type]
    "a pin until no time": (ValueError, lambda m: m.pin(ids(*range(6)), math.nan)),
    "a pin until a text": (TypeError, lambda m: m.pin(ids(*range(6)), "5")),  # type: ignore[arg-type]
    "no time": (ValueError, lambda m: m.expire(math.nan)),
    "a text as time": (TypeError, lambda m: m.expire("5")),  # type: ignore[arg-type]
    "a group that is not there": (ValueError, lambda m: m.table(0, -1)),
    "a group that is not there, of no sequence": (ValueError, lambda m: export.slots(m, [], [], [], group=9)),
    "positions of floats": (TypeError, lambda m: export.slots(m, [0], [0.9], [2.7])),  # type: ignore[list-item]
    "half a page published": (ValueError, lambda m: m.prefix_cache.publish(ids(1, 2), (3,), [])),
    "more pages given up than nobody owns": (KeyError, lambda m: m.prefix_cache.evict(3)),
    "fewer pages than none": (ValueError, lambda m: m.allocator.allocate(-3)),
    "references to a page before the first": (PageStateError, lambda m: m.allocator.ref_count(-1)),
    "references to a page past the last": (PageStateError, lambda m: m.allocator.ref_count(12)),
    "lengths of floats": (TypeError, lambda m: export.padded(m, [0], [3.9])),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_refused_and_changes_nothing(name: str) -> None:
    error, call = WRONG[name]
    manager = used()
    before = state(manager)
    with pytest.raises(error):
        call(manager)
    assert state(manager) == before
    manager.check()


@pytest.mark.parametrize("kind", [np.uint8, np.uint32, np.uint64, np.int64])
def test_numpy_numbers_are_numbers(kind: type[np.integer[Any]]) -> None:
    manager = KVCacheManager(12, np.int64(4))  # type: ignore[arg-type]
    manager.allocate(0, ids(*range(6)), kind(6))  # type: ignore[arg-type]
    manager.extend(0, kind(9))  # type: ignore[arg-type]
    manager.commit(0, ids(*range(9)), kind(9))  # type: ignore[arg-type]
    kept = manager.truncate(0, kind(5))  # type: ignore[arg-type]
    assert (manager.room(0), kept, type(kept)) == (8, 5, int)
    manager.check()


def test_a_prefix_hit_and_the_greatest_number_of_new_tokens_do_not_wrap() -> None:
    manager = used()
    assert manager.allocate(2, ids(*range(50, 59)), np.int64(2**63 - 1)) == 8  # type: ignore[arg-type]
    assert manager.room(2) == 12
    manager.check()


@pytest.mark.parametrize("container", [dict.fromkeys, tuple, lambda x: dict.fromkeys(x).keys()])
def test_sequences_may_come_in_any_container(container: Callable[[Any], Any]) -> None:
    manager = KVCacheManager(12, 4)
    for i in range(2):
        manager.allocate(i, ids(i, 5, 6), 3)
    manager.extend_all(container([0, 1]), np.array([5, 5]))
    manager.commit_all(container([0, 1]), [ids(0, 5, 6, 7, 8), ids(1, 5, 6, 7, 8)], np.array([5, 5]))
    assert [manager.num_computed(i) for i in range(2)] == [5, 5]
    manager.check()


def test_a_pin_whose_time_is_a_number_of_another_kind_ends() -> None:
    manager = used()
    assert manager.pin(ids(*range(50, 59)), np.int64(5)) == 8  # type: ignore[arg-type]
    manager.expire(np.float32(4.5))  # type: ignore[arg-type]
    assert "p" in manager.explain().text().split("\n")[1]
    manager.expire(5)
    assert "p" not in manager.explain().text().split("\n")[1]


@pytest.mark.parametrize("windows", [(2.5,), (math.nan,), (True,), (0,), (2**63,), ()])
def test_a_window_is_a_whole_number_of_tokens(windows: Any) -> None:
    with pytest.raises(ValueError, match="windows must hold"):
        KVCacheManager(12, 4, windows=windows)


def test_no_two_salts_are_one() -> None:
    """Half a surrogate pair beside its other half is not the character that both would be in JSON."""
    salts: list[Any] = ["\U0001f600", "\ud83d\ude00", "\ud83d", "\\ud83d", 1, "1", True, -1, "-1", "None", "null"]
    assert len({namespace(salt) for salt in salts}) == len(salts)


def test_slots_of_pages_that_have_left_the_window_are_refused() -> None:
    manager = KVCacheManager(12, 4, windows=(5,))
    manager.allocate(0, ids(*range(20)), 20)
    manager.commit(0, ids(*range(20)), 20)
    assert len(export.slots(manager, [0], [16], [20])) == 4
    with pytest.raises(IndexError, match="window"):
        export.slots(manager, [0], [0], [4])


def test_a_page_that_collides_and_has_left_its_window_leaves_nothing_behind() -> None:
    """Whatever the digest function does: INV-2 of the prefix cache."""
    manager = KVCacheManager(25, 1, windows=(1,), poison=False)
    manager.prefix_cache._digest = lambda parent, tokens: b"x"
    manager.allocate(0, ids(1, 9), 2)
    manager.commit(0, ids(1, 9), 1)
    manager.allocate(1, ids(2, 3, 4), 3)
    manager.commit(1, ids(2, 3, 4), 2)
    manager.free(0)
    manager.reset()
    manager.commit(1, ids(2, 3, 4), 3)
    manager.check()


def test_a_drawing_is_xml_whatever_a_request_is_called() -> None:
    manager = KVCacheManager(12, 4)
    manager.allocate(0, ids(*range(6)), 6, label="a\x00<b>\x1b\ud800&\U0001f600")
    drawn = manager.explain().svg()
    assert "\U0001f600" in "".join(ElementTree.fromstring(drawn.encode()).itertext())


def test_a_label_takes_one_line_whatever_is_in_it() -> None:
    manager = KVCacheManager(12, 4)
    manager.allocate(0, ids(*range(6)), 6, label="a\nb\u2028c")
    text = manager.explain().text()
    assert len(text.splitlines()) == 4
    assert text.endswith("\na\\nb\\u2028c (sequence 0): 1-2")
    with pytest.raises(InvariantError, match=r"^P1: .*a\\nb\\u2028c \(sequence 0\) holds pages 1-2$"):
        manager.check(idle=True)


def test_every_mark_and_colour_of_a_drawing_is_explained() -> None:
    manager = used()
    for i in range(2, 12):
        manager.fork(0, i)
    assert "9 by nine or more" in manager.explain().text()
    brown, what = 'fill="#8a6d3b"', "cached and pinned"
    drawn = manager.explain().svg()
    assert (drawn.count(brown), what in drawn) == (0, False)
    manager.pin(ids(*range(50, 59)), 1.0)
    drawn = manager.explain().svg()
    assert (drawn.count(brown), what in drawn) == (3, True)
