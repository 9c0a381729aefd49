"""What do the native kernels gain over PyTorch's, each on its own?

    python benchmarks/bench_kernels.py [--quick] [--output FILE]

Linears: all of SmolLM2-135M's layers, one pass, at 1, 8, 32 and 256 rows, in every format, beside torch's F.linear in
float32. Attention of one layer (9 query and 3 KV heads of 64, pages of 16): 32 sequences of 64 to 2,048 tokens with one
query each, the same with 1,024 tokens in shared pages, and a chunk of 256 after 2,048, beside the best form in pure
torch. Kernels take turns, and medians count; the ceilings of the machine are measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor
from torch.nn.functional import linear

from paged import kernels
from paged.attention import AttentionMetadata, cpu, sdpa
from worker.ceilings import measure
from worker.kernels import Frame, Linear
from worker.kernels.native import Program, pack

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # qkv, out, gate and up, down: out and in
LAYERS, PAGE_SIZE, KV_HEADS, GROUP, DIM = 30, 16, 3, 3, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer layers and turns")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "kernels.json")
    args = parser.parse_args()
    library = kernels.library()
    if library is None:
        raise SystemExit(f"native kernels are not here: {kernels.why_not()}")
    threads, turns, layers = torch.get_num_threads(), 3 if args.quick else 15, 4 if args.quick else LAYERS
    ceilings = measure(threads, kernels.FORMATS)
    print(f"{library.sets[-1]}, {threads} threads; memory read {ceilings['read_bytes_per_s'] / 1e9:.1f} GB/s, ", end="")
    rates = {name: ceilings[f"{name}_operations_per_s"] / 1e9 for name in kernels.FORMATS}
    print("multiply, 10^9 operations/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    figures = {
        "linears": linears(layers, turns, threads, ceilings),
        "attention": attention(turns),
    }
    report.write(args.output, unit="milliseconds", ceilings=ceilings, instructions=library.sets[-1], **figures)


def in_turn(runs: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Milliseconds of each, one after another in every turn; the first turn is to warm up.

    Before each is a pause, in which the threads of the one before stop to spin, and one run that does not count.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            time.sleep(0.02)
            run()
            start = time.perf_counter()
            run()
            if turn:
                samples[name].append((time.perf_counter() - start) * 1000)
    return samples


def linears(layers: int, turns: int, threads: int, ceilings: dict[str, float]) -> dict[str, Any]:
    torch.manual_seed(0)
    weights = [torch.randn(shape) for _ in range(layers) for shape in SHAPES]
    packed = {name: [pack(weight, name) for weight in weights] for name in kernels.FORMATS}
    team = kernels.Team(threads)
    print(f"linears of {layers} layers, ms   rows" + "".join(f"{rows:>14}" for rows in (1, 8, 32, 256)))
    results: dict[str, Any] = {}
    for rows in (1, 8, 32, 256):
        inputs = {k: torch.randn(rows, k) for k in {k for _, k in SHAPES}}
        outputs = {n: torch.empty(rows, n) for n in {n for n, _ in SHAPES}}
        frame = _frame(rows)

        def by_torch(inputs: dict[int, Tensor] = inputs) -> None:
            for weight in weights:
                linear(inputs[weight.shape[1]], weight)

        runs: dict[str, Callable[[], object]] = {"float32, torch": by_torch}
        for name, matrices in packed.items():
            program = Program([Linear(inputs[m.k], m, outputs[m.n]) for m in matrices], team)
            runs[name] = partial(program.run, frame)
        results[str(rows)] = in_turn(runs, turns)
    macs = sum(n * k for n, k in SHAPES) * layers
    for name in results["1"]:
        line = "".join(f"{statistics.median(results[str(rows)][name]):14.2f}" for rows in (1, 8, 32, 256))
        print(f"  {name:26}{line}")
    sizes = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0625, "int4": 0.5625}
    for name, size in sizes.items():
        share = [
            max(macs * size / ceilings["read_bytes_per_s"], 2 * macs * rows / ceilings[f"{name}_operations_per_s"])
            * 1000
            / statistics.median(results[str(rows)][name])
            for rows in (1, 8, 32, 256)
        ]
        print(f"  {name + ', of the ceiling':26}" + "".join(f"{value:14.0%}" for value in share))
    return results


def attention(turns: int) -> dict[str, Any]:
    results = {}
    lengths = [int(n) for n in torch.linspace(64, 2048, 32)]
    cases = {
        "32 single tokens": ([(n, 1) for n in lengths], 0),
        "32 single tokens, 1,024 shared": ([(max(n, 1100), 1) for n in lengths], 1024),
        "a chunk of 256 after 2,048": ([(2304, 256)], 0),
    }
    for dtype in (torch.float32, torch.bfloat16):
        for name, (sequences, shared) in cases.items():
            q, k, v, meta = _pages(sequences, shared, dtype)
            wide = q.float()  # as models on native kernels have it
            runs: dict[str, Callable[[], object]] = {
                "native": partial(cpu.paged_attention, wide, k, v, meta, 0.125),
                "torch": partial(sdpa.paged_attention, q, k, v, meta, 0.125),
            }
            samples = results[f"{name}, {str(dtype).removeprefix('torch.')}"] = in_turn(runs, turns)
            native, torchs = (statistics.median(samples[side]) for side in ("native", "torch"))
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            print(f"{label:46}native {native:8.2f} ms   torch {torchs:8.2f} ms   {torchs / native:5.1f} times faster")
    return results


def _frame(rows: int) -> Frame:
    none = torch.zeros(0, dtype=torch.int32)
    meta = AttentionMetadata(none, none, none[None], torch.zeros(0, dtype=torch.int64))
    return Frame(torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64), [meta], torch.arange(rows))


def _pages(
    sequences: list[tuple[int, int]], shared: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    """Queries, K and V in pages in random order, and whose they are; the first `shared` tokens have the same pages."""
    generator = torch.Generator().manual_seed(0)
    counts, common = [-(-length // PAGE_SIZE) for length, _ in sequences], shared // PAGE_SIZE
    order = torch.randperm(sum(counts), generator=generator).int() + 1
    tables, used = torch.zeros(len(sequences), max(counts), dtype=torch.int32), common
    for table, count in zip(tables, counts, strict=True):
        table[:count] = torch.cat((order[:common], order[used : used + count - common]))
        used += count - common
    shape = (sum(counts) + 1, PAGE_SIZE, KV_HEADS, DIM)
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    starts = torch.tensor([0, *(queries for _, queries in sequences)]).cumsum(0).int()
    lens = torch.tensor([length for length, _ in sequences]).int()
    q = torch.randn(int(starts[-1]), KV_HEADS * GROUP, DIM, generator=generator).to(dtype)
    return q, k, v, AttentionMetadata(starts, lens, tables, torch.zeros(0, dtype=torch.int64))


if __name__ == "__main__":
    main()
