"""Jobs beyond one plain run: input order (R03), failed lines again, seeds, a cluster that is lost (B07)."""

from __future__ import annotations

import gzip
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_fakes import FakeAnswerer, request, run, write

from paged import ConfigError
from scheduler.desk import Response
from scheduler.jobs import Stop, Stopped


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def ids(path: Path) -> list[str]:
    return [record["custom_id"] for record in read(path)]


def test_r03_ordered_records_are_in_the_order_of_the_input_after_resumptions_too(tmp_path: Path) -> None:
    lines = [request(f"{i}", f"prompt {99 - i}") for i in range(60)]
    lines[7], lines[20], lines[50] = b"{broken", request("3"), request("50", "bad")
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    for stop_after in (5, 21, 40):
        progress = run(source, target, FakeAnswerer(per_take=2), stop_after=stop_after, ordered=True)
        assert progress.stopped
        found = read(target)
        assert [record["response"]["request_id"] for record in found] == [f"line-{i + 1}" for i in range(len(found))]
    progress = run(source, target, ordered=True)
    assert (progress.ok, progress.failed) == (57, 3)
    found = read(target)
    assert [record["response"]["request_id"] for record in found] == [f"line-{i}" for i in range(1, 61)]
    for i, record in enumerate(found):
        if i not in (7, 20, 50):
            assert record["custom_id"] == f"{i}"
            assert record["response"]["body"]["text"].startswith(f"prompt {99 - i} ")


class Withholding(FakeAnswerer):
    """Does not answer the first line until there is nothing else to answer."""

    def take(self, timeout: float) -> list[tuple[str, Response]]:
        first = self.pending.pop("1", None)
        answered = super().take(timeout)
        if first is not None:
            if not answered:
                return [("1", self._answer(first))]
            self.pending["1"] = first
        return answered


def test_ordered_records_that_wait_are_bounded(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [request(f"{i}") for i in range(1, 3001)]), tmp_path / "out.jsonl"
    answerer, most = Withholding(per_take=50), 0
    held = answerer._answer

    def answer(request: Any) -> Response:
        nonlocal most
        if not target.exists() or not target.stat().st_size:
            most = len(answerer.added)
        return held(request)

    answerer._answer = answer  # type: ignore[method-assign]
    assert run(source, target, answerer, ordered=True).ok == 3000
    assert 500 < most <= 520  # 512 and what is in flight
    assert ids(target) == [f"{i}" for i in range(1, 3001)]


def lost_halfway(folder: Path, **more: Any) -> tuple[Path, Path]:
    """A job whose cluster is lost when 4 lines are answered; line 3 is refused."""
    lines = [request(f"{i}", "bad" if i == 3 else f"prompt {i}") for i in range(1, 31)]
    source, old = write(folder / "in.jsonl", lines), folder / "old.jsonl"
    run(source, old, FakeAnswerer(), stop_after=4, **more)
    answerer = FakeAnswerer()
    answerer.broken = "cluster_lost"
    progress = run(source, old, answerer, **more)
    assert progress.ok + progress.failed == 30
    assert progress.failed >= 5
    return source, old


def test_b07_a_line_that_nobody_answered_has_a_code_and_no_response(tmp_path: Path) -> None:
    _, old = lost_halfway(tmp_path)
    for record in read(old):
        assert (record["response"] is None) != (record["error"] is None)
        if record["error"]:
            assert record["error"] == {"code": "cluster_lost", "message": "nobody is there"}
        elif record["response"]["status_code"] == 200:
            assert "error" not in record["response"]["body"]
        else:
            assert record["response"]["body"]["error"]["message"] == "line 3: no"


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ordered", [False, True])
def test_failed_lines_are_run_again_and_the_others_copied(tmp_path: Path, ordered: bool, suffix: str) -> None:
    source, old = lost_halfway(tmp_path, ordered=ordered)
    if suffix:  # from one kind of file to another
        packed = tmp_path / f"old.jsonl{suffix}"
        run(source, packed, retry_failed=str(old))
    new, before = tmp_path / "new.jsonl", old.read_bytes()
    good = {record["id"] for record in read(old) if record["response"] and record["response"]["status_code"] == 200}
    answerer = FakeAnswerer()
    run(source, new, answerer, stop_after=8, retry_failed=str(old), ordered=ordered)
    progress = run(source, new, answerer, retry_failed=str(old), ordered=ordered)
    assert (progress.ok, progress.failed) == (29, 1)
    assert old.read_bytes() == before
    assert {text for text in before.splitlines() if json.loads(text)["id"] in good} <= {*new.read_bytes().splitlines()}
    lines = sorted(int(record["id"].split("_")[2].split("-")[0]) for record in read(new))
    assert lines == list(range(1, 31))
    assert {int(key) for key in answerer.added}.isdisjoint(int(one.split("_")[2].split("-")[0]) for one in good)
    assert not ordered or [record["response"]["request_id"] for record in read(new)] == [f"line-{i}" for i in lines]
    with pytest.raises(ConfigError, match="begun with retry_failed"):
        run(source, new, ordered=ordered)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_output_can_be_retried(tmp_path: Path, suffix: str) -> None:
    source = write(tmp_path / "in.jsonl", [request(f"{i}", "lost" if i % 3 else f"{i}") for i in range(30)])
    run(source, tmp_path / f"old.jsonl{suffix}")
    answerer = FakeAnswerer()
    progress = run(source, tmp_path / "new.jsonl", answerer, retry_failed=str(tmp_path / f"old.jsonl{suffix}"))
    assert (progress.ok, progress.failed, progress.copied, len(answerer.added)) == (10, 20, 10, 20)


