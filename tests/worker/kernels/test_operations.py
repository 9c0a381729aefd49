"""Every native operation against its plain-torch reference, on every instruction set of this machine, odd sizes too."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paged import kernels as library
from paged.attention import AttentionMetadata
from worker.kernels import (
    KV,
    Argmax,
    Attention,
    Embed,
    Frame,
    Function,
    Gather,
    Linear,
    Norm,
    Operation,
    Rotary,
    SoftCap,
    reference,
)
from worker.kernels.native import Program, pack

NATIVE = library.library()
assert NATIVE is not None, library.why_not()
SETS = NATIVE.sets
FORMATS = list(library.FORMATS)
TEAMS = {(name, threads): library.Team(threads, instructions=name) for name in SETS for threads in (1, 3)}


def frame(tokens: int, sampled: list[int] | None = None, slots: Tensor | None = None) -> Frame:
    none = torch.zeros(0, dtype=torch.int32)
    meta = AttentionMetadata(none, none, none[None], torch.arange(tokens) if slots is None else slots)
    rows = torch.tensor(list(range(tokens)) if sampled is None else sampled, dtype=torch.int64)
    return Frame(torch.randint(0, 50, (tokens,)), torch.randint(0, 30, (tokens,)), [meta], rows)


def compare(
    make: Callable[[], tuple[Operation, Tensor]], it: Frame, tolerance: float, name: str, threads: int = 1
) -> None:
    """make: the operation, over fresh buffers, and the one of them that it writes."""
    operation, found = make()
    Program([operation], TEAMS[name, threads]).run(it)
    operation, wanted = make()
    reference.run([operation], it)
    error = (found.double() - wanted.double()).abs().max().item() / max(1.0, wanted.double().abs().max().item())
    assert error <= tolerance, f"{type(operation).__name__} on {name} is off by {error:.1e}"


def random_linear(rng: random.Random, format_: str, name: str, threads: int) -> None:
    n, k, rows = rng.choice([1, 7, 16, 33, 48, 100]), rng.choice([1, 3, 31, 32, 64, 97, 200]), rng.randint(1, 30)
    gated: Function | None = rng.choice([None, None, "silu", "gelu_tanh"])
    norm = None if gated or rng.random() < 0.5 else torch.randn(k)
    weight, x, before = torch.randn(n, k), torch.randn(rows, 2 * k if gated else k) * 3, torch.randn(rows, n)
    matrix, add = pack(weight, format_, name), rng.random() < 0.5
    bias, scale = torch.randn(n) if rng.random() < 0.3 else None, rng.choice([1.0, 1.0, 0.22])

    out, wanted = before.clone(), before.clone()
    linear = Linear(x, matrix, out, add, norm=norm, eps=1e-6, gated=gated, bias=bias, scale=scale)
    Program([linear], TEAMS[name, threads]).run(frame(rows))
    reference.run([replace(linear, out=wanted)], frame(rows))
    # Each product counts with its own error; a gate near 0 is what cancels of gate x up. With dot products of bfloat16
    # x is rounded to that, by 2^-9. What norms and gates give may differ by a unit in the last place, which now and
    # then is a step more or less in int8.
    y = (x[:, :k] * x[:, k:]).abs() if gated else reference.input_of(linear, rows).abs()
    w = reference.unpack(matrix).abs()
    rounds = format_ == "bfloat16" and name == "avx512"
    tolerance = (2**-8 if rounds else 1e-5) * (y @ w.T + before.abs() + (0 if bias is None else bias.abs()))
    if format_ in ("int8", "int4") and (gated is not None or norm is not None):
        tolerance += 2 * y.amax(1, keepdim=True) / 127 * w.amax(1)
    worst = ((out - wanted).abs() / (tolerance + 1e-30)).max().item()
    assert worst <= 1, f"{format_} [{n}, {k}] on {rows} rows, {name}: {worst:.2f} times what rounding may do"


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format_", FORMATS)
def test_linears_of_all_sizes_agree(format_: str, name: str) -> None:
    torch.manual_seed(0)
    for i in range(40):
        random_linear(random.Random(i), format_, name, threads=1 + i % 2 * 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format_", FORMATS)
def test_thousands_of_linears_agree(format_: str, name: str) -> None:
    torch.manual_seed(1)
    for i in range(2000):
        random_linear(random.Random(i), format_, name, threads=1 + i % 2 * 2)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format_", FORMATS)
def test_a_row_of_a_linear_has_the_same_bits_whatever_is_beside_it(format_: str, name: str) -> None:
    """In any number of rows, at any place among them, on any number of threads."""
    torch.manual_seed(2)
    x, matrix = torch.randn(37, 96), pack(torch.randn(80, 96), format_, name)

    def run(rows: Tensor, threads: int) -> Tensor:
        out = torch.empty(len(rows), 80)
        Program([Linear(rows.contiguous(), matrix, out)], TEAMS[name, threads]).run(frame(len(rows)))
        return out

    whole = run(x, 1)
    assert torch.equal(run(x, 3), whole)
    for first, last in [(0, 1), (5, 7), (30, 33), (10, 14), (1, 6), (3, 9), (0, 7), (20, 28), (36, 37)]:
        assert torch.equal(run(x[first:last], 3), whole[first:last]), (first, last)
    order = torch.randperm(37)
    assert torch.equal(run(x[order], 3), whole[order])


@pytest.mark.parametrize("name", SETS)
def test_packing_rounds_as_it_says_and_unpacks_to_that(name: str) -> None:
    torch.manual_seed(3)
    weight = torch.randn(50, 70)
    weight[3, :32] = 0.0
    for format_ in ("float32", "bfloat16", "float16"):
        assert torch.equal(reference.unpack(pack(weight, format_, name)), weight.to(getattr(torch, format_)).float())
    # half a step of the scale of each group, and what rounding that to float16 adds
    for format_, steps in (("int8", 127), ("int4", 7)):
        padded = torch.nn.functional.pad(weight, (0, 26)).view(50, 3, 32)
        most = padded.abs().amax(-1, keepdim=True).expand(50, 3, 32).flatten(1)[:, :70]
        found = reference.unpack(pack(weight, format_, name))
        assert ((found - weight).abs() <= most / steps * (0.51 if format_ == "int8" else 1.01)).all()
        assert (found[3, :32] == 0).all()


@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_packs_the_same_bytes(name: str) -> None:
    torch.manual_seed(4)
    weight = torch.randn(33, 45)
    for format_ in FORMATS:
        assert torch.equal(pack(weight, format_, name).packed, pack(weight, format_, "baseline").packed)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("n", [1, 5, 16, 37, 576, 1000])
def test_norms_agree(n: int, name: str) -> None:
    torch.manual_seed(5)
    x, weight, before = torch.randn(9, n) * 5, torch.randn(n), torch.randn(9, n)
    x[4] = 0.0

    def make() -> tuple[Operation, Tensor]:
        out = before.clone()
        return Norm(x, weight, out, 1e-6), out

    compare(make, frame(9), 2e-6, name, threads=3)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norms", ["none", "head", "all"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned"),
    [(9, 3, 64, 64), (2, 1, 10, 10), (4, 4, 36, 36), (6, 2, 64, 48), (3, 1, 40, 10), (2, 2, 36, 0)],
)
def test_rotation_and_writing_agree(
    heads: int, kv_heads: int, dim: int, turned: int, norms: str, dtype: torch.dtype, name: str
) -> None:
    torch.manual_seed(6)
    qkv = torch.randn(7, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(30, turned // 2) * 6
    cos, sin = (angles.cos(), angles.sin()) if turned else (None, None)
    q_norm, k_norm = None, None
    if norms != "none":
        q_norm, k_norm = (
            torch.randn(dim * (heads if norms == "all" else 1)),
            torch.randn(dim * (kv_heads if norms == "all" else 1)),
        )
    it = frame(7, slots=torch.tensor([9, 3, 30, 8, 31, 5, 12]))
    for part in ("qkv", "k", "v"):

        def make(part: str = part) -> tuple[Operation, Tensor]:
            k, v = (torch.zeros(8, 4, kv_heads, dim, dtype=dtype) for _ in range(2))
            own = qkv.clone()
            rotary = Rotary(own, cos, sin, heads, KV(k, v, 0), q_norm, k_norm, 1e-6, norms == "all")
            # keys in qkv are rotated by the one, and left alone by the other: only queries count there
            return rotary, {"qkv": own[:, : heads * dim], "k": k, "v": v}[part]

        compare(make, it, {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype], name, threads=3)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("n", [1, 13, 512])
def test_activations_agree(n: int, name: str) -> None:
    """Each by itself, as the input of a linear that changes nothing."""
    torch.manual_seed(7)
    gate_up, same = torch.randn(5, 2 * n) * 8, pack(torch.eye(n), "float32", name)
    gate_up[0, :n] = torch.linspace(-200, 200, n)
    functions: tuple[Function, ...] = ("silu", "gelu_tanh")
    for function in functions:

        def make(function: Function = function) -> tuple[Operation, Tensor]:
            out = torch.empty(5, n)
            return Linear(gate_up, same, out, gated=function), out

        compare(make, frame(5), 2e-6, name, threads=3)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("n", [1, 13, 512])
def test_soft_caps_agree(n: int, name: str) -> None:
    torch.manual_seed(10)
    scores = torch.randn(5, n) * 60
    scores[0] = torch.linspace(-1e4, 1e4, n)

    def make() -> tuple[Operation, Tensor]:
        x = scores.clone()
        return SoftCap(x, 30.0), x

    compare(make, frame(9, sampled=[0, 3, 4, 8]), 2e-6, name, threads=3)


@pytest.mark.parametrize("name", SETS)
def test_rows_are_looked_up_and_gathered(name: str) -> None:
    torch.manual_seed(8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        table = torch.randn(50, 37).to(dtype)

        def embed(table: Tensor = table) -> tuple[Operation, Tensor]:
            out = torch.empty(6, 37)
            return Embed(table, out, 2.5), out

        compare(embed, frame(6), 0.0, name)
    x = torch.randn(6, 37)

    def gather() -> tuple[Operation, Tensor]:
        out = torch.zeros(3, 37)
        return Gather(x, out), out

    compare(gather, frame(6, sampled=[5, 0, 3]), 0.0, name)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("n", [1, 7, 16, 1001])
def test_the_greatest_is_found_of_equals_the_first(n: int, name: str) -> None:
    torch.manual_seed(9)
    x = torch.randint(0, 20, (8, n)).float()
    x[3] = float("-inf")
    x[4, n // 2] = float("inf")

    def make() -> tuple[Operation, Tensor]:
        out = torch.zeros(8, dtype=torch.int64)
        return Argmax(x, out), out

    compare(make, frame(8), 0.0, name, threads=3)
    x[5] = float("nan")  # no row may notice another's
    operation, found = make()
    Program([operation], TEAMS[name, 1]).run(frame(8))
    assert 0 <= int(found[5]) < n
    assert torch.equal(found[:5], x[:5].argmax(-1))


def test_not_a_number_stays_in_its_row() -> None:
    for format_ in FORMATS:
        x = torch.randn(5, 64)
        x[2, 7] = float("nan")
        out = torch.empty(5, 16)
        Program([Linear(x, pack(torch.randn(16, 64), format_), out)], TEAMS[SETS[-1], 1]).run(frame(5))
        assert out[2].isnan().all()
        assert not out[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format_", FORMATS)
def test_a_step_without_rows_that_sample_leaves_its_buffers_alone(format_: str, name: str) -> None:
    """As the middle of a prompt is: the head has nothing to do."""
    out = torch.full((4, 1000), 7.0)
    matrix = pack(torch.randn(1000, 64), format_, name)
    linear = Linear(torch.randn(4, 64), matrix, out, few=True, norm=torch.ones(64), eps=1e-6)
    Program([linear], TEAMS[name, 3]).run(frame(4, sampled=[]))
    assert (out == 7.0).all()


@pytest.mark.parametrize("name", SETS)
def test_weights_that_are_no_numbers_stay_that_and_tiny_ones_keep_their_size(name: str) -> None:
    weight = torch.randn(16, 96)
    weight[3, 40] = float("nan")
    weight[5] = torch.randn(96) * 1e-5
    for format_ in ("int8", "int4"):
        found = reference.unpack(pack(weight, format_, name))
        assert found[3, 32:64].isnan().all()
        assert not found[3, :32].isnan().any()
        most = weight[5].view(3, 32).abs().amax(-1, keepdim=True).expand(3, 32).flatten()
        assert ((found[5] - weight[5]).abs() <= most * (0.3 if format_ == "int8" else 0.2)).all()


def test_a_group_that_the_team_does_not_have_is_refused() -> None:
    k = torch.zeros(4, 16, 1, 32)
    qkv, out = torch.zeros(1, 96), torch.zeros(1, 32)
    with pytest.raises(AssertionError):
        Program([Attention(qkv, out, 1, KV(k, k, 1), 1.0)], TEAMS[SETS[0], 1])
    one, other = (Attention(qkv, out, 1, KV(k, k, 0), 1.0, window) for window in (None, 8))
    with pytest.raises(AssertionError):
        Program([one, other], TEAMS[SETS[0], 1])
