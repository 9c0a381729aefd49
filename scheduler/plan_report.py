"""What `paged plan` found: as lines of text, and as one HTML page with drawings, which needs nothing from outside."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from scheduler.cost import Floats
from scheduler.planner import Capacity, Run

WIDTH, HEIGHT = 620, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 30, 14, 46  # around the plot itself
COLORS = ("#1f5fa8", "#c2571a", "#2e7d4f", "#7a4fa3")
DASHES = ("", "7 4", "2 3", "9 3 2 3")  # so that lines are told apart without colours

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #666; --grid: #ddd; --back: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #aaa; --grid: #444; --back: #1b1b1b; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 1320px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .7rem; text-align: right;
  border-bottom: 1px solid var(--grid); font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; }
.plots { display: flex; flex-wrap: wrap; gap: 1.2rem; } figure { margin: 0; max-width: 640px; flex: 1 1 480px; }
figcaption { color: var(--soft); font-size: .9rem; } svg { width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); } .axis { stroke: var(--soft); }
.grid { stroke: var(--grid); } .mark { stroke: var(--ink); stroke-dasharray: 4 3; }
.wide { overflow-x: auto; }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot, and what it is called. steps: it stays until it changes."""

    name: str
    x: SequenceOf[float]
    y: SequenceOf[float]
    steps: bool = False


def seconds(value: float) -> str:
    """In a unit that suits it, three digits."""
    if value and value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.3g} s" if value < 1000 else f"{value:,.0f} s"


def memory(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3g} MiB"


HEADS = (
    "replicas", "memory", "pages", "served", "first p50", "first p99", "gap p50", "gap p99", "hit rate", "preempted",
    "recomputed", "busy", "holds",
)  # fmt: skip


def cells(run: Run, capacity: Capacity) -> tuple[str, ...]:
    """One row of the table, under HEADS."""
    it = run.replay
    return (
        str(it.replicas),
        memory(run.kv_bytes),
        f"{it.num_pages:,}",
        f"{it.served:,}",
        seconds(it.first_token(50)),
        seconds(it.first_token(99)),
        seconds(it.between_tokens(50)),
        seconds(it.between_tokens(99)),
        f"{it.hit_rate:.1%}",
        f"{it.preemptions:,}",
        f"{it.recomputed:.1%}",
        f"{it.load / it.replicas:.2f}" if math.isfinite(it.load) else "",
        "overloaded" if it.overloaded else "yes" if capacity.targets.held_by(it) else "no",
    )


def rows(capacity: Capacity) -> list[Run]:
    """Every run once, as the table has them: fewest replicas first, then smallest pool."""
    every = {id(run): run for run in (*capacity.by_replicas, *capacity.by_pool)}
    return sorted(every.values(), key=lambda run: (run.replay.replicas, run.replay.num_pages))


def table(capacity: Capacity) -> list[str]:
    """The runs as lines of text."""
    every = [HEADS, *(cells(run, capacity) for run in rows(capacity))]
    widths = [max(len(row[i]) for row in every) for i in range(len(HEADS))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every]


def answers(capacity: Capacity) -> list[str]:
    """What follows, in sentences."""
    base, targets, chosen = capacity.base.replay, capacity.targets, capacity.chosen
    aim = f"first token {seconds(targets.first)} and between tokens {seconds(targets.gap)} at the 99th percentile"
    found = []
    if base.overloaded:
        found.append(
            f"overloaded: arrivals need {base.load:.1f} x this machine; by arithmetic that is "
            f"{base.replicas_needed} replicas that are never idle"
        )
    many = f"{capacity.replicas} replica{'s' if capacity.replicas > 1 else ''}"
    if capacity.holds:
        found.append(f"{many} with {memory(chosen.kv_bytes)} each hold the targets ({aim})")
    else:
        tried = max(run.replay.replicas for run in capacity.by_replicas)
        most = f"none up to {tried} replicas holds" if tried > 1 else "one replica does not hold"
        found.append(f"{most} the targets ({aim}): {_advice(capacity)}")
    knee, least = capacity.knee, capacity.least
    if least is not None:
        found.append(
            f"the smallest pool that was tried and holds them: {memory(least.kv_bytes)} "
            f"({least.replay.num_pages:,} pages) a replica"
        )
    if knee is not None:
        also = ", the smallest that was tried" if knee is capacity.by_pool[0] else ""
        found.append(
            f"knee: {memory(knee.kv_bytes)} ({knee.replay.num_pages:,} pages) a replica{also}; with more, the first "
            f"token's 99th percentile gains less than 10 %"
        )
    return found


