"""plan(): what the pool of an engine is, and what fits into it, on machines whose memory is made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paged import ConfigError, EngineConfig, KVLayout
from paged.sizing import Memory
from scheduler import llm
from scheduler.llm import Plan, plan
from worker import device
from worker.checkpoints import BUILTIN
from worker.model_config import ModelConfig
from worker.tensors import num_parameters

GIB = 2**30
MODEL = ModelConfig.from_hf(BUILTIN["smollm2"].config)
WEIGHTS = 134_515_008 * 4  # of SmolLM2-135M in float32
PAGE = 16 * 46_080


def planned(model: ModelConfig = MODEL, **settings: Any) -> Plan:
    return plan(EngineConfig(**{"dtype": "float32", "device": "cpu", "attention_backend": "sdpa"} | settings), model)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory(basis=8 * GIB, available=6 * GIB, own=GIB)
    monkeypatch.setattr(llm, "host_memory", lambda: found)
    return found


def test_m02_a_share_is_less_what_the_process_holds_and_leaves_room_for_the_model(memory: Memory) -> None:
    assert planned(kv_memory="50%").kv_bytes == memory.basis // 2 - memory.own == 3 * GIB
    assert planned(kv_memory="100%").kv_bytes == min(memory.basis - memory.own, memory.available - WEIGHTS)
    assert planned(kv_memory="100%", dtype="bfloat16").kv_bytes == min(
        memory.basis - memory.own, memory.available - WEIGHTS // 2
    )


@pytest.mark.usefixtures("memory")
def test_a_model_that_is_not_here_takes_nothing_yet() -> None:
    found = plan(EngineConfig(model="org/name", device="cpu", kv_memory="50%"))
    assert (found.kv_bytes, found.num_pages) == (3 * GIB, None)
    assert found.sizing == "pages are not known before the model is here"


def test_bytes_are_refused_where_they_are_not_there(memory: Memory) -> None:
    assert planned(kv_memory=memory.available - WEIGHTS).kv_bytes == memory.available - WEIGHTS
    with pytest.raises(ConfigError, match=f"{memory.available:,} bytes are available, and the model takes {WEIGHTS:,}"):
        planned(kv_memory=memory.available - WEIGHTS + 1)


@pytest.mark.usefixtures("memory")
def test_the_line_says_pages_bytes_tokens_and_how_many_sequences_fit() -> None:
    assert planned(kv_memory=513 * PAGE, max_model_len=2048).sizing == (
        "512 pages and the null page (378,224,640 bytes), 8,192 tokens; "
        "sequences of max_model_len 2,048 that fit at once: 4"
    )
    assert planned(kv_memory=513 * PAGE).sizing.endswith("sequences of max_model_len 8,192 that fit at once: 1")
    assert planned(kv_memory=513 * PAGE, max_model_len=2049).sizing.endswith("2,049 that fit at once: 3")


@pytest.mark.usefixtures("memory")
def test_where_not_even_one_fits_the_line_says_the_longest_that_does() -> None:
    assert planned(kv_memory=512 * PAGE).sizing == (
        "511 pages and the null page (377,487,360 bytes), 8,176 tokens; "
        "sequences of max_model_len 8,192 that fit at once: 0, the longest that fits has 8,176"
    )


@pytest.mark.usefixtures("memory")
def test_a_sequence_takes_pages_in_every_group_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout(15, 3, 64, "float32", 16, windows=(None, None), places=tuple((i % 2, i // 2) for i in range(30)))
    monkeypatch.setattr(llm, "kv_layout", lambda *_: layout)
    assert planned(kv_memory=513 * PAGE // 2, max_model_len=2048).sizing == (
        "512 pages and the null page (189,112,320 bytes), 4,096 tokens; "
        "sequences of max_model_len 2,048 that fit at once: 2"
    )
    with pytest.raises(ConfigError, match=r"4,097 needs 189,849,600 bytes of pages.* lower it to 4,096,"):
        planned(kv_memory=514 * PAGE // 2, max_model_len=4097)


@pytest.mark.usefixtures("memory")
def test_more_pages_than_a_full_step_can_use_are_not_taken() -> None:
    found = planned(kv_memory="2GiB", max_num_seqs=2, max_model_len=100)
    assert found.num_pages == 15
    assert found.sizing.endswith("sequences of max_model_len 100 that fit at once: 2")


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("pages", "longest"), [(2, 16), (500, 7984), (512, 8176)])
def test_m02_a_max_model_len_that_was_set_and_does_not_fit_is_refused_with_the_numbers(
    pages: int, longest: int
) -> None:
    with pytest.raises(ConfigError) as error:
        planned(kv_memory=pages * PAGE + 5, max_model_len=8192)
    assert str(error.value) == (
        f"max_model_len 8,192 needs {513 * PAGE:,} bytes of pages, and kv_memory gives {pages * PAGE + 5:,}: "
        f"lower it to {longest:,}, the longest that fits, or raise kv_memory"
    )
    assert planned(kv_memory=pages * PAGE + 5, max_model_len=longest).max_model_len == longest
    with pytest.raises(ConfigError, match=f"lower it to {longest:,},"):
        planned(kv_memory=pages * PAGE + 5, max_model_len=longest + 1)


@pytest.mark.usefixtures("memory")
def test_memory_for_no_page_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 1 pages of 737,280 bytes, 2 are the least"):
        planned(kv_memory=PAGE, max_model_len=8)


@pytest.mark.usefixtures("memory")
def test_the_models_own_length_need_not_fit() -> None:
    found = planned(replace(MODEL, max_model_len=10**6), kv_memory=3 * PAGE)
    assert (found.num_pages, found.max_model_len) == (3, 10**6)


def test_cuda_goes_by_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "pick_device", lambda _: "cuda")
    monkeypatch.setattr(llm, "cuda_memory", lambda: Memory(basis=80 * GIB, available=30 * GIB, own=2 * GIB))
    monkeypatch.setattr(llm, "host_memory", lambda: pytest.fail("the host does not count"))
    assert planned(kv_memory="30%").kv_bytes == int(0.3 * 80 * GIB) - 2 * GIB
    assert planned(kv_memory="90%").kv_bytes == 30 * GIB - WEIGHTS


def test_native_kernels_hold_the_head_beside_the_embedding_and_quantized_ones_less(memory: Memory) -> None:
    matrices, embedding = num_parameters(MODEL) - 49_152 * 576, 49_152 * 576
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, 4 * (matrices + 2 * embedding)),
        ({"dtype": "bfloat16"}, 2 * (matrices + 2 * embedding)),
        ({"dtype": "bfloat16", "quantization": "int8"}, 2 * embedding + 1.0625 * (matrices + embedding)),
        ({"dtype": "bfloat16", "quantization": "int4"}, 2 * embedding + 0.5625 * matrices + 1.0625 * embedding),
    ]
    for settings, weights in cases:
        found = planned(kv_memory="100%", attention_backend="native", **settings)
        assert found.kv_bytes == min(memory.basis - memory.own, memory.available - int(weights))


def test_a_quantization_without_native_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantization int8 needs the native kernels, .* attention_backend is sdpa"):
        planned(quantization="int8")


def test_without_the_library_pytorch_serves_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "library", lambda: None)
    monkeypatch.setattr(device, "why_not", lambda: "there is no C++ compiler")
    found = planned(attention_backend="auto")
    assert (found.backend, found.backend_reason) == (
        "sdpa",
        "PyTorch, slower than native kernels: there is no C++ compiler",
    )
    wanted: list[dict[str, Any]] = [
        {"attention_backend": "native"},
        {"attention_backend": "auto", "quantization": "int4"},
    ]
    for settings in wanted:
        with pytest.raises(ConfigError, match="there is no C\\+\\+ compiler"):
            planned(**settings)
