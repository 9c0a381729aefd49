"""The tables that README.md and docs/benchmarks.md show, each made of results/*.json and nothing else.

TABLES has them by the name that stands in a mark (report.py). A table is lines of Markdown; the last says where and at
which commit it was measured, where the results know it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Results = dict[str, Any]
WHAT = {
    "W1": "W1, mixed lengths, 32 at once",
    "W2": "W2, one shared prefix of 512 tokens",
    "W3": "W3, a single stream",
    "W4": "W4, prompts of 3,072 tokens",
}
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Table:
    files: tuple[str, ...]  # in results/, in the order in which `lines` takes them
    lines: Callable[..., list[str]]


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    rule = ["---"] * len(header)
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def origin(*results: Results) -> list[str]:
    """Where and when, of those results that say so."""
    known = [it for it in results if "commit" in it]
    machines = dict.fromkeys(f"{it['machine']['cpu']}, {it['machine']['cores']} cores" for it in known)
    commits = dict.fromkeys(it["commit"][:7] for it in known)
    if not known:
        return []
    return ["", f"{'; '.join(machines)}; commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}."]


def seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 5 else f"{value:.2f}"


def mib(value: float) -> str:
    return f"{value / MIB:,.0f}"


def speed(float32: Results, bfloat16: Results, int8: Results, vllm: Results) -> list[str]:
    """The best run of each workload."""
    sides = {"float32": float32, "bfloat16": bfloat16, "int8": int8, f"vLLM, {vllm['dtype']}": vllm}
    rows = []
    for name, what in WHAT.items():
        it = float32["results"][name]
        times = (seconds(min(side["results"][name]["samples"])) for side in sides.values())
        rows.append([what, f"{it['requests']}", f"{it['output_tokens']:,}", *times])
    return grid(["workload", "requests", "output tokens", *sides], rows) + origin(*sides.values())


def agreement(float32: Results, bfloat16: Results, int8: Results, vllm: Results) -> list[str]:
    """Requests whose every token is that of transformers in float32."""
    sides = {"float32": float32, "bfloat16": bfloat16, "int8": int8, f"vLLM, {vllm['dtype']}": vllm}
    each = {name: side["results"] for name, side in sides.items()}
    rows = [
        [name, f"{float32['results'][name]['requests']}", *(f"{it[name]['agrees']}" for it in each.values())]
        for name in WHAT
    ]
    return grid(["workload", "requests", *each], rows) + origin(*sides.values())


def offline(results: Results) -> list[str]:
    it, work = results["float32"], results["workload"]
    medians = {name: statistics.median(samples) for name, samples in it["seconds"].items()}
    ratio = medians["transformers"] / medians["paged"]
    header = ["", "prompt tokens", "output tokens", "transformers", "paged", "times faster"]
    row = [work["name"], f"{work['prompt_tokens']:,}", f"{work['output_tokens']:,}"]
    row += [f"{seconds(medians['transformers'])} s", f"{seconds(medians['paged'])} s", f"{ratio:.1f}"]
    return grid(header, [row]) + origin(results)


def waste(results: Results) -> list[str]:
    rows = [[it["cache"], f"{it['waste'] * 100:,.1f} %", f"{mib(it['peak_bytes'])} MiB"] for it in results["rows"]]
    return grid(["cache", "waste, averaged over the steps", "most held"], rows) + origin(results)


def hit_rate(results: Results) -> list[str]:
    rows = []
    for it in results["rows"]:
        pages = "no limit" if it["pages"] is None else f"{it['pages']:,}"
        rows.append([pages, f"{it['hit_rate']:.2%}".replace("%", " %"), f"{results['blocks'] / it['seconds']:,.0f}"])
    lines = grid(["pages", "blocks found", "blocks a second"], rows)
    return [*lines, "", f"{results['trace']}, {results['blocks']:,} blocks.", *origin(results)]


def quality(results: Results) -> list[str]:
    rows = [
        [name, f"{it['kl_mean']:.2g}", f"{it['kl_99th_percentile']:.2g}", f"{it['same_likeliest'] * 100:.2f} %"]
        for name, it in results["results"].items()
    ]
    header = ["format", "divergence, mean (nats)", "99 % of positions below", "likeliest token the same"]
    return [*grid(header, rows), "", f"{results['positions']:,} positions.", *origin(results)]


def cache(results: Results) -> list[str]:
    """open_lm's six rows; below them the row that was run in full, and what open_lm says."""
    header = ["context", "new tokens", "with (s)", "without (s)", "gain", "times faster", "ratio of operations"]
    header += ["tokens/s with", "without"]
    rows = [
        [
            f"{it['context']:,}",
            f"{it['new']:,}",
            seconds(it["with_s"]),
            seconds(it["without_s"]),
            f"{it['gain'] * 100:.1f} %",
            f"{it['times_faster']:.1f}",
            f"{it['operations_ratio']:.0f}",
            f"{it['tokens_per_s']:.1f}",
            f"{it['tokens_per_s_without']:.2f}",
        ]
        for it in results["rows"]
    ]
    full, theirs = results["in_full"], results["theirs"]
    low, high = (f"{gain * 100:.0f}" for gain in theirs["gain"])
    notes = [
        f"{results['model']} in {results['dtype']}, {results['threads']} threads; medians of {results['turns']} turns. "
        f"Context {full['context']:,} with {full['new']:,} new tokens, without the cache and in full: "
        f"{seconds(full['without_s'])} s, integrated {seconds(full['integrated_s'])} s, a difference of "
        f"{full['difference'] * 100:+.1f} %; {full['agrees']:,} of {full['tokens']:,} tokens are the same.",
        "",
        f"Theirs: gains of {low} to {high} % ({theirs['model']}, {theirs['device']}; {theirs['source']}).",
    ]
    return [*grid(header, rows), "", *notes, *origin(results)]


