"""KVPool: what is written is read back, moves copy whole pages, and the tensors take the bytes that the layout says."""

from __future__ import annotations

import pytest
import torch

from paged import InvariantError, KVLayout, KVPool, Mark, Move

PAGE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
DTYPES = ["float32", "bfloat16", "float16"]


def pool(dtype: str = "float32", page_size: int = 4, num_pages: int = 6) -> KVPool:
    """Every slot filled with its own number, to tell pages apart; V is K plus a half."""
    made = KVPool(KVLayout(num_layers=2, kv_heads=3, head_dim=8, dtype=dtype, page_size=page_size), num_pages)
    slots = torch.arange(num_pages * page_size)
    for layer in range(2):
        k = (slots + 100 * layer).to(made.k[0].dtype)[:, None, None].expand(-1, 3, 8)
        made.write(layer, k, k + 0.5, slots)
    return made


def page(made: KVPool, layer: int, number: int) -> torch.Tensor:
    """K and V of one page, [2, page_size, kv_heads, head_dim]."""
    return torch.stack([made.k[layer][number], made.v[layer][number]]).clone()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_to_slots_is_read_from_them(dtype: str, page_size: int) -> None:
    made = KVPool(KVLayout(num_layers=2, kv_heads=3, head_dim=8, dtype=dtype, page_size=page_size), 6)
    slots = torch.randperm(5 * page_size, generator=torch.Generator().manual_seed(0)) + page_size
    written = [torch.randn(2, len(slots), 3, 8).to(made.k[0].dtype) for _ in range(2)]
    for layer, (k, v) in enumerate(written):
        made.write(layer, k, v, slots)
    for layer, (k, v) in enumerate(written):
        found = made.read(layer, slots)
        assert torch.equal(found[0], k)
        assert torch.equal(found[1], v)


def test_a_slot_is_a_page_and_an_offset() -> None:
    made = pool(page_size=4)
    k, v = torch.full((1, 3, 8), 7.0), torch.full((1, 3, 8), 9.0)
    made.write(1, k, v, torch.tensor([3 * 4 + 2]))
    assert torch.equal(made.k[1][3, 2], k[0])
    assert torch.equal(made.v[1][3, 2], v[0])


def test_a_write_changes_no_other_slot_and_no_other_layer() -> None:
    made, untouched = pool(page_size=4), pool(page_size=4)
    made.write(1, torch.zeros(1, 3, 8), torch.zeros(1, 3, 8), torch.tensor([14]))
    others = torch.tensor([slot for slot in range(24) if slot != 14])
    for found, wanted in zip(made.read(1, others), untouched.read(1, others), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(made.k[0], untouched.k[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_move_copies_k_and_v_of_a_page_in_every_layer(dtype: str) -> None:
    made = pool(dtype)
    source = [page(made, layer, 2) for layer in range(2)]
    made.apply([Move(2, 5)])
    for layer in range(2):
        assert torch.equal(page(made, layer, 5), source[layer])
        assert torch.equal(page(made, layer, 2), source[layer])


def test_moves_are_applied_in_their_order() -> None:
    made = pool()
    first, third = page(made, 0, 1), page(made, 0, 3)
    made.apply([Move(1, 2), Move(2, 4), Move(3, 2)])
    assert torch.equal(page(made, 0, 4), first)
    assert torch.equal(page(made, 0, 2), third)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tensors_take_the_bytes_of_the_layout(dtype: str, page_size: int) -> None:
    made = pool(dtype, page_size)
    assert sum(tensor.nbytes for tensor in (*made.k, *made.v)) == made.num_pages * made.layout.bytes_per_page


def test_m01_the_tensors_fit_into_the_memory_that_their_number_was_reckoned_from() -> None:
    """The bytes of storage, so that padding or a view of something larger would show."""
    layout = KVLayout(num_layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", page_size=16)
    made = KVPool(layout, layout.pages_in(10 * 2**20))
    assert made.num_pages == 28
    assert sum(tensor.untyped_storage().nbytes() for tensor in (*made.k, *made.v)) <= 10 * 2**20


@pytest.mark.parametrize("dtype", DTYPES)
def test_k_and_v_of_each_layer_are_pages_of_slots_of_heads(dtype: str) -> None:
    made = pool(dtype, page_size=16)
    shapes = {(tensor.shape, tensor.dtype) for tensor in (*made.k, *made.v)}
    assert shapes == {(torch.Size([6, 16, 3, 8]), getattr(torch, dtype))}


# Poison mode


def test_a_page_that_is_free_holds_nothing_that_could_pass_for_an_answer() -> None:
    made = pool()
    made.apply([Mark(3, "poison")])
    assert page(made, 0, 3).isnan().all()
    assert page(made, 1, 3).isnan().all()
    assert not page(made, 0, 2).isnan().any()


def test_a_stray_write_into_a_page_that_others_may_find_is_noticed() -> None:
    made = pool(page_size=4)
    made.apply([Mark(2, "seal"), Mark(3, "seal"), Mark(2, "verify")])
    made.write(1, torch.zeros(1, 3, 8), torch.zeros(1, 3, 8), torch.tensor([2 * 4 + 3]))
    made.apply([Mark(3, "verify")])
    with pytest.raises(InvariantError, match="page 2 was written after it was full and others could find it"):
        made.apply([Mark(2, "verify")])


def test_a_seal_ends_when_the_page_is_free_and_when_a_step_failed() -> None:
    made = pool(page_size=4)
    made.apply([Mark(2, "seal"), Mark(3, "seal"), Mark(2, "verify"), Mark(2, "poison"), Mark(2, "verify")])
    made.write(0, torch.zeros(1, 3, 8), torch.zeros(1, 3, 8), torch.tensor([3 * 4]))
    made.forget_seals()
    made.apply([Mark(3, "verify")])


def test_marks_and_moves_are_done_in_their_order() -> None:
    made = pool(page_size=4)
    before = page(made, 0, 1)
    made.apply([Move(1, 4), Mark(1, "poison"), Mark(4, "seal")])
    assert torch.equal(page(made, 0, 4), before)
    made.apply([Mark(4, "verify")])
