"""Rotary embeddings: frequencies of every type against transformers and published numbers; N09, N12, N13, C03, C04."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from paged import CheckpointError
from worker.checkpoints import BUILTIN
from worker.layers import Rotary, frequencies
from worker.model_config import ModelConfig
from worker.rope import Rope

BASE: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 2}
BASE |= {"vocab_size": 99, "intermediate_size": 64, "max_position_embeddings": 16384}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 8.0}


def rope(parameters: dict[str, Any] | None = None, **config: Any) -> Rope:
    it = ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], **BASE, "rope_parameters": parameters, **config})
    assert len(set(it.layer_ropes)) == 1
    assert it.layer_ropes[0] is not None
    return it.layer_ropes[0]


def theirs(parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LlamaConfig(**BASE, rope_parameters=deepcopy(parameters))
        found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return found


@pytest.mark.parametrize(
    "parameters",
    [
        LLAMA3,
        LLAMA3 | {"factor": 8.0, "rope_theta": 1e6, "original_max_position_embeddings": 100},
        LINEAR | {"rope_theta": 10000.0},
        YARN | {"rope_theta": 10000.0},
        YARN | {"rope_theta": 1e6, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        YARN | {"rope_theta": 1e6, "attention_factor": 0.7},
        YARN | {"rope_theta": 1e6, "truncate": None},
        YARN | {"rope_theta": 1e6, "beta_fast": 0, "beta_slow": 0, "mscale": 0, "mscale_all_dim": 0},
        YARN | {"rope_theta": 1e6, "mscale": 0.7, "mscale_all_dim": 1.1},
        YARN | {"rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + i / 31 for i in range(32)],
            "long_factor": [2.0 + i for i in range(32)],
            "original_max_position_embeddings": 4096,
        },
    ],
    ids=lambda it: f"{it['rope_type']}-{len(it)}",
)
def test_n09_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    found, (wanted, scale) = rope(parameters), theirs(parameters)
    assert torch.allclose(frequencies(found, 4096), wanted, rtol=1e-6, atol=0)
    assert found.scale == pytest.approx(scale, rel=1e-12)


def test_n09_published_numbers() -> None:
    plain = frequencies(rope({"rope_theta": 500000.0}), 8192)
    ratio = (plain / frequencies(rope(LLAMA3), 8192)).tolist()
    assert ratio[:15] == [1.0] * 15
    assert ratio[15:18] == pytest.approx([1.6513, 3.2923, 9.6667], abs=1e-3)
    assert ratio[18:] == pytest.approx([32.0] * 14)
    yarn = rope(YARN | {"rope_theta": 10000.0})
    assert yarn.scale == pytest.approx(1.1386294)
    assert float(frequencies(yarn, 4096)[0]) == 1.0
    assert float(frequencies(yarn, 4096)[-1]) == pytest.approx(3.333804e-05)
    linear = frequencies(rope({"rope_theta": 1e4}), 9) / frequencies(rope(LINEAR | {"rope_theta": 1e4}), 9)
    assert linear.tolist() == pytest.approx([8.0] * 32)


@pytest.mark.parametrize(
    ("positions", "original", "longest"), [(16384, 4096, 16384), (4096, 4096, 16384), (4096, None, 4096)]
)
def test_n09_positions_are_extended_once(positions: int, original: int | None, longest: int) -> None:
    """16,384 of a config that says what it became, and of one that says what it was before."""
    scaling = {"rope_type": "yarn", "factor": 4.0} | (
        {"original_max_position_embeddings": original} if original else {}
    )
    config = {**BASE, "max_position_embeddings": positions, "rope_scaling": scaling, "rope_theta": 1e4}
    assert (
        ModelConfig.from_hf({"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4, **config}).max_model_len
        == longest
    )


def test_n09_dynamic_is_refused_with_the_reason() -> None:
    with pytest.raises(CheckpointError, match=r"'dynamic' is not supported: what a request gets would depend on"):
        rope({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_n12_angles_are_exact_whatever_the_dtype(dtype: torch.dtype) -> None:
    """They are rounded as cosines, never before: a position, or an angle, of 16 bits would be off by up to 2."""
    table = Rotary(rope({"rope_theta": 1e4}), 8192, dtype, torch.device("cpu"))
    for position in (257, 512, 4096, 8191):
        exact = np.cos(position * 10000.0 ** (-np.arange(0, 64, 2) / 64))
        rounding = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12
        assert np.abs(table.cos[position].double().numpy() - exact).max() < 1e-3 + rounding
        wide = Rotary(rope({"rope_theta": 1e4}), 8192, torch.float32, torch.device("cpu")).cos[position]
        assert np.abs(wide.double().numpy() - exact).max() < 1e-3
        assert torch.equal(table.cos[position], wide.to(dtype))


@pytest.mark.parametrize("spelling", ["new", "old"])
def test_n13_each_kind_of_layer_has_its_own(spelling: str) -> None:
    new = {
        "rope_parameters": {
            "full_attention": LINEAR | {"rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR}
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = {**BASE, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "layer_types": kinds}
    ropes = ModelConfig.from_hf(config | (new if spelling == "new" else old)).layer_ropes
    assert len(set(ropes[:5])) == 1
    local, everywhere = (frequencies(it, 99) for it in (ropes[0], ropes[5]) if it is not None)
    assert (float(local[0]), float(everywhere[0])) == (1.0, 0.125)
    assert float(local[1]) == pytest.approx(1e4 ** (-2 / 64))
    assert float(everywhere[1]) == pytest.approx(1e6 ** (-2 / 64) / 8)


LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0] * 32}
PHI3: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
SMOLLM2: dict[str, Any] = {
    name: value for name, value in BUILTIN["smollm2"].config.items() if name != "rope_parameters"
}


def test_c03_spellings_of_one_embedding_are_one() -> None:
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 100000},
        {"rope_theta": 100000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100000}},
        {"rope_theta": 100000, "rope_parameters": {"rope_type": "default", "rope_theta": 100000}},
    ]
    assert len({ModelConfig.from_hf(SMOLLM2 | spelling) for spelling in spellings}) == 1
    linear = ModelConfig.from_hf(SMOLLM2 | {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 1e5})
    assert linear.layer_ropes[0] == Rope("linear", 64, 100000.0, factor=2.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_theta": 1e4}}, "two different values of rope_theta"),
        ({"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 2.0}}, "two different values of factor"),
        ({"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}, "two different values of factor"),
        ({"rope_parameters": {"rope_type": "foo"}}, "of type 'foo' is not supported"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, r"of type \['linear'\] is not supported"),
        ({"rope_parameters": LINEAR | {"low_freq_factor": 1.0}}, "rope_parameters.low_freq_factor is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a positive number"),
        (
            {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0, "rope_theta": 1e5}},
            "low_freq_factor 4.0 must be below",
        ),
        ({"rope_parameters": YARN | {"truncate": 1}}, "truncate must be true or false"),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 0}}, "must be a whole number"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor must be a list of 32"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported for this family"),
        (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1"),
        (PHI3 | {"partial_rotary_factor": 0.02}, "1 of 64 dimensions of a head turn"),
        ({"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 1e5}}, "two different values of factor"),
        ({"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"rope_theta": 1e5}}, "values of rope_theta"),
        ({"rope_theta": 1.0}, "rope_theta must be more than 1"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"rope_parameters": YARN | {"factor": 1e308}}, "factor must be a positive number"),
        ({"rope_parameters": LONGROPE | {"original_max_position_embeddings": 1}}, "must be more than 1"),
        ({"rope_parameters": {"full_attention": LINEAR}}, "one object for all layers"),
    ],
)
def test_c03_what_is_not_understood_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(SMOLLM2 | {"rope_theta": 1e5} | config)


def test_c04_frequencies_are_computed_anew_whatever_lay_in_memory() -> None:
    """They are in no file: bit for bit the float32 formula, five times, in memory that held large numbers."""
    wanted = 1.0 / (500000.0 ** (torch.arange(0, 64, 2).float() / 64))
    for _ in range(5):
        del [torch.full((1 << n,), 1e9) for n in range(4, 16)][:]
        assert torch.equal(frequencies(rope({"rope_theta": 500000.0}), 8192), wanted)
        table = Rotary(rope(LLAMA3), 64, torch.float32, torch.device("cpu"))
        assert torch.equal(table.cos, (torch.arange(64).float()[:, None] * frequencies(rope(LLAMA3), 64)).cos())
