"""Attention of packed queries over the pages of their sequences.

Every backend is a function with the signature of `reference.paged_attention`, which defines what is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which queries belong to whom, and where their keys lie in the pages of one group.

    All sequences lie one after another on one flat axis.
    """

    query_start: Tensor  # [seqs + 1] int32: sequence i has the queries query_start[i] to query_start[i + 1] - 1
    seq_lens: Tensor  # [seqs] int32: tokens of each sequence, those of this step included; its queries are the last
    block_tables: Tensor  # [seqs, max_pages] int32, padded with the null page
    slots: Tensor  # [tokens] int64: where K and V of this step's tokens are written


class PagedAttention(Protocol):
    """`reference.paged_attention`, which see, or what does the same."""

    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int | None = None,
        *,
        soft_cap: float = 0.0,
    ) -> Tensor: ...
