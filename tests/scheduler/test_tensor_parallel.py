"""LLM over two workers against LLM over one, by Ray and gloo, with the real model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from paged import LLM, ConfigError, RequestOutput, SamplingParams, WorkerLost
from scheduler.config import EngineConfig
from scheduler.llm import plan
from worker.checkpoints import Checkpoint
from worker.head import join_ray
from worker.ray_executor import RayExecutor
from worker.weights import load_weights

POOL = 320  # tokens: too few for all, so that some give way
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 96, "max_num_seqs": 16}
STORY = "Once upon a time there was a small dragon who wanted to read every book in the library of the old town. " * 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    join_ray("local", num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def two(cluster: None) -> Iterator[LLM]:
    """Native kernels, drafts, a small pool."""
    llm = LLM(
        tensor_parallel_size=2, threads=1, kv_memory=POOL * 30 * 2 * 2 * 64 * 4, num_speculative_tokens=3, **SETTINGS
    )
    yield llm
    llm.close()


def requests() -> list[tuple[str, SamplingParams]]:
    """Long ones in chunks, some that begin alike, greedy, sampled, of several continuations, and that repeat."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"n": 2, "temperature": 1.0},
        {"temperature": 0, "repetition_penalty": 1.1, "logprobs": 2},
    ]
    texts = [STORY + end for end in ("The dragon", "One day", "Nobody", "In winter")]
    texts += ["The capital of France is", "1 2 3 4 1 2 3 4 1 2 3 4 1 2", "def fibonacci(n):\n", "Dear Sir,", STORY]
    return [
        (text, SamplingParams(max_tokens=40, ignore_eos=True, seed=i, **kinds[i % 4])) for i, text in enumerate(texts)
    ]


def answers(llm: LLM) -> list[list[list[int]]]:
    texts, params = zip(*requests(), strict=True)
    outputs = llm.generate(list(texts), list(params)) + llm.generate(list(texts[:2]), list(params[:2]))
    return tokens(outputs)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def one() -> list[list[list[int]]]:
    """What one worker answers, with plenty of pages."""
    llm = LLM(kv_memory="512MiB", **SETTINGS)
    found = answers(llm)
    llm.close()
    return found


@pytest.mark.ray
def test_two_workers_equal_one_token_for_token(two: LLM, one: list[list[list[int]]]) -> None:
    """float32, native: chunks, cached prefixes, forks, preemption and drafts, greedy and sampled."""
    assert answers(two) == one
    stats = two.engine.stats
    assert min(stats.preemptions, stats.cached_tokens, stats.accepted_tokens) > 0


@pytest.mark.ray
def test_each_worker_holds_about_half_of_the_layers_weights(two: LLM, smollm2: Checkpoint) -> None:
    executor = two.engine.executor
    assert isinstance(executor, RayExecutor)
    whole = sum(
        tensor.numel() * 4 for name, tensor in load_weights(smollm2.path, smollm2.config).items() if ".layers." in name
    )
    shares = [held / whole for held in executor.layer_bytes]
    assert all(0.4 < share < 0.6 for share in shares), shares
    assert sum(shares) == pytest.approx(1, abs=0.01), "norms are at both"


@pytest.mark.ray
def test_the_pool_is_as_planned_for_the_worker_with_two_of_three_heads(two: LLM) -> None:
    it = two.plan
    assert it.layout is not None
    assert it.layout.kv_heads == 2
    assert it.num_pages == two.engine.executor.num_pages == POOL // 16
    assert "at each of 2 workers" in it.sizing


