"""Forks through the whole engine, with real models: beams as transformers finds them, new weights (A07), Gemma 3."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import save_words, tiny_gemma3, tiny_llama

from paged import LLM, BeamSearchParams, CheckpointError, InvariantError, Move, SamplingParams
from paged.pool import KVPool
from worker.checkpoints import Checkpoint
from worker.weights import load_weights

FOX = [504, *[2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30, 378] * 3, 2365, 6354]  # case A01, 33 tokens
PROMPTS = ["The capital of France is", "Once upon a time there was a"]


@contextmanager
def engine(model: str | Path = "smollm2", **settings: Any) -> Iterator[LLM]:
    llm = LLM(str(model), dtype="float32", **{"kv_memory": "96MiB", **settings})
    try:
        yield llm
    finally:
        llm.engine.scheduler.manager.check(idle=True)
        llm.close()


def beams_of_transformers(model: Any, prompt: list[int], width: int, length: int, **more: Any) -> list[Any]:
    """Tokens and score of each result, best first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=length,
            return_dict_in_generate=True,
            output_scores=True,
            **more,
        )
    ends = set(
        model.generation_config.eos_token_id
        if isinstance(model.generation_config.eos_token_id, list)
        else [model.generation_config.eos_token_id]
    )
    results = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        results.append((tokens[: stop + 1], score))
    return results


def assert_beams(llm: LLM, model: Any, width: int, length: int, **more: Any) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=length, **more)
    outputs = llm.beam_search(PROMPTS, params)  # both at once
    for output in outputs:
        expected = beams_of_transformers(model, output.prompt_token_ids, width, length, **more)
        assert [choice.token_ids for choice in output.outputs] == [tokens for tokens, _ in expected]
        for choice, (_, score) in zip(output.outputs, expected, strict=True):
            assert choice.score == pytest.approx(score, abs=1e-4)


def test_beams_are_those_of_transformers_and_copy_nothing_but_shared_tails(
    smollm2: Checkpoint, transformers_smollm2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Move] = []
    apply = KVPool.apply

    def counted(pool: KVPool, moves: Any) -> None:
        moves = tuple(moves)
        copied.extend(move for move in moves if isinstance(move, Move))
        apply(pool, moves)

    monkeypatch.setattr(KVPool, "apply", counted)
    with engine() as llm:
        forks: list[int] = []
        fork = llm.engine.scheduler.manager.fork

        def counted_fork(seq_id: int, new_id: int) -> None:
            forks.append(llm.engine.scheduler.manager.num_computed(seq_id) % llm.plan.page_size)
            fork(seq_id, new_id)

        monkeypatch.setattr(llm.engine.scheduler.manager, "fork", counted_fork)
        assert_beams(llm, transformers_smollm2, width=4, length=12)
        # A page a fork at most, and none where a fork found its last page full.
        assert 0 < len(copied) <= sum(1 for in_page in forks if in_page), f"{len(copied)} copies, {len(forks)} forks"


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("page_size", [1, 16])
def test_beams_are_those_of_transformers(
    transformers_smollm2: Any, length_penalty: float, early_stopping: Any, page_size: int
) -> None:
    with engine(page_size=page_size) as llm:
        more = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        assert_beams(llm, transformers_smollm2, width=3, length=40, **more)


def test_choices_of_one_prompt_do_not_depend_on_what_else_runs(smollm2: Checkpoint) -> None:
    params = SamplingParams(temperature=0.9, n=3, seed=5, max_tokens=10, ignore_eos=True)
    with engine() as llm:
        alone = [choice.token_ids for choice in llm.generate(PROMPTS[0], params)[0].outputs]
        beside = llm.generate([PROMPTS[1], PROMPTS[0], PROMPTS[0]], [SamplingParams(max_tokens=20), params, params])
    assert len(set(map(tuple, alone))) == 3
    for output in beside[1:]:
        assert [choice.token_ids for choice in output.outputs] == alone


