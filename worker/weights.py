"""Weights from a Hugging Face folder: safetensors files, one or many, checked by name and shape before they are read.

Pickles are never opened. Every tensor that the model needs must be there, and every tensor that is there must be used.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paged.errors import CheckpointError
from worker.model_config import ModelConfig
from worker.parallel import Shard
from worker.tensors import EMBEDDING, HEAD, expected_tensors, layer_parts

_FLOATS = ("F64", "F32", "F16", "BF16")  # others are quantised, and mean nothing without their scales
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")  # old checkpoints store what is computed from the config


def load_weights(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor of the checkpoint in the folder `path`, by name, as it is stored.

    They are mapped from their files, so that nothing is read before it is used. With tied embeddings `lm_head.weight`
    is the embedding itself. Raises CheckpointError, which names the file or tensor.
    """
    places, index = _files(path)
    files = {
        name: file
        for file in places
        for name in _names(file)
        # of a tensor that lies in two files, the index says which one counts
        if index.get(name, file.name) == file.name and not _COMPUTED.search(name)
    }
    shapes = _shapes(files)
    wanted = expected_tensors(config)
    if config.tie_word_embeddings and HEAD in files:
        wanted[HEAD] = wanted[EMBEDDING]  # a copy is allowed, and may stand for a missing embedding
        if EMBEDDING not in files:
            del wanted[EMBEDDING]
    _check(path, wanted, shapes)
    weights: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as opened:
            for name in (name for name, place in files.items() if place == file):
                weights[name] = opened.get_tensor(name)
    if config.tie_word_embeddings:
        _tie(weights)
    return weights


def replace_weights(weights: dict[str, Tensor], replaced: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Put other tensors in the place of some, by their Hugging Face names.

    Raises CheckpointError, and changes nothing, for a name or shape that is not the model's.
    """
    wanted = expected_tensors(config)
    for name, tensor in replaced.items():
        if name not in wanted:
            raise CheckpointError(f"{name} is not a tensor of this model, which has {', '.join(list(wanted)[:3])}, ...")
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tuple(tensor.shape) != wanted[name]:
            found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)[:80]
            raise CheckpointError(f"{name} must be floating point {wanted[name]}, not {found}")
    for name, tensor in replaced.items():
        weights[name] = tensor.detach().clone()  # the caller may go on changing his
    if config.tie_word_embeddings:
        weights[HEAD] = weights[EMBEDDING]


def take(weights: dict[str, Tensor], *names: str) -> Tensor:
    """The weights of these names, taken out of the dict; several become one, their rows one after another."""
    parts = [weights.pop(name) for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def cut_weights(weights: dict[str, Tensor], config: ModelConfig, shard: Shard) -> None:
    """Leave of the whole model's weights those of a shard, under the same names; `config` is the whole model's.

    Parts of rows are views, parts of columns copies. What is added once to a sum of all workers, rank 0 adds.
    """
    query, key = (
        slice(some.start * config.head_dim, some.stop * config.head_dim) for some in (shard.heads, shard.kv_heads)
    )
    inner = slice(shard.inner.start, shard.inner.stop)
    rows, columns = {"qkv": (query, key, key), "gate_up": (inner, inner)}, {"out": query, "down": inner}
    kv_size = config.num_kv_heads * config.head_dim
    sizes = {"qkv": [config.num_heads * config.head_dim, kv_size, kv_size], "gate_up": [config.intermediate_size] * 2}
    for part, names in layer_parts(config).items():
        matrix = part.removesuffix("_bias")
        for i, name in ((i, name) for i in range(config.num_layers) for name in names):
            place = f"model.layers.{i}.{name}"
            if matrix in rows and len(names) == 1:  # fused
                several = zip(torch.split(weights[place], sizes[matrix]), rows[matrix], strict=True)
                weights[place] = torch.cat([tensor[some] for tensor, some in several])
            elif matrix in rows:
                weights[place] = weights[place][rows[matrix][names.index(name)]]
            elif part in columns:
                weights[place] = weights[place][:, columns[part]].contiguous()
            elif matrix in columns and shard.rank:
                weights[place] = torch.zeros_like(weights[place])
    if shard.rank:
        del weights[HEAD]


def _tie(weights: dict[str, Tensor]) -> None:
    """One tensor under both names; of two that differ the embedding wins (transformers takes the head then)."""
    embedding = weights.get(EMBEDDING)
    if embedding is None:
        embedding = weights[EMBEDDING] = weights[HEAD]
    if HEAD in weights and not torch.equal(weights[HEAD], embedding):
        warnings.warn(f"{HEAD} differs from the embedding it is tied to: the embedding is used for both", stacklevel=3)
    weights[HEAD] = embedding


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of the checkpoint, those of the index or the single one; and the index."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            names = sorted({os.fspath(name) for name in weight_map.values()})
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from None
        single = path / "model.safetensors"
        if single.is_file() and single.name not in names:
            return [single], {}  # a whole model saved over one of many files: transformers takes that, too
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{index} points to {name!r}, which is not a file of this folder: it is not read")
            if not (path / name).is_file():
                raise CheckpointError(f"{index} points to {name}, which is missing: fetch the whole checkpoint again")
        return [path / name for name in names], weight_map
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"], {}
    pickles = sorted(p.name for suffix in ("*.bin", "*.pt", "*.pth") for p in path.glob(suffix))
    if pickles:
        raise CheckpointError(
            f"{path} has only {pickles[0]}, a pickle, which can run code and is never opened: convert it with "
            "transformers' save_pretrained, which writes safetensors"
        )
    raise CheckpointError(f"{path} has no model.safetensors and no model.safetensors.index.json")


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged, or no safetensors file: {error}") from None


def _shapes(files: dict[str, Path]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as opened:
            for name in (name for name, place in files.items() if place == file):
                part = opened.get_slice(name)
                if part.get_dtype() not in _FLOATS:
                    raise CheckpointError(f"{file}: {name} is stored as {part.get_dtype()}, which is not supported")
                shapes[name] = tuple(part.get_shape())
    return shapes


def _check(path: Path, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not part of the model" for name in found if name not in wanted]
    problems += [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{path} does not fit its config.json: {'; '.join(problems[:3])}{more}")
