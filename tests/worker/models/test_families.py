"""Every family over pages against transformers, driven by hand: each group of layers has pages of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import FAMILIES, TINY_GEMMA3, edit_config, oracle_logits, tiny, tiny_gemma3
from safetensors.torch import load_file
from torch import Tensor

from paged.attention import AttentionMetadata
from paged.attention.backends import BACKENDS
from paged.pool import KVPool
from scheduler.llm import kv_layout
from worker.checkpoints import resolve
from worker.loading import load_executor
from worker.model_config import ModelConfig
from worker.models.decoder import Decoder
from worker.rope import Rope
from worker.tensors import expected_tensors, num_parameters
from worker.weights import load_weights

LENGTH = 60  # of each sequence; the window is 7
CHUNKS = {"whole": [60], "chunks": [1, 6, 7, 8, 13, 25], "decode": [20] + [1] * 40}
SEQUENCES = [random.Random(i).choices(range(131), k=LENGTH) for i in range(2)]
LOCAL, EVERYWHERE = Rope("default", 10, 1000.0), Rope("linear", 10, 500000.0, factor=8.0)
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
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    family = getattr(request, "param", "gemma3")
    folder: Path = tmp_path_factory.mktemp(family)
    return folder, tiny(family, folder)


@pytest.fixture(scope="module")
def wanted(checkpoint: tuple[Path, Any]) -> list[Tensor]:
    return [oracle_logits(checkpoint[1], tokens) for tokens in SEQUENCES]


def load(folder: Path, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None) -> Decoder:
    config = config or read(folder)
    return Decoder(config, load_weights(folder, config), LENGTH, dtype, torch.device("cpu"))


def read(folder: Path) -> ModelConfig:
    return resolve(str(folder)).config


@torch.inference_mode()
def run(model: Decoder, chunks: list[int], page_size: int = 4, backend: str = "reference") -> list[Tensor]:
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
        hidden = model.forward(tokens, positions, metas, pool, BACKENDS[backend])
        found.append(torch.split(model.logits(hidden), list(counts)))
        done = [span.stop for span in spans]
    assert (
        len(chunks) == 1
        or page_size > 7
        or (tables == 0).any(2).tolist() == [[w is not None] * 2 for w in layout.windows]
    )
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest, or NaN where there is one."""
    return max(((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)), key=lambda e: (e != e, e))


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 16])
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


# What is a family's own, taken away.
PLANTED: list[tuple[str, dict[str, Any]]] = [
    ("gemma3", {"layer_windows": (6, 6, 6, 6, 6, None) * 2}),
    ("gemma3", {"layer_windows": (7, 7, 7, 7, 7, None, 8, 7, 7, 7, 7, None)}),
    ("gemma3", {"layer_ropes": ((LOCAL,) * 5 + (replace(EVERYWHERE, kind="default"),)) * 2}),
    ("gemma3", {"layer_ropes": ((replace(LOCAL, theta=1010.0),) * 5 + (EVERYWHERE,)) * 2}),
    ("gemma3", {"attention_scale": 10**-0.5}),
    ("gemma3", {"embedding_scale": 1.0}),
    ("gemma3", {"norm_offset": 0.0}),
    ("gemma3", {"activation": "silu"}),
    ("gemma2", {"attention_soft_cap": 0.0}),
    ("gemma2", {"logits_soft_cap": 0.0}),
    ("gemma2", {"layer_windows": (None, 7, None, 7)}),
    ("mistral", {"layer_windows": (8, 7)}),
    ("qwen2", {"layer_windows": (7, None, 7, 7)}),
    ("qwen2", {"layer_ropes": "scale"}),
    ("smollm3", {"layer_ropes": "turned"}),
    ("llama3", {"layer_ropes": "factor"}),
    ("llama-linear", {"layer_ropes": "factor"}),
    ("phi3", {"layer_ropes": "long_factors"}),
    ("phi3", {"layer_ropes": "scale"}),
    ("phi3-window", {"layer_ropes": "dims"}),
    ("granite", {"attention_scale": 0.25}),
    ("granite", {"residual_scale": 1.0}),
    ("granite", {"logits_divisor": 1.0}),
    ("granite", {"embedding_scale": 1.0}),
]


