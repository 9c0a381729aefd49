"""Log-probabilities of prompts, and drafts under sampling, on SmolLM2 in float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paged import LLM, RequestOutput, SamplingParams
from worker.checkpoints import Checkpoint

PARIS = [504, 3575, 282, 4649, 314, 7042]  # The capital of France is Paris
EXPECTED = [-11.5393, -0.3376, -2.4387, -0.4509, -0.2581]  # case N06
ROME = [504, 3575, 282, 4649, 253, 1251]  # begins with the same four tokens
WANTED = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)


def llm_of(**settings: Any) -> LLM:
    return LLM("smollm2", **{"dtype": "float32", "kv_memory": "64MiB", "page_size": 4} | settings)


@pytest.fixture(scope="module")
def shared(smollm2: Checkpoint) -> Iterator[LLM]:
    """For tests that need no settings; they empty the prefix cache before they begin."""
    llm = llm_of()
    yield llm
    llm.close()


def values(output: RequestOutput) -> list[float]:
    """Of each token of the prompt from the second on its own log-probability."""
    entries = output.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    tokens = output.prompt_token_ids[1:]
    return [entry[token].logprob for token, entry in zip(tokens, entries[1:], strict=True) if entry is not None]


def assert_paris(output: RequestOutput) -> None:
    assert values(output) == pytest.approx(EXPECTED, abs=1e-3)


@pytest.mark.parametrize("budget", [512, 2])
def test_n06_cold_and_warm_and_in_chunks_of_two(smollm2: Checkpoint, budget: int) -> None:
    llm = llm_of(max_num_batched_tokens=budget)
    cold, warm = (llm.generate(PARIS, WANTED)[0] for _ in range(2))
    for output in (cold, warm):
        assert_paris(output)
    assert values(cold) == values(warm), "to the last bit"
    again = llm.generate(PARIS, SamplingParams(temperature=0, max_tokens=1))[0]
    assert again.num_cached_tokens == 4, "who asks for none finds its prefix"
    assert again.prompt_logprobs is None
    llm.close()


def test_n06_with_a_preemption_after_the_first_chunk(smollm2: Checkpoint) -> None:
    for caching in (True, False):
        llm = llm_of(max_num_batched_tokens=2, enable_prefix_caching=caching)
        llm.engine.add("r", PARIS, WANTED)
        outputs = llm.engine.step()
        (family,) = llm.engine.scheduler.running
        llm.engine.scheduler._preempt(family)
        while llm.engine.has_work:
            outputs += llm.engine.step()
        assert_paris(outputs[0])
        assert llm.engine.stats.preemptions == 1
        llm.close()


@pytest.mark.parametrize("first", [PARIS, ROME])
@pytest.mark.parametrize(("params", "together"), list(itertools.product([WANTED, None], [False, True])))
def test_n06_beside_and_after_another_that_begins_alike(
    shared: LLM, first: list[int], params: SamplingParams | None, together: bool
) -> None:
    """In both orders; the other asks for log-probabilities too, or does not."""
    other = params or SamplingParams(temperature=0, max_tokens=2)
    prompts = [first, ROME if first is PARIS else PARIS]
    settings = [WANTED if prompt is PARIS else other for prompt in prompts]
    shared.reset_prefix_cache()
    if together:
        outputs = shared.generate(prompts, settings)
    else:
        outputs = [shared.generate(prompt, setting)[0] for prompt, setting in zip(prompts, settings, strict=True)]
    for prompt, output in zip(prompts, outputs, strict=True):
        if prompt is PARIS:
            assert_paris(output)
        elif params is not None:
            assert values(output)[:3] == pytest.approx(EXPECTED[:3], abs=1e-3)
            assert values(output)[3] != pytest.approx(EXPECTED[3], abs=1e-2)


def test_alternatives_and_ranks_are_those_of_transformers(smollm2: Checkpoint, transformers_smollm2: Any) -> None:
    """Of a longer prompt, in chunks, the first of which end within a page."""
    prompt = [(7 * i * i + 13 * i + 500) % 40_000 for i in range(50)]
    llm = llm_of(max_num_batched_tokens=7)
    entries = llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=2))[0].prompt_logprobs
    assert entries is not None
    with torch.inference_mode():
        expected = transformers_smollm2(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for row, token, entry in zip(expected, prompt[1:], entries[1:], strict=False):
        assert entry is not None
        top = row.topk(2).indices.tolist()
        assert list(entry) == [token, *(one for one in top if one != token)]
        own = row[token]  # of likely equals the sum's order decides
        assert int((row > own + 1e-3).sum()) < entry[token].rank <= int((row >= own - 1e-3).sum())
        for one, found in entry.items():
            assert found.logprob == pytest.approx(float(row[one]), abs=1e-3)
    llm.close()


def test_a10_a_prompt_shared_with_one_whose_bias_forces_other_tokens(smollm2: Checkpoint) -> None:
    """The second arrives while the first decodes; each gives what it gives alone, and they share two pages of four."""
    prompt = [*PARIS, 284, 260, 3575, 282]
    params = [
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logit_bias={1000: 100.0}),
    ]
    llm = llm_of(enable_prefix_caching=False)
    alone = [llm.generate(prompt, one)[0].outputs[0].token_ids for one in params]
    llm.close()
    assert alone[1] == [1000] * 10 != alone[0]
    llm, outputs = llm_of(), dict[str, list[int]]()
    llm.engine.add("first", prompt, params[0])
    for _ in range(3):
        llm.engine.step()
    llm.engine.add("second", prompt, params[1])
    llm.engine.step()
    manager = llm.engine.scheduler.manager
    first, second = (manager.table(seq_id).pages for seq_id in sorted(manager._held))
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    while llm.engine.has_work:
        outputs |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
    assert [outputs["first"], outputs["second"]] == alone
    assert manager.num_used == 0
    llm.close()


def test_drafts_change_no_sampled_token(smollm2: Checkpoint) -> None:
    """Seeded, at temperature 1, on prompts that repeat themselves, so that drafts are brought and some are right."""
    prompts = [PARIS * 4, [*ROME, *PARIS] * 3, [28, 33, 28, 33, 28, 33, 28, 33]]
    params = [
        SamplingParams(temperature=t, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True) for t in (1.0, 0.7, 1.0)
    ]
    found = []
    for drafts in (0, 4):
        llm = llm_of(num_speculative_tokens=drafts)
        found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
        stats = llm.engine.stats
        assert (stats.accepted_tokens > 0, stats.draft_tokens > stats.accepted_tokens) == (drafts > 0, drafts > 0)
        llm.close()
    assert found[0] == found[1]
