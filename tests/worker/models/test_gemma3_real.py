"""Gemma 3 270M as it is, in float32, against transformers: past its window, and its text (cases N08, T05)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paged import LLM, SamplingParams
from scheduler.openai import answer_body
from scheduler.text import Tokenizer
from worker.checkpoints import Checkpoint, peek
from worker.inputs import Inputs
from worker.native_model import NativeModel

FOLDER = Path(__file__).parents[3] / "benchmarks" / "workloads"
WORKLOADS = json.loads((FOLDER / "workload_gemma3.json").read_text())
REFERENCE = json.loads((FOLDER / "reference_gemma3_fp32.json").read_text())
TEXT: list[int] = WORKLOADS["W4"][0]["prompt"] + WORKLOADS["W4"][1]["prompt"][1:]  # English, one after another
# As Gemma's own, for what was tuned to chats; the checkpoint here has none.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of every step, [rows that sample, vocab]."""
    found: list[Tensor] = []
    step = NativeModel.step

    def spy(self: NativeModel, inputs: Inputs, *more: Any) -> tuple[Tensor, Tensor]:
        logits, best = step(self, inputs, *more)
        if len(logits):
            found.append(logits.clone())
        return logits, best

    monkeypatch.setattr(NativeModel, "step", spy)
    return found


def engine(**settings: Any) -> LLM:
    return LLM("gemma3", **{"dtype": "float32", "kv_memory": "512MiB", "max_model_len": 8192} | settings)


def greedy(length: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)


def generate(llm: LLM, prompt: list[int], length: int) -> list[int]:
    tokens = llm.generate(prompt, greedy(length))[0].outputs[0].token_ids
    llm.engine.scheduler.check()
    return tokens


@torch.inference_mode()
def oracle(model: Any, tokens: list[int], positions: list[int]) -> Tensor:
    """transformers' logits at some positions, [positions, vocab]: of all, they would be gigabytes."""
    logits: Tensor = model(torch.tensor([tokens]), logits_to_keep=torch.tensor(positions)).logits[0]
    return logits


def difference(found: list[Tensor], wanted: Tensor) -> float:
    """The largest of any logit."""
    error = float((torch.cat(found) - wanted).abs().max())
    print(f"largest difference {error:.1e}, logits up to {float(wanted.abs().max()):.1f}")
    return error


def test_what_peek_says_of_gemma3_is_true(gemma3: Checkpoint) -> None:
    assert gemma3.config == peek("gemma3")


@pytest.mark.parametrize(("budget", "positions"), [(512, [511, 512, 513, 599]), (100, [513, 599])])
def test_n08_logits_around_the_edge_of_the_window(
    gemma3: Checkpoint, transformers_gemma3: Any, seen: list[Tensor], budget: int, positions: list[int]
) -> None:
    """At the end of prompts, computed whole or in chunks; in the longest, pages have left the window by then."""
    llm = engine(max_num_batched_tokens=budget, enable_prefix_caching=False)
    for position in positions:
        generate(llm, TEXT[: position + 1], 1)
    assert difference(seen, oracle(transformers_gemma3, TEXT[:600], positions)) < 1e-3


def test_n08_logits_while_a_sequence_grows_past_the_window(
    gemma3: Checkpoint, transformers_gemma3: Any, seen: list[Tensor]
) -> None:
    """Token by token, each position; pages leave the window on the way."""
    tokens = TEXT[:505] + generate(engine(), TEXT[:505], 32)
    wanted = oracle(transformers_gemma3, tokens, list(range(504, 536)))
    assert difference(seen, wanted) < 1e-3
    assert wanted.argmax(-1).tolist() == tokens[505:]


@pytest.mark.parametrize("length", [24, pytest.param(128, marks=pytest.mark.slow)])
def test_a_single_stream_equals_transformers(gemma3: Checkpoint, transformers_gemma3: Any, length: int) -> None:
    """W3, greedy: what transformers thinks the likeliest after each token of the answer is the next."""
    prompt = WORKLOADS["W3"][0]["prompt"]
    answer = generate(engine(), prompt, length)
    assert answer == REFERENCE["W3"][0][:length]
    positions = list(range(len(prompt) - 1, len(prompt) + length - 1))
    assert oracle(transformers_gemma3, prompt + answer, positions).argmax(-1).tolist() == answer


@pytest.mark.slow
def test_logits_far_past_the_window(gemma3: Checkpoint, transformers_gemma3: Any, seen: list[Tensor]) -> None:
    """4,000 tokens of prompt, then 32 more."""
    tokens = TEXT[:4000] + generate(engine(), TEXT[:4000], 33)
    wanted = oracle(transformers_gemma3, tokens, list(range(3999, 4032)))
    assert difference(seen, wanted) < 1e-3
    assert wanted.argmax(-1).tolist() == tokens[4000:]


@pytest.fixture(scope="module")
def tokenizer(gemma3: Checkpoint) -> Tokenizer:
    return Tokenizer.from_dir(gemma3.path)


def test_t05_one_bos_before_text_and_before_a_chat(tokenizer: Tokenizer, gemma3: Checkpoint, tmp_path: Path) -> None:
    assert tokenizer.encode("Hello").tolist() == [2, 9259]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(gemma3.path / name)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    ids = Tokenizer.from_dir(tmp_path).encode_chat([{"role": "user", "content": "Hi"}]).tolist()
    assert ids == [2, 105, 2364, 107, 10979, 106, 107, 105, 4368, 107]


def test_t05_ids_are_used_as_they_are(gemma3: Checkpoint) -> None:
    llm = engine()
    prompts: list[Any] = [[2, 9259], "Hello"]
    by_ids, by_text = llm.generate(prompts, greedy(2))
    assert list(by_ids.prompt_token_ids) == list(by_text.prompt_token_ids) == [2, 9259]
    for output in (by_ids, by_text):
        assert answer_body(output, greedy(2), False, "gemma3", llm.tokenizer)["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("request_", WORKLOADS["W1"][:8])
def test_text_of_other_peoples_tokens_gives_them_again(tokenizer: Tokenizer, request_: dict[str, Any]) -> None:
    """Those of the workload were made with Gemma's own tokenizer."""
    ids = np.asarray(request_["prompt"])
    text = tokenizer.decode(ids[1:].tolist())
    assert tokenizer.encode(text).tolist() == ids.tolist()