@pytest.mark.ray
def test_weights_are_replaced_at_both_workers(two: LLM, smollm2: Checkpoint) -> None:
    name = "model.layers.7.mlp.down_proj.weight"
    replaced = {name: load_weights(smollm2.path, smollm2.config)[name] * 0.5}
    prompt, params = STORY, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    llm = LLM(kv_memory="64MiB", **SETTINGS)
    before = tokens(llm.generate(prompt, params))
    llm.update_weights(replaced)
    after = tokens(llm.generate(prompt, params))
    assert before != after
    llm.close()
    two.update_weights(replaced)
    assert tokens(two.generate(prompt, params)) == after
    two.update_weights(smollm2.path)
    assert tokens(two.generate(prompt, params)) == before


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "settings",
    [{"attention_backend": "sdpa"}, pytest.param({"quantization": "int8"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_other_backends_and_formats_run(one: list[list[list[int]]], settings: dict[str, str]) -> None:
    """sdpa in float32 gives the same tokens; int8, which rounds rows after sums, at least the same in any batch."""
    llm = LLM(tensor_parallel_size=2, threads=1, kv_memory="64MiB", **SETTINGS, **settings)
    texts, params = zip(*requests()[4:7], strict=True)
    alone = tokens(llm.generate(texts[0], params[0]))
    together = tokens(llm.generate(list(texts), list(params)))
    llm.close()
    assert together[:1] == alone
    assert together == one[4:7] or "quantization" in settings


@pytest.mark.ray
def test_a_worker_that_is_killed_is_noticed_and_the_engine_is_of_no_more_use(two: LLM) -> None:
    """Last of those that use the engine."""
    executor = two.engine.executor
    assert isinstance(executor, RayExecutor)
    running = two.stream(STORY, SamplingParams(max_tokens=100, ignore_eos=True))
    next(running)
    os.kill(executor.pids[0], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=r"over 2 workers is broken, rank 1: its process ended"):
        list(running)
    assert time.monotonic() - began < 15
    with pytest.raises(WorkerLost):
        two.generate("a")


# Without Ray


def test_a_size_that_cannot_be_is_refused_before_anything_is_loaded() -> None:
    for size in (0, True, "2", None):
        with pytest.raises(ConfigError, match="tensor_parallel_size must be a whole number of at least 1"):
            EngineConfig(tensor_parallel_size=size)  # type: ignore[arg-type]


def test_more_workers_than_heads_are_refused(smollm2: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="9 query heads of 3 key/value heads can be divided over at most 9: lower it"):
        plan(EngineConfig(tensor_parallel_size=10), smollm2.config)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.llm.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size above 1 needs Ray: pip install 'paged-kv\[ray\]'"):
        plan(EngineConfig(tensor_parallel_size=2))


def test_threads_and_a_share_of_memory_are_divided_and_bytes_are_each_workers(smollm2: Checkpoint) -> None:
    one, two = (plan(EngineConfig(tensor_parallel_size=size), smollm2.config) for size in (1, 2))
    assert two.threads == max(1, one.threads // 2)
    assert two.threads_reason == f"{one.threads_reason}, for 2 workers"
    assert plan(EngineConfig(tensor_parallel_size=2, threads=3), smollm2.config).threads == 3
    assert two.kv_bytes == pytest.approx(one.kv_bytes / 2, rel=0.05)
    given = plan(EngineConfig(tensor_parallel_size=2, kv_memory="64MiB"), smollm2.config)
    assert given.kv_bytes == 64 * 2**20
    assert given.layout is not None
    assert given.num_pages == 64 * 2**20 // given.layout.bytes_per_page


def test_bytes_for_all_workers_must_be_there(smollm2: Checkpoint) -> None:
    room = plan(EngineConfig(kv_memory="100%"), smollm2.config).kv_bytes
    assert plan(EngineConfig(kv_memory=int(room * 0.7)), smollm2.config)
    with pytest.raises(ConfigError, match="is too much"):
        plan(EngineConfig(kv_memory=int(room * 0.7), tensor_parallel_size=2), smollm2.config)


def test_the_embedding_is_counted_for_every_worker_and_the_head_for_one(smollm2: Checkpoint) -> None:
    config = smollm2.config
    embedding = config.vocab_size * config.hidden_size * 4
    norms = (2 * config.num_layers + 1) * config.hidden_size * 4
    for backend in ("native", "sdpa"):
        settings: dict[str, Any] = {"attention_backend": backend, "dtype": "float32", "device": "cpu"}
        one, two = (plan(EngineConfig(tensor_parallel_size=size, **settings), config) for size in (1, 2))
        assert two.weight_bytes - one.weight_bytes == embedding + norms
