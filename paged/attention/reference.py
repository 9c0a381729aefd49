"""The definition of paged attention, in plain torch and one sequence at a time. Slow, and right."""

from __future__ import annotations

import torch
from torch import Tensor

from paged.attention import AttentionMetadata


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None = None,
    *,
    soft_cap: float = 0.0,
) -> Tensor:
    """softmax(scale * q k^T) v over all tokens of a query's sequence up to and including its own.

    With a window over only the last `window` of those; pages before it are not read. With a soft cap scores are
    soft_cap * tanh(score / soft_cap) (Gemma Team, "Gemma 2", 2024).
    q: [tokens, heads, head_dim]; k_pages, v_pages: [pages, page_size, kv_heads, head_dim], the new K and V already
    written; heads is a multiple of kv_heads, and query head h reads kv head h // (heads // kv_heads).
    Returns [tokens, heads, head_dim] in the dtype of q; everything in between is float32 at least.
    Formula: Vaswani et al., "Attention Is All You Need", 2017, equation 1; grouped heads: Ainslie et al., "GQA", 2023.
    """
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    group = q.shape[1] // kv_heads
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    starts, lens = meta.query_start.tolist(), meta.seq_lens.tolist()
    for i, seq_len in enumerate(lens):
        first, last = starts[i], starts[i + 1]
        if first == last:
            continue
        positions = torch.arange(seq_len - (last - first), seq_len, device=q.device)
        seen = torch.arange(first_seen(seq_len, last - first, window), seq_len, device=q.device)  # positions of keys
        slots = meta.block_tables[i].long()[seen // page_size] * page_size + seen % page_size
        k = k_pages.flatten(0, 1)[slots].to(wide).repeat_interleave(group, dim=1)  # [seen, heads, dim]
        v = v_pages.flatten(0, 1)[slots].to(wide).repeat_interleave(group, dim=1)
        scores = scale * torch.einsum("thd,shd->hts", q[first:last].to(wide), k)
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        unseen = seen[None, :] > positions[:, None]  # [queries, seen]
        if window is not None:
            unseen |= seen[None, :] <= positions[:, None] - window
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        out[first:last] = torch.einsum("hts,shd->thd", weights, v).to(q.dtype)
    return out


def first_seen(seq_len: int, num_queries: int, window: int | None) -> int:
    """The first position that any of the last `num_queries` tokens sees."""
    return 0 if window is None else max(0, seq_len - num_queries - window + 1)
