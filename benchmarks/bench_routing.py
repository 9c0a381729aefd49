"""How much of the prompts do 8 replicas find in their caches, and how even is their work, by who chooses the replica?

    python benchmarks/bench_routing.py TRACE [--quick] [--output FILE] [--draw FILE.svg]

Replays a trace (docs/planner.md) through 8 engines: scheduler, manager and pages as they are, and an executor that
computes nothing. A step takes 20 ms and 50 us a token, up to 64 sequences and 4,096 tokens; pages have 256 tokens.
For each number of pages a replica has (pool, counted in blocks of 512 tokens):

  round robin     one after another
  least work      where the fewest tokens are before it, what was ever seen there not counted (scheduler/simulate.py)
  routing         scheduler/routing.py, told what an answer tells it
  one replica     all the pages and 8 times the speed, which is what no choice between 8 can reach

1. Requests come when the trace says. Tokens found in the cache over tokens of prompts; tokens computed, the most of a
   replica over the mean, and so seconds in steps; seconds to the first token, mean and 99th percentile.
2. The same with other EPSILONs, in the middle pool.
3. A job: all requests there from the beginning; 8 * 256 of them are in flight, and at most 512 at a replica. Hit rate,
   and when the last ended.
4. What a request costs the driver: `pick`, `started` and `finished`, microseconds of CPU time, for 8, 32 and 100
   replicas with 256 requests in flight at each, and prompts of 15 digests; and the digests of a text of 4,000
   characters.

1 to 3 are the same on any machine. Without TRACE, or with --quick, a small trace is made up, which shows only that this
works.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import report

from scheduler.cost import CostModel
from scheduler.policy import Limits
from scheduler.request import Family
from scheduler.routing import EPSILON, Router, Usage, digests
from scheduler.simulate import Replica
from scheduler.traces import Trace, TraceRequest, read_trace

REPLICAS, PAGE, BLOCK, SEATS, SHARE, ROOM = 8, 256, 512, 64, 256, 512
POOLS = (1_000, 3_000, 10_000)  # blocks of a replica
EPSILONS = (0.25, 1.0)
COST = CostModel(step=20e-3, token=50e-6)
Figures = dict[str, Any]


class Choice(Protocol):
    def pick(self, engines: list[Replica], free: list[int], number: int, request: TraceRequest) -> int: ...
    def ended(self, engine: int, family: Family) -> None: ...


class RoundRobin:
    def pick(self, engines: list[Replica], free: list[int], number: int, request: TraceRequest) -> int:
        return min(free, key=lambda i: (i - number) % len(engines))

    def ended(self, engine: int, family: Family) -> None:
        """Nothing to learn."""


class LeastWork(RoundRobin):
    def pick(self, engines: list[Replica], free: list[int], number: int, request: TraceRequest) -> int:
        return min(free, key=lambda i: engines[i].outstanding + engines[i].missing(request))


class Routing:
    def __init__(
        self, pool: int, chains: list[tuple[int, ...]], epsilon: float = EPSILON, room: int = 1_000_000
    ) -> None:
        self.router, self.chains = Router(epsilon), chains
        for i in range(REPLICAS):
            self.router.add(i, room, pool * BLOCK, SEATS)

    def pick(self, engines: list[Replica], free: list[int], number: int, request: TraceRequest) -> int:
        size, chain = request.prompt_tokens + request.output_tokens, self.chains[number]
        picked = self.router.pick(chain, size)
        assert picked in free
        self.router.started(str(number), picked, chain, size)
        return picked

    def ended(self, engine: int, family: Family) -> None:
        request = family.request
        usage = Usage(len(request.prompt_token_ids), family.num_cached or 0, request.max_tokens)
        self.router.finished(request.request_id, usage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--quick", action="store_true", help="a small trace that is made up, and one pool")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "routing.json")
    parser.add_argument("--draw", type=Path, help="draw the first part as SVG into this file")
    args = parser.parse_args()
    trace = made_up() if args.quick or args.trace is None else read_trace(args.trace)
    pools = (200,) if args.quick or args.trace is None else POOLS
    chains = [digests(request.tokens(i)) for i, request in enumerate(trace.requests)]
    print(f"{len(chains):,} requests, {sum(r.prompt_tokens for r in trace.requests):,} tokens of prompts")
    online = {pool: compare(trace, pool, chains) for pool in pools}
    middle = pools[len(pools) // 2]
    epsilons = {epsilon: replay(trace, Routing(middle, chains, epsilon), middle) for epsilon in EPSILONS}
    for epsilon, found in epsilons.items():
        show(f"EPSILON {epsilon}", found)
    job = {
        name: replay(trace, choice, middle, job=True)
        for name, choice in (
            ("round robin", RoundRobin()),
            ("least work", LeastWork()),
            ("routing", Routing(middle, chains, room=ROOM)),
        )
    }
    job["one replica"] = replay(trace, RoundRobin(), middle, together=True, job=True)
    for name, found in job.items():
        print(f"job, {name:14} hit rate {found['hit_rate']:6.2%}, {found['end_s']:,.0f} s")
    costs = {n: driver_us(n, 2_000 if args.quick else 20_000) for n in (8, 32, 100)}
    for replicas, found in costs.items():
        print(f"{replicas:3} replicas: {', '.join(f'{name} {us:.1f} us' for name, us in found.items())}")
    text_us = digests_us(100 if args.quick else 2_000)
    print(f"digests of a text of 4,000 characters: {text_us:.1f} us")
    report.write(
        args.output,
        trace=trace.name,
        online=online,
        epsilons={str(epsilon): found for epsilon, found in epsilons.items()},
        middle_pool=middle,
        epsilon=EPSILON,
        job=job,
        driver_us=costs,
        digests_us=text_us,
    )
    if args.draw:
        args.draw.write_text(drawing(online))


def compare(trace: Trace, pool: int, chains: list[tuple[int, ...]]) -> dict[str, Figures]:
    found: dict[str, Figures] = {}
    print(f"pools of {pool:,} blocks")
    choices: Iterable[tuple[str, Choice]] = (
        ("round robin", RoundRobin()),
        ("least work", LeastWork()),
        ("routing", Routing(pool, chains)),
    )
    for name, choice in choices:
        found[name] = replay(trace, choice, pool)
        show(name, found[name])
    found["one replica"] = replay(trace, RoundRobin(), pool, together=True)
    show("one replica", found["one replica"])
    return found


def show(name: str, found: Figures) -> None:
    print(
        f"  {name:14} hit rate {found['hit_rate']:6.2%}, most over mean: computed {found['computed']:.3f}, busy "
        f"{found['busy']:.3f}; first token: mean {found['first_token_mean_s']:.2f} s, "
        f"p99 {found['first_token_p99_s']:.1f} s",
        flush=True,
    )


def replay(trace: Trace, choice: Choice, pool: int, together: bool = False, job: bool = False) -> Figures:
    """together: one replica instead of 8. job: all at once, and SHARE a replica are in flight, at most ROOM at each."""
    times = REPLICAS if together else 1
    limits = Limits(200_000, times * pool * BLOCK // PAGE, PAGE, (None,), times * SEATS, times * 4_096)
    cost = CostModel(step=COST.step / times, token=COST.token / times)
    engines = [Replica(limits, cost, prefix_caching=True) for _ in range(REPLICAS // times)]
    flying = [0] * len(engines)

    def step(i: int) -> None:
        for family in engines[i].step():
            flying[i] -= 1
            choice.ended(i, family)

    for number, request in enumerate(trace.requests):
        if job:
            while sum(flying) >= REPLICAS * SHARE:
                step(min((i for i, count in enumerate(flying) if count), key=lambda i: engines[i].clock))
            request = TraceRequest(0.0, request.prompt_tokens, request.output_tokens, request.hash_ids)
        for i, engine in enumerate(engines):
            while engine.clock < request.arrival and engine.scheduler.has_work:
                step(i)
        free = [i for i, count in enumerate(flying) if not job or count < times * ROOM]
        picked = choice.pick(engines, free, number, request)
        flying[picked] += 1
        engines[picked].add(number, request, request.tokens(number))
    for i, engine in enumerate(engines):
        while engine.scheduler.has_work:
            step(i)
    stats = [engine.scheduler.stats for engine in engines]
    computed = np.array([one.computed_tokens for one in stats])
    busy = np.array([engine.busy for engine in engines])
    first = np.concatenate([engine.times.first for engine in engines])
    return {
        "hit_rate": sum(one.cached_tokens for one in stats) / sum(one.prompt_tokens for one in stats),
        "computed": float(computed.max() / computed.mean()),
        "busy": float(busy.max() / busy.mean()),
        "computed_tokens": computed.tolist(),
        "busy_s": [round(one, 1) for one in busy.tolist()],
        "first_token_mean_s": float(first.mean()),
        "first_token_p99_s": float(np.percentile(first, 99)),
        "end_s": max(engine.clock for engine in engines),
    }


def made_up() -> Trace:
    """Conversations that go on, and begin alike."""
    rng, talks, fresh, requests = random.Random(0), list[list[int]](), 1, list[TraceRequest]()
    for i in range(400):
        talk = rng.choice(talks[-40:]) if talks and rng.random() < 0.6 else [0]
        talk = [*talk, *range(fresh, fresh + rng.randint(1, 8))]
        fresh = talk[-1] + 1
        talks.append(talk)
        requests.append(TraceRequest(i / 8, BLOCK * len(talk), rng.randint(10, 100), tuple(talk)))
    return Trace("made up", tuple(requests))


def driver_us(replicas: int, requests: int) -> dict[str, float]:
    """Mean microseconds of each call, of this thread's time, so that neighbours count little."""
    rng, router = random.Random(0), Router()
    for i in range(replicas):
        router.add(i, ROOM, 2_000_000, SEATS)
    starts = [tuple(rng.getrandbits(64) for _ in range(10)) for _ in range(200)]
    flying: list[str] = []
    seconds = dict.fromkeys(("pick", "started", "finished"), 0.0)
    full = replicas * SHARE
    for number in range(full + requests):
        chain = (*rng.choice(starts), *(rng.getrandbits(64) for _ in range(5)))
        if number >= full:
            place = rng.randrange(full)
            flying[place], flying[-1] = flying[-1], flying[place]
            key = flying.pop()
            began = time.thread_time()
            router.finished(key, Usage(960, 640, 60))
            seconds["finished"] += time.thread_time() - began
        began = time.thread_time()
        picked = router.pick(chain, 1_000)
        chosen = time.thread_time()
        assert picked is not None
        router.started(str(number), picked, chain, 1_000)
        if number >= full:
            seconds["started"] += time.thread_time() - chosen
            seconds["pick"] += chosen - began
        flying.append(str(number))
    return {name: total / requests * 1e6 for name, total in seconds.items()}


