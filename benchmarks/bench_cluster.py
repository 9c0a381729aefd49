"""What does a request cost a cluster's driver, and what do two replicas of one thread do against one of two?

    python benchmarks/bench_cluster.py [--quick] [--output FILE] [--draw FILE.svg]

1. Driver: CPU time of this process for each request, over several thousand prompts of 256 characters, one token each;
   what it takes when idle is apart.
   Over Ray: 1, 2, 4 and 8 nodes on this machine (ray.cluster_utils), a replica with a random model of one layer on
   each. Without Ray: 1, 8, 32 and 100 replicas that are here, know no model and answer at once, so that this is the
   driver's own share: text to digests, routing, pickling, keeping. In two ways: `many` waiting at each replica, where
   one message carries several requests, and `one` at each, where every request and answer is a message of its own.
2. Replicas: workload W1 (64 requests, SmolLM2) through Cluster.generate with two replicas of one thread and with one of
   two, and through LLM.generate in this process with two threads, one after the other, several times; medians. Caching
   of prefixes is off, so that no run finds the pages of the one before. Also the share of a core that the driver took.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import report

from scheduler.config import EngineConfig
from scheduler.desk import PromptRequest, Result
from scheduler.driver import Driver
from scheduler.outputs import CompletionOutput, EngineStats, RequestOutput
from scheduler.replica import ReplicaInfo, Report
from worker.head import join_ray
from worker.step import SamplingParams

HOME = Path(__file__).parents[1]
NODES, FAKES = (1, 2, 4, 8), (1, 8, 32, 100)
MANY = 64  # requests that wait at a replica
IDLE_S = 2.0
OBJECTS = 100 * 2**20  # bytes of a node's object store
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
Figures = dict[str, Any]


# 1. The driver


class Fake:
    """A Link to a replica in this process that answers at once; the answer is unpickled, as one that has come far."""

    def __init__(self, index: int) -> None:
        self._info = ReplicaInfo(index, "here", "fake", 256, 1_000_000, 1, "", 0.0, EngineConfig(), {})
        output = RequestOutput(
            "0", "x" * 256, list(range(64)), [CompletionOutput(0, "yes", [7], finish_reason="length")], True
        )
        self._output = pickle.dumps(output, pickle.HIGHEST_PROTOCOL)
        self._lock = threading.Lock()
        self._keys: list[str] = []
        self._waits: Future[Any] | None = None

    def call(self, method: str, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        if method == "take":
            with self._lock:
                self._waits = done
            self._answer(at_once=args[1] == 0)
        else:
            if method == "add":
                with self._lock:
                    self._keys += [key for key, _ in args[1]]
                self._answer()
            done.set_result(self._info if method == "open" else None)
        return done

    def restart(self) -> None:
        """There is no process."""

    def end(self) -> None:
        """There is no process."""

    def _answer(self, at_once: bool = False) -> None:
        with self._lock:
            waits, keys = self._waits, self._keys
            if waits is None or not (keys or at_once):
                return
            self._waits, self._keys = None, []
        waits.set_result(([(key, pickle.loads(self._output)) for key in keys], Report(0, EngineStats())))


def feed(driver: Driver, requests: int, most: int, idle: float = 0.0) -> Figures:
    """Send so many prompts, `most` of them at once; what it took. idle: share of a core that is not due to them."""
    ended, free = threading.Event(), threading.Semaphore(most)
    left, failed = [requests], list[Result]()

    def sink(result: Result) -> None:
        if not isinstance(result, RequestOutput):
            failed.append(result)
        left[0] -= 1
        free.release()
        if not left[0]:
            ended.set()

    text = "What a prompt says that is as long as many are. " * 6
    began, cpu = time.perf_counter(), time.process_time()
    for number in range(requests):
        free.acquire()
        driver.add(PromptRequest(f"{number} {text}"[:256], ONE_TOKEN), sink)
    ended.wait()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    if failed:
        sys.exit(f"{len(failed)} of {requests} requests failed: {failed[0]}")
    return {"us": (cpu - idle * wall) / requests * 1e6, "requests_per_s": requests / wall, "cpu_share": cpu / wall}


def both(driver: Driver, replicas: int, requests: int) -> Figures:
    """After some to warm up. idle_share: of a core that this process takes when there is nothing to do."""
    feed(driver, requests // 4, MANY * replicas)
    time.sleep(1)
    began, cpu = time.perf_counter(), time.process_time()
    time.sleep(IDLE_S)
    idle = (time.process_time() - cpu) / (time.perf_counter() - began)
    found: Figures = {"idle_share": idle}
    for way, count, most in (("many", requests, MANY * replicas), ("one", requests // 2, replicas)):
        found[way] = feed(driver, count, most, idle)
    return found


def show(what: str, found: Figures) -> None:
    print(f"{what:22} idle: {found['idle_share']:.1%} of a core")
    for way in ("many", "one"):
        figures = found[way]
        print(
            f"{what:22} {way:4} at each: {figures['us']:6.0f} us of the driver a request, "
            f"{figures['requests_per_s']:6.0f} requests/s, {figures['cpu_share']:4.0%} of a core",
            flush=True,
        )


def without_ray(replicas: int, requests: int) -> Figures:
    driver = Driver()
    try:
        for index in range(replicas):
            driver.found(index, Fake(index))
        driver.wait(replicas)
        return both(driver, replicas, max(requests, 4 * MANY * replicas))  # of which most find the others under way
    finally:
        driver.close()


def over_ray(nodes: tuple[int, ...], requests: int, model: Path) -> dict[int, Figures]:
    """By number of nodes; one Ray that grows."""
    from ray._private.authentication import authentication_token_setup as tokens
    from ray.cluster_utils import Cluster as Nodes

    from scheduler.cluster import Cluster

    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as who joins does
    found = dict[int, Figures]()
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECTS}
    ray = Nodes(initialize_head=True, head_node_args=head)
    try:
        ray.add_node(num_cpus=1, object_store_memory=OBJECTS)
        settings: dict[str, Any] = {"threads": 1, "kv_memory": "64MiB", "dtype": "float32"}
        with Cluster.launch(str(model), address=ray.address, **settings) as cluster:
            there = 1
            for count in nodes:
                for _ in range(count - there):
                    ray.add_node(num_cpus=1, object_store_memory=OBJECTS)
                cluster.scale(count)
                cluster._driver.wait(count)
                there = count
                found[count] = both(cluster._driver, count, requests)
                show(f"over Ray, {count} nodes", found[count])
    finally:
        ray.shutdown()
    return found


def predicted(rays: dict[int, Figures], fakes: dict[int, Figures]) -> Figures:
    """For the most replicas: what a request costs over the most nodes, and what routing among more adds to it."""
    near, far = max(rays), max(fakes)
    least = min(fakes, key=lambda count: abs(count - near))
    found = Figures()
    for way in ("many", "one"):
        us = rays[near][way]["us"] + max(0.0, fakes[far][way]["us"] - fakes[least][way]["us"])
        found[way] = {"replicas": far, "us": us, "requests_per_s": 1e6 / us, "of_each": 1e6 / us / far}
        print(f"predicted for {far} replicas, {way} at each: {us:.0f} us, so a core feeds {1e6 / us:.0f} requests/s")
    return found


# 2. Replicas


def replicas(requests: list[Figures], turns: int) -> Figures:
    """Seconds and output tokens per second of W1, by what computes it."""
    import ray

    from scheduler.cluster import Cluster
    from scheduler.llm import LLM

    prompts = [request["prompt"] for request in requests]
    params = [SamplingParams(temperature=0, max_tokens=one["out"], ignore_eos=True) for one in requests]
    settings: dict[str, Any] = {"enable_prefix_caching": False, "kv_memory": "1GiB"}
    # Room for both clusters, of which one works at a time: together they have more threads than there may be cores.
    join_ray("local", num_cpus=4, object_store_memory=OBJECTS, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        with (
            Cluster.launch("smollm2", replicas=2, threads=1, **settings) as two,
            Cluster.launch("smollm2", replicas=1, threads=2, **settings) as one,
            closing(LLM("smollm2", threads=2, **settings)) as here,
        ):
            ways: dict[str, Callable[..., list[RequestOutput]]] = {
                "two replicas of one thread": two.generate,
                "one replica of two threads": one.generate,
                "LLM in process, two threads": here.generate,
            }
            samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            tokens = dict[str, list[list[int]]]()
            for turn in range(turns + 1):  # the first is to warm up
                for name, generate in ways.items():
                    began, cpu = time.perf_counter(), time.process_time()
                    outputs = generate(prompts, params)
                    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
                    tokens[name] = [output.outputs[0].token_ids for output in outputs]
                    if turn:
                        samples[name].append((wall, cpu / wall))
    finally:
        ray.shutdown()
    total = sum(one["out"] for one in requests)
    first = next(iter(tokens.values()))
    if any(other != first for other in tokens.values()):
        sys.exit("W1 has other tokens in another place")
    found = Figures()
    for name, runs in samples.items():
        wall = statistics.median(wall for wall, _ in runs)
        share = statistics.median(share for _, share in runs)
        found[name] = {"wall_s": [round(wall, 2) for wall, _ in runs], "tokens_per_s": total / wall}
        found[name]["requests_per_s"] = len(requests) / wall
        if not name.startswith("LLM"):
            found[name]["driver_cpu_share"] = share
        print(f"{name:28} {wall:6.2f} s, {total / wall:6.1f} tokens/s, this process: {share:.1%} of a core", flush=True)
    return found


# Drawing


def drawing(rays: dict[int, Figures], fakes: dict[int, Figures]) -> str:
    """Microseconds of the driver over the number of replicas, as SVG: both ways, over Ray and without."""
    left, right, base, high = 64, 520, 250, 200
    lines = [
        ("over Ray, one request at each", "#b4501f", "", [(n, f["one"]["us"]) for n, f in rays.items()]),
        ("over Ray, many at each", "#1f6fb4", "", [(n, f["many"]["us"]) for n, f in rays.items()]),
        ("without Ray, one at each", "#b4501f", "5 4", [(n, f["one"]["us"]) for n, f in fakes.items()]),
        ("without Ray, many at each", "#1f6fb4", "5 4", [(n, f["many"]["us"]) for n, f in fakes.items()]),
    ]
    most = max(us for *_, points in lines for _, us in points)
    tick = next(step for step in (50, 100, 200, 500, 1000, 2000, 5000, 10**9) if most / step <= 6)
    top = tick * (int(most / tick) + 1)

    def place(replicas: int, us: float) -> tuple[float, float]:
        return left + 20 + (right - left - 40) * math.log(replicas) / math.log(FAKES[-1]), base - high * us / top

    parts = list[str]()
    for us in range(0, top + 1, tick):
        y = place(1, us)[1]
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{us}</text>')
    for replicas in sorted({*NODES, *FAKES}):
        parts.append(f'<text x="{place(replicas, 0)[0]:.1f}" y="{base + 18}" text-anchor="middle">{replicas}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{base + 38}" text-anchor="middle">replicas</text>')
    for i, (name, colour, dashes, points) in enumerate(lines):
        spots = [place(*point) for point in points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in spots]
        y = 60 + 22 * i
        parts.append(
            f'<path d="M{right + 12} {y - 4}h28" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        )
        parts.append(f'<text x="{right + 46}" y="{y}">{name}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="300" font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="white"/>'
        '<text x="8" y="20" font-size="13">CPU time of the driver for a request, microseconds</text>'
        f"{''.join(parts)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two nodes, few requests, a short part of W1")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "cluster.json")
    parser.add_argument("--draw", type=Path, help="draw the first part as SVG into this file")
    args = parser.parse_args()
    before = os.getloadavg()[0]
    nodes, requests, turns = (NODES[:2], 400, 1) if args.quick else (NODES, 4_000, 3)
    w1 = report.workload("W1")
    w1 = [{**one, "out": min(one["out"], 8)} for one in w1[:8]] if args.quick else w1
    fakes = dict[int, Figures]()
    for count in FAKES:
        fakes[count] = without_ray(count, requests)
        show(f"without Ray, {count}", fakes[count])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "tiny")
        make = [sys.executable, str(HOME / "examples" / "make_random_model.py"), "--params", "200K"]
        subprocess.run([*make, "-o", str(model)], check=True, capture_output=True)
        rays = over_ray(nodes, requests, model)
    far = predicted(rays, fakes)
    found = replicas(w1, turns)
    report.write(args.output, load_before=before, without_ray=fakes, over_ray=rays, predicted=far, w1=found)
    if args.draw:
        args.draw.write_text(drawing(rays, fakes))


if __name__ == "__main__":
    main()
