"""Weights as the native kernels take them. Of a converted model they are packed once, and mapped from then on.

A packed model is one file: the tensors, each at a multiple of 64 bytes, written as they are packed; then JSON with each
tensor's name, dtype, shape and place, and the length of that in 8 bytes. It lies in the cache beside the model that was
converted there, under its name, which has the digest of the model's file, the format, and the version of what is
packed; it appears there whole or not at all. All instruction sets take the same packed bytes. A user's own folder may
change, so it is packed at every start.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from worker.checkpoints import CacheError, cached, default_cache
from worker.device import head_format
from worker.kernels.native import pack
from worker.model_config import ModelConfig
from worker.parallel import Shard
from worker.tensors import EMBEDDING, HEAD, MATRICES, NORM, NORMS, layer_parts
from worker.weights import cut_weights, load_weights, take

VERSION = 3  # to be raised when what is packed changes
ALIGNMENT = 64
FILE = "packed.bin"
_LENGTH = 8  # bytes of the last number


def packed_weights(
    path: Path, config: ModelConfig, dtype: torch.dtype, quantization: str | None, shard: Shard | None = None
) -> dict[str, Tensor]:
    """The packed tensors of the checkpoint in the folder `path`, or of a shard of it. Raises CheckpointError."""

    def packed() -> Iterator[tuple[str, Tensor]]:
        weights = load_weights(path, config)
        if shard is not None:
            cut_weights(weights, config, shard)
        return pack_weights(weights, config if shard is None else shard.config(config), dtype, quantization)

    if path.parent != default_cache():
        return dict(packed())
    formats = "-".join([str(dtype).removeprefix("torch."), *([quantization] if quantization else [])])
    part = "" if shard is None else f"-{shard.rank}-of-{shard.size}"
    key = f"{path.name}-{formats}{part}-packed-v{VERSION}"
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
        return dict(packed())


def pack_weights(
    weights: dict[str, Tensor], config: ModelConfig, dtype: torch.dtype, quantization: str | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a NativeModel by name. Takes the weights out of the dict, one by one. A shard may have no head.

    Matrices are quantised from what the checkpoint holds, not from that in `dtype`: GGUF's Q8_0 and Q4_0, which have
    the same groups of 32 as our int8 and int4, become exactly what they were.
    """
    own = str(dtype).removeprefix("torch.")
    embedding, head = weights.pop(EMBEDDING), weights.pop(HEAD, None)
    if head is not None:
        yield "head", pack(head, head_format(own, quantization)).packed
    yield "embedding", embedding.to(dtype)
    yield "norm", weights.pop(NORM).float() + config.norm_offset
    for i in range(config.num_layers):
        for part, names in layer_parts(config).items():
            tensor = take(weights, *(f"model.layers.{i}.{name}" for name in names))
            if part in MATRICES:
                yield f"{i}.{part}", pack(tensor, quantization or own).packed
            else:
                yield f"{i}.{part}", tensor.float() + (config.norm_offset if part in NORMS else 0.0)
    assert not weights, f"weights that nothing uses: {sorted(weights)}"


def _write(file: Path, parts: Iterable[tuple[str, Tensor]]) -> None:
    places: dict[str, tuple[str, list[int], int]] = {}
    with file.open("wb") as out:
        for name, tensor in parts:
            places[name] = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), out.tell()
            out.write(tensor.contiguous().view(torch.uint8).numpy().data)
            out.write(bytes(-out.tell() % ALIGNMENT))
        index = json.dumps(places).encode()
        out.write(index + len(index).to_bytes(_LENGTH, "little"))


def _map(file: Path) -> dict[str, Tensor]:
    """Raises ValueError for a file that is not as long as it says; what is in it is not looked at."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        opened.seek(max(0, size - _LENGTH))
        length = int.from_bytes(opened.read(), "little")
        if length + _LENGTH > size:
            raise ValueError(f"it has {size} bytes, and {length} at its end would say what they are")
        opened.seek(size - _LENGTH - length)
        places = json.loads(opened.read(length))
    ends = [
        start + torch.Size(shape).numel() * getattr(torch, dtype).itemsize for dtype, shape, start in places.values()
    ]
    wanted = -(-max(ends) // ALIGNMENT) * ALIGNMENT + length + _LENGTH
    if size != wanted:
        raise ValueError(f"it has {size} bytes of {wanted}")
    raw = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    parts = {}
    for name, (dtype, shape, start) in places.items():
        kind = getattr(torch, dtype)
        parts[name] = raw[start : start + torch.Size(shape).numel() * kind.itemsize].view(kind).view(shape)
    return parts
