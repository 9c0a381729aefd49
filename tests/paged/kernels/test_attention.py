"""Native attention on every instruction set of this machine: right against float64, each row the same bits always."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from paged import kernels
from paged.attention import AttentionMetadata, cpu
from paged.attention.reference import paged_attention as reference

NATIVE = kernels.library()
assert NATIVE is not None, kernels.why_not()
SETS = NATIVE.sets
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Sequences = list[tuple[int, int]]  # tokens, and how many of them are queries


def make(
    rng: random.Random, lengths: Sequences, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, shared: int = 0
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """K and V pages, and block tables, of which the first `shared` tokens' full pages are the same for all."""
    common = shared // page_size
    counts = [-(-length // page_size) for length, _ in lengths]
    ids = list(range(1, sum(counts) + common + 2))
    rng.shuffle(ids)
    head = [ids.pop() for _ in range(common)]
    tables = [head[:count] + [ids.pop() for _ in range(count - common)] for count in counts]
    shape = (sum(counts) + common + 2, page_size, kv_heads, dim)
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return k, v, tables


def metadata(lengths: Sequences, tables: list[list[int]]) -> AttentionMetadata:
    starts = list(itertools.accumulate((queries for _, queries in lengths), initial=0))
    padded = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = torch.tensor(table, dtype=torch.int32)
    lens = torch.tensor([length for length, _ in lengths], dtype=torch.int32)
    return AttentionMetadata(torch.tensor(starts, dtype=torch.int32), lens, padded, torch.zeros(0, dtype=torch.int64))


def check_random_cases(seed: int, cases: int) -> None:
    """Ragged batches around the blocks of 256 and the chunk of 16, against the reference in float64."""
    rng = random.Random(seed)
    for case in range(cases):
        kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 7, 9])
        dim, page_size, dtype = rng.choice([32, 36, 64, 80, 96, 128, 256]), 2 ** rng.randrange(9), rng.choice(DTYPES)
        window, soft_cap = rng.choice([None, None, 1, 7, 200, 256, 300]), rng.choice([0.0, 0.0, 30.0])
        lengths = []
        for _ in range(rng.randint(1, 5)):
            around = [256 * i + j for i in (1, 2) for j in (-1, 0, 1)]
            length = rng.choice([rng.randint(1, 40), rng.randint(1, 700), *around])
            lengths.append((length, rng.choice([1, 1, min(length, rng.randint(1, 20)), rng.randint(1, length)])))
        k, v, tables = make(rng, lengths, kv_heads, dim, page_size, dtype, rng.choice([0, min(n for n, _ in lengths)]))
        meta = metadata(lengths, tables)
        q = torch.randn(int(meta.query_start[-1]), kv_heads * group, dim)
        scale = dim**-0.5
        wanted = reference(q.double(), k.double(), v.double(), meta, scale, window, soft_cap=soft_cap)
        for name in SETS:
            found = cpu.paged_attention(q, k, v, meta, scale, window, soft_cap=soft_cap, instructions=name)
            error = (found.double() - wanted).abs().max().item()
            # Dot products of bfloat16 round queries and weights to that: 2^-9 of scores and of each of the summands.
            tolerance = 5e-2 if dtype == torch.bfloat16 and name == "avx512" else 2e-5
            assert error < tolerance, f"case {case} of seed {seed} on {name}: off by {error:.1e}, {lengths}, {window}"


def test_random_ragged_batches_agree_with_float64() -> None:
    check_random_cases(seed=0, cases=60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 31))
def test_thousands_of_random_ragged_batches_agree_with_float64(seed: int) -> None:
    check_random_cases(seed, cases=100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("page_size", "window"), [(16, None), (1, None), (256, 300), (16, 40)])
def test_a_query_has_the_same_bits_however_it_is_computed(
    name: str, dtype: torch.dtype, page_size: int, window: int | None
) -> None:
    """Alone, in chunks of any size, beside others, with shared pages read together or not, on one to three threads."""
    rng = random.Random(1)
    lengths = [(700, 700), (560, 560), (600, 600), (530, 530)]
    k, v, tables = make(rng, lengths, 3, 64, page_size, dtype, shared=512)
    queries = [torch.randn(length, 9, 64) for length, _ in lengths]

    def run(parts: list[tuple[int, int, int]], threads: int = 1, share: bool = True) -> list[Tensor]:
        """Queries first to last - 1 of some sequences in one call."""
        sizes = [last - first for _, first, last in parts]
        meta = metadata([(last, last - first) for _, first, last in parts], [tables[i] for i, _, _ in parts])
        q = torch.cat([queries[i][first:last] for i, first, last in parts])
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out = cpu.paged_attention(q, k, v, meta, 0.125, window, instructions=name, share=share)
        finally:
            torch.set_num_threads(before)
        return list(torch.split(out, sizes))

    whole = [run([(i, 0, length)])[0] for i, (length, _) in enumerate(lengths)]
    together = run([(i, 0, length) for i, (length, _) in enumerate(lengths)], threads=2)
    assert all(torch.equal(a, b) for a, b in zip(whole, together, strict=True))
    for first, last in [(0, 1), (255, 256), (256, 257), (511, 513), (520, 529), (500, 517), (100, 400)]:
        for threads, share in [(1, True), (1, False), (2, True), (3, True)]:
            found = run([(i, first, last) for i in range(4)], threads, share)
            for i in range(4):
                assert torch.equal(found[i], whole[i][first:last]), (first, last, threads, share, i)
                assert torch.equal(run([(i, first, last)])[0], whole[i][first:last])


