"""Every backend of paged attention against one dense oracle in float64, over random ragged batches."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from paged.attention import AttentionMetadata, PagedAttention, cpu, reference, sdpa
from paged.kernels import library

NATIVE = library()
BACKENDS: dict[str, PagedAttention] = {
    "reference": reference.paged_attention,
    "sdpa": sdpa.paged_attention,
    **{name: partial(cpu.paged_attention, instructions=name) for name in (NATIVE.sets if NATIVE else ())},
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest value of the oracle's output

PAGE_SIZES, GROUPS, HEAD_DIMS, KV_HEADS = [1, 4, 16, 64, 256], [1, 3, 4], [16, 64, 80], [1, 2, 3]
WINDOWS = [1, 7, 16, 40, 1000]  # of one token, over and at the ends of pages, and longer than any sequence
# Every page size with every group and head dim; the number of KV heads goes round with them.
SHAPES = [
    (page_size, group, head_dim, KV_HEADS[i % 3])
    for i, (page_size, group, head_dim) in enumerate(itertools.product(PAGE_SIZES, GROUPS, HEAD_DIMS))
]


@dataclass(frozen=True)
class Batch:
    """One step: packed queries over pages, and for the oracle each sequence's own K and V, never in pages."""

    q: Tensor  # [tokens, heads, head_dim]
    k_pages: Tensor  # [pages, page_size, kv_heads, head_dim], NaN wherever no token lies
    v_pages: Tensor
    meta: AttentionMetadata
    scale: float
    dense: list[tuple[Tensor, Tensor]]  # per sequence K and V, [seq, kv_heads, head_dim]
    window: int | None

    def run(self, backend: PagedAttention) -> Tensor:
        return backend(self.q, self.k_pages, self.v_pages, self.meta, self.scale, self.window)


