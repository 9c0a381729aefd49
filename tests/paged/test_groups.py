"""Windows: what a sequence of Gemma 3's shape holds, what a hit needs, and what is given back."""

from __future__ import annotations

import numpy as np
import pytest

from paged import KVCacheManager, KVLayout
from paged.block_table import Windows, peak_pages
from paged.prefix_cache import Tokens

GEMMA3_270M = tuple(512 if (layer + 1) % 6 else None for layer in range(18))
PAGE_SIZE = 4


def ramp(length: int, start: int = 1) -> Tokens:
    return np.arange(start, start + length, dtype=np.int32)


def run(manager: KVCacheManager, seq_id: int, prompt: Tokens, chunk: int = 1000) -> int:
    cached = computed = manager.allocate(seq_id, prompt, min(chunk, len(prompt)))
    while computed < len(prompt):
        computed = min(computed + chunk, len(prompt))
        manager.extend(seq_id, computed)
        manager.commit(seq_id, prompt, computed)
    return cached


def test_gemma3_has_six_groups_of_three_layers() -> None:
    layout = KVLayout.of(GEMMA3_270M, 1, 256, "bfloat16", 16)
    assert layout.windows == (512,) * 5 + (None,)
    assert (layout.num_layers, layout.bytes_per_token, layout.bytes_per_page) == (3, 18_432, 294_912 // 6)
    assert sorted(layout.places) == [(group, i) for group in range(6) for i in range(3)]
    for layer, (group, _) in enumerate(layout.places):
        assert layout.windows[group] == GEMMA3_270M[layer]


@pytest.mark.parametrize(
    ("layer_windows", "size", "groups"),
    [
        ((None,) * 30, 30, 1),
        ((4096,) * 32, 32, 1),
        ((4096, None) * 13, 13, 2),
        ((512,) * 22 + (None,) * 4, 2, 13),  # 4 layers a group would leave 2 of 28 places empty
        ((1024,) * 29 + (None,) * 5, 5, 7),  # 1 of 35 is
        ((7,) * 3 + (None,) * 2, 1, 5),
    ],
)
def test_layers_are_split_into_groups_of_one_size(layer_windows: Windows, size: int, groups: int) -> None:
    layout = KVLayout.of(layer_windows, 1, 8, "float32", 16)
    assert (layout.num_layers, len(layout.windows)) == (size, groups)
    assert len(set(layout.places)) == len(layer_windows), "no place is taken twice"
    assert all(index < size for _, index in layout.places)


@pytest.mark.parametrize("chunk", [512, 2048])
def test_gemma3_at_16000_tokens_holds_what_it_must(chunk: int) -> None:
    """Within 5 % of the arithmetic minimum at every step: all tokens in full layers, window and chunk in the others."""
    layout = KVLayout.of(GEMMA3_270M, 1, 256, "bfloat16", 16)
    per_layer = layout.bytes_per_token // 18
    full, windowed = GEMMA3_270M.count(None), 18 - GEMMA3_270M.count(None)
    manager = KVCacheManager(60_000, layout.page_size, windows=layout.windows)
    tokens = np.random.default_rng(0).integers(0, 1000, 16_300, dtype=np.int32)
    manager.allocate(1, tokens[:16_000], chunk)
    computed, most = 0, 0.0
    while computed < 16_300:
        step = min(chunk, 16_000 - computed) if computed < 16_000 else 1
        manager.extend(1, computed + step)
        held = manager.num_used * layout.bytes_per_page
        window = min(computed, 511) + step  # a query sees 512 tokens, its own included
        minimum = per_layer * (full * (computed + step) + windowed * window)
        if computed >= 1000:
            most = max(most, held / minimum)
        assert manager.num_used <= peak_pages(computed + step, layout.page_size, layout.windows, chunk)
        computed += step
        manager.commit(1, tokens, computed)
    assert 1.0 <= most < 1.05
    manager.check()
    whole = per_layer * 18 * 16_300
    assert manager.num_used * layout.bytes_per_page < 0.25 * whole
    manager.free(1)
    manager.check(idle=True)


def test_pages_that_leave_the_window_are_given_back_while_the_sequence_runs() -> None:
    manager = KVCacheManager(30, PAGE_SIZE, windows=(6,), enable_prefix_caching=False)
    run(manager, 1, ramp(20))
    # The token at 20 sees 15 to 19: the pages 3 and 4.
    assert [bool(page) for page in manager.table(1).pages] == [False] * 3 + [True] * 2
    assert manager.num_used == 2
    assert [change[:2] for change in manager.take_changes(1)] == [(0, 0), (0, 1), (0, 2)]


def test_a_hit_needs_only_the_windows_pages() -> None:
    manager = KVCacheManager(9, PAGE_SIZE, windows=(6,))
    run(manager, 1, ramp(20), chunk=4)
    manager.free(1)
    run(manager, 2, ramp(24, start=100), chunk=4)  # takes the pages that left the window, the oldest first
    assert manager.match(ramp(21)) == 20
    found = manager.prefix_cache.match(ramp(21))
    assert [bool(entry.pages[0]) for entry in found] == [False] * 3 + [True] * 2
    assert manager.allocate(3, ramp(21), 1) == 20
    assert manager.table(3).pages[:5] == [0, 0, 0, *(entry.pages[0] for entry in found[3:])]
    manager.check()


def test_a_hit_is_the_longest_that_is_whole_in_every_group() -> None:
    """Of the windowed group the pages around token 8 are gone, those of the end are there; the full group has all."""
    manager = KVCacheManager(40, PAGE_SIZE, windows=(None, 6))
    run(manager, 1, ramp(20), chunk=4)
    gone = [entry.pages[1] for entry in manager.prefix_cache.match(ramp(21))][:3]
    manager.free(1)
    cache = manager.prefix_cache
    assert manager.match(ramp(13)) == 12
    while any(cache.entry(page) for page in gone):  # by least recent use they are the first to go
        manager._pages.reclaim(cache.evict())
    manager.check()
    assert manager.match(ramp(21)) == 20
    assert manager.match(ramp(13)) == 0, "the window before token 12 is gone, and every shorter one"
    manager.check()


def test_truncating_into_a_window_that_is_gone_gives_what_is_still_there() -> None:
    manager = KVCacheManager(30, PAGE_SIZE, windows=(None, 6))
    run(manager, 1, ramp(20), chunk=4)
    assert manager.truncate(1, 19) == 19
    assert manager.truncate(1, 13) == 13, "the cache still has the pages before"
    manager.check()
    manager.extend(1, 20)
    manager.confirm_moves(manager.take_moves())  # copies of the pages that can be found, and must stay as they are
    manager.commit(1, ramp(20), 20)
    manager.reset()
    assert manager.truncate(1, 13) == 0, "now nobody has them"
    manager.check()
    manager.free(1)
    manager.check(idle=True)


def test_a_page_of_full_attention_that_goes_takes_what_follows_with_it() -> None:
    manager = KVCacheManager(30, PAGE_SIZE, windows=(None, 6))
    run(manager, 1, ramp(12))
    manager.free(1)
    entry = manager.prefix_cache.match(ramp(13))[0]
    manager.prefix_cache.unpark([entry.pages[0]])
    manager.prefix_cache._idle[entry.pages[0]] = entry
    manager.prefix_cache._idle.move_to_end(entry.pages[0], last=False)
    manager._pages.reclaim(manager.prefix_cache.evict())
    assert (manager.match(ramp(13)), len(manager.prefix_cache)) == (0, 0)
    manager.check(idle=True)


@pytest.mark.parametrize("windows", [(), (0,), (None, -3)])
def test_windows_that_make_no_sense_are_refused(windows: Windows) -> None:
    with pytest.raises(ValueError, match="windows must hold"):
        KVCacheManager(8, PAGE_SIZE, windows=windows)


def test_a_batch_extends_where_every_group_has_a_window_as_one_does() -> None:
    """However long the table: the pages that have left the window take none."""
    manager, tokens = KVCacheManager(5, PAGE_SIZE, windows=(8,)), ramp(100)
    manager.allocate(1, tokens, 4)
    manager.commit(1, tokens, 4)
    for n in range(5, 101):
        manager.extend_all([1], np.array([n]))
        manager.commit_all([1], [tokens], np.array([n]))
        manager.check()
    assert manager.room(1) == 100


def test_no_tokens_are_wanted_before_the_first_page_can_leave_a_window() -> None:
    manager = KVCacheManager(20, PAGE_SIZE, windows=(None, 8, 2**63 - 1))
    manager.allocate(1, ramp(4), 4)
    manager.commit(1, ramp(4), 2)
    manager.commit_all([1], [None], np.array([3]))  # type: ignore[list-item]  # nothing is looked at
    assert manager.num_computed(1) == 3
    manager.check()


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("window", range(1, 10))
def test_the_peak_of_pages_is_what_is_held_at_most(page_size: int, window: int) -> None:
    """Chunks begin at every token in turn, so at each place in a page."""
    for chunk in range(1, 7):
        manager = KVCacheManager(50, page_size, enable_prefix_caching=False, windows=(window,), poison=False)
        manager.allocate(1, ramp(40), 0)
        most = 0
        for computed in range(40 - chunk):
            manager.extend(1, computed + chunk)
            most = max(most, manager.num_used)
            assert peak_pages(computed + chunk, page_size, (window,), chunk) == most
            manager.commit(1, ramp(40), computed + 1)