def _advice(capacity: Capacity) -> str:
    last = capacity.by_replicas[-1].replay
    if last.overloaded:
        return "raise --max-replicas"
    over = []
    if last.first_token(99) > capacity.targets.first:
        over.append(f"the first token takes {seconds(last.first_token(99))} then: raise --max-replicas")
    if last.between_tokens(99) > capacity.targets.gap:
        over.append(
            f"between tokens it takes {seconds(last.between_tokens(99))} then, as chunks of prompts stand beside them: "
            "lower max_num_batched_tokens, or raise --max-replicas"
        )
    return "; ".join(over)


def page(capacity: Capacity, settings: SequenceOf[tuple[str, str]], notes: SequenceOf[str]) -> str:
    """The whole report as HTML. settings: names and values. notes: what else is to be known."""
    title = f"Capacity for {capacity.trace.name}"
    listed = "".join(f"<li>{html.escape(text)}</li>" for text in answers(capacity))
    noted = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    chosen, base = capacity.chosen, capacity.base
    shown = [(_called(run), run) for run in ((base, chosen) if chosen is not base else (base,))]
    plots = [
        distribution("first token", [(name, run.replay.first) for name, run in shown], capacity.targets.first),
        distribution("between tokens", [(name, run.replay.gaps) for name, run in shown], capacity.targets.gap),
        *(timeline(name, run) for name, run in shown),
        pools(capacity),
    ]
    if len(capacity.by_replicas) > 1:
        plots.append(replicas(capacity))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>'
        f"<h1>{html.escape(title)}</h1>\n<ul>{listed}</ul>\n{noted}\n"
        f'<h2>Runs</h2><div class="wide">{_html_table(HEADS, [cells(run, capacity) for run in rows(capacity)])}</div>\n'
        f'<h2>Plots</h2><div class="plots">{"".join(plots)}</div>\n'
        f"<h2>Settings</h2>{_html_table(('setting', 'value'), settings)}\n</body></html>\n"
    )


def _called(run: Run) -> str:
    number = run.replay.replicas
    return f"{number} replica{'s' if number > 1 else ''}, {memory(run.kv_bytes)}"


