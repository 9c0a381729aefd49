"""Gemma 3 over pages against transformers, driven by hand: each group of layers has pages of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import TINY_GEMMA3, edit_config, oracle_logits, tiny_gemma3
from torch import Tensor

from paged.attention import AttentionMetadata
from paged.pool import KVPool
from scheduler.llm import kv_layout
from worker.checkpoints import resolve
from worker.loading import ATTENTION, load_executor
from worker.model_config import ModelConfig
from worker.models.gemma3 import Gemma3
from worker.weights import load_weights

LENGTH = 60  # of each sequence; the window is 7
CHUNKS = {"whole": [60], "chunks": [1, 6, 7, 8, 13, 25], "decode": [20] + [1] * 40}
SEQUENCES = [random.Random(i).choices(range(131), k=LENGTH) for i in range(2)]
OLD_SPELLING = {
    "layer_types": None,
    "rope_parameters": None,
    "sliding_window_pattern": 6,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_local_base_freq": 1000.0,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of more, in tensors as small as these, on a busy machine, each waits for the others: thirty times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gemma3")
    return folder, tiny_gemma3(folder)


@pytest.fixture(scope="module")
def wanted(checkpoint: tuple[Path, Any]) -> list[Tensor]:
    return [oracle_logits(checkpoint[1], tokens) for tokens in SEQUENCES]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Gemma3:
    config = read(folder)
    return Gemma3(config, load_weights(folder, config, dtype, torch.device("cpu")), LENGTH)


def read(folder: Path) -> ModelConfig:
    return resolve(str(folder)).config


@torch.inference_mode()
def run(model: Gemma3, chunks: list[int], page_size: int = 4, backend: str = "reference") -> list[Tensor]:
    """Logits of both sequences, packed; the second has the chunks from last to first.

    Before each step what no window reaches any more becomes NaN, and its entry in the table the null page, as is
    everything from the beginning that is not yet written.
    """
    layout = kv_layout(model.config, str(model.embedding.dtype).removeprefix("torch."), page_size)
    num_pages = -(-LENGTH // page_size)
    shape = (len(layout.windows), len(SEQUENCES), num_pages)
    total = shape[0] * shape[1] * shape[2]
    pool = KVPool(layout, total + 1)
    tensors = [*pool.k, *pool.v]
    for tensor in tensors:
        tensor.fill_(float("nan"))
    tables = 1 + torch.randperm(total, dtype=torch.int32).view(shape)  # no page twice
    done, found = [0, 0], []
    for counts in zip(chunks, reversed(chunks), strict=True):
        for group, window in enumerate(layout.windows):
            for i, num in enumerate(done) if window is not None else ():
                gone = tables[group, i, : max(0, num - (window or 0) + 1) // page_size]
                for tensor in tensors:
                    tensor[gone.long()] = float("nan")
                gone.zero_()
        spans = [range(num, num + count) for num, count in zip(done, counts, strict=True)]
        positions = torch.tensor([position for span in spans for position in span])
        rows = torch.tensor([i for i, span in enumerate(spans) for _ in span])
        starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        lens = torch.tensor([span.stop for span in spans], dtype=torch.int32)
        slots = tables[:, rows, positions // page_size].long() * page_size + positions % page_size
        metas = [
            AttentionMetadata(starts, lens, table.clone(), slot) for table, slot in zip(tables, slots, strict=True)
        ]
        tokens = torch.tensor([SEQUENCES[i][p] for i, span in enumerate(spans) for p in span])
        hidden = model.forward(tokens, positions, metas, pool, ATTENTION[backend])
        found.append(torch.split(model.logits(hidden), list(counts)))
        done = [span.stop for span in spans]
    assert len(chunks) == 1 or (tables == 0).any(dim=2).tolist() == [[w is not None] * 2 for w in layout.windows]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest, or NaN where there is one."""
    return max(((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)), key=lambda e: (e != e, e))


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_logits_are_those_of_transformers(
    checkpoint: tuple[Path, Any], wanted: list[Tensor], chunks: list[int], page_size: int, backend: str
) -> None:
    assert error(run(load(checkpoint[0]), chunks, page_size, backend), wanted) < 1e-4


def test_layers_of_both_kinds_in_any_order_with_a_head_of_its_own(tmp_path: Path) -> None:
    kinds = [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full", "sliding")]
    changes = {"layer_types": kinds, "num_hidden_layers": 5, "num_key_value_heads": 3, "tie_word_embeddings": False}
    model = tiny_gemma3(tmp_path, rope_parameters=None, **changes)
    wanted = [oracle_logits(model, tokens) for tokens in SEQUENCES]
    assert error(run(load(tmp_path), CHUNKS["chunks"]), wanted) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_windows": (6, 6, 6, 6, 6, None) * 2},
        {"layer_windows": (7, 7, 7, 7, 7, 60, 7, 7, 7, 7, 7, None)},  # all is seen, but by the local rotary base
        {"layer_windows": (7, 7, 7, 7, 7, None, 8, 7, 7, 7, 7, None)},
        {"rope_factor": 1.0},
        {"local_rope_theta": 1010.0},
        {"attention_scale": 10**-0.5},
    ],
)
def test_any_of_what_is_gemma_3s_own_shows_in_that_comparison(
    checkpoint: tuple[Path, Any], wanted: list[Tensor], changes: dict[str, Any]
) -> None:
    config = replace(read(checkpoint[0]), **changes)
    weights = load_weights(checkpoint[0], config, torch.float32, torch.device("cpu"))
    assert error(run(Gemma3(config, weights, LENGTH), CHUNKS["whole"]), wanted) > 1e-3


def test_in_bfloat16_it_is_as_near_as_transformers_is(tmp_path: Path) -> None:
    """To the float32 logits of the same rounded weights."""
    model, ours = tiny_gemma3(tmp_path).bfloat16(), load(tmp_path, torch.bfloat16)
    assert torch.equal(ours.embedding * ours.embedding_scale, model.model.embed_tokens(torch.arange(131)))
    theirs = [oracle_logits(model, tokens).float() for tokens in SEQUENCES]
    wanted = [oracle_logits(model.float(), tokens) for tokens in SEQUENCES]
    found = run(ours, CHUNKS["whole"])
    squares = [sum((a - b).square().sum().item() for a, b in zip(c, wanted, strict=True)) for c in (found, theirs)]
    assert squares[0] < 1.5 * squares[1]


def test_old_and_new_spelling_are_one_config(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    new = read(checkpoint[0])
    tiny_gemma3(tmp_path)
    edit_config(tmp_path, **OLD_SPELLING)
    assert read(tmp_path) == new
    assert new.layer_windows == ((7,) * 5 + (None,)) * 2
    assert (new.rope_theta, new.rope_factor, new.local_rope_theta) == (500000.0, 8.0, 1000.0)
    assert (new.tie_word_embeddings, new.eos_token_ids) == (True, tuple(TINY_GEMMA3["eos_token_id"]))


def test_a_config_knows_how_many_numbers_its_tensors_have(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    assert read(folder).num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_architecture_of_the_config_is_the_one_that_is_loaded(checkpoint: tuple[Path, Any]) -> None:
    config = read(checkpoint[0])
    layout = kv_layout(config, "float32", 4)
    runner = load_executor(checkpoint[0], config, layout, num_pages=2, max_model_len=4)._runner
    assert runner is not None
    assert isinstance(runner.model, Gemma3)
