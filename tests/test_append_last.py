"""benchmarks/append_last.py, to which pages are compared: its logits are those of transformers' own cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import oracles
import pytest
import torch
from torch import Tensor

HOME = Path(__file__).parents[1]
ROOM, STEPS = 14, 6


@pytest.fixture(scope="module")
def append_last() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME / "benchmarks"))
        yield importlib.import_module("append_last")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return oracles.tiny_llama(tmp_path_factory.mktemp("tiny"))


def tokens(batch: int, prompt: int) -> Tensor:
    return torch.randint(3, 131, (batch, prompt + STEPS), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def compare(module: ModuleType, model: Any, batch: int, prompt: int, decode: Callable[..., Tensor]) -> None:
    from transformers import DynamicCache

    ids, wanted = tokens(batch, prompt), DynamicCache(config=model.config)
    cache = module.AppendLastCache(model.config, ROOM)
    expected = model(ids[:, :prompt], cache=wanted, use_cache=True).logits[:, -1]
    torch.testing.assert_close(module.prefill(model, ids[:, :prompt], cache), expected)
    for i in range(prompt, prompt + STEPS):
        expected = model(ids[:, i : i + 1], cache=wanted, use_cache=True).logits[:, -1]
        torch.testing.assert_close(decode(model, ids[:, i : i + 1], cache), expected, rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(cache.layers, wanted.layers, strict=True):
            torch.testing.assert_close(mine.keys[:, :, : i + 1], theirs.keys)
            torch.testing.assert_close(mine.values[:, :, : i + 1], theirs.values)
    assert int(cache.length) == prompt + STEPS


@pytest.mark.parametrize(("batch", "prompt"), [(3, 1), (3, 5), (1, 5), (3, ROOM - STEPS)])
def test_logits_and_what_is_kept_are_those_of_dynamic_cache(
    append_last: ModuleType, model: Any, batch: int, prompt: int
) -> None:
    """To the last slot too, where the newest token needs no move."""
    compare(append_last, model, batch, prompt, append_last.decode)


def test_one_row_with_one_head(append_last: ModuleType, tmp_path: Path) -> None:
    """Whose slots lie side by side, which PyTorch takes for an overlap."""
    compare(append_last, oracles.tiny_llama(tmp_path, num_key_value_heads=1), 1, 5, append_last.decode)


def test_empty_slots_hold_no_weight(append_last: ModuleType, model: Any) -> None:
    """Whatever lies in them: a cache that is used again is full of another answer."""
    from transformers import DynamicCache

    cache, ids = append_last.AppendLastCache(model.config, ROOM), tokens(3, 5)
    with torch.inference_mode():
        append_last.prefill(model, ids, cache)
        cache.reset()
        append_last.prefill(model, ids[:, :3], cache)
        found = append_last.decode(model, ids[:, 3:4], cache)
        expected = model(ids[:, :4], cache=DynamicCache(config=model.config)).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_compiled_as_one_graph_for_all_lengths(append_last: ModuleType, model: Any) -> None:
    graphs = 0

    def backend(graph: Any, _inputs: object) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    torch._dynamo.reset()
    compare(append_last, model, 3, 5, torch.compile(append_last.decode, fullgraph=True, backend=backend))
    assert graphs == 1
