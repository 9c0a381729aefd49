"""A manager's block tables in the forms that attention kernels take. NumPy arrays; `torch.from_numpy` shares them.

    padded   xformers, FlashAttention, torch's varlen_attn    block_tables [seqs, max_pages], and the lengths
    csr      FlashInfer                                       indptr, indices, last_page_len
    slots    where K and V of tokens are written              page * page_size + offset

`seq_lens` are the tokens of each sequence that a kernel is to see, those written in this step included; room beyond
them is left out. In a windowed group the null page stands where pages have left the window. All arrays are contiguous,
and the caller's own.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from paged.errors import PageStateError
from paged.manager import KVCacheManager

Ints = npt.NDArray[np.int32]
Lengths = SequenceOf[int] | npt.NDArray[np.int64]


def padded(manager: KVCacheManager, seq_ids: SequenceOf[int], seq_lens: Lengths, group: int = 0) -> tuple[Ints, Ints]:
    """Block tables int32 [seqs, pages of the longest], padded with the null page, and seq_lens int32 [seqs].

    Raises PageStateError for an unknown sequence, and for one without room for so many tokens; TypeError for lengths
    that are not whole numbers, ValueError for a group that is not there.
    """
    counts = _page_counts(manager, seq_ids, seq_lens)
    tables = np.ascontiguousarray(manager.tables(seq_ids, group)[:, : int(counts.max(initial=0))])
    tables[np.arange(tables.shape[1]) >= counts[:, None]] = 0
    return tables, np.array(seq_lens, dtype=np.int32)


def csr(
    manager: KVCacheManager, seq_ids: SequenceOf[int], seq_lens: Lengths, group: int = 0
) -> tuple[Ints, Ints, Ints]:
    """indptr int32 [seqs + 1], indices int32 [pages] and last_page_len int32 [seqs], 1 to page_size (0 of no token).

    The pages of sequence i are indices[indptr[i]:indptr[i + 1]]. Raises as `padded`.
    """
    counts = _page_counts(manager, seq_ids, seq_lens)
    tables = manager.tables(seq_ids, group)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    indices = tables[np.arange(tables.shape[1]) < counts[:, None]]
    last = np.asarray(seq_lens, dtype=np.int64) - np.maximum(counts - 1, 0) * manager.page_size
    return indptr, indices, last.astype(np.int32)


def slots(
    manager: KVCacheManager, seq_ids: SequenceOf[int], starts: Lengths, stops: Lengths, group: int = 0
) -> npt.NDArray[np.int64]:
    """The slots of positions starts[i] to stops[i] - 1 of each sequence, one after another, int64 [tokens].

    Raises PageStateError for an unknown sequence, IndexError for positions without a page, or whose page has left the
    window; TypeError for positions that are not whole numbers, ValueError for a group that is not there, and for other
    starts and stops than one for each sequence.
    """
    manager._check_group(group)
    parts = [
        manager.table(seq_id, group).slots(start, stop)
        for seq_id, start, stop in zip(seq_ids, starts, stops, strict=True)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _page_counts(manager: KVCacheManager, seq_ids: SequenceOf[int], seq_lens: Lengths) -> npt.NDArray[np.int64]:
    if len(seq_lens) and np.asarray(seq_lens).dtype.kind not in "iu":
        raise TypeError(f"lengths are whole numbers of 64 bits, not {seq_lens!r:.80}")
    lengths = np.asarray(seq_lens, dtype=np.int64)
    room = np.array([manager.room(seq_id) for seq_id in seq_ids], dtype=np.int64)
    if lengths.shape != room.shape or (lengths < 0).any() or (lengths > room).any():
        raise PageStateError(f"sequences {list(seq_ids)} have room for {room.tolist()} tokens, not {lengths.tolist()}")
    return -(-lengths // manager.page_size)