def test_a07_after_new_weights_nothing_old_is_found_and_the_answers_are_theirs(
    smollm2: Checkpoint, transformers_smollm2: Any
) -> None:
    """Negate K and V of layer 0, and back; held to transformers with the same weights."""
    names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "kv"]
    weights = load_weights(smollm2.path, smollm2.config)
    negated = {name: -weights[name] for name in names}
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
    with engine() as llm:
        outputs = [llm.generate([FOX], greedy)[0]]
        for replaced in (negated, {}):
            llm.update_weights(replaced)
            outputs.append(llm.generate([FOX], greedy)[0])
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    assert outputs[2].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert outputs[1].outputs[0].token_ids != outputs[0].outputs[0].token_ids
    state = dict(transformers_smollm2.named_parameters())
    with torch.no_grad():
        for name in names:
            state[name].neg_()
        try:
            choice = outputs[1].outputs[0]
            logits = transformers_smollm2(torch.tensor([FOX + choice.token_ids])).logits[0, len(FOX) - 1 : -1]
        finally:
            for name in names:
                state[name].neg_()
    assert logits.argmax(-1).tolist() == choice.token_ids
    expected = logits.log_softmax(-1).max(-1).values.tolist()
    assert choice.logprobs is not None
    found = [row[token].logprob for row, token in zip(choice.logprobs, choice.token_ids, strict=True)]
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("replaced", "match"),
    [
        ({"model.layers.99.mlp.down_proj.weight": torch.zeros(1)}, "is not a tensor of this model"),
        ({"model.norm.weight": torch.zeros(3)}, r"must be floating point \(576,\)"),
        ({"model.norm.weight": torch.zeros(576, dtype=torch.int8)}, "must be floating point"),
        ("no/such/folder/of/weights", "unknown model"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(smollm2: Checkpoint, replaced: Any, match: str) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4)
    with engine() as llm:
        before = llm.generate([FOX], greedy)[0]
        with pytest.raises(CheckpointError, match=match):
            llm.update_weights(replaced)
        after = llm.generate([FOX], greedy)[0]
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.num_cached_tokens == 32


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_gemma3_over_windows_equals_transformers(tmp_path: Path, page_size: int) -> None:
    """Prompts and answers far longer than the window of 7, several at once, some with a beginning that is cached."""
    model = tiny_gemma3(tmp_path)
    save_words(tmp_path)
    generator = torch.Generator().manual_seed(0)
    common = torch.randint(3, 100, (30,), generator=generator).tolist()
    prompts = [common[:20], [*common, 5], [*common, 6, 7], common[3:9]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with engine(tmp_path, page_size=page_size, max_num_batched_tokens=24, kv_memory="8MiB") as llm:
        assert llm.plan.layout is not None
        assert llm.plan.layout.windows == (7,) * 5 + (None,)
        first = llm.generate(prompts[:1], params)
        outputs = first + llm.generate(prompts[1:], params)
        assert outputs[1].num_cached_tokens == 20 // page_size * page_size
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens


def test_poison_makes_a_stale_page_and_a_stray_write_loud(tmp_path: Path) -> None:
    """The whole engine, with a fault planted in its worker: the tests above stand on these being seen."""
    tiny_llama(tmp_path)
    save_words(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = list(range(3, 40))
    with engine(tmp_path, kv_memory="1MiB", page_size=4) as llm:
        clean = llm.generate(prompt, params)[0].outputs[0].token_ids
        pool = llm.engine.executor._runner.pool  # type: ignore[attr-defined]
        pool.k[0][llm.engine.scheduler.manager.prefix_cache.match(np.array(prompt, dtype=np.int32))[2].pages[0], 1] += 1
        with pytest.raises(InvariantError, match="was written after it was full"):
            llm.generate(prompt, params)
        llm.reset_prefix_cache()
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == clean
        # A page that was given back, read by a table that still names it.
        freed = llm.engine.scheduler.manager.allocator._free[-1]
        assert bool(pool.k[0][freed].isnan().all())
