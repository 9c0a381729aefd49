"""Slots and offsets past 2^31: pools larger than a 32-bit number counts, of which only a few pages are ever touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paged import AttentionMetadata, BlockTable, KVLayout, KVPool, Move
from paged.attention import PagedAttention, reference, sdpa
from paged.sizing import host_memory

PAGE_SIZE, KV_HEADS, HEAD_DIM = 16, 2, 64
PER_PAGE = PAGE_SIZE * KV_HEADS * HEAD_DIM
NUM_PAGES = 2**31 // PER_PAGE + 1024  # 2^31 elements and 2 million more, 4 GiB of each of K and V
LAST = NUM_PAGES - 1
# Low pages, both sides of 2^31 elements, high pages: among them those that 32-bit offsets in bytes would mix up.
MIXED = [LAST, 1, 2**31 // PER_PAGE - 1, 2**31 // PER_PAGE, 2**31 // PER_PAGE + 1, 2, LAST - 1]
LOW = [3, 4, 5, 6, 7, 8, 9]


@pytest.fixture(params=["bfloat16", "float16"])
def pool(request: pytest.FixtureRequest) -> KVPool:
    return KVPool(KVLayout(1, KV_HEADS, HEAD_DIM, request.param, PAGE_SIZE), NUM_PAGES)


def random(pool: KVPool, tokens: int, heads: int = KV_HEADS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens + heads)
    return torch.randn(tokens, heads, HEAD_DIM, generator=generator).to(pool.k[0].dtype)


def slots_of(pages: list[int]) -> torch.Tensor:
    table = BlockTable(PAGE_SIZE, pages)
    return torch.from_numpy(table.slots(0, table.capacity))


def test_what_is_written_on_both_sides_of_2_31_elements_is_read_back(pool: KVPool) -> None:
    before = host_memory()
    assert pool.k[0].numel() > 2**31
    slots = slots_of(MIXED)
    k, v = random(pool, len(slots)), -random(pool, len(slots))
    pool.write(0, k, v, slots)
    found = pool.read(0, slots)
    assert torch.equal(found[0], k)
    assert torch.equal(found[1], v)
    for i, page in enumerate(MIXED):
        assert torch.equal(pool.k[0][page], k[i * PAGE_SIZE : (i + 1) * PAGE_SIZE])
    after = host_memory()
    assert before is not None
    assert after is not None
    assert after.own - before.own < 100 * 2**20  # the rest of 8 GiB was never touched


@pytest.mark.parametrize(("source", "target"), [(LAST, 1), (1, LAST), (LAST, LAST - 1)])
def test_moves_reach_the_last_pages(pool: KVPool, source: int, target: int) -> None:
    k, v = random(pool, PAGE_SIZE), -random(pool, PAGE_SIZE)
    pool.write(0, k, v, slots_of([source]))
    pool.apply([Move(source, target)])
    found = pool.read(0, slots_of([target]))
    assert torch.equal(found[0], k)
    assert torch.equal(found[1], v)


@pytest.mark.parametrize("attention", [reference.paged_attention, sdpa.paged_attention], ids=["reference", "sdpa"])
def test_attention_over_high_pages_is_that_over_low_ones(pool: KVPool, attention: PagedAttention) -> None:
    length = len(MIXED) * PAGE_SIZE - 3
    lens = [length, length]  # a prompt chunk of 5, and one token to decode
    q = random(pool, 6, heads=2 * KV_HEADS)
    results = []
    for pages in (LOW, MIXED):
        slots = slots_of(pages)
        pool.write(0, random(pool, len(slots)), -random(pool, len(slots)), slots)
        meta = AttentionMetadata(
            query_start=torch.tensor([0, 5, 6], dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.tensor([pages, pages], dtype=torch.int32),
            slots=slots,
        )
        results.append(attention(q, pool.k[0], pool.v[0], meta, HEAD_DIM**-0.5, None))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_slots_past_2_31_are_64_bits_wide(page_size: int) -> None:
    page = min(2**31 // page_size + 1, 2**31 - 1)
    table = BlockTable(page_size, [1, page, page - 1])
    slots = table.slots(0, 3 * page_size)
    assert slots.dtype == np.int64
    assert slots.tolist() == [p * page_size + i for p in (1, page, page - 1) for i in range(page_size)]
    assert slots.tolist() == [table.slot(position) for position in range(3 * page_size)]
    assert max(slots) >= 2**31 - 1
