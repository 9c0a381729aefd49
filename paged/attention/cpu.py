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

    instructions: one of `library().sets`; share: read pages that sequences share once, which changes no bit. Raises
    ValueError for shapes, dtypes, page ids and lengths that do not fit each other.
    """
    tables = meta.query_start, meta.seq_lens, meta.block_tables
    out: Tensor = _attention(q, k_pages, v_pages, *tables, scale, window or 0, soft_cap, instructions, share)
    return out


def attend(
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
    """`paged_attention` of tensors that are known to fit: nothing is checked, and the compiler does not see it."""
    wide = q.float().contiguous()
    out = torch.empty_like(wide)
    tokens, heads, dim = q.shape
    operation = kernels.Attention(
        kernels.ATTENTION, 0, wide.data_ptr(), out.data_ptr(), heads * dim, pages_of(k_pages, v_pages), heads, scale,
        soft_cap, 0, window or 0,
    )  # fmt: skip
    frame, _kept = frame_of(meta, tokens)
    _team(torch.get_num_threads(), instructions).run([operation], frame, share)
    return out.to(q.dtype)


def write(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, meta: AttentionMetadata, instructions: str | None = None
) -> None:
    """Write k and v [tokens, kv_heads, head_dim] to the slots of the metadata.

    Raises ValueError for shapes, dtypes and slots that do not fit.
    """
    _write(k, v, k_pages, v_pages, meta.slots, instructions)


# As operators of PyTorch, so that its compiler and profiler see them.


@torch.library.custom_op("paged::attention", mutates_args=())
def _attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor,
    scale: float, window: int, soft_cap: float, instructions: str | None, share: bool,
) -> Tensor:  # fmt: skip
    _check_pages(k_pages, v_pages)
    _check(q.dim() == 3 and q.shape[2] == k_pages.shape[3], f"q is {list(q.shape)}, pages {list(k_pages.shape)}")
    tokens, heads, _ = q.shape
    _check(heads > 0 and heads % k_pages.shape[2] == 0, f"{heads} query heads do not share {k_pages.shape[2]} KV heads")
    _check_sequences(tokens, query_start, seq_lens, block_tables, k_pages, window)
    none = torch.empty(0, dtype=torch.int64)
    meta = AttentionMetadata(query_start, seq_lens, block_tables, none)
    return attend(q, k_pages, v_pages, meta, scale, window, soft_cap=soft_cap, instructions=instructions, share=share)


@_attention.register_fake
def _(q: Tensor, *_rest: object) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("paged::write", mutates_args=("k_pages", "v_pages"))
def _write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, instructions: str | None) -> None:
    _check_pages(k_pages, v_pages)
    _check(
        k.shape == v.shape == (len(slots), *k_pages.shape[2:]),
        f"k is {list(k.shape)}, v {list(v.shape)}, {len(slots)} slots",
    )
    _check(slots.dtype == torch.int64, f"slots are {slots.dtype}, not int64")
    last = k_pages.shape[0] * k_pages.shape[1] - 1
    _check(not len(slots) or (int(slots.min()) >= 0 and int(slots.max()) <= last), f"slots must be 0 to {last}")
    k, v = k.float().contiguous(), v.float().contiguous()
    operation = kernels.Write(kernels.WRITE, 0, k.data_ptr(), v.data_ptr(), pages_of(k_pages, v_pages), 0)
    none = torch.empty(0, dtype=torch.int32)
    frame, _kept = frame_of(AttentionMetadata(none, none, none[None], slots), len(k))
    _team(torch.get_num_threads(), instructions).run([operation], frame)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _check_pages(k_pages: Tensor, v_pages: Tensor) -> None:
    _check(k_pages.shape == v_pages.shape, f"k_pages is {list(k_pages.shape)}, v_pages {list(v_pages.shape)}")
    _check(k_pages.dim() == 4 and 0 not in k_pages.shape, f"pages are {list(k_pages.shape)}, not four sizes above 0")
    for pages in (k_pages, v_pages):
        _check(pages.dtype in _DTYPES, f"pages are {pages.dtype}, not one of {_DTYPES}")
        _check(pages.dtype == k_pages.dtype, f"k_pages is {k_pages.dtype}, v_pages {v_pages.dtype}")
        _check(pages.device.type == "cpu" and pages.is_contiguous(), "pages must be contiguous and on the CPU")


def _check_sequences(
    tokens: int, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor, k_pages: Tensor, window: int
) -> None:
    kinds = {"query_start": query_start, "seq_lens": seq_lens, "block_tables": block_tables}
    for name, tensor in kinds.items():
        _check(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, not int32")
    count, room = len(seq_lens), k_pages.shape[1] * block_tables.shape[-1]
    _check(
        block_tables.dim() == 2 and len(block_tables) == count, f"{count} sequences, tables {list(block_tables.shape)}"
    )
    _check(query_start.shape == (count + 1,), f"{count} sequences, query_start {list(query_start.shape)}")
    _check(window >= 0, f"window is {window}")
    if not count:
        return
    queries = query_start.diff()
    ends = int(query_start[0]), int(query_start[-1])
    _check(ends[0] >= 0 and ends[1] <= tokens and int(queries.min()) >= 0, f"query_start does not fit {tokens} tokens")
    _check(bool((seq_lens >= queries).all()), "seq_lens must count the queries too")
    _check(int(seq_lens.max()) <= room, f"seq_lens up to {int(seq_lens.max())}, block tables for {room} tokens")
    if block_tables.numel():
        low, high = int(block_tables.min()), int(block_tables.max())
        _check(low >= 0 and high < len(k_pages), f"block tables name pages {low} to {high} of {len(k_pages)}")


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


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.lru_cache(maxsize=8)
def _team(threads: int, instructions: str | None) -> kernels.Team:
    return kernels.Team(threads, instructions=instructions)
