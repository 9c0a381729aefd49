"""The whole state of allocator, prefix cache and manager as plain values: a refused call must leave it equal."""

from __future__ import annotations

from typing import Any

from paged import BlockAllocator, KVCacheManager, PrefixCache
from paged.prefix_cache import Entry


def of_allocator(allocator: BlockAllocator) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in vars(allocator).items()}


def of_entry(entry: Entry) -> tuple[Any, ...]:
    children = sorted(child.page for child in entry.children)
    return (id(entry), entry.digest, entry.page, entry.tokens, id(entry.parent), children, entry.live)


def of_cache(cache: PrefixCache) -> dict[str, Any]:
    return {
        "root": of_entry(cache._root),
        "entries": {digest: of_entry(entry) for digest, entry in cache._entries.items()},
        "by_page": {page: id(entry) for page, entry in cache._by_page.items()},
        "idle": list(cache._idle.items()),
    }


def of_manager(manager: KVCacheManager) -> dict[str, Any]:
    return {
        "allocator": of_allocator(manager.allocator),
        "prefix_cache": of_cache(manager.prefix_cache),
        "held": {
            seq_id: (list(held.table.pages), list(map(of_entry, held.chain)), held.num_computed)
            for seq_id, held in manager._held.items()
        },
        "moves": list(manager._moves),
        "under_way": list(manager._under_way),
    }
