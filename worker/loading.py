"""Puts a worker together: weights into a model, a pool beside it, an executor around both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paged.attention import PagedAttention, cpu, reference, sdpa
from paged.kernels import Team
from paged.layout import KVLayout
from paged.pool import KVPool
from worker.executor import LocalExecutor
from worker.model_config import ModelConfig
from worker.models.decoder import Decoder
from worker.native_model import NativeModel
from worker.packing import pack_weights, packed_weights
from worker.runner import Model, ModelRunner
from worker.weights import load_weights, replace_weights

ATTENTION: dict[str, PagedAttention] = {
    "reference": reference.paged_attention,
    "sdpa": sdpa.paged_attention,
    "native": cpu.paged_attention,
}


def load_executor(
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
) -> LocalExecutor:
    """A worker in this process for the checkpoint in the folder `path`, computing in the layout's dtype.

    positions: that a sequence can reach in so many pages, None is max_model_len.
    num_pages counts the null page; threads is for the whole process, None leaves it. With the backend `native` the
    whole model runs on the native kernels, in a quantization if one is given. Raises CheckpointError.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    pool = KVPool(layout, num_pages, device)
    dtype = getattr(torch, layout.dtype)
    team = Team(torch.get_num_threads(), len(layout.windows)) if backend == "native" else None

    def load(folder: Path, replaced: Mapping[str, Any]) -> Model:
        if team is not None and not replaced:
            parts = packed_weights(folder, config, dtype, quantization)
            return NativeModel(config, parts, pool, max_model_len, team, quantization, positions)
        weights = load_weights(folder, config)
        replace_weights(weights, replaced, config)
        if team is not None:
            parts = dict(pack_weights(weights, config, dtype, quantization))
            return NativeModel(config, parts, pool, max_model_len, team, quantization, positions)
        return Decoder(config, weights, max_model_len, dtype, torch.device(device), positions)

    runner = ModelRunner(load(path, {}), pool, ATTENTION[backend])
    return LocalExecutor(runner, load)
