"""Weights as the native kernels take them. Of a converted model they are packed once, and mapped from then on.

A packed model is one file: a line of JSON with each tensor's name, dtype, shape and place, then the tensors, each at a
multiple of 64 bytes. It lies in the cache beside the model that was converted there, under its name, which has the
digest of the model's file, the format, and the version of what is packed; it appears there whole or not at all. All
instruction sets take the same packed bytes. A user's own folder may change, so it is packed at every start.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from worker.checkpoints import CacheError, cached, default_cache
from worker.device import head_format
from worker.kernels import Matrix
from worker.kernels.native import pack
from worker.model_config import GEMMA3, ModelConfig
from worker.weights import EMBEDDING, HEAD, load_weights

VERSION = 2  # to be raised when what is packed changes
ALIGNMENT = 64
FILE = "packed.bin"

MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
GEMMA3_NORMS = {
    **NORMS,
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def packed_weights(path: Path, config: ModelConfig, dtype: torch.dtype, quantization: str | None) -> dict[str, Tensor]:
    """The packed tensors of the checkpoint in the folder `path`. Raises CheckpointError."""

    def packed() -> dict[str, Tensor]:
        weights = load_weights(path, config, dtype, torch.device("cpu"))
        return dict(pack_weights(weights, config, quantization))

    if path.parent != default_cache():
        return packed()
    formats = "-".join([str(dtype).removeprefix("torch."), *([quantization] if quantization else [])])
    key = f"{path.name}-{formats}-packed-v{VERSION}"
    try:
        folder = cached(key, default_cache(), lambda work: _write(work / FILE, packed()))
        try:
            return _map(folder / FILE)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:  # whatever a wrong header leads to
            print(f"paged: {folder / FILE} is damaged ({error}): packing again", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
            return _map(cached(key, default_cache(), lambda work: _write(work / FILE, packed())) / FILE)
    except CacheError as error:
        print(f"paged: packing in memory, at this start and the next: {error}", file=sys.stderr)
        return packed()


def pack_weights(
    weights: dict[str, Tensor], config: ModelConfig, quantization: str | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a NativeModel by name. Takes the weights out of the dict, one by one."""
    embedding, head = weights.pop(EMBEDDING), weights.pop(HEAD)
    own = str(embedding.dtype).removeprefix("torch.")
    yield "embedding", embedding
    yield "head", pack(head, head_format(own, quantization)).packed
    gemma3 = config.architecture == GEMMA3
    more = 1.0 if gemma3 else 0.0  # Gemma's norms multiply by 1 + weight
    yield "norm", weights.pop("model.norm.weight").float() + more
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        for name, parts in MATRICES.items():
            matrix = torch.cat([weights.pop(f"{prefix}{part}.weight") for part in parts])
            yield f"{i}.{name}", pack(matrix, quantization or own).packed
        for name, part in (GEMMA3_NORMS if gemma3 else NORMS).items():
            yield f"{i}.{name}", weights.pop(f"{prefix}{part}.weight").float() + more


def layer_matrix(parts: Mapping[str, Tensor], i: int, name: str, format_: str, config: ModelConfig) -> Matrix:
    """One of MATRICES of layer i."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "qkv": (query + 2 * key, hidden),
        "out": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    return Matrix(parts[f"{i}.{name}"], format_, *shapes[name])


def _write(file: Path, parts: Mapping[str, Tensor]) -> None:
    places: dict[str, tuple[str, list[int], int]] = {}
    end = 0
    for name, tensor in parts.items():
        places[name] = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    header = json.dumps(places).encode()
    header += b" " * (-(len(header) + 1) % ALIGNMENT) + b"\n"
    with file.open("wb") as out:
        out.write(header)
        for name, tensor in parts.items():
            out.seek(len(header) + places[name][2])
            out.write(tensor.contiguous().view(torch.uint8).numpy().data)
        out.truncate(len(header) + end)


def _map(file: Path) -> dict[str, Tensor]:
    """Raises ValueError for a file that is not as long as it says; what is in it is not looked at."""
    with file.open("rb") as opened:
        header = opened.readline()
    size, places = file.stat().st_size, json.loads(header)
    ends = [
        start + torch.Size(shape).numel() * getattr(torch, dtype).itemsize for dtype, shape, start in places.values()
    ]
    wanted = len(header) + -(-max(ends) // ALIGNMENT) * ALIGNMENT
    if size != wanted:
        raise ValueError(f"it has {size} bytes of {wanted}")
    raw = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    parts = {}
    for name, (dtype, shape, start) in places.items():
        kind = getattr(torch, dtype)
        first = len(header) + start
        parts[name] = raw[first : first + torch.Size(shape).numel() * kind.itemsize].view(kind).view(shape)
    return parts