def digests_us(rounds: int) -> float:
    text = "What a long prompt says. " * 160
    began = time.thread_time()
    for _ in range(rounds):
        digests(text)
    return (time.thread_time() - began) / rounds * 1e6


def drawing(online: dict[int, dict[str, Figures]]) -> str:
    """Bars of the hit rate, a group for each pool; over each the tokens computed, most over mean."""
    colours = {"round robin": "#b8b8b8", "least work": "#7f9fbf", "routing": "#1f6fb4", "one replica": "#dfe7ee"}
    wide, high, left, base = 42, 200, 56, 240
    most = max(found["hit_rate"] for group in online.values() for found in group.values())
    top = 0.1 * np.ceil(most / 0.1)
    parts, x = list[str](), left + 20
    for tick in np.arange(0, top + 0.05, 0.1):
        y = base - high * tick / top
        parts.append(f'<path d="M{left} {y:.1f}H640" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>')
    for pool, group in online.items():
        middle = x + 2 * wide
        for name, found in group.items():
            tall = high * found["hit_rate"] / top
            parts.append(
                f'<rect x="{x}" y="{base - tall:.1f}" width="{wide - 4}" height="{tall:.1f}" fill="{colours[name]}"/>'
            )
            over = "" if name == "one replica" else f"{found['computed']:.2f}"
            parts.append(f'<text x="{x + wide / 2 - 2}" y="{base - tall - 5:.1f}" text-anchor="middle">{over}</text>')
            x += wide
        parts.append(f'<text x="{middle}" y="{base + 18}" text-anchor="middle">{pool:,} blocks a replica</text>')
        x += 24
    for i, (name, colour) in enumerate(colours.items()):
        parts.append(f'<rect x="{left + 140 * i}" y="272" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18 + 140 * i}" y="282">{name}</text>')
    title = "Share of the prompt tokens that a cache had; above a bar: tokens computed, busiest over mean"
    parts.append(f'<text x="8" y="18">{title}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="656" height="296" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    main()
