"""The planner: how many replicas and pages, in words, in a table, and on one page that needs nothing from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from scheduler import cli, plan_report, planner
from scheduler.cost import CostModel
from scheduler.planner import Capacity, Planner, Run, Targets, thin
from scheduler.policy import Limits
from scheduler.simulate import simulate
from scheduler.traces import Trace, TraceRequest

COST = CostModel(step=0.5, token=0.01, read=0.001)
LIMITS = Limits(max_model_len=128, num_pages=64, page_size=4, max_num_seqs=8, max_num_batched_tokens=32)


def trace(count: int = 60, apart: float = 0.4, prompt: int = 20, output: int = 6) -> Trace:
    return Trace("made up", tuple(TraceRequest(i * apart, prompt, output) for i in range(count)))


def plan(given: Trace, targets: Targets, limits: Limits = LIMITS, processes: int = 1, most: int = 16) -> Capacity:
    with Planner(given, limits, 1024, COST, targets, max_replicas=most, processes=processes) as it:
        return it.run()


def test_the_fewest_replicas_that_hold_the_targets_are_found() -> None:
    capacity = plan(trace(), Targets(first=2.0, gap=3.0))
    assert capacity.base.replay.overloaded
    assert capacity.holds
    counts = [run.replay.replicas for run in capacity.by_replicas]
    assert counts == sorted(set(counts))
    for count in range(1, capacity.replicas + 1):
        assert capacity.targets.held_by(simulate(trace(), LIMITS, COST, count)) == (count == capacity.replicas)
    text = "\n".join(plan_report.answers(capacity))
    assert f"overloaded: arrivals need {capacity.base.replay.load:.1f} x this machine" in text
    assert f"{capacity.replicas} replicas with 0.0635 MiB each hold the targets" in text


def test_one_machine_that_holds_the_targets_is_enough() -> None:
    capacity = plan(trace(apart=10.0), Targets(first=2.0, gap=3.0))
    assert [run.replay.replicas for run in capacity.by_replicas] == [1]
    assert capacity.holds
    assert "overloaded" not in " ".join(plan_report.answers(capacity))


def test_targets_that_nothing_holds_are_said_with_what_there_is() -> None:
    """A step takes half a second, so a tenth between tokens is out of reach of any number of replicas."""
    capacity = plan(trace(), Targets(first=2.0, gap=0.1))
    assert not capacity.holds
    assert capacity.least is None
    text = "\n".join(plan_report.answers(capacity))
    assert re.search(r"none up to \d+ replicas holds the targets", text)
    assert "lower max_num_batched_tokens" in text


def test_replicas_end_where_the_user_says() -> None:
    capacity = plan(trace(), Targets(first=2.0, gap=3.0), most=1)
    assert [run.replay.replicas for run in capacity.by_replicas] == [1]
    assert "raise --max-replicas" in "\n".join(plan_report.answers(capacity))


def test_the_knee_is_the_smallest_pool_near_the_largest() -> None:
    """Every replay by hand: 26 tokens are 7 pages, so eight at once, which is the most that run, take 56 pages."""
    capacity = plan(trace(apart=2.0), Targets(first=60.0, gap=10.0))
    pools = [run.replay.num_pages for run in capacity.by_pool]
    assert pools == sorted(set(pools))
    assert {16, 32, 64, 128, 256} <= set(pools)
    replays = {pages: simulate(trace(apart=2.0), replace(LIMITS, num_pages=pages), COST) for pages in pools}
    for run in capacity.by_pool:
        assert run.replay.first_token(99) == pytest.approx(replays[run.replay.num_pages].first_token(99))
    bound = 1.1 * replays[pools[-1]].first_token(99)
    near = [pages for pages in pools if replays[pages].served == 60 and replays[pages].first_token(99) <= bound]
    assert capacity.knee is not None
    assert capacity.knee.replay.num_pages == near[0]
    assert near[0] > pools[0], "there must be a knee to find"


def test_a_pool_that_serves_fewer_requests_is_no_knee() -> None:
    """One long request needs 20 pages: smaller pools refuse it, and are quick with the others."""
    some = Trace("made up", (*trace(apart=10.0).requests, TraceRequest(700.0, 75, 5)))
    capacity = plan(some, Targets(first=60.0, gap=10.0))
    assert capacity.by_pool[0].replay.served == 60
    assert capacity.knee is not None
    assert capacity.knee.replay.served == 61
    assert capacity.knee.replay.num_pages >= 20
    assert "serves only 60 requests" in plan_report.pools(capacity)


def test_other_processes_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan(trace(), Targets(first=2.0, gap=3.0))
    monkeypatch.setattr(planner, "SMALL", 0)
    together = plan(trace(), Targets(first=2.0, gap=3.0), processes=2)
    one, two = (
        {(run.replay.replicas, run.replay.num_pages): plan_report.cells(run, it) for run in plan_report.rows(it)}
        for it in (alone, together)
    )
    assert len(one.keys() & two.keys()) > 4
    assert all(one[setting] == two[setting] for setting in one.keys() & two.keys())
    assert (alone.replicas, plan_report.answers(alone)[-1]) == (together.replicas, plan_report.answers(together)[-1])


def test_what_is_kept_of_a_replay_has_its_percentiles() -> None:
    replay = simulate(trace(count=600, output=9), LIMITS, COST, 4)
    kept = thin(replay)
    assert len(replay.gaps) > len(kept.gaps) == 2001
    for percent in (0, 50, 99, 100):
        assert kept.between_tokens(percent) == pytest.approx(replay.between_tokens(percent), rel=1e-9)
        assert kept.first_token(percent) == replay.first_token(percent)
    assert len(kept.timeline) <= 500 < len(replay.timeline)
    assert kept.timeline[:, 1:].max(axis=0).tolist() == replay.timeline[:, 1:].max(axis=0).tolist()


class Page(HTMLParser):
    """Tags must be closed in order; `texts` is what is between them."""

    EMPTY = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: SequenceOf[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "onload"} & {name for name, _ in attrs}
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page() -> tuple[str, Capacity]:
    capacity = plan(trace(), Targets(first=2.0, gap=3.0))
    return plan_report.page(capacity, [("model", "a <b> & c")], ["a note"]), capacity


def test_the_report_is_whole_and_needs_nothing_from_outside() -> None:
    text, capacity = page()
    parser = Page()
    parser.feed(text)
    assert parser.open == []
    said = " ".join(parser.texts)
    for line in (*plan_report.answers(capacity), "a note", "a <b> & c"):
        assert line in said
    assert not re.search(r"https?:|//|@import|url\(|<script|<img|<link", text)


def test_plots_lie_within_their_frames_and_say_in_words_what_they_show() -> None:
    text, capacity = page()
    plots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(plots) == 6  # two distributions, two timelines, pools, replicas
    for plot in plots:
        _, _, width, height = map(float, plot.attrib["viewBox"].split())
        assert plot.findtext("title") == plot.attrib["aria-label"] != ""
        paths = [one.attrib["d"] for one in plot.iter("path") if "stroke" in one.attrib]
        assert paths
        for path in paths:
            for kind, x, y in re.findall(r"([ML])(-?[\d.]+),(-?[\d.]+)", path):
                assert plan_report.LEFT <= float(x) <= width, kind
                assert 0 <= float(y) <= height
            assert all(0 <= float(y) <= height for y in re.findall(r"V(-?[\d.]+)", path))
            assert all(0 <= float(x) <= width for x in re.findall(r"H(-?[\d.]+)", path))
    first = capacity.chosen.replay.first_token(99)
    assert f"99 % within {plan_report.seconds(first)}" in plots[0].attrib["aria-label"]


def test_a_line_is_drawn_where_its_values_are() -> None:
    """A linear axis from 0 to 10 and one of powers from 1 to 100: the middle of each is where it must be."""
    line = plan_report.Line("a", [0.0, 5.0, 10.0], [1.0, 10.0, 100.0])
    svg = plan_report.figure("text", [line], x_name="x", y_name="y", log_y=True)
    (path,) = re.findall(r'stroke-width="2" stroke-dasharray="" d="(M[^"]*)"', svg)
    places = [tuple(map(float, place.split(","))) for place in re.split("[ML]", path)[1:]]
    left, right = plan_report.LEFT, plan_report.WIDTH - plan_report.RIGHT
    top, bottom = plan_report.TOP, plan_report.HEIGHT - plan_report.BOTTOM
    assert places == [(left, bottom), ((left + right) / 2, (top + bottom) / 2), (right, top)]


def test_nothing_that_is_empty_or_equal_breaks_a_plot() -> None:
    flat = plan_report.Line("a", [3.0, 3.0], [0.0, 0.0])
    for lines in ([], [flat], [plan_report.Line("b", [], [])]):
        ElementTree.fromstring(plan_report.figure("t", lines, x_name="x", y_name="y").split("<figcaption>")[0][8:])
    same = Run(1024, simulate(trace(count=1), LIMITS, COST))
    assert "1.02 KiB" not in plan_report.timeline("one", same)
    assert np.isfinite(same.replay.first_token(99))


# The command

OURS = '{"timestamp": %s, "prompt_tokens": 30, "output_tokens": 4, "hash_ids": [1], "block_tokens": 16}'
NUMBERS = "step=0.01,token=0.001"


def write(file: Path, *lines: str) -> str:
    file.write_text("\n".join(lines))
    return str(file)


@pytest.mark.usefixtures("smollm2")
def test_the_command_prints_a_table_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = json.dumps({"timestamp": 1, "prompt_tokens": 9000, "output_tokens": 4})
    source = write(tmp_path / "t.jsonl", *(OURS % (i / 4) for i in range(40)), long)
    report = tmp_path / "plan.html"
    # More memory than any machine here has: it is planned for, not taken.
    settings = ("--kv-memory", "9000GiB", "--max-num-seqs", "4", "--dtype", "float32")
    done = cli.run(["plan", "--trace", source, "-o", str(report), "--cost", NUMBERS, *settings])
    out, err = capsys.readouterr()
    assert done == 0, err
    assert "t.jsonl: 41 requests in 10 s, 10,200 tokens of prompts and 164 of answers" in out
    assert "refused, as an engine would: 1 longer than max_model_len 8,192" in out
    assert "1 lines were out of order" in out
    largest = [re.split(r" {2,}", line.strip()) for line in out.splitlines() if line.strip().startswith("1  ")][-1]
    assert largest[:4] == ["1", "1.41 GiB", "2,048", "40"]  # what four of the longest take
    assert "52.0%" in out  # 39 of 40 prompts of 30 tokens hit 16
    assert "1 replica with" in out
    assert "knee: " in out
    assert f"report: {report}" in err
    assert report.read_text().startswith("<!doctype html>")


@pytest.mark.usefixtures("smollm2")
def test_without_a_cost_the_model_is_measured_and_what_was_measured_can_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, kept = write(tmp_path / "t.jsonl", OURS % 0), tmp_path / "cost.json"
    few = {"max-model-len": "64", "max-num-seqs": "1", "kv-memory": "16MiB", "max-num-batched-tokens": "16"}
    settings = [word for name, value in few.items() for word in (f"--{name}", value)]
    assert cli.run(["plan", "--trace", source, "--save-cost", str(kept), *settings]) == 0
    first = capsys.readouterr().out
    assert json.loads(kept.read_text())["step"] > 0
    assert cli.run(["plan", "--trace", source, "--cost", str(kept), *settings]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--trace", "none"], "trace none does not exist"),
        (["--trace", "empty"], "trace empty has no request"),
        (["--trace", "bad"], "trace bad, line 2"),
        (["--trace", "good", "--cost", "step=-1"], "step of a cost model"),
        (["--trace", "good", "--cost", NUMBERS, "--save-cost", "x"], "--save-cost writes what is measured"),
        (["--trace", "good", "--cost", NUMBERS, "--ttft-p99", "0"], "--ttft-p99 must be seconds"),
        (["--trace", "good", "--cost", NUMBERS, "--itl-p99", "nan"], "--itl-p99 must be seconds"),
        (["--trace", "good", "--cost", NUMBERS, "-o", "good"], "good is the trace"),
        (["--trace", "good", "--cost", NUMBERS, "-o", "no/where.html"], "cannot be written"),
        (["--trace", "good", "--cost", NUMBERS, "--max-replicas", "0"], "--max-replicas"),
        (["--trace", "good", "--cost", NUMBERS, "--model", "nope"], "unknown model 'nope'"),
        (["--trace", "good", "--cost", NUMBERS, "--max-model-len", "8", "--kv-memory", "64MiB"], "can be served"),
        ([], "--trace"),
    ],
)
@pytest.mark.usefixtures("smollm2")
def test_what_cannot_work_is_one_line_and_exit_code_two(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "empty")
    write(tmp_path / "good", OURS % 0)
    write(tmp_path / "bad", OURS % 0, "broken")
    assert cli.run(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("paged: error: ")
    assert text in err
    assert (tmp_path / "good").read_text() == OURS % 0