def _html_table(heads: SequenceOf[str], lines: SequenceOf[SequenceOf[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def distribution(what: str, runs: SequenceOf[tuple[str, Floats]], target: float) -> str:
    """Shares of requests (or gaps) that took at most so long."""
    lines, said = [], []
    for name, values in runs:
        if len(values):
            x = np.maximum(values, 1e-4)
            lines.append(Line(name, x.tolist(), np.linspace(0, 1, len(x)).tolist()))
            p50, p99 = np.percentile(values, (50, 99))
            said.append(f"{name}: half within {seconds(p50)}, 99 % within {seconds(p99)}")
    text = f"Time {'to the ' if what.startswith('first') else ''}{what}. {'; '.join(said)}. Target {seconds(target)}."
    return figure(text, lines, x_name="seconds", y_name="share at most", log_x=True, marks=[(target, "target")])


def timeline(name: str, run: Run) -> str:
    """Requests running and waiting, and pages held, as shares of their most."""
    moments = run.replay.timeline
    lines, said = [], []
    for column, what in ((1, "running"), (2, "waiting"), (3, "pages held")):
        most = run.replay.num_pages * run.replay.replicas if column == 3 else moments[:, column].max(initial=0)
        lines.append(Line(what, moments[:, 0].tolist(), (moments[:, column] / max(most, 1)).tolist(), steps=True))
        said.append(f"{what}: at most {moments[:, column].max(initial=0):,.0f}")
    said[-1] += f" of {run.replay.num_pages * run.replay.replicas:,}"
    text = f"Over time, {name}; running and waiting over their most, pages over all. {', '.join(said)}."
    return figure(text, lines, x_name="seconds since the first arrival", y_name="share")


def pools(capacity: Capacity) -> str:
    """99th percentiles over the memory of a replica, with the knee."""
    largest = capacity.by_pool[-1]
    runs = [run for run in capacity.by_pool if run.replay.served == largest.replay.served]
    knee = [] if capacity.knee is None else [(capacity.knee.kv_bytes / 2**30, "knee")]
    said = [f"{memory(run.kv_bytes)}: first token {seconds(run.replay.first_token(99))}" for run in runs]
    said += [
        f"{memory(run.kv_bytes)} serves only {run.replay.served:,} requests and is left out"
        for run in capacity.by_pool
        if run.replay.served != largest.replay.served
    ]
    text = f"99th percentiles by memory of a replica, with {capacity.replicas}. {'; '.join(said)}."
    return figure(text, _percentiles(runs, [run.kv_bytes / 2**30 for run in runs]), x_name="GiB of pages a replica",
                  y_name="seconds", log_x=True, log_y=True, marks=knee, dots=True)  # fmt: skip


def replicas(capacity: Capacity) -> str:
    """99th percentiles over the number of replicas."""
    runs = capacity.by_replicas
    text = "99th percentiles by number of replicas. " + "; ".join(
        f"{r.replay.replicas}: first token {seconds(r.replay.first_token(99))}" for r in runs
    )
    marks = [(float(capacity.replicas), "holds")] if capacity.holds else []
    return figure(f"{text}.", _percentiles(runs, [float(run.replay.replicas) for run in runs]), x_name="replicas",
                  y_name="seconds", log_y=True, marks=marks, dots=True)  # fmt: skip


def _percentiles(runs: SequenceOf[Run], x: SequenceOf[float]) -> list[Line]:
    return [
        Line("first token", x, [max(run.replay.first_token(99), 1e-4) for run in runs]),
        Line("between tokens", x, [max(run.replay.between_tokens(99), 1e-4) for run in runs]),
    ]


class _Axis:
    """From values to places between `start` and `end` on the page."""

    def __init__(self, values: SequenceOf[float], start: float, end: float, log: bool) -> None:
        low, high = (min(values), max(values)) if values else (1.0, 1.0)
        self.log = log
        if log:
            self.ticks = _powers(low, high)
            low, high = min(low, self.ticks[0]), max(high, self.ticks[-1])
        else:
            low = min(low, 0.0)
            step = _round_step((high - low) / 5 or 1.0)
            high = max(math.ceil(high / step - 1e-9) * step, low + step)
            self.ticks = [low + i * step for i in range(round((high - low) / step) + 1)]
        self._low, self._high = (math.log10(low), math.log10(high)) if log else (low, high)
        if self._high <= self._low:
            self._low, self._high = self._low - 0.5, self._high + 0.5
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)


def _powers(low: float, high: float) -> list[float]:
    """Round numbers around and between two, at most about seven."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    steps = (1, 2, 5) if last - first <= 2 else (1,)
    every = [digit * 10.0**power for power in range(first, last + 1) for digit in steps]
    inside = [tick for tick in every if low <= tick * (1 + 1e-9) and tick <= high * (1 + 1e-9)]
    below = [tick for tick in every if tick < low][-1:] if not inside or inside[0] > low * (1 + 1e-9) else []
    above = [tick for tick in every if tick > high][:1] if not inside or inside[-1] < high * (1 - 1e-9) else []
    return [*below, *inside, *above]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= step * (1 - 1e-9))


def figure(
    text: str,
    lines: SequenceOf[Line],
    *,
    x_name: str,
    y_name: str,
    log_x: bool = False,
    log_y: bool = False,
    marks: SequenceOf[tuple[float, str]] = (),
    dots: bool = False,
) -> str:
    """A plot and the sentence that says the same. marks: places on the x axis, and what they are called."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    x_axis = _Axis([*(x for line in lines for x in line.x), *(x for x, _ in marks)], LEFT, right, log_x)
    y_axis = _Axis([y for line in lines for y in line.y], bottom, TOP, log_y)
    parts = []
    for tick in x_axis.ticks:
        at = x_axis(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,.6g}</text>')
    for tick in y_axis.ticks:
        at = y_axis(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:,.6g}</text>')
    parts.append(f'<path class="axis" fill="none" d="M{LEFT},{TOP}V{bottom}H{right}"/>')
    for i, line in enumerate(lines):
        parts += _drawn(line, i, x_axis, y_axis, dots)
    for value, name in marks:
        at, anchor = x_axis(value), "end" if x_axis(value) > (LEFT + right) / 2 else "start"
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        shift = -5 if anchor == "end" else 5
        parts.append(f'<text x="{at + shift:.1f}" y="{TOP + 12}" text-anchor="{anchor}">{html.escape(name)}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{bottom + 34}" text-anchor="middle">{html.escape(x_name)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{html.escape(y_name)}</text>'
    )
    label = html.escape(text)
    legend = "".join(
        f'<line x1="{LEFT + 170 * i}" x2="{LEFT + 170 * i + 24}" y1="{HEIGHT + 8}" y2="{HEIGHT + 8}" '
        f'stroke="{COLORS[i]}" stroke-width="2" stroke-dasharray="{DASHES[i]}"/>'
        f'<text x="{LEFT + 170 * i + 30}" y="{HEIGHT + 12}">{html.escape(line.name)}</text>'
        for i, line in enumerate(lines)
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT + 22}" role="img" aria-label="{label}"><title>{label}</title>'
        f"{''.join(parts)}{legend}</svg><figcaption>{label}</figcaption></figure>\n"
    )


def _drawn(line: Line, number: int, x_axis: _Axis, y_axis: _Axis, dots: bool) -> list[str]:
    color, places = COLORS[number], [(x_axis(x), y_axis(y)) for x, y in zip(line.x, line.y, strict=True)]
    if not places:
        return []
    path = f"M{places[0][0]:.1f},{places[0][1]:.1f}"
    for x, y in places[1:]:
        path += f"H{x:.1f}V{y:.1f}" if line.steps else f"L{x:.1f},{y:.1f}"
    parts = [f'<path fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{DASHES[number]}" d="{path}"/>']
    if dots:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in places]
    return parts