@pytest.mark.parametrize(("checkpoint", "changes"), PLANTED, indirect=["checkpoint"], ids=str)
def test_any_of_what_is_a_familys_own_shows_in_that_comparison(
    checkpoint: tuple[Path, Any], wanted: list[Tensor], changes: dict[str, Any]
) -> None:
    config = read(checkpoint[0])
    ropes = config.layer_ropes
    match changes.get("layer_ropes"):
        case "scale":
            changes = {"layer_ropes": tuple(rope and replace(rope, scale=1.0) for rope in ropes)}
        case "turned":
            changes = {"layer_ropes": (ropes[0],) * len(ropes)}
        case "dims":
            changes = {"layer_ropes": tuple(rope and replace(rope, dims=rope.dims + 2) for rope in ropes)}
        case "factor":
            changes = {"layer_ropes": tuple(rope and replace(rope, factor=rope.factor + 1) for rope in ropes)}
        case "long_factors":
            changes = {"layer_ropes": tuple(rope and replace(rope, short_factors=rope.long_factors) for rope in ropes)}
    changed = replace(config, **changes)
    assert changed != config
    assert error(run(load(checkpoint[0], config=changed), CHUNKS["whole"]), wanted) > 1e-3


def test_longrope_takes_long_factors_where_sequences_may_be_longer_than_it_was_trained(tmp_path: Path) -> None:
    """As transformers does for a longer one; `max_model_len` decides it for all, so that none depends on others."""
    model = tiny("phi3", tmp_path, original_max_position_embeddings=50)
    assert read(tmp_path).default_max_model_len == 50
    assert read(tmp_path).max_model_len == 256
    found = run(load(tmp_path), CHUNKS["chunks"])  # LENGTH is 60
    assert error(found, [oracle_logits(model, tokens) for tokens in SEQUENCES]) < 1e-4
    short = oracle_logits(model, SEQUENCES[0][:50])
    assert float((found[0][:50] - short).abs().max()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_it_is_as_near_as_transformers_is(tmp_path: Path, family: str) -> None:
    """To the float32 logits of the same rounded weights."""
    model, ours = tiny(family, tmp_path), load(tmp_path, torch.bfloat16)
    for parameter in model.parameters():  # and nothing else, as .bfloat16() would: rotary tables stay exact
        parameter.data = parameter.data.bfloat16().float()
    wanted = [oracle_logits(model, tokens) for tokens in SEQUENCES]
    theirs = [oracle_logits(model.bfloat16(), tokens).float() for tokens in SEQUENCES]
    if family.startswith("gemma"):
        assert torch.equal(ours.embedding * ours.embedding_scale, model.model.embed_tokens(torch.arange(131)))
    found = run(ours, CHUNKS["whole"])
    squares = [sum((a - b).square().sum().item() for a, b in zip(c, wanted, strict=True)) for c in (found, theirs)]
    assert squares[0] < 1.5 * squares[1]


def test_old_and_new_spelling_are_one_config(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    new = read(checkpoint[0])
    tiny_gemma3(tmp_path)
    edit_config(tmp_path, **OLD_SPELLING)
    assert read(tmp_path) == new
    assert new.layer_windows == ((7,) * 5 + (None,)) * 2
    assert new.layer_ropes == ((LOCAL,) * 5 + (EVERYWHERE,)) * 2
    assert (new.tie_word_embeddings, new.eos_token_ids) == (True, tuple(TINY_GEMMA3["eos_token_id"]))


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
def test_a_config_knows_how_many_numbers_its_tensors_have(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    assert num_parameters(read(folder)) == sum(parameter.numel() for parameter in model.parameters())
    assert expected_tensors(read(folder)).keys() == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_rotary_tables_are_for_what_the_pool_holds(checkpoint: tuple[Path, Any], backend: str) -> None:
    """Of a model that knows a million positions they would take gigabytes."""
    config = read(checkpoint[0])
    layout = kv_layout(config, "float32", 4)
    executor = load_executor(
        checkpoint[0], config, layout, num_pages=9, max_model_len=1_000_000, positions=32, backend=backend
    )
    assert executor._runner is not None
    model = executor._runner.model
    tables = model.rotaries if isinstance(model, Decoder) else model._rotaries
    assert {len(table.cos) for table in tables.values()} == {32}
