"""Paged attention by gathering each sequence's K and V and PyTorch's scaled_dot_product_attention.

Every sequence by itself, and the query heads that share a KV head as rows of one matrix, so that K and V are neither
padded nor repeated: the fastest form in pure torch that we measured.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged.attention import AttentionMetadata
from paged.attention.reference import first_seen


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
    """As `reference.paged_attention`, which see for shapes and meaning."""
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    group = heads // kv_heads
    out = torch.empty_like(q)
    # [kv_heads, group, tokens, head_dim]: of one sequence, a view whose middle axes are the rows of one matrix
    grouped = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    result = out.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    starts, lens = meta.query_start.tolist(), meta.seq_lens.tolist()
    for i, seq_len in enumerate(lens):
        first, last = starts[i], starts[i + 1]
        num = last - first
        if num == 0:
            continue
        seen = first_seen(seq_len, num, window)
        page = seen // page_size
        table = meta.block_tables[i, page : -(-seq_len // page_size)]
        part = slice(seen - page * page_size, seq_len - page * page_size)
        # [kv_heads, seen, head_dim]
        k = k_pages.index_select(0, table).flatten(0, 1)[part].transpose(0, 1)
        v = v_pages.index_select(0, table).flatten(0, 1)[part].transpose(0, 1)
        rows = grouped[:, :, first:last].reshape(1, kv_heads, group * num, head_dim)
        mask = None if num == 1 else _mask(num, seq_len - seen, window, q).repeat(group, 1)
        if soft_cap:  # which PyTorch's function does not have
            scores = soft_cap * torch.tanh(rows.float() @ k.float().transpose(1, 2) * (scale / soft_cap))
            weights = (scores if mask is None else scores + mask).softmax(dim=-1)
            attended = (weights @ v.float()).to(q.dtype)
        else:
            attended = scaled_dot_product_attention(rows, k[None], v[None], attn_mask=mask, scale=scale)
        result[:, :, first:last] = attended.view(kv_heads, group, num, head_dim)
    return out


def _mask(num: int, num_keys: int, window: int | None, like: Tensor) -> Tensor:
    """Added to the scores [num, num_keys] of a sequence's last `num` tokens: -inf where a key is not seen."""
    unseen = torch.full((num, num_keys), float("-inf"), dtype=like.dtype, device=like.device)
    future = unseen.triu(diagonal=num_keys - num + 1)
    return future if window is None else future + unseen.tril(diagonal=num_keys - num - window)
