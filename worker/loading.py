"""Puts a worker together: weights into a model, a pool beside it, an executor around both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged.attention.backends import BACKENDS
from paged.kernels import Team
from paged.layout import KVLayout
from paged.pool import KVPool
from worker.executor import LocalExecutor
from worker.model_config import ModelConfig
from worker.models.decoder import Decoder
from worker.native_model import NativeModel
from worker.packing import pack_weights, packed_weights
from worker.parallel import Shard
from worker.runner import Model, ModelRunner
from worker.weights import cut_weights, load_weights, replace_weights

Load = Callable[[Path, Mapping[str, Any]], Model]  # of a folder, and tensors by name in place of its own


def load_executor(path: Path, config: ModelConfig, layout: KVLayout, **settings: Any) -> LocalExecutor:
    """A worker in this process for a whole model. Arguments as of `load_runner`."""
    return LocalExecutor(*load_runner(path, config, layout, **settings))


def load_runner(
    path: Path,
    config: ModelConfig,
    layout: KVLayout,
    *,
    num_pages: int,
    max_model_len: int,
    positions: int | None = None,
    device: str = "cpu",
    backend: str = "sdpa",
    quantization: str | None = None,
    threads: int | None = None,
    shard: Shard | None = None,
    total: Callable[[Tensor], Tensor] | None = None,
) -> tuple[ModelRunner, Load]:
    """A runner for the checkpoint in the folder `path`, computing in the layout's dtype; and what loads other weights.

    positions: that a sequence can reach in so many pages, None is max_model_len.
    num_pages counts the null page; threads is for the whole process, None leaves it. With the backend `native` the
    whole model runs on the native kernels, in a quantization if one is given. With a shard only that part of the model
    is here; `config` is the whole model's, `layout` the shard's, and `total` sums over all shards. Raises
    CheckpointError.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    pool = KVPool(layout, num_pages, device)
    dtype = getattr(torch, layout.dtype)
    team = Team(torch.get_num_threads(), len(layout.windows)) if backend == "native" else None
    own = config if shard is None else shard.config(config)

    def native(parts: dict[str, Tensor], team: Team) -> NativeModel:
        return NativeModel(own, parts, pool, max_model_len, team, quantization, positions, total)

    def load(folder: Path, replaced: Mapping[str, Any]) -> Model:
        if team is not None and not replaced:
            return native(packed_weights(folder, config, dtype, quantization, shard), team)
        weights = load_weights(folder, config)
        replace_weights(weights, replaced, config)
        if shard is not None:
            cut_weights(weights, config, shard)
        if team is not None:
            return native(dict(pack_weights(weights, own, dtype, quantization)), team)
        return Decoder(own, weights, max_model_len, dtype, torch.device(device), positions, total)

    return ModelRunner(load(path, {}), pool, BACKENDS[backend]), load
