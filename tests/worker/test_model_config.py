"""ModelConfig: what config.json says, in old and new spellings, and refused by name where it is not understood."""

from __future__ import annotations

from typing import Any

import pytest

from paged import CheckpointError
from worker.checkpoints import BUILTIN
from worker.model_config import ModelConfig

CONFIG: dict[str, Any] = BUILTIN["smollm2"].config


def change(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (CONFIG | changes).items() if value is not None}


def test_m01_head_dim_is_the_models_own() -> None:
    assert ModelConfig.from_hf(change(head_dim=80)).head_dim == 80
    assert ModelConfig.from_hf(change(head_dim=None)).head_dim == 64


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": None, "rope_theta": 100000},
        {"rope_parameters": None, "rope_theta": 100000.0, "rope_scaling": {"type": "default"}},
        {"rope_theta": 100000.0},
        {"rope_parameters": None, "rope_scaling": {"rope_type": "default", "rope_theta": 100000.0}},
        {"rope_parameters": {"rope_type": None, "type": "default", "rope_theta": 100000.0}},
    ],
)
def test_old_and_new_spellings_of_the_base_are_equal(rope: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(change(**rope)) == ModelConfig.from_hf(CONFIG)


def test_without_a_base_ten_thousand_is_taken_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="10000"):
        assert ModelConfig.from_hf(change(rope_parameters=None)).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 5.0}, "two different values"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e5}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ({"rope_scaling": {"rope_type": "foo"}}, "'foo'"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 7}}, "two different values"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_theta": "1e5"}, "rope_theta must be a positive number"),
        ({"rope_theta": -1}, "rope_theta must be a positive number"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 2}, "do not divide"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"head_dim": None, "hidden_size": 577}, "577 is not a multiple"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "2"}, "eos_token_id must be"),
        ({"eos_token_id": [2, True]}, "eos_token_id must be"),
        ({"architectures": 5}, "names 5"),
        ({"architectures": None, "model_type": "qwen2"}, "names qwen2"),
        ({"architectures": None, "model_type": None}, "no architecture"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(change(**changes))


def test_what_is_absent_is_as_transformers_has_it() -> None:
    from transformers import LlamaConfig

    names = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    config = ModelConfig.from_hf(change(**dict.fromkeys(names)))
    theirs = LlamaConfig(hidden_size=576, num_attention_heads=9)
    assert (config.num_kv_heads, config.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (config.rms_norm_eps, config.max_model_len) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert config.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("generation", "config", "joined"),
    [(None, 2, (2,)), (7, None, (7,)), ([2, 198], 2, (2, 198)), ([5, 2], [2, 7], (5, 2, 7)), (None, None, ())],
)
def test_s12_end_tokens_of_both_files_are_joined(generation: Any, config: Any, joined: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf(change(eos_token_id=config), {"eos_token_id": generation}).eos_token_ids == joined
