"""Peers take turns on workloads: A B A B. What comes of a peer that hangs or dies, and how two of them are compared."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from peers.process import Child, Peer, PeerError

REST_S = 0.5  # before each run: longer than threads of the one before spin
Requests = list[dict[str, Any]]
Sample = dict[str, Any]


class Contestant:
    """A peer and its child, which is started when it is needed: at first, and after one that was lost."""

    def __init__(self, peer: Peer, warm: Requests, timeout_s: float) -> None:
        self.name = peer.name
        self.about: dict[str, Any] | None = None  # what it runs with
        self._peer, self._warm, self._timeout_s = peer, warm, timeout_s
        self._child: Child | None = None
        self._never: str | None = None  # why it cannot be loaded
        self._skip: str | None = None  # why it leaves out what is left of a workload

    def next_workload(self) -> None:
        self._skip = self._never

    def sample(self, requests: Requests) -> tuple[Sample, list[list[int]] | None]:
        """One run, and its tokens; null for its seconds, no tokens, and why, if there was none."""
        result: Sample = {"seconds": None, "load_average": os.getloadavg()[0]}
        if self._skip is not None:
            return result | {"why": self._skip}, None
        try:
            child = self._child or self._load()
            time.sleep(REST_S)
            child.run(self._warm, self._timeout_s, renew=True)
            result["load_average"] = os.getloadavg()[0]
            answer = child.run(requests, self._timeout_s)
        except PeerError as error:
            self.close()
            self._skip = self._never or f"left out: {str(error).splitlines()[0]}"
            return result | {"why": str(error)}, None
        return result | {"seconds": answer["wall_s"], "first_token_s": answer["first_token_s"]}, answer["tokens"]

    def _load(self) -> Child:
        _say(f"{self.name} loads")
        try:
            self._child = Child(self._peer)
        except PeerError as error:
            self._never = f"could not be loaded: {str(error).splitlines()[0]}"
            raise
        self.about = self._child.about
        return self._child

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None


def measure(
    peers: Sequence[Peer],
    workloads: Mapping[str, Requests],
    warm: Requests,
    reference: Mapping[str, list[list[int]]],
    repeat: int,
    timeout_s: float,
) -> dict[str, Any]:
    """Of each peer what it ran with, and its samples of each workload; ratios are to the first peer, which is paged."""
    contestants = [Contestant(peer, warm, timeout_s) for peer in peers]
    found: dict[str, dict[str, Any]] = {peer.name: {} for peer in peers}
    try:
        for name, requests in workloads.items():
            samples = _turns(contestants, name, requests, reference.get(name), repeat)
            for peer in peers:
                times = [one["seconds"] for one in samples[peer.name] if one["seconds"] is not None]
                found[peer.name][name] = {
                    "requests": len(requests),
                    "median_s": statistics.median(times) if times else None,
                    "times_paged": ratio(samples[peer.name], samples[peers[0].name]),
                    "samples": samples[peer.name],
                }
    finally:
        for one in contestants:
            one.close()
    return {one.name: {"ran_with": one.about, "workloads": found[one.name]} for one in contestants}


def _turns(
    contestants: Sequence[Contestant], name: str, requests: Requests, wanted: list[list[int]] | None, repeat: int
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {one.name: [] for one in contestants}
    for one in contestants:
        one.next_workload()
    for turn in range(repeat):
        of_paged = None
        for one in contestants:
            sample, tokens = one.sample(requests)
            if one is contestants[0]:
                of_paged = tokens
            if tokens is not None:
                sample |= {"agrees": _equal(tokens, wanted), "agrees_with_paged": _equal(tokens, of_paged)}
            samples[one.name].append(sample)
            seconds = sample["seconds"]
            _say(f"{name} turn {turn + 1}: {one.name} {sample['why'] if seconds is None else f'{seconds:.2f} s'}")
    return samples


def ratio(samples: Sequence[Sample], base: Sequence[Sample]) -> float | None:
    """The median over turns of seconds / seconds of the base, of the turns that both have."""
    pairs = [
        one["seconds"] / other["seconds"]
        for one, other in zip(samples, base, strict=True)
        if one["seconds"] is not None and other["seconds"] is not None
    ]
    return statistics.median(pairs) if pairs else None


def _equal(tokens: list[list[int]], wanted: list[list[int]] | None) -> int | None:
    """Outputs that are the same; None where there is nothing to compare with."""
    return None if wanted is None else sum(a == b for a, b in zip(tokens, wanted, strict=True))


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
