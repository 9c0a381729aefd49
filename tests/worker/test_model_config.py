"""ModelConfig: what config.json says, in old and new spellings, and refused by name where it is not understood."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from paged import CheckpointError
from worker.checkpoints import BUILTIN
from worker.model_config import ModelConfig

CONFIG: dict[str, Any] = BUILTIN["smollm2"].config
GEMMA3: dict[str, Any] = {  # 1B as published, in the old spelling
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def change(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (CONFIG | changes).items() if value is not None}


def gemma3(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (GEMMA3 | changes).items() if value is not None}


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


def test_a_llama_sees_everything_in_every_layer() -> None:
    config = ModelConfig.from_hf(change(sliding_window=7))  # which Llama knows nothing of
    assert config.layer_windows == (None,) * config.num_layers
    assert (config.rope_factor, config.attention_scale) == (1.0, config.head_dim**-0.5)


@pytest.mark.parametrize(
    "spelling",
    [
        {"architectures": None},
        {"rope_scaling": LINEAR, "rope_theta": None, "rope_local_base_freq": None},
        {"rope_scaling": {"type": "linear", "factor": 8}, "sliding_window_pattern": None},
        {
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 2e6}, "sliding_attention": None},
        },
        {
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 7.0}},
        },
        {"layer_types": ["sliding_attention", "full_attention"] * 13},
        {"layer_types": ["full_attention"] * 26},
        {"sliding_window_pattern": 4},
        {"query_pre_attn_scalar": 168},
        dict.fromkeys(
            ("head_dim", "num_key_value_heads", "max_position_embeddings", "query_pre_attn_scalar", "sliding_window")
        ),
    ],
)
def test_a_gemma_3_is_what_transformers_makes_of_its_config(spelling: dict[str, Any]) -> None:
    from transformers import Gemma3TextConfig

    config, theirs = ModelConfig.from_hf(gemma3(**spelling)), Gemma3TextConfig(**deepcopy(gemma3(**spelling)))
    full, sliding = theirs.rope_parameters["full_attention"], theirs.rope_parameters["sliding_attention"]
    assert config.layer_windows == tuple(
        theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types
    )
    assert (config.rope_theta, config.rope_factor) == (full["rope_theta"], full.get("factor", 1.0))
    assert config.local_rope_theta == sliding["rope_theta"]
    assert config.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert (config.num_kv_heads, config.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (config.max_model_len, config.tie_word_embeddings) == (theirs.max_position_embeddings, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration, and only"),
        ({"architectures": None, "model_type": "gemma3"}, "names gemma3,"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number"),
        ({"layer_types": ["full_attention"] * 25}, "layer_types must list 26 layers"),
        ({"layer_types": "full_attention"}, "layer_types must list 26 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"] * 13}, "layer type 'chunked_attention'"),
        ({"layer_types": [["full_attention"]] * 26}, "layer type .'full_attention'."),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number"),
        ({"sliding_window": 0}, "sliding_window must be a whole number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number"),
        ({"rope_local_base_freq": "10000"}, "rope_local_base_freq must be a positive number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "of full_attention and sliding_attention"),
        ({"rope_parameters": {"sliding_attention": LINEAR}}, "rope_parameters.sliding_attention of type 'linear'"),
        ({"rope_parameters": {"full_attention": 1e6}}, "rope_parameters.full_attention must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "two different values of rope_theta"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}}, "values of rope_local_base_freq"),
        ({"rope_parameters": {"full_attention": LINEAR}, "rope_scaling": LINEAR | {"factor": 2}}, "values of the fact"),
    ],
)
def test_what_is_not_understood_of_a_gemma_3_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(gemma3(**changes))


def test_a_gemma_3_with_windows_of_no_size_is_refused() -> None:
    with pytest.raises(CheckpointError, match="sliding_window must be a whole number"):
        ModelConfig.from_hf(GEMMA3 | {"sliding_window": None})
