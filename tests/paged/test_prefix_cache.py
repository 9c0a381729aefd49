"""PrefixCache: what is found, what is forgotten and in which order, and that check() sees each planted fault."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import snapshot

import paged
from paged import InvariantError, KVCacheManager, PrefixCache
from paged.prefix_cache import DEFAULT, Entry, Tokens, namespace

PAGE_SIZE = 4
P, Q = list(range(1, 10)), list(range(11, 20))  # case A08: two full pages and one token each


def tokens(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


def publish(
    made: PrefixCache, ids: Tokens, pages: list[int], chain: list[Entry], num_computed: int, where: bytes = DEFAULT
) -> list[tuple[int, ...] | None]:
    """Publish the full pages among the computed tokens; `pages` are those after the chain's."""
    results = []
    for i, page in enumerate(pages, len(chain)):
        if (i + 1) * PAGE_SIZE <= num_computed:
            results.append(made.publish(ids[i * PAGE_SIZE : (i + 1) * PAGE_SIZE], (page,), chain, where))
    return results


def constant(parent: bytes, page: bytes) -> bytes:
    return b"x"


def one_bit(parent: bytes, page: bytes) -> bytes:
    return bytes([hashlib.sha256(parent + page).digest()[0] & 1])


def manager_with(digest: Callable[[bytes, bytes], bytes], num_pages: int = 16) -> KVCacheManager:
    manager = KVCacheManager(num_pages, PAGE_SIZE)
    manager.prefix_cache = manager._pages.prefix_cache = PrefixCache(PAGE_SIZE, digest=digest)
    return manager


def run(manager: KVCacheManager, seq_id: int, prompt: list[int]) -> int:
    """Begin a sequence and compute its whole prompt. Returns the tokens that were cached."""
    cached = manager.allocate(seq_id, tokens(*prompt), len(prompt))
    manager.commit(seq_id, tokens(*prompt), len(prompt))
    return cached


def hit(manager: KVCacheManager, prompt: list[int]) -> list[int]:
    """The pages found for a prompt."""
    return [entry.pages[0] for entry in manager.prefix_cache.match(tokens(*prompt))]


# Digests


