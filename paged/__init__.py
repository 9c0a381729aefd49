"""paged: a manager for the paged KV cache of transformer decoders, and the batched serving engine around it.

The memory half is imported here and needs no torch. What needs more is found by name on first use:

    from paged import LLM, SamplingParams
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged.allocator import NULL_PAGE, BlockAllocator
from paged.block_table import BlockTable, pages_for
from paged.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    EngineClosed,
    InvariantError,
    OutOfPages,
    PagedError,
    PageStateError,
    RequestError,
    RequestFailed,
    StepError,
)
from paged.layout import KVLayout
from paged.manager import KVCacheManager
from paged.pages import Mark, Move
from paged.prefix_cache import PrefixCache, namespace

if TYPE_CHECKING:
    from paged.attention import AttentionMetadata
    from paged.hf import PagedCache
    from paged.pool import KVPool
    from scheduler.async_llm import AsyncLLM
    from scheduler.beam import BeamSearchParams
    from scheduler.cluster import Cluster, ReplicaStatus
    from scheduler.config import EngineConfig
    from scheduler.engine import Engine
    from scheduler.llm import LLM
    from scheduler.metrics import Metrics, MetricsSummary, Percentiles
    from scheduler.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput
    from scheduler.policy import Limits, Rules
    from scheduler.ray_data import Generate
    from worker.executor import Executor, WorkerLost
    from worker.step import SamplingParams, Step, StepResult, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    # memory
    "NULL_PAGE",
    "BlockAllocator",
    "BlockTable",
    "KVCacheManager",
    "KVLayout",
    "Mark",
    "Move",
    "PrefixCache",
    "namespace",
    "pages_for",
    # memory that needs torch
    "AttentionMetadata",
    "KVPool",
    "PagedCache",
    # the engine
    "LLM",
    "AsyncLLM",
    "Cluster",
    "ReplicaStatus",
    "Generate",
    "SamplingParams",
    "StructuredOutputsParams",
    "BeamSearchParams",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Limits",
    "Rules",
    "Executor",
    "RequestMetrics",
    "Metrics",
    "MetricsSummary",
    "Percentiles",
    "Step",
    "StepResult",
    # errors
    "PagedError",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "EngineClosed",
    "InvariantError",
    "OutOfPages",
    "PageStateError",
    "RequestError",
    "RequestFailed",
    "StepError",
    "WorkerLost",
]

_FORWARDED = {
    "AttentionMetadata": "paged.attention",
    "KVPool": "paged.pool",
    "PagedCache": "paged.hf",
    "LLM": "scheduler.llm",
    "AsyncLLM": "scheduler.async_llm",
    "Cluster": "scheduler.cluster",
    "ReplicaStatus": "scheduler.cluster",
    "Generate": "scheduler.ray_data",
    "RequestOutput": "scheduler.outputs",
    "CompletionOutput": "scheduler.outputs",
    "Logprob": "scheduler.outputs",
    "EngineStats": "scheduler.outputs",
    "RequestMetrics": "scheduler.outputs",
    "Metrics": "scheduler.metrics",
    "MetricsSummary": "scheduler.metrics",
    "Percentiles": "scheduler.metrics",
    "BeamSearchParams": "scheduler.beam",
    "Engine": "scheduler.engine",
    "EngineConfig": "scheduler.config",
    "Limits": "scheduler.policy",
    "Rules": "scheduler.policy",
    "Executor": "worker.executor",
    "WorkerLost": "worker.executor",
    "SamplingParams": "worker.step",
    "Step": "worker.step",
    "StepResult": "worker.step",
    "StructuredOutputsParams": "worker.step",
}


def __getattr__(name: str) -> Any:
    if name not in _FORWARDED:
        raise AttributeError(f"module 'paged' has no attribute {name!r}")
    if not _FORWARDED[name].startswith("paged."):
        _check_siblings()
    value = getattr(importlib.import_module(_FORWARDED[name]), name)
    value.__module__ = __name__  # users are shown only `paged`
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _check_siblings() -> None:
    """`scheduler` and `worker` are common names: another package of that name must not be taken for ours."""
    home = Path(__file__).resolve().parent.parent
    for name in ("scheduler", "worker"):
        spec = find_spec(name)
        places = [Path(place).resolve().parent for place in (spec.submodule_search_locations or ())] if spec else []
        if home not in places:
            found = (spec.origin or str(places[0])) if spec else "nothing"
            raise ImportError(f"paged needs its own package {name!r} beside it, in {home}, and found {found}")


for _name in ("BlockAllocator", "BlockTable", "KVCacheManager", "KVLayout", "Mark", "Move", "PrefixCache"):
    globals()[_name].__module__ = __name__
for _name in (n for n in __all__ if n.endswith(("Error", "Pages", "Failed", "Closed"))):
    globals()[_name].__module__ = __name__
del _name