def test_sharing_pages_reads_them_once_and_is_seen_in_the_plan_only() -> None:
    """That what is compared above is shared at all: more sequences on the same pages take less than on their own."""
    rng = random.Random(2)
    lengths = [(2049, 1)] * 16
    k, v, tables = make(rng, lengths, 1, 64, 16, torch.float32, shared=2048)
    meta, q = metadata(lengths, tables), torch.randn(16, 4, 64)
    once = cpu.paged_attention(q, k, v, meta, 0.125)
    # A page that is the same in all tables, but by another id: each reads its own copy, and nothing changes.
    k, v = torch.cat((k, k)), torch.cat((v, v))
    meta.block_tables[1::2] += len(k) // 2
    assert torch.equal(cpu.paged_attention(q, k, v, meta, 0.125), once)
    assert torch.equal(cpu.paged_attention(q, k, v, meta, 0.125, share=False), once)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [(3, 64), (1, 36), (2, 5)])
def test_k_and_v_are_written_to_their_slots_rounded_as_torch_rounds(
    name: str, dtype: torch.dtype, width: tuple[int, int]
) -> None:
    infinite = float("inf")
    special = torch.tensor([0.0, -0.0, infinite, -infinite, 1e-8, -3e-6, 65504.0, 65519.9, 65520.0, 1e30, 2**-14])
    k, v = torch.randn(40, *width) * 10 ** torch.linspace(-9, 5, 40)[:, None, None], torch.randn(40, *width)
    k.view(-1)[: len(special)] = special
    k.view(-1)[len(special)] = float("nan")
    k_pages, v_pages = torch.zeros(6, 8, *width, dtype=dtype), torch.zeros(6, 8, *width, dtype=dtype)
    slots = torch.randperm(47)[:40] + 1
    meta = AttentionMetadata(
        torch.tensor([0, 40], dtype=torch.int32), torch.tensor([40], dtype=torch.int32), torch.zeros(1, 5).int(), slots
    )
    cpu.write(k, v, k_pages, v_pages, meta, instructions=name)
    for pages, rows in ((k_pages, k), (v_pages, v)):
        wanted = torch.zeros_like(pages)
        wanted.view(48, *width)[slots] = rows.to(dtype)
        assert torch.equal(pages.nan_to_num(nan=12.5), wanted.nan_to_num(nan=12.5))


def test_a_planted_fault_is_caught() -> None:
    """That the comparison above is one: a page id that is off by one is far outside of the tolerance."""
    rng = random.Random(3)
    k, v, tables = make(rng, [(100, 1)], 1, 32, 16, torch.float32)
    meta, q = metadata([(100, 1)], tables), torch.randn(1, 1, 32)
    wanted = reference(q.double(), k.double(), v.double(), meta, 0.2)
    meta.block_tables[0, 3] = meta.block_tables[0, 2]
    assert (cpu.paged_attention(q, k, v, meta, 0.2).double() - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("page_size", [96, 512])
def test_pages_that_blocks_do_not_consist_of_are_right_too(page_size: int) -> None:
    rng = random.Random(4)
    lengths = [(1100, 1)] * 3
    k, v, tables = make(rng, lengths, 1, 64, page_size, torch.float32, shared=page_size)
    meta, q = metadata(lengths, tables), torch.randn(3, 2, 64)
    wanted = reference(q.double(), k.double(), v.double(), meta, 0.125)
    assert (cpu.paged_attention(q, k, v, meta, 0.125).double() - wanted).abs().max() < 2e-5


@pytest.mark.parametrize("name", SETS)
def test_a_block_of_which_nothing_counts_changes_nothing(name: str) -> None:
    """Infinite keys give scores of -inf: what the other blocks say is left."""
    rng = random.Random(5)
    k, v, tables = make(rng, [(512, 1)], 1, 32, 256, torch.float32)
    k[tables[0][1]] = float("-inf")
    meta, q = metadata([(512, 1)], tables), torch.rand(1, 1, 32) + 0.1
    k[tables[0][0]] -= 200 / (0.2 * float(q.sum()))  # far below what e^x can tell from 0
    found = cpu.paged_attention(q, k, v, meta, 0.2, instructions=name)
    first = metadata([(256, 1)], tables)
    assert torch.allclose(found, cpu.paged_attention(q, k, v, first, 0.2, instructions=name), atol=1e-6)


def test_two_threads_of_python_take_turns() -> None:
    rng = random.Random(6)
    cases = []
    for length in (700, 300):
        k, v, tables = make(rng, [(length, length)], 1, 64, 16, torch.float32)
        meta, q = metadata([(length, length)], tables), torch.randn(length, 3, 64)
        cases.append((q, k, v, meta, cpu.paged_attention(q, k, v, meta, 0.125)))

    def run(case: int) -> bool:
        q, k, v, meta, wanted = cases[case]
        return all(torch.equal(cpu.paged_attention(q, k, v, meta, 0.125), wanted) for _ in range(100))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, (0, 1))) == [True, True]


