"""Shards: which part of a model's layers each worker of a replica holds. No torch.

A shard has whole heads: some of the KV heads, one after another, and the query heads that belong to them. Where there
are fewer KV heads than workers, several workers hold the same one, and divide its query heads. The inner dimension of
the MLP is divided in multiples of 32, the groups in which int8 and int4 round, so that a shard's weights are rounded as
the whole model's. Matrices that lead into a half of a layer are cut by rows, those that lead out by columns: what they
give is summed over the workers. Embedding and norms are everywhere, the head is with rank 0, which alone samples.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from paged.errors import ConfigError
from worker.model_config import ModelConfig

GROUP = 32


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one worker, as numbers of what the whole model has."""

    rank: int
    size: int  # workers
    heads: range
    kv_heads: range
    inner: range  # of intermediate_size

    def config(self, config: ModelConfig) -> ModelConfig:
        """The whole model's config as this shard's: its heads, its inner dimension."""
        return replace(
            config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
        )


def shards(config: ModelConfig, size: int) -> tuple[Shard, ...]:
    """A shard for each of `size` workers, by rank. Raises ConfigError where the model cannot be divided so."""
    if size > 1 and config.qk_norm == "all":
        raise ConfigError(
            f"tensor_parallel_size is {size}, and this model norms all heads of a token together, which no worker has: "
            "use 1"
        )
    group = config.num_heads // config.num_kv_heads  # query heads of a KV head
    holders = _shares(size, config.num_kv_heads) if size > config.num_kv_heads else [1] * config.num_kv_heads
    if max(holders) > group:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and {config.num_heads} query heads of {config.num_kv_heads} key/value "
            f"heads can be divided over at most {config.num_heads}: lower it"
        )
    if config.intermediate_size < size:
        raise ConfigError(f"tensor_parallel_size is {size}, and the MLP has {config.intermediate_size} rows: lower it")
    if size > config.num_kv_heads:
        kv_heads = [range(i, i + 1) for i, count in enumerate(holders) for _ in range(count)]
        heads = _ranges([share for count in holders for share in _shares(group, count)])
    else:
        kv_heads = _ranges(_shares(config.num_kv_heads, size))
        heads = [range(some.start * group, some.stop * group) for some in kv_heads]
    unit = GROUP if config.intermediate_size >= GROUP * size else 1
    inner = [unit * share for share in _shares(config.intermediate_size // unit, size)]
    inner[-1] += config.intermediate_size % unit
    parts = zip(heads, kv_heads, _ranges(inner), strict=True)
    return tuple(Shard(rank, size, *part) for rank, part in enumerate(parts))


def _shares(total: int, parts: int) -> list[int]:
    """`total` as so many parts that differ by at most one, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def _ranges(sizes: SequenceOf[int]) -> list[range]:
    """Ranges of these sizes, one after another."""
    return [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
