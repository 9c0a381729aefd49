"""Draws what bench_sweep.py measured: two figures of three panels, as SVG and PNG, for light and dark pages.

    python benchmarks/sweep_plots.py benchmarks/results/sweep.json sweep.svg

writes sweep-batch.svg, sweep-batch-dark.svg, the same as .png, and sweep-prompt likewise. From the same JSON comes the
same SVG, byte for byte, with the same matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Entry = dict[str, Any]

# Of each contender: colour on light and on dark pages (after Okabe and Ito, told apart by the colour-blind), line,
# marker, width: what is drawn later is thinner, as the same bytes lie on one line. Dashes: compiled, or another dtype.
STYLES: dict[str, tuple[str, str, str, str, float]] = {
    "paged": ("#0072B2", "#4EA8F0", "-", "o", 3.2),
    "paged, default": ("#0072B2", "#4EA8F0", "--", "o", 2.2),
    "PagedCache": ("#009E73", "#2CC79B", "-", "s", 1.5),
    "DynamicCache": ("#5F6670", "#B4BBC4", "-", "D", 1.5),
    "StaticCache": ("#D55E00", "#F5803E", "-", "^", 1.4),
    "StaticCache compiled": ("#D55E00", "#F5803E", "--", "^", 1.4),
    "append-last": ("#B45C92", "#DE96C4", "-", "v", 1.2),
    "append-last compiled": ("#B45C92", "#DE96C4", "--", "v", 1.2),
}
THEMES = {
    "": {"page": "#FFFFFF", "text": "#1F2328", "faint": "#59636E", "grid": "#E3E7EB"},
    "-dark": {"page": "#0D1117", "text": "#F0F6FC", "faint": "#9198A1", "grid": "#262C36"},
}
PANELS: list[tuple[str, Callable[[Entry], float]]] = [
    ("time per token, ms", lambda it: statistics.median(it["token_s"]) * 1000),
    ("peak memory over the model, MiB", lambda it: it["peak_bytes"] / 2**20),
    ("K/V held but empty, MiB", lambda it: it["kv_empty_bytes"] / 2**20),
]


def check() -> None:
    """Raises ConfigError where there is nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib, which is not here: pip install matplotlib, or leave --plot out")


def draw(results: dict[str, Any], output: Path, description: str = "") -> list[Path]:
    """Both sweeps of a report of bench_sweep.py; the files that were written.

    output: names them, without -batch or -prompt and with any of the endings. description: goes into their metadata.
    Raises ConfigError for another ending, and where matplotlib is not installed.
    """
    check()
    if output.suffix not in ("", ".svg", ".png"):
        raise ConfigError(f"plots are drawn as .svg and .png, and {output.name} ends in {output.suffix}")
    import matplotlib

    output.parent.mkdir(parents=True, exist_ok=True)
    written = []
    about = {"Description": description} if description else {}
    with matplotlib.rc_context({"svg.hashsalt": "paged", "font.family": "DejaVu Sans", "font.size": 9.5}):
        for sweep in ("batch", "prompt"):
            entries = [it for it in results["points"] if it["sweep"] == sweep]
            if not entries:
                continue
            for theme in THEMES:
                figure = _figure(results, entries, sweep, theme)
                stem = output.with_name(f"{output.stem}-{sweep}{theme}")
                figure.savefig(f"{stem}.svg", metadata=about | {"Date": None})
                figure.savefig(f"{stem}.png", metadata=about, dpi=180)
                written += [stem.with_name(f"{stem.name}.{ending}") for ending in ("svg", "png")]
    return written


def _figure(results: dict[str, Any], entries: list[Entry], sweep: str, theme: str) -> Figure:
    from matplotlib.figure import Figure

    colours = THEMES[theme]
    figure = Figure(figsize=(9.4, 4.3), facecolor=colours["page"])
    figure.subplots_adjust(left=0.062, right=0.98, top=0.78, bottom=0.285, wspace=0.24)
    names = [name for name in STYLES if any(it["contender"] == name for it in entries)]
    finished = [it for it in entries if "not_finished" not in it]
    for i, (title, value) in enumerate(PANELS):
        axes = figure.add_subplot(1, 3, i + 1)
        for name in names:
            some = sorted((it for it in finished if it["contender"] == name), key=lambda it: it[sweep])
            light, dark, dashes, marker, width = STYLES[name]
            axes.plot(
                [it[sweep] for it in some], [value(it) for it in some], color=dark if theme else light, linewidth=width,
                linestyle=dashes, marker=marker, markersize=4 + width / 2, label=name,
                markerfacecolor=colours["page"] if dashes == "--" else None,
            )  # fmt: skip
        _dress(axes, title, sorted({it[sweep] for it in entries}), [value(it) for it in finished], colours)
        axes.set_xlabel("rows in the batch" if sweep == "batch" else "tokens in the prompt", color=colours["text"])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.035), ncols=4, frameon=False, handlelength=3.2,
        labelcolor=colours["text"], columnspacing=2.2,
    )  # fmt: skip
    _words(figure, results, entries, sweep, colours)
    return figure


def _dress(axes: Axes, title: str, places: list[int], values: list[float], colours: dict[str, str]) -> None:
    """Axes by factors; where a value is 0, linear near it."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set_facecolor(colours["page"])
    axes.set_title(title, color=colours["text"], fontsize=10, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,}" for place in places], fontsize=8.5)
    axes.xaxis.set_minor_locator(NullLocator())
    least = min((value for value in values if value > 0), default=1.0)
    most = max([*values, least])
    steps = (1.0, 2.0, 5.0) if most < 100 * least else (1.0,)
    if min(values, default=1.0) <= 0:
        axes.set_yscale("symlog", linthresh=least, linscale=0.5)
        tens = [10.0**n for n in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]
        ticks = [step * ten for ten in tens for step in steps if step * ten >= least / 1.4]
        axes.yaxis.set_major_locator(FixedLocator([0.0, *ticks]))
        axes.set_ylim(-least / 4, most * 1.4)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=steps))
        axes.set_ylim(least / 1.4, most * 1.4)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(colors=colours["faint"], which="both", length=0)
    axes.grid(visible=True, color=colours["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _words(figure: Figure, results: dict[str, Any], entries: list[Entry], sweep: str, colours: dict[str, str]) -> None:
    """What was measured, where and how; what is missing."""
    first, machine = entries[0], results["machine"]
    model = Path(results["model"]).name  # it may be a folder
    fixed = f"prompts of {first['prompt']:,} tokens" if sweep == "batch" else "one row"
    head = f"{model}: {fixed}, {first['new']} new; float32 (paged, default: {results['default_dtype']})"
    how = f"{machine['cpu']}, {results['threads']} threads  ·  {results['command']}  ·  commit {results['commit'][:10]}"
    missing = ", ".join(
        f"{it['contender']} at {it[sweep]:,} ({it['not_finished']})" for it in entries if "not_finished" in it
    )
    left = 0.012
    figure.text(left, 0.94, head, color=colours["text"], fontsize=min(11.5, 11.5 * 85 / len(head)), fontweight="bold")
    figure.text(left, 0.888, how, color=colours["faint"], fontsize=min(8.5, 8.5 * 140 / len(how)))
    if missing:
        note = textwrap.shorten(f"not finished: {missing}", 170, placeholder=" and others")
        figure.text(left, 0.018, note, color=colours["faint"], fontsize=7.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    try:
        written = draw(json.loads(args.results.read_text()), args.output)
    except ConfigError as error:
        sys.exit(f"sweep_plots: {error}")
    print("\n".join(str(path) for path in written))


if __name__ == "__main__":
    main()
