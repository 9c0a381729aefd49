"""The model over pages against transformers: logits, log-probabilities and tokens of tiny random checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import oracle_logits, tiny_llama

from paged import LLM, KVCacheManager, SamplingParams, StepError
from paged.layout import KVLayout
from worker.checkpoints import resolve
from worker.inputs import SequenceState, build_inputs
from worker.loading import load_executor
from worker.step import Reset, Row, Step

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 131, 70)]


def executor(folder: Path, page_size: int = 4, backend: str = "sdpa", dtype: str = "float32") -> Any:
    config = resolve(str(folder)).config
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, dtype, page_size)
    return load_executor(folder, config, layout, num_pages=200, max_model_len=512, backend=backend)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True, "num_key_value_heads": 6, "rope_theta": 5e5}])
def test_logits_of_chunks_and_decodes_equal_transformers(
    tmp_path: Path, overrides: dict[str, Any], backend: str
) -> None:
    """Within 1e-4, at every position, for chunks of several sizes and single tokens in one packed forward."""
    if "rope_theta" in overrides:
        overrides = overrides | {"rope_parameters": {"rope_type": "default", "rope_theta": overrides["rope_theta"]}}
        overrides.pop("rope_theta")
    model = tiny_llama(tmp_path, **overrides)
    runner = executor(tmp_path, backend=backend)._runner
    manager = KVCacheManager(200, 4)
    sequences = {0: TOKENS, 1: TOKENS[::-1][:41], 2: TOKENS[10:30]}
    states = {}
    logits: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    chunks = {0: [33, 1, 7, 1, 28], 1: [1, 1, 20, 19], 2: [5, 15]}
    for i, tokens in sequences.items():
        manager.allocate(i, np.asarray(tokens, dtype=np.int32), len(tokens))
        pages = tuple(manager.table(i).pages)
        states[i] = SequenceState(Reset(np.asarray(tokens, dtype=np.int32), (pages,), 0, GREEDY, 0, 0, 1))
    for turn in range(5):
        rows = [Row(i, sizes[turn], samples=False) for i, sizes in chunks.items() if turn < len(sizes)]
        inputs = build_inputs(rows, [states[row.seq_id] for row in rows], 4, torch.device("cpu"))
        with torch.inference_mode():
            hidden = runner.model.forward(
                inputs.token_ids, inputs.positions, inputs.metas, runner.pool, runner.attention
            )
            parts = runner.model.logits(hidden).split([row.num_tokens for row in rows])
        for row, part in zip(rows, parts, strict=True):
            states[row.seq_id].num_computed += row.num_tokens
            logits[row.seq_id].append(part)
    for i, tokens in sequences.items():
        expected = oracle_logits(model, tokens)
        assert (torch.cat(logits[i]) - expected).abs().max() < 1e-4


def test_generated_tokens_and_logprobs_equal_transformers(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "hf", vocab_size=49152, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "hf" / name).symlink_to(resolve("smollm2").path / name)
    llm = LLM(str(tmp_path / "hf"), dtype="float32", kv_memory="2MiB", max_num_batched_tokens=16)
    prompts = [TOKENS[:n] for n in (1, 15, 16, 17, 48)]
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        tokens, rows = output.outputs[0].token_ids, output.outputs[0].logprobs
        values = oracle_logits(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        assert tokens == values.argmax(-1).tolist()
        assert rows is not None
        assert all(abs(row[t].logprob - float(v[t])) < 1e-4 for row, t, v in zip(rows, tokens, values, strict=True))


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    reset = Reset(np.asarray(TOKENS, dtype=np.int32), (tuple(range(1, 20)),), 0, GREEDY, 0, 0, 1, GREEDY.logprobs)
    results = []
    for dtype in ("float32", "bfloat16"):
        worker = executor(tmp_path, dtype=dtype)
        worker.submit(Step(0, (Row(0, len(TOKENS), reset=reset),)))
        results.append(worker.result().logprobs[0])
    assert abs(results[0].top_logprobs[0] - results[1].top_logprobs[0]) < 0.2


def test_the_worker_refuses_what_does_not_fit(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    worker = executor(tmp_path)
    reset = Reset(np.asarray(TOKENS[:8], dtype=np.int32), ((1, 2),), 0, GREEDY, 0, 0, 1)

    def run(*rows: Row, number: int, **more: Any) -> Any:
        worker.submit(Step(number, rows, **more))
        return worker.result()

    assert run(Row(0, 8, reset=reset), number=0).seq_ids == (0,)
    with pytest.raises(StepError, match="step 2 came where 1 was due"):
        run(Row(0, 1, ((0, 2, 3),)), number=2)
    with pytest.raises(StepError, match=r"2 pages of 4"):
        run(Row(0, 1), number=1)  # no page for its ninth token
    with pytest.raises(StepError, match="not known here"):
        run(Row(7, 1), number=2)
    with pytest.raises(StepError, match="not known here"):
        run(Row(0, 1, ((0, 2, 3),)), number=9, restart=True)  # a restart forgets everything
    assert run(Row(0, 8, reset=reset), number=10).seq_ids == (0,)
    with pytest.raises(StepError, match="reaches the last token"):
        run(Row(1, 4, reset=reset), number=11)


def test_no_model_of_transformers_is_imported_while_we_generate(tmp_path: Path, smollm2: Any) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from paged import LLM, SamplingParams; llm = LLM('smollm2')\n"
        "llm.generate('Hello', SamplingParams(max_tokens=2))\n"
        "assert 'transformers' not in sys.modules\n"
        "llm.chat([{'role': 'user', 'content': 'Hello'}], SamplingParams(max_tokens=2))\n"
        "assert 'transformers' in sys.modules\n"  # chat templates
        "found = [m for m in sys.modules if m.startswith('transformers.models')]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
