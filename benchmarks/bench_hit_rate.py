"""How much of a trace's prompts does the prefix cache find, at which number of pages, and how fast does it look?

    python benchmarks/bench_hit_rate.py TRACE [--quick] [--output FILE]

Replays a Mooncake trace (JSONL; every hash id stands for one block of a prompt) through `PrefixCache` and
`BlockAllocator`: each block is one page, its hash id is its token; requests one after another. Unlike an engine, which
must compute at least a prompt's last token, the last block may hit too. The hit rate is blocks found over blocks asked
for, and each request counts once. Of a request that is larger than the cache only what fits is kept.

Without TRACE a small random one with shared beginnings is made, which shows only that this works.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import report

from paged import BlockAllocator, PrefixCache
from paged.prefix_cache import Tokens

SIZES = (1_000, 10_000, 30_000, 50_000, 100_000, None)  # pages; None is as many as there are blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--quick", action="store_true", help="one size, and the first 1,000 requests")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "hit_rate.json")
    args = parser.parse_args()
    requests = read(args.trace) if args.trace else made_up()
    sizes = SIZES[1:2] if args.quick else SIZES
    requests = requests[:1000] if args.quick else requests
    total = sum(map(len, requests))
    print(f"{len(requests):,} requests, {total:,} blocks")
    rows = []
    for pages in sizes:
        cache, allocator = PrefixCache(page_size=1), BlockAllocator((pages or total) + 1)
        start = time.perf_counter()
        hits = replay(requests, cache, allocator)
        seconds = time.perf_counter() - start
        cache.check()
        allocator.check([])
        rows.append({"pages": pages, "hits": hits, "hit_rate": hits / total, "seconds": seconds})
        name = f"{pages:,}" if pages else "unlimited"
        print(f"{name:>10} pages: hit rate {hits / total:.4f}, {total / seconds:,.0f} blocks a second", flush=True)
    report.write(args.output, trace=args.trace.name if args.trace else "made up", blocks=total, rows=rows)


def read(trace: Path) -> list[Tokens]:
    with trace.open() as lines:
        return [np.array(json.loads(line)["hash_ids"], dtype=np.int32) for line in lines]


def made_up() -> list[Tokens]:
    """Conversations that go on: each request begins with an earlier one."""
    rng, requests, fresh = random.Random(0), list[Tokens](), 0
    for _ in range(2_000):
        before = rng.choice(requests) if requests and rng.random() < 0.6 else np.zeros(0, dtype=np.int32)
        new = np.arange(fresh, fresh + rng.randint(1, 30), dtype=np.int32)
        fresh += len(new)
        requests.append(np.concatenate((before, new)))
    return requests


def replay(requests: list[Tokens], cache: PrefixCache, allocator: BlockAllocator) -> int:
    """Blocks found in all."""
    end = np.zeros(1, dtype=np.int32)  # a last token is never matched, so here is one
    hits = 0
    for tokens in requests:
        chain = cache.match(np.append(tokens, end))
        hits += len(chain)
        found = [entry.pages[0] for entry in chain]
        allocator.share(found)
        cache.unpark(found)
        wanted = min(len(tokens) - len(chain), allocator.num_free + allocator.num_cached)
        if allocator.num_free < wanted:
            allocator.reclaim(cache.evict(wanted - allocator.num_free))
        new = allocator.allocate(wanted)
        for i, page in enumerate(new, len(found)):
            cache.publish(tokens[i : i + 1], (page,), chain)
        cache.park(allocator.park([entry.pages[0] for entry in reversed(chain)]))
    return hits


if __name__ == "__main__":
    main()