def sweep(kind: str, results: Results) -> list[str]:
    """By contender and by what grows, `batch` or `prompt`: time per token, peak memory, K and V held but empty."""
    points = [it for it in results["points"] if it["sweep"] == kind]
    found = {(it["contender"], it[kind]): it for it in points}
    contenders, sizes = dict.fromkeys(it["contender"] for it in points), sorted({it[kind] for it in points})
    measures: dict[str, Callable[[Results], str]] = {
        "Time of a decode step, ms": lambda it: f"{statistics.median(it['token_s']) * 1000:,.1f}",
        "Peak memory over the model, MiB": lambda it: mib(it["peak_bytes"]),
        "K and V held but empty, MiB": lambda it: f"{it['kv_empty_bytes'] / MIB:,.1f}",
    }
    lines = []
    for title, shown in measures.items():
        rows = [
            [name, *(shown(found[name, size]) if found.get((name, size), {}).get("token_s") else "" for size in sizes)]
            for name in contenders
        ]
        lines += [f"{title}:", "", *grid([kind, *(f"{size:,}" for size in sizes)], rows), ""]
    return lines[:-1] + origin(results)


def compiled(results: Results) -> list[str]:
    """The engine's step in plain torch, as one compiled graph beside eager."""
    it = results["compiled_engine"]
    eager, graph = (statistics.median(it[f"{name}_token_s"]) * 1000 for name in ("eager", "compiled"))
    header = ["batch", "page boundaries passed", "eager, ms", "compiled, ms", "recompiles", "rows with equal tokens"]
    agrees = f"{it['agrees']} of {it['batch']}"
    row = [f"{it['batch']}", f"{it['page_boundaries']}", f"{eager:.1f}", f"{graph:.1f}", f"{it['recompiles']}", agrees]
    return grid(header, [row]) + origin(results)


def peers(results: Results) -> list[str]:
    """Of each dtype: median seconds, in brackets how many times those of paged, and outputs as in float32."""
    names = list(results["workloads"])

    def cell(it: Results) -> str:
        if it["median_s"] is None:
            why: str = next(sample["why"] for sample in it["samples"] if "why" in sample)
            return why.splitlines()[0]
        agrees = next(sample["agrees"] for sample in it["samples"] if sample["seconds"] is not None)
        times = "" if it["times_paged"] is None else f" ({it['times_paged']:.2f})"
        return f"{seconds(it['median_s'])}{times}, {agrees} of {it['requests']}"

    lines = []
    for dtype, each in results["peers"].items():
        rows = [[peer, *(cell(it["workloads"][name]) for name in names)] for peer, it in each.items()]
        lines += [f"{dtype}:", "", *grid(["", *names], rows), ""]
    return lines[:-1] + origin(results)


WORKLOADS = ("workloads_float32.json", "workloads_bfloat16.json", "workloads_int8.json", "workloads_vllm_bfloat16.json")
TABLES = {
    "speed": Table(WORKLOADS, speed),
    "agreement": Table(WORKLOADS, agreement),
    "offline": Table(("offline.json",), offline),
    "waste": Table(("waste.json",), waste),
    "hit_rate": Table(("hit_rate.json",), hit_rate),
    "quality": Table(("quality.json",), quality),
    "cache": Table(("cache.json",), cache),
    "sweep_batch": Table(("sweep.json",), lambda results: sweep("batch", results)),
    "sweep_prompt": Table(("sweep.json",), lambda results: sweep("prompt", results)),
    "compiled": Table(("sweep.json",), compiled),
    "peers": Table(("peers.json",), peers),
}
