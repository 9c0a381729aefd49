"""The main bar: greedy float32 output on SmolLM2 equals transformers', token for token, however it is computed.

The reference was made with transformers, each request alone, without padding (benchmarks/workloads). In the plain run a
sample of every workload with outputs cut short stands for the whole, which is `slow`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import LLM, RequestOutput, SamplingParams
from worker.checkpoints import Checkpoint

FOLDER = Path(__file__).parent.parent / "benchmarks" / "workloads"
WORKLOADS = json.loads((FOLDER / "workload_smollm2.json").read_text())
REFERENCE = json.loads((FOLDER / "reference_smollm2_fp32.json").read_text())
NAMES = ["W1", "W2", "W3", "W4"]

Requests = list[tuple[list[int], list[int]]]  # prompt, expected tokens


@contextmanager
def engine(**settings: Any) -> Iterator[LLM]:
    llm = LLM("smollm2", **{"dtype": "float32", "max_num_seqs": 32, "kv_memory": "2GiB"} | settings)
    yield llm
    stats = llm.engine.stats
    llm.engine.scheduler.check()
    assert stats.used_pages == stats.running == stats.waiting == 0
    llm.close()


def requests(name: str, number: int | None = None, output: int | None = None) -> Requests:
    """The first `number` requests of a workload, their output cut to `output` tokens; None is all."""
    pairs = zip(WORKLOADS[name][:number], REFERENCE[name][:number], strict=True)
    return [(request["prompt"], expected[:output]) for request, expected in pairs]


def greedy(length: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, **more)


def answers(llm: LLM, wanted: Requests) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in wanted], [greedy(len(expected)) for _, expected in wanted])


def assert_equal(outputs: list[RequestOutput], wanted: Requests) -> None:
    wrong = [i for i, (o, (_, tokens)) in enumerate(zip(outputs, wanted, strict=True)) if ids(o) != tokens]
    assert not wrong, f"requests {wrong} of {len(wanted)} differ from transformers"


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def bytes_for(tokens: int) -> int:
    """kv_memory that holds so many tokens of SmolLM2 in float32, besides the null page of 16."""
    return (tokens + 16) * 46_080


# The shortest prompts of W1, so that 32 fit into the budget of a step or two.
SAMPLE = sorted(requests("W1", output=6), key=lambda request: len(request[0]))[:32]
SAMPLE += requests("W2", 6, 6) + requests("W3", 1, 24) + requests("W4", 1, 4)


def test_a_sample_of_every_workload_equals_transformers(smollm2: Checkpoint) -> None:
    """With 32 sequences in a step at once."""
    with engine(max_num_batched_tokens=1024) as llm:
        assert_equal(answers(llm, SAMPLE), SAMPLE)
        assert llm.engine.stats.max_running == 32
        assert llm.engine.stats.cached_tokens >= 3 * 512  # W2's shared prefix


def test_a_sample_equals_transformers_when_preempted(smollm2: Checkpoint) -> None:
    """With a pool so small that at least 5 % of the tokens are computed twice."""
    wanted = sorted(requests("W1", output=40), key=lambda request: len(request[0]))[:12]
    with engine(kv_memory=bytes_for(640), enable_prefix_caching=False) as llm:
        assert_equal(answers(llm, wanted), wanted)
        stats = llm.engine.stats
        assert stats.preemptions > 0
        assert stats.recomputed_tokens >= 0.05 * stats.computed_tokens, stats


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_workload_equals_transformers(smollm2: Checkpoint, name: str) -> None:
    wanted = requests(name)
    with engine() as llm:
        assert_equal(answers(llm, wanted), wanted)
        assert llm.engine.stats.max_running == min(32, len(wanted))


# Pools in which as many sequences start as leaves no room for all of them to grow.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), [("W1", 1536), ("W2", 281 * 16), ("W3", 400), ("W4", 387 * 16)])
def test_a_workload_equals_transformers_when_preempted(smollm2: Checkpoint, name: str, tokens: int) -> None:
    """W3 is one request, which nothing could preempt: it runs twice. W2's prompts must begin together to collide."""
    wanted = requests(name) * (2 if name == "W3" else 1)
    budget = 8192 if name == "W2" else 512
    with engine(kv_memory=bytes_for(tokens), enable_prefix_caching=False, max_num_batched_tokens=budget) as llm:
        assert_equal(answers(llm, wanted), wanted)
        stats = llm.engine.stats
        assert stats.recomputed_tokens >= 0.05 * stats.computed_tokens, stats


# Rules of the scheduler, one at a time, and pools so small that somebody gives way (but where nobody ever does).
RULES: dict[str, dict[str, Any]] = {
    "guaranteed": {"admission": "guaranteed"},
    "priority": {"policy": "priority"},
    "longest_prefix": {"policy": "longest_prefix", "enable_prefix_caching": True},
    "shortest": {"policy": "shortest"},
    "cheapest": {"victim": "cheapest"},
    "largest": {"victim": "largest"},
    "drafts": {"num_speculative_tokens": 4},
    "drafts, guaranteed": {"num_speculative_tokens": 4, "admission": "guaranteed"},
    "max_step_ms": {"max_step_ms": 60.0},
}