def test_a_digest_is_sha256_over_the_digest_before_and_the_tokens_as_little_endian_int32() -> None:
    cache, chain = PrefixCache(PAGE_SIZE), list[Entry]()
    publish(cache, tokens(1, 2, 3, 4, 300, 70_000, 7, 2**31 - 1), [5, 6], chain, 8)
    root = hashlib.sha256(b"[null, null, 0]").digest()
    first = hashlib.sha256(root + struct.pack("<4i", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4i", 300, 70_000, 7, 2**31 - 1)).digest()
    assert [entry.digest for entry in chain] == [first, second]


def test_an_entry_keeps_the_tokens_of_its_page_in_their_order() -> None:
    cache, chain = PrefixCache(PAGE_SIZE), list[Entry]()
    publish(cache, tokens(4, 3, 2, 1), [5], chain, 4)
    assert chain[0].tokens == struct.pack("<4i", 4, 3, 2, 1)


@pytest.mark.parametrize("other", [[4, 3, 2, 1, 9], [1, 2, 3, 5, 9], [0, 1, 2, 3, 4], [256, 512, 768, 1024, 9]])
def test_other_tokens_or_another_order_of_them_are_not_found(other: list[int]) -> None:
    cache = PrefixCache(PAGE_SIZE)
    publish(cache, tokens(1, 2, 3, 4), [5], [], 4)
    assert cache.match(tokens(*other)) == []


def test_tokens_of_another_width_or_stride_are_found_all_the_same() -> None:
    cache = PrefixCache(PAGE_SIZE)
    publish(cache, tokens(1, 2, 3, 4), [5], [], 4)
    strided = np.array([1, 0, 2, 0, 3, 0, 4, 0, 9], dtype=np.int32)[::2]
    assert [entry.pages[0] for entry in cache.match(strided)] == [5]


def test_the_same_page_after_another_history_is_not_found() -> None:
    cache = PrefixCache(PAGE_SIZE)
    publish(cache, tokens(1, 2, 3, 4, 5, 6, 7, 8), [5, 6], [], 8)
    assert cache.match(tokens(5, 6, 7, 8, 9)) == []
    assert [entry.pages[0] for entry in cache.match(tokens(1, 2, 3, 4, 9, 9, 9, 9, 5, 6, 7, 8, 9))] == [5]


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_a_hit_never_covers_the_last_token(length: int, pages: int) -> None:
    cache = PrefixCache(PAGE_SIZE)
    publish(cache, np.arange(12, dtype=np.int32), [5, 6, 7], [], 12)
    assert len(cache.match(np.arange(length, dtype=np.int32))) == pages


def test_looking_up_changes_nothing() -> None:
    manager = manager_with(paged.prefix_cache.sha256_digest)
    run(manager, 1, P)
    manager.free(1)
    before = snapshot.of_manager(manager)
    assert manager.match(tokens(*P)) == 8
    assert snapshot.of_manager(manager) == before


def test_only_full_pages_of_computed_tokens_are_published() -> None:
    cache, chain = PrefixCache(PAGE_SIZE), list[Entry]()
    publish(cache, tokens(*P), [5, 6, 7], chain, 7)
    assert [entry.pages[0] for entry in chain] == [5]
    publish(cache, tokens(*P), [6, 7], chain, 8)
    assert [entry.pages[0] for entry in chain] == [5, 6]


def test_a_page_whose_content_is_cached_already_is_a_duplicate() -> None:
    cache, chain = PrefixCache(PAGE_SIZE), list[Entry]()
    publish(cache, tokens(*P), [5, 6], [], 8)
    assert publish(cache, tokens(1, 2, 3, 4, 50, 60, 70, 80), [7, 8], chain, 8) == [(5,), (8,)]
    assert [entry.pages[0] for entry in chain] == [5, 8]
    assert cache.entry(7) is None
    cache.check()


def test_the_number_of_entries_is_the_length() -> None:
    cache = PrefixCache(PAGE_SIZE)
    publish(cache, tokens(*P), [5, 6], [], 8)
    assert (len(cache), cache.num_idle) == (2, 0)


# A08: digests that collide


@pytest.mark.parametrize("digest", [constant, one_bit])
def test_a08_another_prompt_with_the_same_digests_hits_nothing(digest: Callable[[bytes, bytes], bytes]) -> None:
    manager = manager_with(digest)
    run(manager, 1, P)
    assert run(manager, 2, Q) == 0
    manager.check()


@pytest.mark.parametrize("digest", [constant, one_bit])
def test_a08_the_same_prompt_hits_only_pages_of_its_own_tokens(digest: Callable[[bytes, bytes], bytes]) -> None:
    manager = manager_with(digest)
    run(manager, 1, P)
    own = manager.table(1).pages
    found = hit(manager, P)
    assert found == own[: len(found)]
    assert found, "the first page has a slot of its own"


@pytest.mark.parametrize("digest", [constant, one_bit])
def test_a08_a_page_that_repeats_within_a_prompt_is_not_its_own_child(digest: Callable[[bytes, bytes], bytes]) -> None:
    """[1, 2, 3, 4] twice: tokens and (with a constant digest) digest are equal, the history is not."""
    manager = manager_with(digest)
    repeated = [1, 2, 3, 4, 1, 2, 3, 4, 9]
    run(manager, 1, repeated)
    pages = manager.table(1).pages
    found = hit(manager, repeated)
    assert found == pages[: len(found)]
    assert len(set(found)) == len(found)
    manager.check()


@pytest.mark.parametrize("digest", [constant, one_bit])
@pytest.mark.parametrize("seed", range(10))
def test_a08_whatever_collides_a_hit_has_the_whole_history(digest: Callable[[bytes, bytes], bytes], seed: int) -> None:
    """Random prompts of two different tokens, so that pages repeat; every page is known by the history put into it."""
    rng = random.Random(seed)
    manager, history = manager_with(digest, 10), dict[int, list[int]]()
    for seq_id in range(60):
        prompt = rng.choices([1, 2], k=rng.randint(1, 17))
        for i, page in enumerate(hit(manager, prompt)):
            assert history[page] == prompt[: (i + 1) * PAGE_SIZE]
        run(manager, seq_id, prompt)
        for i, page in enumerate(manager.table(seq_id).pages):
            history[page] = prompt[: (i + 1) * PAGE_SIZE]
        manager.check()
        manager.free(seq_id)
        manager.check()


# Eviction


def test_a02_an_evicted_page_is_never_found() -> None:
    manager = KVCacheManager(4, PAGE_SIZE)
    run(manager, 1, list(range(1, 9)))
    first, second = manager.table(1).pages
    manager.free(1)
    run(manager, 2, [21, 22, 23, 24, 25])
    assert second in manager.table(2).pages, "the page of tokens 5 to 8 was the victim"
    assert hit(manager, [*range(1, 9), 9]) == [first]
    assert not {first} & set(manager.table(2).pages)
    manager.check()


def a03() -> int:
    manager = KVCacheManager(4, PAGE_SIZE)
    run(manager, 1, list(range(1, 13)))
    manager.free(1)
    run(manager, 2, [50, 51, 52])
    return manager.match(tokens(*range(1, 13), 99))


def test_a03_the_last_page_of_a_chain_is_the_victim_in_200_of_200_pools() -> None:
    assert [a03() for _ in range(200)] == [8] * 200


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_a03_does_not_depend_on_the_seed_of_pythons_hash(seed: str) -> None:
    home = Path(paged.__file__).parent.parent
    code = f"""
import numpy as np
from paged import KVCacheManager
def tokens(*ids): return np.array(ids, dtype=np.int32)
def run(manager, seq_id, prompt):
    manager.allocate(seq_id, tokens(*prompt), len(prompt))
    manager.commit(seq_id, tokens(*prompt), len(prompt))
for _ in range(200):
    manager = KVCacheManager(4, {PAGE_SIZE})
    run(manager, 1, range(1, 13))
    manager.free(1)
    run(manager, 2, [50, 51, 52])
    assert manager.match(tokens(*range(1, 13), 99)) == 8
"""
    environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(home)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)


def test_the_least_recently_used_chain_goes_first() -> None:
    manager = KVCacheManager(6, PAGE_SIZE)
    for seq_id, prompt in enumerate((P, Q)):
        run(manager, seq_id, prompt[:8])
        manager.free(seq_id)
    run(manager, 2, P)  # P is used again, so Q is the older one
    manager.free(2)
    run(manager, 3, [50, 51, 52, 53, 54])
    assert (manager.match(tokens(*P)), manager.match(tokens(*Q))) == (8, 4)


def test_evicting_with_every_page_owned_raises() -> None:
    manager = KVCacheManager(4, PAGE_SIZE)
    run(manager, 1, P)
    with pytest.raises(KeyError, match="0 pages without an owner, 1 wanted"):
        manager.prefix_cache.evict()


def test_evicting_more_than_there_is_changes_nothing() -> None:
    made = PrefixCache(PAGE_SIZE)
    publish(made, tokens(0, 1, 2, 3, 4, 5, 6, 7), [3, 4], [], 8)
    made.park([4, 3])
    before = snapshot.of_cache(made)
    with pytest.raises(KeyError, match="2 pages without an owner, 3 wanted"):
        made.evict(3)
    assert snapshot.of_cache(made) == before
    assert made.evict(2) == [4, 3]


def test_what_only_a_forgotten_page_led_to_is_forgotten_too() -> None:
    made = PrefixCache(PAGE_SIZE)
    chain: list[Entry] = []
    publish(made, tokens(*range(12)), [5, 6, 7], chain, 12)
    made.park([5])  # 6 and 7 keep an owner
    assert made.evict() == [5]
    assert (len(made), [entry.live for entry in chain]) == (0, [False] * 3)
    made.check()
    assert publish(made, tokens(*range(16)), [8], chain, 16) == [None]
    assert len(made) == 0, "nothing is published below a forgotten page"


def test_a_sequence_that_computes_what_another_has_cached_counts_as_a_use_of_it() -> None:
    """Both miss; the first is gone before the second ends, so the page is the second's to give back."""
    manager = KVCacheManager(8, PAGE_SIZE)
    for seq_id in (1, 2):
        manager.allocate(seq_id, tokens(*P), 9)
    manager.commit(1, tokens(*P), 4)
    manager.free(1)
    run(manager, 3, Q[:4])
    manager.free(3)
    manager.commit(2, tokens(*P), 9)
    manager.free(2)
    manager.check()
    assert next(manager.prefix_cache.idle_pages()) == hit(manager, [*Q[:4], 0])[0]


class Node:
    """A page of the model below: its history, who owns it, when it was last used."""

    def __init__(self, path: tuple[int, ...], owners: int) -> None:
        self.path = path
        self.owners = owners
        self.used = 0


class LeastRecentlyUsed:
    """What a prefix cache over `num_pages` holds, by brute force: nodes by history, and the time of each one's use."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.nodes: dict[tuple[int, ...], Node] = {}
        self.running: dict[int, tuple[list[Node], list[Node], int]] = {}  # its path, the nodes it owns, private pages
        self.clock = itertools.count(1)

    def match(self, prompt: list[int]) -> list[Node]:
        paths = [tuple(prompt[:end]) for end in range(PAGE_SIZE, len(prompt), PAGE_SIZE)]
        return [self.nodes[path] for path in itertools.takewhile(self.nodes.__contains__, paths)]

    def run(self, seq_id: int, prompt: list[int]) -> bool:
        """Compute a prompt; False, and nothing changes, where there are too few pages."""
        path = self.match(prompt)
        private = -(-len(prompt) // PAGE_SIZE) - len(path)
        if private > self.free() + sum(not n.owners and n not in path for n in self.nodes.values()):
            return False
        for node in path:
            node.owners += 1
        while private > self.free():
            victim = min((node for node in self.nodes.values() if not node.owners), key=lambda node: node.used)
            for other in [other for other in self.nodes.values() if other.path[: len(victim.path)] == victim.path]:
                del self.nodes[other.path]
                self.turn_private(other)
        owned = list(path)
        for end in range((len(path) + 1) * PAGE_SIZE, len(prompt) + 1, PAGE_SIZE):
            history = tuple(prompt[:end])
            node = self.nodes.setdefault(history, Node(history, owners=0))
            node.owners += 1
            private -= 1  # its own page is the node's now, or is given back as the node had one
            owned.append(node)
            path.append(node)
        self.running[seq_id] = path, owned, private
        return True

    def turn_private(self, gone: Node) -> None:
        for seq_id, (path, owned, private) in self.running.items():
            if gone in owned:
                self.running[seq_id] = path, [node for node in owned if node is not gone], private + 1

    def finish(self, seq_id: int) -> None:
        path, owned, _ = self.running.pop(seq_id)
        for node in owned:
            node.owners -= 1
        for node in reversed(path):
            node.used = next(self.clock)

    def free(self) -> int:
        return self.num_pages - len(self.nodes) - sum(private for _, _, private in self.running.values())


@pytest.mark.parametrize("seed", range(30))
def test_eviction_is_by_least_recent_use_as_in_a_brute_force_model(seed: int) -> None:
    """After each of 120 random operations, every prompt hits as long a prefix as in the model."""
    rng = random.Random(seed)
    num_pages = rng.randint(4, 14)
    manager, model = KVCacheManager(num_pages + 1, PAGE_SIZE), LeastRecentlyUsed(num_pages)
    prompts = [[rng.randint(0, 1) for _ in range(rng.randint(1, 21))] for _ in range(6)]
    for _ in range(8):
        prompts.append(rng.choice(prompts)[: rng.randint(0, 16)] + rng.choices([2, 3], k=rng.randint(1, 6)))
    for seq_id in range(120):
        if model.running and rng.random() < 0.5:
            done = rng.choice(list(model.running))
            model.finish(done)
            manager.free(done)
        prompt = rng.choice(prompts)
        if model.run(seq_id, prompt):
            run(manager, seq_id, prompt)
        else:
            with pytest.raises(paged.OutOfPages):
                run(manager, seq_id, prompt)
        manager.check()
        found = [manager.match(tokens(*prompt)) for prompt in prompts]
        assert found == [len(model.match(prompt)) * PAGE_SIZE for prompt in prompts]
        assert manager.allocator.num_free == model.free()


def trace(seed: int) -> list[list[int]]:
    """Requests as chains of block ids, as in Mooncake's traces: conversations that go on, among others."""
    rng, requests, fresh = random.Random(seed), list[list[int]](), itertools.count()
    for _ in range(300):
        before = rng.choice(requests) if requests and rng.random() < 0.6 else []
        requests.append(before[: rng.randint(0, len(before))] + [next(fresh) for _ in range(rng.randint(1, 9))])
    return requests


def oracle_hits(requests: list[list[int]], capacity: int) -> list[int]:
    """Blocks found of each request: a dict of when each block was used last, of a request the last block first."""
    used: dict[int, int] = {}
    clock, result = itertools.count(), []
    for blocks in requests:
        hits = len(list(itertools.takewhile(used.__contains__, blocks)))
        result.append(hits)
        mine = set(blocks[:hits])
        for block in blocks[hits:]:
            if len(used) == capacity:
                others = used.keys() - mine
                if not others:
                    break  # of a request that is larger than the cache only what fits is kept
                del used[min(others, key=used.__getitem__)]
            used[block] = -1
            mine.add(block)
        for block in reversed([block for block in blocks if block in mine]):
            used[block] = next(clock)
    return result


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("capacity", [5, 20, 100, 400, 5000])
@pytest.mark.parametrize("seed", range(3))
def test_hits_over_traces_are_those_of_an_independent_oracle(seed: int, capacity: int, shuffled: bool) -> None:
    requests = trace(seed)
    if shuffled:
        random.Random(seed).shuffle(requests)
    cache, allocator, found = PrefixCache(1), paged.BlockAllocator(capacity + 1), []
    for blocks in requests:
        chain = cache.match(tokens(*blocks, -1))
        found.append(len(chain))
        pages = [entry.pages[0] for entry in chain]
        allocator.share(pages)
        cache.unpark(pages)
        wanted = min(len(blocks) - len(chain), allocator.num_free + allocator.num_cached)
        if wanted > allocator.num_free:
            allocator.reclaim(cache.evict(wanted - allocator.num_free))
        for block, page in zip(blocks[len(chain) :], allocator.allocate(wanted), strict=False):
            cache.publish(tokens(block), (page,), chain)
        cache.park(allocator.park([entry.pages[0] for entry in reversed(chain)]))
    assert found == oracle_hits(requests, capacity)
    assert capacity < 100 or sum(found) > 100


# Planted faults


def cache() -> PrefixCache:
    """A chain of pages 5, 6, 7 and a branch 8 below 5; 9 in another namespace, pinned. All but 6 are idle.

    root <- 5 <- 6 <- 7
              <- 8
    other <- 9
    """
    made, chain = PrefixCache(PAGE_SIZE), list[Entry]()
    publish(made, np.arange(12, dtype=np.int32), [5, 6, 7], [], 12)
    publish(made, tokens(0, 1, 2, 3, 50, 51, 52, 53), [5, 8], [], 8)
    publish(made, tokens(0, 1, 2, 3), [9], chain, 4, namespace("salt"))
    made.pin(chain, 10.0)
    for page in (7, 8, 5, 9):
        made.park([page])
    return made


def at(made: PrefixCache, page: int) -> Entry:
    entry = made.entry(page)
    assert entry is not None
    return entry


def stray() -> Entry:
    return Entry(b"stray", b"", None, (0,))


def set_on(page: int, name: str, value: object) -> Callable[[PrefixCache], object]:
    return lambda c: setattr(at(c, page), name, value)


INV1, INV2, INV3 = (f"prefix cache INV-{i}" for i in (1, 2, 3))
Fault = tuple[str, str, Callable[[PrefixCache], object], str]
FAULTS: list[Fault] = [
    ("_roots", "another root", lambda c: c._roots.update({namespace(): stray()}), INV1),
    ("_roots", "one lost", lambda c: c._roots.pop(namespace("salt")), INV1),
    ("_entries", "a parent lost", lambda c: c._entries.pop(at(c, 6).digest), INV1),
    ("_entries", "a leaf lost", lambda c: c._entries.pop(at(c, 7).digest), INV2),
    ("_entries", "a leaf under another key", lambda c: c._entries.update({b"x": c._entries.popitem()[1]}), INV1),
    ("_entries", "an entry twice", lambda c: c._entries.update({b"x": at(c, 7)}), INV1),
    ("_by_page", "a page lost", lambda c: c._by_page.pop(6), INV2),
    ("_by_page", "a page too many", lambda c: c._by_page.update({99: at(c, 6)}), INV2),
    ("_by_page", "two pages swapped", lambda c: c._by_page.update({7: at(c, 8), 8: at(c, 7)}), INV2),
    ("_idle", "a page without an entry", lambda c: c._idle.update({99: stray()}), INV2),
    ("_idle", "another entry", lambda c: c._idle.update({7: at(c, 8)}), INV2),
    ("_idle", "a child after its parent", lambda c: c._idle.move_to_end(8), INV3),
    ("_idle", "a pinned page", lambda c: c._idle.update({9: c._pinned_idle.pop(9)}), INV2),
    ("_pinned_idle", "a page that is not pinned", lambda c: c._pinned_idle.update({7: c._idle.pop(7)}), INV2),
    ("_pins", "one lost", lambda c: c._pins.clear(), INV2),
    ("_pins", "one too many", lambda c: c._pins.update({at(c, 7): 1.0}), INV2),
    ("_pins", "one that cannot be found", lambda c: c._pins.update({stray(): 1.0}), INV2),
    ("entry.child", "none", set_on(6, "child", None), INV1),
    ("entry.child", "one that cannot be found", set_on(7, "child", stray()), INV2),
    ("entry.child", "another's", lambda c: setattr(at(c, 7), "child", at(c, 6)), INV2),
    ("entry.right", "none", lambda c: setattr(at(c, 8), "right", None), INV1),
    ("entry.left", "none", lambda c: setattr(at(c, 6), "left", None), INV2),
    ("entry.parent", "none", set_on(7, "parent", None), INV1),
    ("entry.parent", "not an entry", set_on(7, "parent", stray()), INV1),
    ("entry.parent", "another", lambda c: setattr(at(c, 7), "parent", at(c, 8)), INV1),
    ("entry.live", "dead", set_on(7, "live", False), INV1),
    ("entry.tokens", "others", set_on(7, "tokens", bytes(16)), INV1),
    ("entry.digest", "another", set_on(7, "digest", bytes(32)), INV1),
    ("entry.pages", "another", set_on(7, "pages", (99,)), INV2),
    ("entry.pages", "none", set_on(7, "pages", (0,)), INV2),
]


@pytest.mark.parametrize(("attribute", "what", "plant", "invariant"), FAULTS, ids=[f"{f[0]}-{f[1]}" for f in FAULTS])
def test_check_names_the_invariant_of_a_planted_fault(
    attribute: str, what: str, plant: Callable[[PrefixCache], object], invariant: str
) -> None:
    """A page missing in `_idle` is the manager's to see: it knows who owns what."""
    made = cache()
    made.check()
    plant(made)
    with pytest.raises(InvariantError, match=f"^{invariant}: "):
        made.check()


def test_a_fault_is_planted_in_every_attribute_that_holds_state() -> None:
    state = set(vars(cache())) - {"page_size", "windows", "_digest"} | {f"entry.{name}" for name in Entry.__slots__}
    assert {fault[0] for fault in FAULTS} == state


def test_checking_many_siblings_takes_no_longer_than_as_many_others() -> None:
    """Looking for each among all of them would take a minute."""
    made = PrefixCache(1)
    for i in range(50_000):
        made.publish(tokens(i), (i + 1,), [])
    before = time.process_time()
    made.check()
    assert time.process_time() - before < 5
