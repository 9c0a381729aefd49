"""Weights: every file and tensor is checked by name before it is read (cases C02 and C05)."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import FAMILIES, edit_config, tiny, tiny_llama
from safetensors.torch import load_file, save_file

from paged import CheckpointError
from worker.checkpoints import BUILTIN, resolve
from worker.model_config import ModelConfig
from worker.models.decoder import Decoder, Layer
from worker.tensors import expected_tensors, num_parameters
from worker.weights import load_weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(folder: Path) -> dict[str, torch.Tensor]:
    return load_weights(folder, resolve(str(folder)).config)


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of model.safetensors; None removes one. Dots in names are written as two underscores."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value.contiguous().clone()
    save_file(tensors, file)


@pytest.fixture
def tied(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    model = tiny_llama(tmp_path, tie_word_embeddings=True)
    return tmp_path, model.state_dict()[EMBEDDING]


@pytest.fixture
def untied(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    return tmp_path, tiny_llama(tmp_path).state_dict()


def test_all_tensors_are_those_of_transformers(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = untied
    weights = load(folder)
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) for name in state)


def test_many_files_are_one_checkpoint(tmp_path: Path) -> None:
    state = tiny_llama(tmp_path, shard_size="50KB").state_dict()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    weights = load(tmp_path)
    assert all(torch.equal(weights[name], state[name]) for name in state)


def test_c02a_tied_without_a_head_uses_the_embedding(tied: tuple[Path, torch.Tensor]) -> None:
    weights = load(tied[0])
    assert weights[HEAD] is weights[EMBEDDING]
    assert torch.equal(weights[HEAD], tied[1])


def test_c02b_a_tied_copy_is_allowed(tied: tuple[Path, torch.Tensor]) -> None:
    folder, embedding = tied
    edit_weights(folder, lm_head__weight=embedding)
    weights = load(folder)
    assert weights[HEAD] is weights[EMBEDDING]
    assert torch.equal(weights[HEAD], embedding)


def test_c02c_of_two_that_differ_the_embedding_wins_with_one_warning(tied: tuple[Path, torch.Tensor]) -> None:
    folder, embedding = tied
    edit_weights(folder, lm_head__weight=embedding + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = load(folder)
    assert ["lm_head.weight differs" in str(w.message) for w in caught] == [True]
    assert torch.equal(weights[HEAD], embedding)
    assert torch.equal(weights[EMBEDDING], embedding)


def test_c02d_an_untied_head_is_used(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = untied
    weights = load(folder)
    assert torch.equal(weights[HEAD], state[HEAD])
    assert not torch.equal(weights[HEAD], weights[EMBEDDING])


def test_c02e_an_untied_head_that_is_absent_is_named(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    edit_weights(untied[0], lm_head__weight=None)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load(untied[0])


def test_c02f_without_the_flag_llama_is_untied(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = untied
    edit_config(folder, tie_word_embeddings=None)
    assert torch.equal(load(folder)[HEAD], state[HEAD])
    edit_weights(folder, lm_head__weight=None)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load(folder)


def test_c02g_a_tied_head_stands_for_an_absent_embedding(tied: tuple[Path, torch.Tensor]) -> None:
    folder, embedding = tied
    edit_weights(folder, lm_head__weight=embedding, model__embed_tokens__weight=None)
    weights = load(folder)
    assert torch.equal(weights[EMBEDDING], embedding)
    assert weights[HEAD] is weights[EMBEDDING]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model__layers__1__mlp__up_proj__weight": None}, r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ({"model__layers__0__extra__weight": torch.ones(3)}, r"layers\.0\.extra\.weight is not part of the model"),
        ({"model__norm__weight": torch.ones(47)}, r"model\.norm\.weight is \[47\], not \[48\]"),
        ({"model__layers__0__self_attn__q_proj__bias": torch.ones(96)}, r"q_proj\.bias is not part"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    untied: tuple[Path, dict[str, torch.Tensor]], change: dict[str, Any], message: str
) -> None:
    edit_weights(untied[0], **change)
    with pytest.raises(CheckpointError, match=message):
        load(untied[0])


def test_rotary_buffers_of_old_checkpoints_are_passed_over(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = untied
    edit_weights(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert load(folder).keys() == state.keys()


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def test_c05_a_pickle_is_refused_and_not_opened(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, marker = untied[0], untied[0] / "marker"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(marker)))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle.*convert"):
        load(folder)
    assert not marker.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert marker.exists()  # the trap works


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_llama(tmp_path, shard_size="50KB")
    return tmp_path


def point_index_to(folder: Path, name: str) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(content))


def test_c05_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}, which is missing"):
        load(sharded)


def test_c05_a_truncated_file_is_named(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    file = untied[0] / "model.safetensors"
    for length in (4, 40, file.stat().st_size - 100):
        file.write_bytes(file.read_bytes()[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            load(untied[0])


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors"])
def test_c05_a_path_outside_the_folder_is_not_read(sharded: Path, name: str) -> None:
    point_index_to(sharded, name)
    with pytest.raises(CheckpointError, match="not a file of this folder"):
        load(sharded)


def test_c05_an_extra_file_is_ignored(sharded: Path) -> None:
    names = load(sharded).keys()
    (sharded / "consolidated.safetensors").write_bytes(b"anything")
    assert load(sharded).keys() == names


def test_c05_a_single_file_beside_an_index_of_others_is_the_model(sharded: Path) -> None:
    """A whole model saved over one of many files; as in transformers."""
    whole = {name: tensor + 1 for name, tensor in load(sharded).items()}
    save_file(whole, sharded / "model.safetensors")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load(sharded).items())


def test_c05_code_of_the_checkpoint_is_never_run(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder = untied[0]
    edit_config(folder, auto_map={"AutoModelForCausalLM": "evil.Model"}, architectures=["EvilForCausalLM"])
    (folder / "evil.py").write_text(f"open({str(folder / 'marker')!r}, 'w')")
    with pytest.raises(CheckpointError, match=r"EvilForCausalLM.*never run"):
        load(folder)
    assert not (folder / "marker").exists()
    edit_config(folder, architectures=["LlamaForCausalLM"])
    load(folder)  # built in: the map is not looked at
    assert not (folder / "marker").exists()


def test_of_a_tensor_in_two_files_the_index_says_which(sharded: Path) -> None:
    name = "model.norm.weight"
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    right = load(sharded)[name].clone()
    others = sorted(set(index.values()) - {index[name]})
    for file in (sharded / others[0], sharded / others[-1]):  # one read before, one after
        save_file(load_file(file) | {name: right + 1}, file)
    assert torch.equal(load(sharded)[name], right)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"weight_map": []}',
        '{"weight_map": {"model.norm.weight": 5, "a": "b"}}',
        '{"weight_map": {"a": 5}}',
        "[" * 100_000,
    ],
)
def test_an_index_that_is_none_is_named(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json is not an index"):
        load(sharded)


def test_integers_are_not_taken_for_weights(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Of a quantised checkpoint, which means nothing without its scales."""
    edit_weights(untied[0], model__norm__weight=torch.ones(48, dtype=torch.int8))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored as I8"):
        load(untied[0])


