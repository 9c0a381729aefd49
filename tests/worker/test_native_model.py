"""A whole model on native kernels against the torch model, which is held to transformers: logits, bits, files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import FAMILIES, tiny
from torch import Tensor

from paged import SamplingParams
from paged.attention import AttentionMetadata
from paged.attention.reference import paged_attention
from paged.kernels import Team, library
from paged.pool import KVPool
from scheduler.engine import Engine
from scheduler.llm import kv_layout
from scheduler.policy import Limits
from worker import checkpoints, packing
from worker.checkpoints import resolve
from worker.inputs import Inputs
from worker.kernels.native import pack
from worker.kernels.reference import unpack
from worker.loading import load_executor
from worker.models.decoder import Decoder
from worker.native_model import NativeModel
from worker.packing import pack_weights
from worker.tensors import HEAD
from worker.weights import load_weights

NATIVE = library()
assert NATIVE is not None
LENGTH = 90
SEQUENCES = [np.random.default_rng(i).integers(0, 131, LENGTH).tolist() for i in range(3)]
# Root mean square of the difference to a model in float32, over that of its logits: what rounding does. Of int8 and
# int4, whose weights the other has too, it is what rounding the rows does.
TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-2, "float16": 1e-2, "int8": 0.15, "int4": 0.15}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    tiny(request.param, folder)
    return folder


# Families of which one set of instructions stands for all.
CASES = [
    pytest.param(family, kind, name, id=f"{family}-{kind}-{name}")
    for family in FAMILIES
    for kind in TOLERANCE
    for name in (NATIVE.sets if family in ("llama", "gemma3") else NATIVE.sets[-1:])
]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    tiny(request.param, folder)
    return folder


class Driver:
    """A model, and the pages of three sequences, which lie one after another."""

    def __init__(self, folder: Path, kind: str, name: str | None = None, threads: int = 1) -> None:
        self.config = resolve(str(folder)).config
        dtype = kind if kind in ("float32", "bfloat16", "float16") else "float32"
        quantization = None if kind == dtype else kind
        self.layout = kv_layout(self.config, dtype, page_size=4)
        self.num_pages = -(-LENGTH // 4) * len(SEQUENCES)
        self.pool = KVPool(self.layout, 1 + self.num_pages * len(self.layout.windows))
        weights = load_weights(folder, self.config)
        parts = dict(pack_weights(weights, self.config, getattr(torch, dtype), quantization))
        team = Team(threads, len(self.layout.windows), name)
        self.model = NativeModel(self.config, parts, self.pool, LENGTH, team, quantization)

    def inputs(self, rows: list[tuple[int, int, int]]) -> Inputs:
        """Tokens first to last - 1 of some sequences in one step, every one of which samples."""
        ids = torch.tensor([token for i, first, last in rows for token in SEQUENCES[i][first:last]])
        positions = torch.tensor([p for _, first, last in rows for p in range(first, last)])
        owners = torch.tensor([i for i, first, last in rows for _ in range(first, last)])
        starts = torch.tensor([0, *(last - first for _, first, last in rows)]).cumsum(0).int()
        lens = torch.tensor([last for _, _, last in rows]).int()
        each = self.num_pages // len(SEQUENCES)
        metas = []
        for group in range(len(self.layout.windows)):
            base = 1 + group * self.num_pages
            tables = torch.stack([base + i * each + torch.arange(each) for i, _, _ in rows]).int()
            slots = (base + owners * each + positions // 4) * 4 + positions % 4
            metas.append(AttentionMetadata(starts, lens, tables, slots))
        return Inputs(ids, positions, tuple(metas), torch.arange(len(ids)))

    def logits(self, steps: list[list[tuple[int, int, int]]]) -> list[Tensor]:
        """Of each sequence all logits [LENGTH, vocab], computed in these steps."""
        found: list[list[Tensor]] = [[] for _ in SEQUENCES]
        for rows in steps:
            logits, best = self.model.step(self.inputs(rows))
            assert torch.equal(best, logits.argmax(-1))
            parts = torch.split(logits.clone(), [last - first for _, first, last in rows])
            for (i, _, _), part in zip(rows, parts, strict=True):
                found[i].append(part)
        return [torch.cat(parts) for parts in found]


WHOLE = [[(i, 0, LENGTH)] for i in range(3)]
MIXED = [
    [(0, 0, 40), (1, 0, 1), (2, 0, 17)],
    [(2, 17, 90), (0, 40, 41)],
    *([(0, 41 + n, 42 + n), (1, 1 + n, 2 + n)] for n in range(40)),
    [(1, 41, 90), (0, 81, 90)],
]


def torch_logits(folder: Path, kind: str) -> list[Tensor]:
    """The torch model's in float32, each sequence as a whole, with weights as a kind rounds them."""
    driver = Driver(folder, "float32")
    weights = load_weights(folder, driver.config)
    if kind in ("int8", "int4"):
        for name in [name for name in weights if name.endswith("_proj.weight")]:
            weights[name] = unpack(pack(weights[name], kind))
        weights[HEAD] = unpack(pack(weights[HEAD], "int8"))
    model = Decoder(driver.config, weights, LENGTH, torch.float32, torch.device("cpu"))
    found = []
    with torch.inference_mode():
        for rows in WHOLE:
            it = driver.inputs(rows)
            hidden = model.forward(it.token_ids, it.positions, it.metas, driver.pool, paged_attention)
            found.append(model.logits(hidden))
    return found


