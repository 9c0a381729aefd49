"""How far are the logits of the native kernels' formats from float32's?

    python benchmarks/bench_quality.py [--quick] [--output FILE]

The prompts of W4 and W1 (English text) go through SmolLM2-135M in chunks of 256 tokens, in float32 and in each format.
Of every position: the Kullback-Leibler divergence of the distribution over the vocabulary from that in float32, in
nats, and whether the likeliest token is the same. Means over all positions, and the 99th percentile.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from paged import kernels
from paged.attention import AttentionMetadata
from paged.kernels import Team
from paged.pool import KVPool
from scheduler.llm import kv_layout
from worker.checkpoints import Checkpoint, resolve
from worker.inputs import Inputs
from worker.native_model import NativeModel
from worker.packing import packed_weights

PAGE_SIZE, CHUNK, LONGEST = 16, 256, 4096
FORMATS: dict[str, tuple[str, str | None]] = {
    "bfloat16": ("bfloat16", None),
    "float16": ("float16", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few prompts")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "quality.json")
    args = parser.parse_args()
    library = kernels.library()
    if library is None:
        raise SystemExit(f"native kernels are not here: {kernels.why_not()}")
    prompts = [request["prompt"] for name in ("W4", "W1") for request in report.workload(name)]
    prompts = [prompts[0][:512], *prompts[4:8]] if args.quick else prompts
    checkpoint, tokens = resolve("smollm2"), sum(map(len, prompts))
    exact = _model(checkpoint, "float32", None)
    others = {name: _model(checkpoint, *format_) for name, format_ in FORMATS.items()}
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in FORMATS}
    for i, prompt in enumerate(prompts):
        chunks = [_logits(model, prompt) for model in (exact, *others.values())]
        for wanted, *given in zip(*chunks, strict=True):
            for name, logits in zip(FORMATS, given, strict=True):
                p, q = log_softmax(wanted, -1), log_softmax(logits, -1)
                divergence = kl_div(q, p, reduction="none", log_target=True).sum(-1)
                found[name].append((divergence, wanted.argmax(-1) == logits.argmax(-1)))
        print(f"\r{i + 1} of {len(prompts)} prompts", end="", flush=True)
    print(f"\n{library.sets[-1]}, {tokens:,} positions; divergence from float32 in nats")
    results: dict[str, Any] = {}
    for name, parts in found.items():
        divergence, same = (torch.cat(column) for column in zip(*parts, strict=True))
        results[name] = {
            "kl_mean": divergence.mean().item(),
            "kl_99th_percentile": divergence.quantile(0.99).item(),
            "same_likeliest": same.float().mean().item(),
        }
        it = results[name]
        print(f"{name:10}mean {it['kl_mean']:.5f}   99 % below {it['kl_99th_percentile']:.4f}   ", end="")
        print(f"likeliest token the same at {it['same_likeliest']:.2%}")
    report.write(args.output, unit="nats", instructions=library.sets[-1], positions=tokens, results=results)


def _model(checkpoint: Checkpoint, dtype: str, quantization: str | None) -> NativeModel:
    pool = KVPool(kv_layout(checkpoint.config, dtype, PAGE_SIZE), LONGEST // PAGE_SIZE + 1)
    parts = packed_weights(checkpoint.path, checkpoint.config, getattr(torch, dtype), quantization)
    team = Team(torch.get_num_threads())
    return NativeModel(checkpoint.config, parts, pool, LONGEST, team, quantization)


def _logits(model: NativeModel, prompt: list[int]) -> Iterator[Tensor]:
    """Logits of all positions, chunk by chunk."""
    table = torch.arange(1, LONGEST // PAGE_SIZE + 1, dtype=torch.int32)
    for first in range(0, len(prompt), CHUNK):
        last = min(first + CHUNK, len(prompt))
        positions = torch.arange(first, last)
        start, length = (torch.tensor(it, dtype=torch.int32) for it in ([0, last - first], [last]))
        meta = AttentionMetadata(start, length, table[None], positions + PAGE_SIZE)  # page 0 is the null page
        ids, rows = torch.tensor(prompt[first:last]), torch.arange(last - first)
        yield model.step(Inputs(ids, positions, (meta,), rows))[0]


if __name__ == "__main__":
    main()