def test_what_needs_no_conversion_stays_in_its_file(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """A changed byte of the file shows in a tensor that is mapped, and not in one that was copied."""
    folder, state = untied
    file = folder / "model.safetensors"
    mapped = load(folder)["model.norm.weight"]
    copied = mapped.bfloat16()
    with file.open("r+b") as opened:
        opened.seek(8)
        opened.write(bytes(file.stat().st_size - 8))
    assert not mapped.any()
    assert torch.equal(copied, state["model.norm.weight"].bfloat16())


def test_a_folder_without_weights_says_so(untied: tuple[Path, dict[str, torch.Tensor]]) -> None:
    (untied[0] / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        load(untied[0])


@pytest.mark.parametrize("tie", [True, False])
def test_a_config_knows_how_many_numbers_its_tensors_have(tie: bool) -> None:
    config = ModelConfig.from_hf(BUILTIN["smollm2"].config | {"tie_word_embeddings": tie, "head_dim": 80})
    assert num_parameters(config) == sum(math.prod(shape) for shape in expected_tensors(config).values())


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("qwen2", "self_attn.k_proj.bias"),
        ("qwen3", "self_attn.q_norm.weight"),
        ("qwen3", "self_attn.o_proj.bias"),
        ("llama3", "mlp.down_proj.bias"),
        ("gemma3", "pre_feedforward_layernorm.weight"),
        ("olmo2", "post_feedforward_layernorm.weight"),
        ("phi3", "self_attn.qkv_proj.weight"),
    ],
)
def test_c06_a_tensor_of_a_familys_own_is_missed_by_name(tmp_path: Path, family: str, tensor: str) -> None:
    tiny(family, tmp_path)
    name = f"model.layers.1.{tensor}"
    edit_weights(tmp_path, **{name.replace(".", "__"): None})
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("llama", "self_attn.q_proj.bias"),
        ("qwen2", "self_attn.o_proj.bias"),
        ("mistral", "self_attn.q_norm.weight"),
        ("phi3", "self_attn.q_proj.weight"),
        ("olmo2", "input_layernorm.weight"),
    ],
)
def test_c06_a_tensor_that_a_family_does_not_have_is_named(tmp_path: Path, family: str, tensor: str) -> None:
    tiny(family, tmp_path)
    name = f"model.layers.0.{tensor}"
    edit_weights(tmp_path, **{name.replace(".", "__"): torch.ones(48)})
    with pytest.raises(CheckpointError, match=f"{name} is not part of the model"):
        load(tmp_path)


def test_c06_a_norm_of_one_head_is_not_one_of_all(tmp_path: Path) -> None:
    tiny("olmo2", tmp_path)
    edit_weights(tmp_path, model__layers__1__self_attn__k_norm__weight=torch.ones(16))
    with pytest.raises(CheckpointError, match=r"k_norm\.weight is \[16\], not \[32\]"):
        load(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_c04_every_tensor_is_used_and_every_part_is_a_number(tmp_path: Path, family: str) -> None:
    """Loaded, tied or computed: what is left over stops the loading, and nothing is what memory held before."""
    tiny(family, tmp_path)
    config = resolve(str(tmp_path)).config
    weights = load_weights(tmp_path, config)
    assert weights.keys() == expected_tensors(config).keys() | {HEAD}
    decoder = Decoder(config, weights, 64, torch.float32, torch.device("cpu"))
    assert not weights
    tables = [table for rotary in decoder.rotaries.values() for table in (rotary.cos, rotary.sin)]
    for tensor in (*tables, *(value for layer in decoder.layers for value in vars_of(layer) if value is not None)):
        assert tensor.device.type == "cpu"
        assert tensor.isfinite().all()


def vars_of(layer: Layer) -> list[torch.Tensor | None]:
    return [getattr(layer, field.name) for field in fields(layer)]
