"""examples/make_random_model.py: what it writes is what was asked for, loads here, and in transformers."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from paged import LLM, SamplingParams
from worker.checkpoints import peek

EXAMPLE = Path(__file__).parent.parent / "examples" / "make_random_model.py"
SCRIPT = runpy.run_path(str(EXAMPLE))
CODE = "import runpy, sys; script = runpy.run_path(sys.argv[1]); script['main'].__globals__['SHARD_BYTES'] = 500_000; "
CODE += "del sys.argv[1]; script['main']()"  # several files, of a model as small as this


def make(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, str(EXAMPLE), "-o", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "new" / "small"
    done = make(folder, "--params", "1M")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "2 layers, hidden 192" in done.stderr
    return folder


def test_it_has_the_shape_and_size_that_were_asked_for(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * 1_002_432
    config = peek(str(folder))
    assert config is not None
    assert (config.num_layers, config.hidden_size, config.dtype) == (2, 192, "bfloat16")


def test_no_file_is_larger_than_a_shard_and_the_values_are_as_of_an_initialiser(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert len(files) > 2
    for file in files:
        with safe_open(file, framework="pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no dict
        assert all(index["weight_map"][name] == file.name for name in weights)
        assert sum(weight.nbytes for weight in weights.values()) <= 500_000
        for name, weight in weights.items():
            std = 0.0 if "norm" in name else 0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert weight.dtype == torch.bfloat16
            assert weight.float().std().item() == pytest.approx(std, rel=0.05), name


def test_it_answers_as_transformers_does(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    llm = LLM(str(folder), dtype="float32", kv_memory="16MiB")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    output = llm.generate("x\u00e9", params)[0]
    assert len(output.prompt_token_ids) == 3  # a byte each
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([list(output.prompt_token_ids)])
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8, eos_token_id=None
    )
    assert output.outputs[0].token_ids == found[0, 3:].tolist()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_paged_generate_takes_the_folder(folder: Path, quantization: str | None) -> None:
    command = [
        sys.executable,
        "-c",
        "from scheduler.cli import main; main()",
        "generate",
        "--model",
        str(folder),
        "x",
        "--max-tokens",
        "8",
    ]
    command += ["--temperature", "0", "--ignore-eos", "--kv-memory", "16MiB"]
    command += ["--quantization", quantization] if quantization else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_seed_decides(folder: Path, tmp_path: Path) -> None:
    def files(path: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in path.iterdir()}

    make(tmp_path / "same", "--params", "1M", "--seed", "0")
    assert files(tmp_path / "same") == files(folder)
    make(tmp_path / "other", "--params", "1M", "--seed", "1")
    changed = {name for name, content in files(tmp_path / "other").items() if content != files(folder)[name]}
    assert changed == {file.name for file in folder.glob("*.safetensors")}


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path, tmp_path / "file"):
        done = make(target, "--params", "1M")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert f"{target} exists and is not an empty folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    done = make(tmp_path / "x", "--params=many")
    assert done.returncode == 2
    assert "error: argument --params: 'many' is no number" in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("text", ["", "B", "1T", "-1M", "10K", "nan", "1e99"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        SCRIPT["number"](text)


@pytest.mark.parametrize("text", ["200K", "2.5M", "10000000", "135M", "3B", "70b"])
def test_any_size_has_about_as_many_parameters(text: str) -> None:
    wanted = SCRIPT["number"](text)
    assert SCRIPT["count"](SCRIPT["shape"](wanted)) == pytest.approx(wanted, rel=0.02)


def test_the_shape_of_1_1b_is_tinyllamas() -> None:
    config = SCRIPT["shape"](1_100_000_000)
    assert SCRIPT["count"](config) == 1_100_048_384
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (32, 4)
    assert len(list(SCRIPT["split"](SCRIPT["tensors"](config)))) == 5  # files