def test_the_references_soft_cap_is_the_formula() -> None:
    """Over scores computed densely."""
    rng = random.Random(7)
    k, v, tables = make(rng, [(40, 40)], 1, 32, 16, torch.float32)
    meta, q = metadata([(40, 40)], tables), torch.randn(40, 2, 32)
    keys, values = (t[tables[0]].flatten(0, 1)[:40, 0].double() for t in (k, v))
    scores = 3 * torch.tanh(torch.einsum("thd,sd->hts", q.double(), keys) / 3)
    weights = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(-1)
    found = reference(q.double(), k.double(), v.double(), meta, 1.0, soft_cap=3.0)
    assert torch.allclose(found, torch.einsum("hts,sd->thd", weights, values))
    assert not torch.allclose(found, reference(q.double(), k.double(), v.double(), meta, 1.0), atol=1e-3)


def test_attention_and_writing_are_operators_that_torch_can_trace() -> None:
    rng = random.Random(8)
    k, v, tables = make(rng, [(40, 3), (20, 1)], 2, 32, 16, torch.float32)
    meta, q = metadata([(40, 3), (20, 1)], tables), torch.randn(4, 4, 32)
    meta = AttentionMetadata(meta.query_start, meta.seq_lens, meta.block_tables, torch.tensor([21, 5, 9, 30]))
    rows = torch.randn(4, 2, 32)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cpu.write(rows, 2 * rows, k, v, meta)
        return cpu.paged_attention(q, k, v, meta, 0.2, 30) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    own, others = (k.clone(), v.clone()), (k.clone(), v.clone())
    assert torch.equal(compiled(q, *own), step(q, *others))
    assert torch.equal(own[0], others[0])
    assert not torch.equal(own[0], k)


def test_operators_refuse_what_does_not_fit() -> None:
    """Each would read or write beside the tensors."""
    rng = random.Random(9)
    k, v, tables = make(rng, [(40, 3)], 2, 32, 16, torch.float32)
    meta, q = metadata([(40, 3)], tables), torch.randn(3, 4, 32)
    good = {"q": q, "k": k, "v": v, "start": meta.query_start, "lens": meta.seq_lens, "tables": meta.block_tables}

    def run(**changed: Tensor) -> Tensor:
        it = good | changed
        meta = AttentionMetadata(it["start"], it["lens"], it["tables"], torch.zeros(0, dtype=torch.int64))
        return cpu.paged_attention(it["q"], it["k"], it["v"], meta, 0.2)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    assert run().shape == (3, 4, 32)
    wrong: list[dict[str, Tensor]] = [
        {"q": q[..., :16]},
        {"q": q[:, :3]},
        {"q": q[0]},
        {"k": k[1:]},
        {"v": v.half()},
        {"k": k.double(), "v": v.double()},
        {"k": k.to(torch.int8), "v": v.to(torch.int8)},
        {"k": k.transpose(0, 1), "v": v.transpose(0, 1)},
        {"tables": meta.block_tables + 1000},
        {"tables": meta.block_tables - 1000},
        {"tables": meta.block_tables.long()},
        {"tables": meta.block_tables[0]},
        {"lens": ints(100_000)},
        {"lens": ints(2)},
        {"lens": ints(40, 40)},
        {"start": ints(0, 100_000)},
        {"start": ints(3, 0)},
        {"start": ints(0)},
    ]
    for changed in wrong:
        with pytest.raises(ValueError, match=r"\w"):
            run(**changed)
    rows = torch.randn(2, 2, 32)
    for slots in (torch.tensor([0]), torch.tensor([0, 10**9]), torch.tensor([-1, 0]), ints(0, 1)):
        before = k.clone()
        with pytest.raises(ValueError, match="slots"):
            cpu.write(rows, rows, k, v, AttentionMetadata(ints(0), ints(0), ints(0)[None], slots))
        assert torch.equal(k, before)