def check_rules(wanted: Requests, tokens: int, **settings: Any) -> None:
    """Requests of all classes, in a pool of so many tokens. Prints the figures that docs quote."""
    params = [greedy(len(expected)) for _, expected in wanted]
    classes = [(7 * i) % 21 - 10 for i in range(len(wanted))]
    with engine(kv_memory=bytes_for(tokens), **settings) as llm:
        assert_equal(llm.generate([prompt for prompt, _ in wanted], params, priority=classes), wanted)
        stats = llm.engine.stats
        print(
            f"{settings}: {stats.num_steps} steps, {stats.preemptions} preemptions, "
            f"{stats.recomputed_tokens / stats.computed_tokens:.1%} recomputed, "
            f"{stats.accepted_tokens} of {stats.draft_tokens} drafts accepted"
        )
        assert (stats.preemptions == 0) == (settings.get("admission") == "guaranteed")
        assert (stats.accepted_tokens > 0) == ("num_speculative_tokens" in settings)


def test_a_sample_equals_transformers_under_other_rules(smollm2: Checkpoint) -> None:
    wanted = sorted(requests("W1", output=40), key=lambda request: len(request[0]))[:6]
    drafts = {"num_speculative_tokens": 4}
    check_rules(wanted, 160, policy="priority", victim="cheapest", enable_prefix_caching=False, **drafts)
    check_rules(wanted, 160, policy="priority", victim="cheapest", admission="guaranteed", **drafts)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_a_workload_equals_transformers_under_each_rule(smollm2: Checkpoint, name: str) -> None:
    check_rules(requests("W1"), 1536, **{"enable_prefix_caching": False} | RULES[name])


# What must change no token: page size, budget, prefix cache; and whether a request runs alone or in a batch.
CONFIGS = list(itertools.product([1, 16, 64], [64, 2048], [True, False]))
PLAIN_CONFIGS = [(1, 64, True), (16, 2048, False), (64, 2048, True), (64, 64, False)]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, min_p=0.01, seed=7, max_tokens=12, ignore_eos=True)


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and sampled requests of different lengths, some with a long common prefix."""
    prompts = [w["prompt"] for w in WORKLOADS["W1"][3:9] + WORKLOADS["W2"][:3]]
    return prompts, [greedy(10) if i % 2 else SAMPLED for i in range(len(prompts))]


@pytest.fixture(scope="module")
def expected_mixed(smollm2: Checkpoint) -> list[list[int]]:
    """What each request of `mixed` gives alone in a new engine."""
    prompts, params = mixed()
    with engine(enable_prefix_caching=False) as llm:
        return [ids(llm.generate([p], [q])[0]) for p, q in zip(prompts, params, strict=True)]


def check_config(expected: list[list[int]], page_size: int, budget: int, caching: bool) -> None:
    prompts, params = mixed()
    with engine(page_size=page_size, max_num_batched_tokens=budget, enable_prefix_caching=caching) as llm:
        assert [ids(o) for o in llm.generate(prompts, params)] == expected
        assert ids(llm.generate(prompts[-1], params[-1])[0]) == expected[-1]  # again, now cached, alone
        assert (llm.engine.stats.cached_tokens > 0) == caching


@pytest.mark.parametrize(("page_size", "budget", "caching"), PLAIN_CONFIGS)
def test_settings_change_no_token(expected_mixed: list[list[int]], page_size: int, budget: int, caching: bool) -> None:
    check_config(expected_mixed, page_size, budget, caching)


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "budget", "caching"), [c for c in CONFIGS if c not in PLAIN_CONFIGS])
def test_more_settings_change_no_token(
    expected_mixed: list[list[int]], page_size: int, budget: int, caching: bool
) -> None:
    check_config(expected_mixed, page_size, budget, caching)


def test_the_reference_backend_gives_the_same_tokens(expected_mixed: list[list[int]]) -> None:
    prompts, params = mixed()
    with engine(attention_backend="reference") as llm:
        assert [ids(o) for o in llm.generate(prompts, params)] == expected_mixed


def test_logprobs_equal_transformers(smollm2: Checkpoint, transformers_smollm2: Callable[..., Any]) -> None:
    """Of every generated token, within 1e-4, batched and chunked; alternatives and ranks too."""
    wanted = requests("W1", 8, 12)
    params = [greedy(len(expected), logprobs=3) for _, expected in wanted]
    with engine(max_num_batched_tokens=100) as llm:
        outputs = llm.generate([prompt for prompt, _ in wanted], params)
    for (prompt, expected), output in zip(wanted, outputs, strict=True):
        with torch.inference_mode():
            logits = transformers_smollm2(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1]
        values = logits.log_softmax(-1)
        entries = output.outputs[0].logprobs
        assert entries is not None
        assert len(entries) == len(expected)
        for row, token, entry in zip(values, expected, entries, strict=True):
            top = row.topk(3).indices.tolist()
            assert list(entry) == [token, *(t for t in top if t != token)]
            assert entry[token].rank == 1
            assert all(abs(entry[t].logprob - float(row[t])) < 1e-4 for t in entry)
