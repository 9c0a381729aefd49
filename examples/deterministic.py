"""One request in twenty random batches has the same bits each time; and what `deterministic=True` costs.

    python examples/deterministic.py

The bits are those of the float32 log-probabilities of the 20 likeliest tokens at each place, which come from all logits
there; tests/test_deterministic.py compares the logits themselves. About a minute on two cores.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import struct
import time
from pathlib import Path
from typing import Any

from paged import LLM, RequestOutput, SamplingParams

WORKLOADS = Path(__file__).parents[1] / "benchmarks" / "workloads" / "workload_smollm2.json"
PROMPT = (
    "Once upon a time there was a lighthouse keeper who wrote a letter every evening, and never sent one of them. One"
)
PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=32, ignore_eos=True, logprobs=20)
BATCHES, ROUNDS = 20, 7
REQUESTS, LONGEST = 16, 48  # of W1: how many, and the most tokens that each gives


def digest(output: RequestOutput) -> str:
    """Of the bits of all that was told of each token."""
    found = hashlib.sha256()
    for entries in output.outputs[0].logprobs or ():
        for token, entry in entries.items():
            found.update(struct.pack("<id", token, entry.logprob))
    return found.hexdigest()[:16]


def same_bits() -> None:
    """Raises AssertionError where a batch changes them."""
    # With so small a budget neighbours decide how the prompt is cut into chunks, and in which steps it is computed.
    llm = LLM("smollm2", deterministic=True, kv_memory="256MiB", max_num_batched_tokens=64)
    print(f"{PROMPT!r} and {PARAMS.max_tokens} tokens")
    print(f"in {llm.plan.dtype}, {llm.plan.backend_reason}, {llm.plan.threads} threads; digests of the bits:")
    wanted = digest(llm.generate(PROMPT, PARAMS)[0])
    print(f"  alone{'':40}  {wanted}")
    rng = random.Random(0)
    for number in range(1, BATCHES + 1):
        if rng.random() < 0.5:
            llm.reset_prefix_cache()
        prompts: list[Any] = [rng.choices(range(1000, 40000), k=rng.randint(1, 100)) for _ in range(rng.randint(1, 9))]
        params = [SamplingParams(seed=rng.randrange(9), max_tokens=rng.randint(1, 32)) for _ in prompts]
        place = rng.randint(0, len(prompts))
        beside = sum(map(len, prompts))
        prompts.insert(place, PROMPT)
        params.insert(place, PARAMS)
        output = llm.generate(prompts, params)[place]
        cached = "cached" if output.num_cached_tokens else "not"
        print(
            f"  batch {number:2}: {len(prompts) - 1:2} others of {beside:4} tokens, prefix {cached:6}  {digest(output)}"
        )
        assert digest(output) == wanted, f"in batch {number} the bits are others than alone"
    print(f"bit-equal in {BATCHES} of {BATCHES} batches")


def cost() -> None:
    """W1, or what of it takes half a minute, without and with the promise in turn."""
    requests = json.loads(WORKLOADS.read_text())["W1"][:REQUESTS]
    prompts = [request["prompt"] for request in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=min(request["out"], LONGEST), ignore_eos=True) for request in requests
    ]
    llms = {promise: LLM("smollm2", deterministic=promise, kv_memory="512MiB") for promise in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for round_ in range(-1, ROUNDS):  # the first warms up
        for promise, llm in llms.items():
            llm.reset_prefix_cache()
            start = time.perf_counter()
            llm.generate(prompts, params)
            if round_ >= 0:
                seconds[promise].append(time.perf_counter() - start)
    total = sum(param.max_tokens or 0 for param in params)
    print(f"W1's first {REQUESTS} requests, of each at most {LONGEST} tokens, {total} in all, {ROUNDS} times in turn:")
    for promise, each in seconds.items():
        times = " ".join(f"{one:.2f}" for one in each)
        print(f"  deterministic={promise!s:5}  median {statistics.median(each):.2f} s  of {times}")
    ratio = statistics.median(seconds[True]) / statistics.median(seconds[False])
    print(f"deterministic=True takes {ratio:.2f} times as long (may take 1.25): nothing is computed differently")


if __name__ == "__main__":
    same_bits()
    cost()
