"""The whole state of allocator, prefix cache and manager as plain values: a refused call must leave it equal."""

from __future__ import annotations

from typing import Any

from paged import BlockAllocator, KVCacheManager, PrefixCache
from paged.prefix_cache import Entry


def of_allocator(allocator: BlockAllocator) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in vars(allocator).items()}


def of_entry(entry: Entry) -> tuple[Any, ...]:
    children = [id(child) for child in entry.children]
    siblings = (id(entry.left), id(entry.right))
    return (
        *siblings,
        *(id(entry), entry.digest, entry.pages, entry.tokens, id(entry.parent), children, entry.live),
    )


def of_cache(cache: PrefixCache) -> dict[str, Any]:
    return {
        "roots": {key: of_entry(root) for key, root in cache._roots.items()},
        "entries": {digest: of_entry(entry) for digest, entry in cache._entries.items()},
        "by_page": {page: id(entry) for page, entry in cache._by_page.items()},
        "idle": list(cache._idle.items()),
        "pinned_idle": list(cache._pinned_idle.items()),
        "pins": list(cache._pins.items()),
    }


def of_manager(manager: KVCacheManager) -> dict[str, Any]:
    return {
        "allocator": of_allocator(manager.allocator),
        "prefix_cache": of_cache(manager.prefix_cache),
        "held": {
            seq_id: (held.row, list(map(of_entry, held.chain)), list(held.changes), held.promise, held.num_known)
            for seq_id, held in manager._held.items()
        },
        "store": {name: value.tolist() for name, value in vars(manager._store).items() if name != "_unused"},
        "unused": list(manager._store._unused),
        "promised": dict(manager._promised),
        "pages": (list(manager._pages._moves), list(manager._pages._under_way), dict(manager._pages._moved)),
    }
