"""ModelConfig: what config.json says, in old and new spellings, and refused by name where it is not understood."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from paged import CheckpointError
from worker.checkpoints import BUILTIN
from worker.families import FAMILIES
from worker.model_config import ModelConfig
from worker.rope import Rope

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
        assert ModelConfig.from_hf(change(rope_parameters=None)).layer_ropes[0] == Rope("default", 64, 10000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 5.0}, "two different values"),
        ({"rope_scaling": {"rope_type": "foo"}}, "'foo'"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 7}}, "two different values"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_theta": "1e5"}, "rope_theta must be a positive number"),
        ({"rope_theta": -1}, "rope_theta must be a positive number"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"sliding_window_pattern": 6}, "sliding_window_pattern is not supported for LlamaForCausalLM"),
        ({"residual_multiplier": 0.2}, "residual_multiplier is not supported for LlamaForCausalLM"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"layer_types": ["sliding_attention"] * 30}, "layer_types other than full_attention"),
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
        ({"architectures": None, "model_type": "qwen2_moe"}, "names qwen2_moe"),
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
    assert config.attention_scale == config.head_dim**-0.5


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
    for window, rope in zip(config.layer_windows, config.layer_ropes, strict=True):
        wanted = full if window is None else sliding
        assert rope is not None
        assert (rope.theta, rope.factor) == (wanted["rope_theta"], wanted.get("factor", 1.0))
        assert rope.kind == ("default" if rope.factor == 1 else "linear")
    assert config.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert (config.num_kv_heads, config.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (config.max_model_len, config.tie_word_embeddings) == (theirs.max_position_embeddings, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration, and only"),
        ({"architectures": None, "model_type": "gemma3"}, "names gemma3,"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported for Gemma3ForCausalLM"),
        ({"final_logit_softcapping": -50.0}, "final_logit_softcapping must be a positive number"),
        ({"mlp_bias": True}, "mlp_bias is not supported for Gemma3ForCausalLM"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported for Gemma3ForCausalLM"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number"),
        ({"layer_types": ["full_attention"] * 25}, "layer_types must list 26 layers"),
        ({"layer_types": "full_attention"}, "layer_types must list 26 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"] * 13}, "layer type 'chunked_attention'"),
        ({"layer_types": [["full_attention"]] * 26}, "layer type .'full_attention'."),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number"),
        ({"sliding_window": 0}, "sliding_window must be a whole number"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number"),
        ({"rope_local_base_freq": "10000"}, "rope_local_base_freq must be a positive number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "of full_attention and sliding_attention"),
        ({"rope_parameters": {"full_attention": 1e6}}, "rope_parameters.full_attention must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "two different values of rope_theta"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}}, "values of rope_local_base_freq"),
        ({"rope_parameters": {"full_attention": LINEAR}, "rope_scaling": LINEAR | {"factor": 2}}, "values of factor"),
    ],
)
def test_what_is_not_understood_of_a_gemma_3_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(gemma3(**changes))


def test_a_gemma_3_with_windows_of_no_size_is_refused() -> None:
    with pytest.raises(CheckpointError, match="sliding_window must be a whole number"):
        ModelConfig.from_hf(GEMMA3 | {"sliding_window": None})


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "vocab_size": 99,
}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_a_familys_config_leaves_out_is_as_transformers_has_it(architecture: str) -> None:
    import transformers

    name = architecture.removesuffix("ForCausalLM") + ("TextConfig" if architecture.startswith("Gemma3") else "Config")
    given = SMALL | ({"pad_token_id": 0} if architecture.startswith(("Phi3", "SmolLM3")) else {})
    theirs = getattr(transformers, name)(**deepcopy(given))
    saved = {"architectures": [architecture], **given}
    if architecture in ("SmolLM3ForCausalLM", "Phi3ForCausalLM") or architecture.startswith("Gemma"):
        config = ModelConfig.from_hf(saved)  # whose base transformers knows
        rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
        assert rope["rope_theta"] in {it.theta for it in config.layer_ropes if it is not None}
    else:
        config = ModelConfig.from_hf(saved | {"rope_parameters": ROPE})
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.max_model_len == theirs.max_position_embeddings
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    kinds = getattr(theirs, "layer_types", None)
    sliding = getattr(theirs, "sliding_window", None)
    if kinds is None:
        kinds = ["sliding_attention" if sliding and architecture.startswith(("Mistral", "Phi3")) else "full"] * 6
    assert config.layer_windows == tuple(sliding if kind == "sliding_attention" else None for kind in kinds)
    turning = getattr(theirs, "no_rope_layers", None) or [1] * 6
    assert [rope is not None for rope in config.layer_ropes] == [bool(one) for one in turning]
    scales = {"embedding_multiplier": config.embedding_scale, "residual_multiplier": config.residual_scale}
    scales |= {"attention_multiplier": config.attention_scale, "logits_scaling": config.logits_divisor}
    for field, value in scales.items():
        assert value == getattr(theirs, field, value)
    assert config.attention_soft_cap == (getattr(theirs, "attn_logit_softcapping", None) or 0.0)
    assert config.logits_soft_cap == (getattr(theirs, "final_logit_softcapping", None) or 0.0)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 6),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9,) * 6),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": False}, (None,) * 6),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 4,
            },
            (None,) * 4 + (9, 9),
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": None, "use_sliding_window": True}, (None,) * 6),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 5}, (5,) * 6),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "sliding_window": 5, "use_sliding_window": True},
            (None, None, None, 5, None, None),
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 5}, (5, None) * 3),
    ],
)
def test_which_layers_slide(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert ModelConfig.from_hf(SMALL | {"rope_parameters": ROPE} | changes).layer_windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "max_window_layers": -1, "use_sliding_window": True}, "max_window_la"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 6},
            "use_sliding_window is not",
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, "no_rope_layers must list 6"),
        ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0}, "residual_multiplier must be a positive"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias is not supported for Mis"),
        ({"architectures": ["Olmo2ForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is not supported"),
        ({"architectures": ["Phi3ForCausalLM"], "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window_pattern": 3}, "sliding_window_pattern must be 2"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "llama"}, "its model_type llama is LlamaForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "num_experts": 8}, "num_experts is not supported"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**8}, "num_hidden_layers must be a whole num"),
        ({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 10**12}, "max_position_embeddings must be"),
        ({"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(SMALL | {"rope_parameters": ROPE} | changes)


@pytest.mark.parametrize(
    "harmless",
    [
        {"num_experts": 0, "quantization_config": {}, "position_embedding_type": "rope"},
        {"hidden_act": "swish"},
        {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 4096, "sliding_window_size": 4096},  # 9B, published
    ],
)
def test_what_changes_nothing_is_no_hindrance(harmless: dict[str, Any]) -> None:
    plain = {"architectures": harmless.get("architectures", ["LlamaForCausalLM"]), "rope_parameters": ROPE}
    assert ModelConfig.from_hf(SMALL | plain | harmless) == ModelConfig.from_hf(SMALL | plain)
