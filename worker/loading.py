"""Puts a worker together: weights into a model, a pool beside it, an executor around both."""

from __future__ import annotations

from pathlib import Path

import torch

from paged.attention import PagedAttention, reference, sdpa
from paged.layout import KVLayout
from paged.pool import KVPool
from worker.executor import LocalExecutor
from worker.model_config import ModelConfig
from worker.models.llama import Llama
from worker.runner import ModelRunner
from worker.weights import load_weights

ATTENTION: dict[str, PagedAttention] = {"reference": reference.paged_attention, "sdpa": sdpa.paged_attention}


def load_executor(
    path: Path,
    config: ModelConfig,
    layout: KVLayout,
    *,
    num_pages: int,
    max_model_len: int,
    device: str = "cpu",
    backend: str = "sdpa",
    threads: int | None = None,
) -> LocalExecutor:
    """A worker in this process for the checkpoint in the folder `path`, computing in the layout's dtype.

    num_pages counts the null page; threads is for the whole process, None leaves it. Raises CheckpointError.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    weights = load_weights(path, config, getattr(torch, layout.dtype), torch.device(device))
    model = Llama(config, weights, max_model_len)
    return LocalExecutor(ModelRunner(model, KVPool(layout, num_pages, device), ATTENTION[backend]))
