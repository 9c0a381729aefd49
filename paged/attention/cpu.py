"""Paged attention by the native kernels (paged/kernels/attention.inc), and the writing of K and V."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from paged import kernels
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
    instructions: str | None = None,
    share: bool = True,
) -> Tensor:
    """As `reference.paged_attention`, which see for shapes and meaning; everything in between is float32.

    instructions: one of `library().sets`; share: read pages that sequences share once, which changes no bit.
    """
    tables = meta.query_start, meta.seq_lens, meta.block_tables
    out: Tensor = _attention(q, k_pages, v_pages, *tables, scale, window or 0, soft_cap, instructions, share)
    return out


def write(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, meta: AttentionMetadata, instructions: str | None = None
) -> None:
    """Write k and v [tokens, kv_heads, head_dim] to the slots of the metadata."""
    _write(k, v, k_pages, v_pages, meta.slots, instructions)


# As operators of PyTorch, so that its compiler and profiler see them.


@torch.library.custom_op("paged::attention", mutates_args=())
def _attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor,
    scale: float, window: int, soft_cap: float, instructions: str | None, share: bool,
) -> Tensor:  # fmt: skip
    wide = q.float().contiguous()
    out = torch.empty_like(wide)
    tokens, heads, dim = q.shape
    operation = kernels.Attention(
        kernels.ATTENTION, 0, wide.data_ptr(), out.data_ptr(), heads * dim, pages_of(k_pages, v_pages), heads, scale,
        soft_cap, 0, window,
    )  # fmt: skip
    none = torch.empty(0, dtype=torch.int64)
    frame, _kept = frame_of(AttentionMetadata(query_start, seq_lens, block_tables, none), tokens)
    _team(torch.get_num_threads(), instructions).run([operation], frame, share)
    return out.to(q.dtype)


@_attention.register_fake
def _(q: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("paged::write", mutates_args=("k_pages", "v_pages"))
def _write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, instructions: str | None) -> None:
    k, v = k.float().contiguous(), v.float().contiguous()
    operation = kernels.Write(kernels.WRITE, 0, k.data_ptr(), v.data_ptr(), pages_of(k_pages, v_pages), 0)
    none = torch.empty(0, dtype=torch.int32)
    frame, _kept = frame_of(AttentionMetadata(none, none, none[None], slots), len(k))
    _team(torch.get_num_threads(), instructions).run([operation], frame)


def pages_of(k_pages: Tensor, v_pages: Tensor) -> kernels.Pages:
    """K and V of one layer, contiguous [pages, page_size, kv_heads, head_dim]."""
    assert k_pages.is_contiguous()
    assert v_pages.is_contiguous()
    _, page_size, kv_heads, dim = k_pages.shape
    format_ = kernels.FORMATS[str(k_pages.dtype).removeprefix("torch.")]
    return kernels.Pages(k_pages.data_ptr(), v_pages.data_ptr(), format_, page_size, kv_heads, dim)


def sequences_of(meta: AttentionMetadata) -> tuple[kernels.Sequences, tuple[Tensor, ...]]:
    """The sequences, and the tensors that they point to."""
    kept = tuple(t.contiguous() for t in (meta.query_start, meta.seq_lens, meta.block_tables, meta.slots))
    start, lens, tables, slots = kept
    assert start.dtype == lens.dtype == tables.dtype == torch.int32
    assert slots.dtype == torch.int64
    return kernels.Sequences(start.data_ptr(), lens.data_ptr(), tables.data_ptr(), tables.shape[1], len(lens)), kept


def frame_of(meta: AttentionMetadata, tokens: int) -> tuple[kernels.Frame, object]:
    """The frame of operations that know only pages, and what must outlive it."""
    sequences, kept = sequences_of(meta)
    slots = (ctypes.c_void_p * 1)(kept[-1].data_ptr())
    return kernels.Frame(tokens=tokens, groups=ctypes.pointer(sequences), slots=slots), (sequences, kept, slots)


@functools.lru_cache(maxsize=8)
def _team(threads: int, instructions: str | None) -> kernels.Team:
    return kernels.Team(threads, instructions=instructions)