def test_a_retry_of_another_input_or_of_itself_is_refused(tmp_path: Path) -> None:
    source, old = lost_halfway(tmp_path)
    with pytest.raises(ConfigError, match="is the output to retry"):
        run(source, old, retry_failed=str(old))
    with pytest.raises(ConfigError, match=r"output to retry .* does not exist"):
        run(source, tmp_path / "new.jsonl", retry_failed=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="no record of a job"):
        run(source, tmp_path / "new.jsonl", retry_failed=str(source))
    write(source, [request("another"), *source.read_bytes().splitlines()[1:]])
    with pytest.raises(ConfigError, match="line 1 has changed"):
        run(source, tmp_path / "new.jsonl", retry_failed=str(old))
    assert not (tmp_path / "new.jsonl").exists()


def test_an_output_that_is_not_in_order_does_not_go_on_ordered(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [request(f"{i}") for i in range(30)]), tmp_path / "out.jsonl"
    run(source, target, stop_after=10)
    target.with_name("out.jsonl.journal").unlink()
    before = target.read_bytes()
    with pytest.raises(ConfigError, match=r"has line \d+ and not line \d+, so it was not begun with --ordered"):
        run(source, target, ordered=True)
    assert target.read_bytes() == before
    assert run(source, target).ok == 30


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_output_that_somebody_wrote_in_another_way_can_be_retried(tmp_path: Path, suffix: str) -> None:
    lines = [request(f"{i}", "bad" if i == 3 else f"prompt {i}") for i in range(1, 31)]
    source, old, new = write(tmp_path / "in.jsonl", lines), tmp_path / f"old.jsonl{suffix}", tmp_path / "new.jsonl"
    run(source, tmp_path / "out.jsonl")
    compact = [json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in read(tmp_path / "out.jsonl")]
    old.write_bytes(gzip.compress(b"".join(compact)) if suffix else b"".join(compact))
    progress = run(source, new, retry_failed=str(old))
    assert (progress.copied, progress.failed) == (29, 1)
    assert set(new.read_bytes().splitlines(keepends=True)) >= {one for one in compact if b"batch_req_3-" not in one}
    old.write_bytes(old.read_bytes() * 2)
    with pytest.raises(ConfigError, match="has two records of line"):
        run(source, tmp_path / "newer.jsonl", retry_failed=str(old))


class Counting(FakeAnswerer):
    """Has its counts anew each time, as a cluster has."""

    def take(self, timeout: float) -> list[tuple[str, Response]]:
        self.stats = replace(self.stats, output_tokens=self.stats.output_tokens + 100, running=7)
        return super().take(timeout)


def test_counts_are_those_of_now(tmp_path: Path) -> None:
    answerer = Counting()
    answerer.stats.output_tokens = 1000
    progress = run(write(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl", answerer)
    assert progress.stats.running == 7
    assert progress.tokens_per_second == pytest.approx(100 / progress.seconds)


def seeds(path: Path) -> dict[str, str]:
    return {record["custom_id"]: record["response"]["body"]["text"].split()[-1] for record in read(path)}


def test_seeds_are_those_of_the_line_whatever_is_restarted(tmp_path: Path) -> None:
    lines = [request(f"{i}") for i in range(20)]
    lines[5] = request("5", seed=1234)
    lines[6] = request("6", seed=None)
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run(source, target, stop_after=7, seed=None)
    header = json.loads(Path(f"{target}.journal").read_text().splitlines()[0])
    run(source, target, seed=None)  # goes on with what was drawn then
    found = seeds(target)
    assert found["5"] == "1234"
    assert len({*found.values()}) == 20
    run(source, tmp_path / "again.jsonl", FakeAnswerer(room=3, per_take=1), seed=header["_seeds"])
    assert seeds(tmp_path / "again.jsonl") == found
    run(source, tmp_path / "other.jsonl", seed=None)
    assert seeds(tmp_path / "other.jsonl") != found


def test_a_second_signal_or_one_outside_of_a_job_stops_at_once() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with Stop() as stop:
            with pytest.raises(Stopped) as caught:
                signal.raise_signal(number)
            assert caught.value.number == number
            stop.gently = True
            signal.raise_signal(number)
            assert stop.number == number
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