def make(
    page_size: int, group: int, head_dim: int, kv_heads: int, dtype: torch.dtype, window: int | None = None
) -> Batch:
    """Sequences of one token, whole prompts, chunks after a past, single tokens at and around the end of a page.

    Pages that lie wholly before the window of a sequence's first query are NaN, and the null page in its table.
    """
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    longest = 2 * page_size + 40
    lengths = [(1, 1), (page_size, 1), (page_size + 1, 1), (2 * page_size, 2 * page_size), (longest, 7)]
    for _ in range(4):
        length = rng.randint(1, longest)
        lengths.append((length, rng.choice([1, length, rng.randint(1, length)])))
    rng.shuffle(lengths)
    num_pages = [-(-length // page_size) for length, _ in lengths]
    owned = list(range(1, sum(num_pages) + 4))  # three pages are nobody's, and neither is page 0
    rng.shuffle(owned)
    shape = (len(owned) + 1, page_size, kv_heads, head_dim)
    k_pages, v_pages = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    tables = torch.zeros(len(lengths), max(num_pages) + 2, dtype=torch.int32)
    dense, new_slots = [], []
    for i, (length, queries) in enumerate(lengths):
        table, owned = owned[: num_pages[i]], owned[num_pages[i] :]
        tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
        slots = [table[p // page_size] * page_size + p % page_size for p in range(length)]
        k, v = (torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
        k_pages.view(-1, kv_heads, head_dim)[slots] = k
        v_pages.view(-1, kv_heads, head_dim)[slots] = v
        passed = 0 if window is None else max(0, length - queries + 1 - window) // page_size
        k_pages[table[:passed]] = v_pages[table[:passed]] = float("nan")
        tables[i, :passed] = 0
        dense.append((k, v))
        new_slots += slots[length - queries :]
    starts = [0, *itertools.accumulate(queries for _, queries in lengths)]
    meta = AttentionMetadata(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([length for length, _ in lengths], dtype=torch.int32),
        tables,
        torch.tensor(new_slots, dtype=torch.int64),
    )
    q = torch.randn(starts[-1], kv_heads * group, head_dim, generator=generator).to(dtype)
    return Batch(q, k_pages, v_pages, meta, 1.7 * head_dim**-0.5, dense, window)


def oracle(batch: Batch, shift: int = 0) -> Tensor:
    """Sequence by sequence and head by head in float64. A query sees `shift` tokens past its own; 0 is right."""
    starts = batch.meta.query_start.tolist()
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    group = batch.q.shape[1] // batch.k_pages.shape[2]
    for i, (k, v) in enumerate(batch.dense):
        rows = slice(starts[i], starts[i + 1])
        own = torch.arange(len(k))[len(k) - (rows.stop - rows.start) :, None]  # [queries, 1]
        seen = torch.arange(len(k)) <= (own + shift).clamp(min=0)  # [queries, seq]
        if batch.window is not None:
            seen &= torch.arange(len(k)) > own - batch.window
        for head in range(batch.q.shape[1]):
            keys, values = k[:, head // group].double(), v[:, head // group].double()
            weights = (batch.scale * (batch.q[rows, head].double() @ keys.T)).exp() * seen
            out[rows, head] = (weights @ values) / weights.sum(dim=1, keepdim=True)
    return out


def assert_close(batch: Batch, found: Tensor, wanted: Tensor) -> None:
    """The largest error, NaN being the largest of all, is within the tolerance of the largest value."""
    assert found.shape == batch.q.shape
    assert found.dtype == batch.q.dtype
    error = (found.double() - wanted).abs().max().item() / wanted.abs().max().item()
    assert error <= TOLERANCE[batch.q.dtype], f"off by {error:.1e} of the largest value"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("page_size", "group", "head_dim", "kv_heads"), SHAPES)
def test_every_backend_agrees_with_dense_attention_in_float64(
    page_size: int, group: int, head_dim: int, kv_heads: int, dtype: torch.dtype
) -> None:
    batch = make(page_size, group, head_dim, kv_heads, dtype)
    wanted = oracle(batch)
    for backend in BACKENDS.values():
        assert_close(batch, batch.run(backend), wanted)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_with_a_window_too_and_without_what_lies_before_it(page_size: int, dtype: torch.dtype, window: int) -> None:
    batch = make(page_size, 3, 16, 2, dtype, window)
    wanted = oracle(batch)
    for backend in BACKENDS.values():
        assert_close(batch, batch.run(backend), wanted)


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("window", [7, 16, 40])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
def test_a_window_that_is_off_by_one_fails_that_comparison(dtype: torch.dtype, window: int, off: int) -> None:
    batch = make(16, 3, 16, 2, dtype, window)
    with pytest.raises(AssertionError, match="of the largest value"):
        assert_close(batch, oracle(replace(batch, window=window + off)).to(dtype), oracle(batch))


@pytest.mark.parametrize("name", BACKENDS)
def test_reading_a_page_before_the_window_fails_that_comparison(name: str) -> None:
    batch = replace(make(4, 3, 16, 2, torch.float32, window=7), window=12)
    with pytest.raises(AssertionError, match="off by nan"):
        assert_close(batch, batch.run(BACKENDS[name]), oracle(batch))


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_mask_that_is_off_by_one_fails_that_comparison(page_size: int, dtype: torch.dtype, shift: int) -> None:
    batch = make(page_size, 3, 64, 2, dtype)
    with pytest.raises(AssertionError, match="of the largest value"):
        assert_close(batch, oracle(batch, shift).to(dtype), oracle(batch))


@pytest.mark.parametrize("name", BACKENDS)
def test_reading_a_slot_without_a_token_fails_that_comparison(name: str) -> None:
    """The poison works: a sequence said to be one token longer than it is reads NaN."""
    batch = make(16, 3, 64, 2, torch.float32)
    batch.meta.seq_lens[batch.meta.seq_lens % 16 != 0] += 1
    with pytest.raises(AssertionError, match="off by nan"):
        assert_close(batch, batch.run(BACKENDS[name]), oracle(batch))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sequence_without_queries_adds_nothing(name: str) -> None:
    batch = make(4, 3, 16, 2, torch.float32)
    starts = torch.cat([batch.meta.query_start[:1], batch.meta.query_start])
    lens = torch.cat([torch.tensor([9], dtype=torch.int32), batch.meta.seq_lens])
    tables = torch.cat([torch.zeros_like(batch.meta.block_tables[:1]), batch.meta.block_tables])
    meta = AttentionMetadata(starts, lens, tables, batch.meta.slots)
    found = BACKENDS[name](batch.q, batch.k_pages, batch.v_pages, meta, batch.scale, None)
    assert_close(batch, found, oracle(batch))


@pytest.mark.parametrize("name", BACKENDS)
def test_queries_that_are_a_slice_of_something_wider_give_the_same(name: str) -> None:
    """As q is, cut from one projection of q, k and v."""
    batch = make(4, 3, 16, 2, torch.float32)
    tokens, heads, head_dim = batch.q.shape
    wide = torch.cat([batch.q.reshape(tokens, -1), torch.randn(tokens, 64)], dim=1)
    sliced = wide[:, : heads * head_dim].view(tokens, heads, head_dim)
    found = BACKENDS[name](sliced, batch.k_pages, batch.v_pages, batch.meta, batch.scale, None)
    assert_close(batch, found, oracle(batch))


@pytest.mark.parametrize("name", BACKENDS)
def test_attention_changes_neither_queries_nor_pages(name: str) -> None:
    batch = make(4, 3, 16, 2, torch.float32)
    before = [tensor.clone() for tensor in (batch.q, batch.k_pages, batch.v_pages)]
    batch.run(BACKENDS[name])
    for now, then in zip((batch.q, batch.k_pages, batch.v_pages), before, strict=True):
        assert torch.equal(now.nan_to_num(7), then.nan_to_num(7))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("steps", [[10], [3, 3, 3, 1], [1] * 10], ids=str)
def test_n08_a_window_of_four_has_its_own_token_and_three_before(backend: PagedAttention, steps: list[int]) -> None:
    """Equal scores, values one-hot by position: the output is which keys a query saw, however it was computed."""
    k, v = torch.zeros(4, 4, 1, 16), torch.zeros(4, 4, 1, 16)
    v.view(16, 16)[4:14, :10] = torch.eye(10)  # page 0 is the null page
    found, done = [], 0
    for count in steps:
        meta = AttentionMetadata(
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([done + count], dtype=torch.int32),
            torch.tensor([[1, 2, 3]], dtype=torch.int32),
            torch.arange(4 + done, 4 + done + count),
        )
        found.append(backend(torch.ones(count, 1, 16), k, v, meta, 1.0, 4))
        done += count
    wanted = [[1 / min(4, i + 1) if max(0, i - 3) <= j <= i else 0.0 for j in range(10)] for i in range(10)]
    assert torch.allclose(torch.cat(found)[:, 0, :10], torch.tensor(wanted), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_backend_caps_scores_alike(backend: PagedAttention, window: int | None, dtype: torch.dtype) -> None:
    batch = make(16, 3, 64, 2, dtype, window)
    q = batch.q * 5
    wanted = reference.paged_attention(q, batch.k_pages, batch.v_pages, batch.meta, batch.scale, window, soft_cap=2.0)
    found = backend(q, batch.k_pages, batch.v_pages, batch.meta, batch.scale, window, soft_cap=2.0)
    plain = backend(q, batch.k_pages, batch.v_pages, batch.meta, batch.scale, window)
    assert float((found.double() - wanted.double()).norm() / wanted.double().norm()) < TOLERANCE[dtype] / 2
    assert not torch.allclose(plain, wanted, atol=1e-2)
