"""Shards, and several workers against one: which part each has, what they compute together, and what breaks them."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import FAMILIES, tiny
from parallel_fakes import Threads, engine_of

from paged import ConfigError, RequestOutput, SamplingParams, StepError, WorkerLost
from paged.kernels import library
from scheduler.engine import Engine
from scheduler.policy import Rules
from worker.checkpoints import resolve
from worker.group import Group
from worker.kernels import Matrix
from worker.kernels.native import pack
from worker.kernels.reference import unpack
from worker.model_config import ModelConfig
from worker.parallel import GROUP, shards
from worker.step import Step
from worker.tensor_parallel import accept, connect, listen
from worker.tensors import HEAD, layer_parts
from worker.weights import cut_weights, load_weights

assert library() is not None
PROMPTS = [[(i * 37 + j * j * (i + 3)) % 131 for j in range(length)] for i, length in enumerate((3, 25, 40, 9))]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=3)
CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 99,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "rope_theta": 10000.0,
    }
)
DIVIDED = [family for family in FAMILIES if family != "olmo2"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            tiny(family, made[family])
        return made[family]

    return folder


def run(engine: Engine, requests: list[tuple[list[int], Any]]) -> list[RequestOutput]:
    for i, (prompt, params) in enumerate(requests):
        engine.add(str(i), prompt, params)
    found: dict[str, RequestOutput] = {}
    while engine.has_work:
        found |= {output.request_id: output for output in engine.step()}
    return [found[str(i)] for i in range(len(requests))]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


# Shards


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 8), size=st.integers(1, 12), inner=st.integers(1, 700))
def test_shards_hold_every_head_and_every_part_of_the_mlp(kv_heads: int, group: int, size: int, inner: int) -> None:
    config = replace(CONFIG, num_heads=kv_heads * group, num_kv_heads=kv_heads, intermediate_size=inner)
    if size > kv_heads * group or inner < size:
        with pytest.raises(ConfigError, match=rf"tensor_parallel_size is {size}.*lower it"):
            shards(config, size)
        return
    found = shards(config, size)
    assert [shard.rank for shard in found] == list(range(size))
    assert [head for shard in found for head in shard.heads] == list(range(kv_heads * group))
    assert [row for shard in found for row in shard.inner] == list(range(inner))
    held = [head for shard in found for head in shard.kv_heads]
    assert held == sorted(held)
    assert set(held) == set(range(kv_heads))
    for shard in found:
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        own = shard.config(config)
        assert own.num_heads % own.num_kv_heads == 0
        assert [head // (own.num_heads // own.num_kv_heads) for head in range(own.num_heads)] == [
            head // group - shard.kv_heads.start for head in shard.heads
        ], "the kernels find the KV head of a query head by its number in the shard"
        if inner >= GROUP * size:
            assert shard.inner.start % GROUP == 0
    if size <= kv_heads:
        assert len(held) == kv_heads, "held once"
        sizes = [len(shard.kv_heads) for shard in found]
        assert max(sizes) - min(sizes) <= 1


def test_three_heads_on_two_workers_are_two_and_one(smollm2: Any) -> None:
    first, second = shards(smollm2.config, 2)
    assert (list(first.kv_heads), list(second.kv_heads)) == ([0, 1], [2])
    assert (list(first.heads), list(second.heads)) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])
    assert len(first.inner) == len(second.inner) == 768


def test_a_norm_over_all_heads_cannot_be_divided(folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, and this model norms all heads of a token"):
        shards(resolve(str(folder("olmo2"))).config, 2)


@pytest.mark.parametrize("family", ["llama3", "gemma3", "phi3", "granite"])
@pytest.mark.parametrize("size", [2, 3])
def test_shards_of_weights_are_all_of_them_once(folder: Callable[[str], Path], family: str, size: int) -> None:
    path = folder(family)
    config = resolve(str(path)).config
    whole, parts = load_weights(path, config), []
    for shard in shards(config, size):
        weights = load_weights(path, config)
        cut_weights(weights, config, shard)
        assert (HEAD in weights) == (shard.rank == 0)
        parts.append(weights)
    for name in (name for names in layer_parts(config).values() for name in names):
        place = f"model.layers.0.{name}"
        tensor, cut = whole[place], [weights[place] for weights in parts]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat(cut, dim=1), tensor)
        elif name.endswith(("o_proj.bias", "down_proj.bias")):
            assert torch.equal(cut[0], tensor)
            assert not any(other.any() for other in cut[1:])
        elif name.endswith(("norm.weight", "layernorm.weight")):
            assert all(torch.equal(other, tensor) for other in cut)
        elif "gate_up_proj" in name:
            halves = [torch.chunk(other, 2) for other in cut]
            assert torch.equal(torch.cat([gate for gate, _ in halves] + [up for _, up in halves]), tensor)
        elif name.endswith(("gate_proj.weight", "up_proj.weight", "gate_proj.bias", "q_proj.weight", "q_proj.bias")):
            assert torch.equal(torch.cat(cut), tensor)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_columns_of_a_shard_are_rounded_as_those_of_the_whole(kind: str) -> None:
    config = replace(CONFIG, intermediate_size=224, num_heads=6, num_kv_heads=3, head_dim=32)
    weight = torch.randn(64, 224) * torch.rand(64, 1)
    rounded = unpack(pack(weight, kind))
    for shard in shards(config, 3):
        columns = slice(shard.inner.start, shard.inner.stop)
        part: Matrix = pack(weight[:, columns].contiguous(), kind)
        assert torch.equal(unpack(part), rounded[:, columns])


# What they compute together


@pytest.mark.parametrize("backend", ["native", "sdpa"])
@pytest.mark.parametrize("family", DIVIDED)
def test_two_workers_answer_as_one(folder: Callable[[str], Path], family: str, backend: str) -> None:
    path, requests = folder(family), [(prompt, GREEDY) for prompt in PROMPTS]
    one = run(engine_of(path, 1, backend=backend), requests)
    engine = engine_of(path, 2, backend=backend)
    two = run(engine, requests)
    engine.close()
    assert tokens(two) == tokens(one)
    for a, b in zip(one, two, strict=True):
        close(a, b)


@pytest.mark.parametrize(("family", "size"), [("llama", 3), ("llama3", 6), ("gemma3", 3), ("phi3", 4)])
def test_more_workers_than_heads_divide_answer_as_one(folder: Callable[[str], Path], family: str, size: int) -> None:
    path, requests = folder(family), [(prompt, GREEDY) for prompt in PROMPTS[:2]]
    one = run(engine_of(path, 1), requests)
    engine = engine_of(path, size)
    several = run(engine, requests)
    engine.close()
    assert tokens(several) == tokens(one)
    for a, b in zip(one, several, strict=True):
        close(a, b)


def close(a: RequestOutput, b: RequestOutput) -> None:
    entries = [*(a.prompt_logprobs or [])[1:], *(a.outputs[0].logprobs or [])]
    others = [*(b.prompt_logprobs or [])[1:], *(b.outputs[0].logprobs or [])]
    assert len(entries) == len(others) == len(a.prompt_token_ids) - 1 + 16
    for entry, other in zip(entries, others, strict=True):
        assert entry is not None
        assert other is not None
        for token in entry.keys() & other.keys():
            assert entry[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_other_formats_run_and_do_not_depend_on_what_else_runs(
    folder: Callable[[str], Path], settings: dict[str, Any]
) -> None:
    """N2: alone, and beside others in chunks."""
    requests = [(prompt, SamplingParams(seed=i, max_tokens=20, ignore_eos=True)) for i, prompt in enumerate(PROMPTS)]
    engine = engine_of(folder("llama"), 2, **settings)
    alone = [tokens(run(engine, [request])) for request in requests]
    engine.close()
    engine = engine_of(folder("llama"), 2, budget=13, **settings)
    assert tokens(run(engine, requests)) == [answer for (answer,) in alone]
    engine.close()


def mixture() -> list[tuple[list[int], SamplingParams]]:
    """Requests of many kinds; some begin alike, some repeat themselves, so that drafts come true."""
    few = {"allowed_token_ids": [5, 7, 9]}
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"n": 2}, few, {"temperature": 0} | few, {"min_p": 0.1}]
    return [
        (PROMPTS[2][:24] + [i] + PROMPTS[i % 4], SamplingParams(seed=i, max_tokens=30, ignore_eos=True, **kinds[i % 5]))
        for i in range(10)
    ]


@pytest.mark.parametrize("rules", [Rules(), Rules(num_speculative_tokens=4)], ids=["plain", "drafts"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_followers_keep_up_with_chunks_forks_preemption_hits_and_drafts(
    folder: Callable[[str], Path], family: str, rules: Rules
) -> None:
    """A follower's own sequences are the leader's, to the last token."""
    path, windowed = folder(family), family == "gemma3"
    wanted = tokens(run(engine_of(path, 1), mixture()))
    engine = engine_of(path, 2, usable=260 if windowed else 60, budget=17, rules=rules)
    executor = engine.executor
    assert isinstance(executor, Threads)
    for i, (prompt, params) in enumerate(mixture()):
        engine.add(str(i), prompt, params)
    found: dict[str, RequestOutput] = {}
    while engine.has_work:
        found |= {output.request_id: output for output in engine.step()}
        if executor._sampled is not None and engine.has_work:
            leader, follower = executor.runners[0]._states, executor.runners[1]._states
            assert leader.keys() == follower.keys()
            for seq_id, state in leader.items():
                other = follower[seq_id]
                end = min(state.num_tokens, other.num_tokens)
                assert state.tokens[:end].tolist() == other.tokens[:end].tolist()
                assert state.pages[:, : state.num_pages].tolist() == other.pages[:, : other.num_pages].tolist()
    engine.close()
    assert tokens([found[str(i)] for i in range(10)]) == wanted
    stats = engine.stats
    assert stats.cached_tokens
    assert stats.preemptions or windowed
    assert bool(stats.accepted_tokens) == bool(rules.num_speculative_tokens)


@pytest.mark.parametrize(("family", "kind"), [("llama", {}), ("gemma3", {"dtype": "bfloat16"})], ids=str)
def test_n03_bits_of_two_workers_do_not_depend_on_the_batch(
    folder: Callable[[str], Path], family: str, kind: dict[str, Any]
) -> None:
    """N3 of a given tensor_parallel_size: all logits of requests alone, and beside others, in chunks, with drafts."""
    seen: list[dict[bytes, bytes]] = []
    for budget, drafts, together in ((64, 0, False), (11, 0, True), (40, 3, True)):
        engine = engine_of(
            folder(family), 2, usable=700, budget=budget, rules=Rules(num_speculative_tokens=drafts), **kind
        )
        bits = record(engine)
        if together:
            run(engine, mixture())
        else:
            for request in mixture():
                run(engine, [request])
        engine.close()
        seen.append(bits)
    for other in seen[1:]:
        compared = seen[0].keys() & other.keys()
        assert len(compared) > 250
        assert [key for key in compared if seen[0][key] != other[key]] == []


def record(engine: Engine) -> dict[bytes, bytes]:
    """Digests of all logits that rank 0 computes, by the tokens before them."""
    assert isinstance(engine.executor, Threads)
    runner = engine.executor.runners[0]
    compute, bits = runner.compute, dict[bytes, bytes]()

    def recorded(work: Any) -> Any:
        logits, best = compute(work)
        if work.inputs is not None:
            rows = torch.searchsorted(work.inputs.metas[0].query_start, work.inputs.sampled, right=True) - 1
            for row, place, values in zip(rows.tolist(), work.inputs.sampled.tolist(), logits, strict=True):
                before = work.states[row].tokens[: int(work.inputs.positions[place]) + 1]
                digest = hashlib.blake2b(values.numpy().tobytes()).digest()
                assert bits.setdefault(before.tobytes(), digest) == digest
        return logits, best

    vars(runner).update(compute=recorded)
    return bits


# What breaks


def test_a_step_that_does_not_fit_fails_alone_and_the_next_ones_run(folder: Callable[[str], Path]) -> None:
    path, requests = folder("llama"), [(prompt, GREEDY) for prompt in PROMPTS]
    wanted = tokens(run(engine_of(path, 1), requests))
    engine = engine_of(path, 2)
    executor = engine.executor
    assert isinstance(executor, Threads)
    assert tokens(run(engine, requests)) == wanted
    executor.submit(Step(10**6, ()))
    with pytest.raises(StepError, match="step 1000000 came where"):
        executor.result()
    engine.scheduler.fail()
    assert tokens(run(engine, requests)) == wanted
    engine.close()
    assert not executor.errors


def test_ctrl_c_in_the_middle_of_a_step_leaves_no_worker_behind(folder: Callable[[str], Path]) -> None:
    path, requests = folder("llama"), [(prompt, GREEDY) for prompt in PROMPTS]
    wanted = tokens(run(engine_of(path, 1), requests))
    engine = engine_of(path, 2)
    executor = engine.executor
    assert isinstance(executor, Threads)
    total, when = executor.seats[0].total, iter([False] * 7 + [True] + [False] * 10**6)

    def interrupted(part: torch.Tensor) -> torch.Tensor:
        if next(when):
            signal.raise_signal(signal.SIGINT)
        return total(part)

    vars(executor.runners[0].model).update(_total=interrupted)
    for i, request in enumerate(requests):
        engine.add(str(i), *request)
    found: dict[str, RequestOutput] = {}
    interrupts = 0
    while engine.has_work:
        try:
            found |= {output.request_id: output for output in engine.step()}
        except KeyboardInterrupt:
            interrupts += 1
    engine.close()
    assert interrupts == 1
    assert executor.seats[0].sums == executor.seats[1].sums
    assert tokens([found[str(i)] for i in range(len(requests))]) == wanted


def test_a_worker_that_fails_in_a_step_is_named_and_the_executor_is_of_no_more_use(
    folder: Callable[[str], Path],
) -> None:
    engine = engine_of(folder("llama"), 2)
    executor = engine.executor
    assert isinstance(executor, Threads)
    run(engine, [(PROMPTS[0], GREEDY)])
    vars(executor.runners[1]).update(compute=lambda work: 1 / 0)
    engine.add("a", PROMPTS[1], GREEDY)
    with pytest.raises(WorkerLost, match=r"over 2 workers is broken, rank 1: ZeroDivisionError.*: start the engine"):
        engine.step()
    for call in (engine.step, lambda: engine.update_weights(folder("llama"), {})):
        with pytest.raises(WorkerLost, match="ZeroDivisionError"):
            call()
    engine.close()


def test_a_failure_of_rank_0_between_sums_does_not_leave_the_others_waiting(folder: Callable[[str], Path]) -> None:
    engine = engine_of(folder("llama"), 3)
    executor = engine.executor
    assert isinstance(executor, Threads)
    run(engine, [(PROMPTS[0], GREEDY)])

    def fails(part: torch.Tensor) -> torch.Tensor:
        raise MemoryError("of rank 0")

    vars(executor.runners[0].model).update(_total=fails)
    vars(executor).update(_why=lambda: "")
    engine.add("a", PROMPTS[1], GREEDY)
    with pytest.raises(WorkerLost, match="rank 0: MemoryError: of rank 0"):
        engine.step()
    engine.close()
    assert not any(thread.is_alive() for thread in executor.threads)


@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_weights_are_replaced_at_every_worker(folder: Callable[[str], Path], backend: str) -> None:
    path, requests = folder("llama"), [(prompt, GREEDY) for prompt in PROMPTS]
    config = resolve(str(path)).config
    other = {name: tensor * 0.9 for name, tensor in load_weights(path, config).items() if "proj" in name}
    engine = engine_of(path, 1, backend=backend)
    engine.update_weights(path, other)
    wanted = tokens(run(engine, requests))
    engine = engine_of(path, 2, backend=backend)
    assert tokens(run(engine, requests)) != wanted
    engine.update_weights(path, other)
    assert tokens(run(engine, requests)) == wanted
    with pytest.raises(Exception, match="nonsense is not a tensor of this model"):
        engine.update_weights(path, {"nonsense": torch.zeros(1)})
    assert tokens(run(engine, requests)) == wanted, "nobody has changed anything"
    engine.close()


def test_followers_are_known_by_their_rank_in_whatever_order_they_come(tmp_path: Path) -> None:
    with listen(tmp_path / "leader", 3) as listener:
        theirs = {rank: connect(tmp_path / "leader", rank) for rank in (3, 1, 2)}
        mine = accept(listener, 3, 5.0)
        for rank, link in enumerate(mine, 1):
            link.send_bytes(bytes([rank]))
            assert theirs[rank].recv_bytes() == bytes([rank])
        with pytest.raises(TimeoutError):
            accept(listener, 1, 0.1)
    for link in (*mine, *theirs.values()):
        link.close()


# The group


def in_threads(tmp_path: Path, size: int, act: Callable[[Group, int], Any], timeout: float = 20.0) -> list[Any]:
    """What `act` returns, or raises, in each of the workers of a real group."""
    found: list[Any] = [None] * size

    def worker(rank: int) -> None:
        try:
            group = Group(tmp_path / "store", rank, size, timeout=timeout)
            found[rank] = act(group, rank)
        except Exception as error:  # noqa: BLE001
            found[rank] = error

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_added_in_order_of_rank(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [[torch.randn(rows, 33).to(dtype) for rows in (5, 1, 40)] for _ in range(3)]
    found = in_threads(tmp_path, 3, lambda group, rank: [group.total(part).clone() for part in parts[rank]])
    for totals in found:
        for i, total in enumerate(totals):
            first, second, third = (parts[rank][i].float() for rank in range(3))
            assert torch.equal(total, ((first + second) + third).to(dtype))
            assert total.dtype == dtype


def test_who_waits_for_a_worker_that_ends_gets_an_error_at_once(tmp_path: Path) -> None:
    began = time.monotonic()

    def act(group: Group, rank: int) -> Any:
        group.total(torch.ones(2, 3))
        return group.close() if rank == 1 else group.total(torch.ones(2, 3))

    first, _ = in_threads(tmp_path, 2, act, timeout=60.0)
    assert isinstance(first, RuntimeError)
    assert time.monotonic() - began < 30


def test_who_waits_for_a_worker_that_hangs_gets_an_error_in_the_end(tmp_path: Path) -> None:
    ended = threading.Event()

    def act(group: Group, rank: int) -> Any:
        if rank == 1:
            return ended.wait(20)
        try:
            return group.total(torch.ones(2, 3))
        finally:
            ended.set()

    first, second = in_threads(tmp_path, 2, act, timeout=0.5)
    assert isinstance(first, RuntimeError)
    assert second is True