@pytest.mark.parametrize(("family", "kind", "name"), CASES, indirect=["family"])
def test_logits_are_those_of_the_torch_model(family: Path, kind: str, name: str) -> None:
    found = Driver(family, kind, name).logits(WHOLE)
    for mine, wanted in zip(found, torch_logits(family, kind), strict=True):
        error = float((mine - wanted).norm() / wanted.norm())
        assert error <= TOLERANCE[kind]


@pytest.mark.parametrize(("family", "kind", "name"), CASES, indirect=["family"])
def test_logits_have_the_same_bits_however_a_sequence_is_computed(family: Path, kind: str, name: str) -> None:
    """Whole, or in chunks and single tokens beside others, on one thread or two: what N3 promises."""
    whole, mixed = Driver(family, kind, name).logits(WHOLE), Driver(family, kind, name, threads=2).logits(MIXED)
    for a, b in zip(whole, mixed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_tokens_do_not_depend_on_what_else_runs_nor_on_preemption(folder: Path, settings: dict[str, str]) -> None:
    """N2 beyond float32: alone, batched, and in a pool so small that requests are preempted and recomputed."""
    prompts: Any = [tokens[: 20 + 7 * i] for i, tokens in enumerate(SEQUENCES * 2)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40, ignore_eos=True) for i in range(len(prompts))]
    config = resolve(str(folder)).config

    def answers(num_pages: int, together: bool) -> tuple[dict[str, list[int]], int]:
        layout = kv_layout(config, settings.get("dtype", "float32"), 4)
        executor = load_executor(
            folder,
            config,
            layout,
            num_pages=num_pages,
            max_model_len=128,
            backend="native",
            quantization=settings.get("quantization"),
        )
        limits = Limits(128, num_pages - 1, 4, layout.windows, max_num_seqs=8, max_num_batched_tokens=24)
        engine = Engine(executor, None, limits, vocab_size=config.vocab_size)
        found: dict[str, list[int]] = {}
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            engine.add(str(i), prompt, param)
            while engine.has_work and not (together and i + 1 < len(prompts)):
                found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        return found, engine.stats.preemptions

    wanted, _ = answers(400, together=False)
    windows = kv_layout(config, "float32", 4).windows
    longest = Limits(128, 10**6, 4, windows, 8, 24).pages(95)
    found, preemptions = answers(1 + longest * 3 // 2, together=True)
    assert found == wanted
    assert len(found) == len(prompts)
    assert preemptions > 0 or len(windows) > 1  # with windows so few pages grow that admission keeps clear of it


def test_packed_weights_of_a_converted_model_are_written_once_and_mapped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = checkpoints.default_cache() / "model-v1"
    model.parent.mkdir(parents=True)
    model.symlink_to(folder)
    config = resolve(str(folder)).config
    first = packing.packed_weights(model, config, torch.bfloat16, "int8")
    (file,) = checkpoints.default_cache().glob("model-v1-bfloat16-int8-packed-v*/packed.bin")
    made = file.stat().st_mtime_ns
    wanted = dict(pack_weights(load_weights(model, config), config, torch.bfloat16, "int8"))
    second = packing.packed_weights(model, config, torch.bfloat16, "int8")
    assert file.stat().st_mtime_ns == made
    for parts in (first, second):
        assert parts.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert parts[name].dtype == tensor.dtype
            assert torch.equal(parts[name], tensor)
            assert parts[name].data_ptr() % packing.ALIGNMENT == 0
    packing.packed_weights(model, config, torch.float32, None)  # another format is another file
    assert len(list(checkpoints.default_cache().glob("*-packed-v*/packed.bin"))) == 2


def test_a_folder_of_the_users_is_packed_in_memory_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packing.packed_weights(folder, resolve(str(folder)).config, torch.float32, None)
    assert not list(tmp_path.iterdir())


def converted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as if it had been converted into the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = checkpoints.default_cache() / "model-v1"
    model.parent.mkdir(parents=True)
    model.symlink_to(folder)
    return model


@pytest.mark.parametrize("damage", ["empty", "short", "long", "zeros", "list", "dtype", "missing"])
def test_a_damaged_file_is_packed_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    model = converted(folder, tmp_path, monkeypatch)
    config = resolve(str(model)).config
    whole = {name: part.clone() for name, part in packing.packed_weights(model, config, torch.float32, None).items()}
    (file,) = checkpoints.default_cache().glob("*/packed.bin")
    content = file.read_bytes()
    file.unlink()  # what is mapped stays as it was
    changed = {"empty": b"", "short": content[:-1], "long": content + b"0", "zeros": bytes(len(content))}
    changed |= {"list": b"[]" + (2).to_bytes(8, "little"), "dtype": content.replace(b"float32", b"float23", 1)}
    if damage in changed:
        file.write_bytes(changed[damage])
    assert capsys.readouterr().err == ""
    again = packing.packed_weights(model, config, torch.float32, None)
    assert "is damaged" in capsys.readouterr().err
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert file.read_bytes() == content


def test_a_cache_that_cannot_be_written_is_done_without(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = converted(folder, tmp_path, monkeypatch)
    config = resolve(str(model)).config
    (checkpoints.default_cache() / f"model-v1-float32-packed-v{packing.VERSION}").write_text("in the way")
    parts = packing.packed_weights(model, config, torch.float32, None)
    assert "packing in memory" in capsys.readouterr().err
    assert parts["norm"].dtype == torch.float32
    assert not list(checkpoints.default_cache().glob("*.tmp-*"))


def test_starts_at_the_same_time_and_kills_leave_a_whole_file(folder: Path, tmp_path: Path) -> None:
    """Four processes at once, one of them killed soon: the others have the same tensors, and nothing else is left."""
    script = """if True:
        import os, sys, torch
        from pathlib import Path
        from worker import checkpoints, packing
        model = checkpoints.default_cache() / "model-v1"
        config = checkpoints.resolve(str(model)).config
        if sys.argv[1] == "killed":
            write = packing._write
            def stop(file, parts):
                write(file, list(parts)[:3])
                os.kill(os.getpid(), 9)
            packing._write = stop
        parts = packing.packed_weights(model, config, torch.float32, None)
        print(sum(float(t.double().sum()) for t in parts.values()))
    """
    model = tmp_path / "paged" / "models" / "model-v1"
    model.parent.mkdir(parents=True)
    model.symlink_to(folder)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    kinds = ["killed", "whole", "whole", "whole"]
    started = [
        subprocess.Popen([sys.executable, "-c", script, kind], env=env, stdout=subprocess.PIPE, text=True)
        for kind in kinds
    ]
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started][1:] == [0, 0, 0]
    assert printed[1] == printed[2] == printed[3] != ""
    left = [path.name for path in model.parent.iterdir() if ".tmp-" in path.name]
    assert not left
