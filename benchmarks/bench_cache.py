"""What does a KV cache save? The six rows that open_lm's pull request 74 measured: a context, and so many new tokens.

    python benchmarks/bench_cache.py [--quick] [--dtype DTYPE] [--turns N] [--output FILE]     (or: paged bench cache)

One sequence, greedy, ignore_eos, SmolLM2-135M-Instruct, one engine without the prefix cache for both sides:

  with the cache     the engine generates the whole row: a prompt of `context` tokens, `new` tokens after it
  without            what a program does that keeps no K and V: for every new token one forward over the whole sequence
                     so far, here a request with all of it as prompt and max_tokens=1, which begins with an empty pool
                     (a prompt longer than max_num_batched_tokens is computed in several steps, as always)

The second side takes long, so it is integrated. For each row t(L), the seconds of one such forward, is timed at the
eight lengths L_k = context + new * k / 7, k = 0..7 (rounded; lengths that rows share are timed once). Between two of
them t is taken to be linear, and the forwards that a row needs are summed:

    without = sum over i = 0 .. new - 1 of p(context + i)
    p(L) = t_k + (t_k+1 - t_k) * (L - L_k) / (L_k+1 - L_k)   where L_k <= L <= L_k+1

which is exact where t is linear; a part a * L^2 of t comes out too large by a * (new / 7)^3 / 6 in each of the seven
pieces. The first row is also run in full, token by token, and both are reported. Its tokens must be those of the other
side, in float32 and in every dtype on the native kernels; else it is reported how many are.

Turns: every row with the cache, then every length without, several times; each figure is a median. gain is
1 - with / without. Beside it stands the ratio of multiply-add operations, without over with, counted from the model's
shapes: linears, attention over what a query sees, the head where a token is sampled. No cache can save more time than
that where both sides compute equally fast; one token at a time computes more slowly than many.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import report
import tables

from paged import LLM, PagedError, SamplingParams
from worker.model_config import ModelConfig
from worker.tensors import matrix_shapes

UNIT = 512  # rows are (context, new tokens) in units of it
ROWS = ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1))
POINTS = 8
THEIRS = {
    "source": "open_lm, pull request 74, of which we know the range of gains but no single row",
    "gain": [0.4, 0.8],
    "model": "1 B parameters",
    "device": "A6000",
}
Row = tuple[int, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="rows of a 64th of the length, and two turns")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, help="how often everything is timed [5]")
    report.add_output(parser, "cache")
    args = parser.parse_args()
    unit, turns = (UNIT // 64, 2) if args.quick else (UNIT, 5)
    turns = turns if args.turns is None else args.turns
    if turns < 1:
        parser.error(f"--turns must be at least 1, not {turns}")
    rows = [(context * unit, new * unit) for context, new in ROWS]
    longest = max(map(sum, rows))
    try:
        # One token more than any row has, for the one that is asked for after the greatest length.
        llm = LLM(args.model, dtype=args.dtype, max_num_seqs=1, max_model_len=longest + 1, enable_prefix_caching=False)
    except PagedError as error:
        parser.error(str(error))
    figures = measure(Sides(llm, longest), rows, turns)
    print("\n".join(tables.cache(figures)))
    require_same_tokens(figures)
    report.write(report.output(args, "cache"), **figures)


class Sides:
    """Both sides, on one engine. Text is that of a long prompt of W4."""

    def __init__(self, llm: LLM, longest: int) -> None:
        self.llm = llm
        vocabulary = llm.model_config.vocab_size
        self._text = [token % vocabulary for token in report.workload("W4")[0]["prompt"][:longest]]
        assert len(self._text) == longest

    def cached(self, row: Row) -> tuple[float, list[int]]:
        """Seconds of a row with the cache, and its tokens."""
        return self._run(self._text[: row[0]], row[1])

    def uncached(self, length: int) -> float:
        """Seconds of one forward over a sequence of this length."""
        return self._run(self._text[:length], 1)[0]

    def uncached_in_full(self, row: Row) -> tuple[list[float], list[int]]:
        """Seconds of every forward of a row without the cache, and its tokens."""
        tokens, seconds = self._text[: row[0]], list[float]()
        for i in range(row[1]):
            spent, new = self._run(tokens, 1)
            seconds.append(spent)
            tokens = tokens + new
            if (i + 1) % 64 == 0:
                say(f"in full, without: {i + 1} of {row[1]} tokens")
        return seconds, tokens[row[0] :]

    def _run(self, prompt: list[int], new: int) -> tuple[float, list[int]]:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=new)
        start = time.perf_counter()
        (output,) = self.llm.generate([prompt], params)
        return time.perf_counter() - start, output.outputs[0].token_ids


def measure(sides: Sides, rows: Sequence[Row], turns: int) -> dict[str, Any]:
    """All figures, ready to be written. The first of the rows is the one that is run in full."""
    needed = sorted({length for row in rows for length in lengths(row)})
    sides.uncached(needed[-1])  # to warm up, and make room for the most
    sides.cached((rows[0][0], 8))
    cached: dict[Row, list[float]] = {row: [] for row in rows}
    uncached: dict[int, list[float]] = {length: [] for length in needed}
    for turn in range(turns):
        for row in rows:
            seconds, tokens = sides.cached(row)
            cached[row].append(seconds)
            if row == rows[0]:
                wanted = tokens
            say(f"turn {turn + 1}: {row[0]} with {row[1]} new tokens, cached: {seconds:.2f} s")
        for length in needed:
            uncached[length].append(sides.uncached(length))
        say(f"turn {turn + 1}: {len(needed)} lengths without: {sum(it[-1] for it in uncached.values()):.2f} s")
    medians = {length: statistics.median(samples) for length, samples in uncached.items()}
    seconds_in_full, tokens = sides.uncached_in_full(rows[0])
    total, integral, plan = sum(seconds_in_full), integrate(medians, rows[0]), sides.llm.plan
    return {
        "model": sides.llm.model_name,
        "dtype": plan.dtype,
        "backend": plan.backend_reason if plan.backend == "native" else plan.backend,
        "threads": plan.threads,
        "turns": turns,
        "rows": [compare(sides.llm.model_config, row, cached[row], medians) for row in rows],
        "forward_s": {str(length): samples for length, samples in uncached.items()},
        "in_full": {
            "context": rows[0][0],
            "new": rows[0][1],
            "without_s": total,
            "integrated_s": integral,
            "difference": integral / total - 1,
            "forward_s": seconds_in_full,
            "tokens": len(wanted),
            "agrees": sum(a == b for a, b in zip(tokens, wanted, strict=True)),
            "must_agree": plan.dtype == "float32" or plan.backend == "native",
        },
        "theirs": THEIRS,
    }


def require_same_tokens(figures: Mapping[str, Any]) -> None:
    """Ends the run where the sides differ and may not."""
    full = figures["in_full"]
    if full["must_agree"] and full["agrees"] < full["tokens"]:
        raise SystemExit(
            f"only {full['agrees']} of {full['tokens']} tokens are the same with and without the cache, and in "
            f"{figures['dtype']} on {figures['backend']} all must be: the comparison is worth nothing"
        )


def compare(config: ModelConfig, row: Row, cached: list[float], medians: Mapping[int, float]) -> dict[str, Any]:
    """The figures of one row."""
    with_s, without_s = statistics.median(cached), integrate(medians, row)
    few, many = operations_with(config, row), operations_without(config, row)
    return {
        "context": row[0],
        "new": row[1],
        "with_s": with_s,
        "with_samples": cached,
        "without_s": without_s,
        "gain": 1 - with_s / without_s,
        "times_faster": without_s / with_s,
        "tokens_per_s": row[1] / with_s,
        "tokens_per_s_without": row[1] / without_s,
        "operations": few,
        "operations_without": many,
        "operations_ratio": many / few,
    }


def lengths(row: Row) -> list[int]:
    """The lengths at which the uncached side of a row is timed: even steps from its context to its end."""
    context, new, pieces = *row, POINTS - 1
    return [(2 * (context * pieces + new * k) + pieces) // (2 * pieces) for k in range(POINTS)]


def integrate(medians: Mapping[int, float], row: Row) -> float:
    """Seconds of all forwards of a row: those between two measured lengths lie on a line between them."""
    points = lengths(row)
    each = np.interp(np.arange(row[0], sum(row)), points, [medians[length] for length in points])
    return float(each.sum())


def operations_with(config: ModelConfig, row: Row) -> int:
    """Multiply-adds of a row with the cache: the prompt, then one token at a time; the last is not computed."""
    context, new = row
    return forward(config, 0, context) + sum(forward(config, i, i + 1) for i in range(context, context + new - 1))


def operations_without(config: ModelConfig, row: Row) -> int:
    """The same of a forward over everything so far for each new token."""
    context, new = row
    return sum(forward(config, 0, length) for length in range(context, context + new))


def forward(config: ModelConfig, first: int, last: int) -> int:
    """Multiply-adds of one forward over positions first .. last - 1, one of which samples, all before them cached."""
    each = config.num_layers * sum(rows * columns for rows, columns in matrix_shapes(config).values())
    seen = sum(_pairs(last, window) - _pairs(first, window) for window in config.layer_windows)
    attention = 2 * config.num_heads * config.head_dim * seen  # q k^T, and the weights times V
    return (last - first) * each + attention + config.vocab_size * config.hidden_size


def _pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, over a sequence: 1 + 2 + ... up to the window, then always that many."""
    grows = length if window is None else min(length, window)
    return grows * (grows + 1) // 2 + (length - grows) * (window or 0)


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
