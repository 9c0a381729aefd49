"""J1: whatever is cut, killed, full or changed, each line has its record exactly once (cases B04 and B05)."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from job_fakes import ABOUT, FakeAnswerer, request, run, write

from paged import ConfigError
from scheduler import journal
from scheduler.journal import Entry, Output

FAKES = Path(__file__).parents[1] / "job_fakes.py"
LINES = [request(f"id-{i}", "same" if i in (3, 4) else f"prompt {i}") for i in range(1, 11)]
SUFFIXES = {"plain": "", "gzip": ".gz", "zstd": ".zst"}


def unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(content)
    if path.suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
        return bytes(reader.read())
    return content


def records(path: Path) -> list[bytes]:
    content = unpacked(path)
    assert content.endswith(b"\n")
    return content.splitlines(keepends=True)


def numbers(path: Path) -> list[int]:
    """The line of each record; every one is JSON."""
    return [int(json.loads(text)["response"]["request_id"].removeprefix("line-")) for text in records(path)]


class Files:
    """An input of ten lines, the output of an undisturbed run, and its journal."""

    def __init__(self, folder: Path, suffix: str = "", ordered: bool = False) -> None:
        self.source, self.target = write(folder / "in.jsonl", LINES), folder / f"out.jsonl{suffix}"
        self.journal = folder / f"{self.target.name}.journal"
        self.ordered = ordered
        # Stopped and gone on, so that a packed output has several pieces.
        self.run(stop_after=3)
        self.run(stop_after=6)
        self.run()
        self.whole, self.noted = self.target.read_bytes(), self.journal.read_bytes()
        self.records = records(self.target)

    def run(self, **more: Any) -> Any:
        return run(self.source, self.target, ordered=self.ordered, **more)

    def check(self) -> None:
        found = records(self.target)
        assert (found if self.ordered else sorted(found)) == (self.records if self.ordered else sorted(self.records))
        assert run_is_done(self)


def run_is_done(files: Files) -> bool:
    answerer = FakeAnswerer()
    files.run(answerer=answerer)
    return answerer.added == []


@pytest.fixture(scope="module", params=[(kind, ordered) for kind in SUFFIXES for ordered in (False, True)], ids=str)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    kind, ordered = request.param
    return Files(tmp_path_factory.mktemp("job"), SUFFIXES[kind], ordered)


@settings(max_examples=40)
@given(st.data())
def test_output_and_journal_cut_at_any_byte_lose_double_and_tear_nothing(files: Files, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(files.whole)), label="end of the output")
    noted = data.draw(st.integers(0, len(files.noted)), label="end of the journal")
    files.target.write_bytes(files.whole[:end])
    files.journal.write_bytes(files.noted[:noted])
    before = files.whole[: files.whole[:end].rfind(b"\n") + 1] if files.target.suffix == ".jsonl" else b""
    files.run()
    assert files.target.read_bytes().startswith(before), "what was whole is not written again"
    files.check()


def test_an_output_proves_itself_without_its_journal(files: Files) -> None:
    files.target.write_bytes(files.whole)
    files.journal.unlink()
    assert run_is_done(files)
    assert files.target.read_bytes() == files.whole
    assert [e for e in files.journal.read_bytes().splitlines() if e[:1].isdigit()] == [
        e for e in files.noted.splitlines() if e[:1].isdigit()
    ]


class Killed(BaseException):
    """In the place of SIGKILL: nothing more is written."""


def killed_at(at: int) -> Callable[[int, int, bytes], None]:
    """A `_write` under which the process dies when so many bytes were written, in the middle of a write too."""
    left = at

    def write(file: int, offset: int, content: bytes) -> None:
        nonlocal left
        os.pwrite(file, content[:left], offset)
        left -= len(content)
        if left < 0:
            left = 0
            raise Killed

    return write


def survives(folder: Path, at: int, ordered: bool) -> bool:
    """A job killed at a byte, and gone on with; whether it was killed at all. Asserts that all is whole."""
    source, target = write(folder / "in.jsonl", LINES), folder / "out.jsonl"
    target.unlink(missing_ok=True)
    (folder / "out.jsonl.journal").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_write", killed_at(at))
        try:
            run(source, target, ordered=ordered)
        except Killed:
            killed = True
        else:
            killed = False
    run(source, target, ordered=ordered)
    assert sorted(numbers(target)) == list(range(1, 11))
    assert not ordered or numbers(target) == list(range(1, 11))
    return killed


@pytest.mark.parametrize("ordered", [False, True])
def test_b04_killed_at_any_byte_that_is_written(tmp_path: Path, ordered: bool) -> None:
    at = 0
    while survives(tmp_path, at, ordered):
        at += 13
    assert at > 2000


def trusting(self: Output, found: Any, output: Any) -> list[Entry]:
    """As `_verified` would be if it believed the journal."""
    for text in found:
        if match := journal._ENTRY.fullmatch(text):
            line, digest, status, end, length, crc = match.groups()
            self.index.add(Entry(int(line), digest.decode(), status.decode(), int(end), int(length), int(crc, 16)))
            self._end = int(end)
        self._noted += len(text)
    return []


def appending(self: Output, found: Any, output: Any, honest: Any = Output._recovered) -> list[Entry]:
    """As `_recovered` would be if it took what is torn for whole."""
    adopted: list[Entry] = honest(self, found, output)
    self._end = os.fstat(output.fileno()).st_size
    return adopted


@pytest.mark.parametrize(("name", "fault"), [("_verified", trusting), ("_recovered", appending)])
def test_a_planted_fault_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any) -> None:
    """The check above is able to fail: it asserts, or finds a record that is no JSON."""
    monkeypatch.setattr(Output, name, fault)
    with pytest.raises((AssertionError, ValueError)):
        all(survives(tmp_path, at, ordered=False) for at in range(0, 4000, 13))


@pytest.mark.parametrize("with_journal", [True, False])
@pytest.mark.parametrize("variant", ["a", "b", "c", "d"])
def test_b04_a_torn_last_line(tmp_path: Path, variant: str, with_journal: bool) -> None:
    files = Files(tmp_path)
    five, sixth = b"".join(files.records[:5]), files.records[5]
    torn = {
        "a": five + sixth[:60],
        "b": five + sixth[: sixth.index("\u20ac".encode()) + 1],  # inside of a character
        "c": five + sixth.removesuffix(b"\n"),
        "d": b"",
    }[variant]
    files.target.write_bytes(torn)
    if not with_journal:
        files.journal.unlink()
    answerer = FakeAnswerer()
    progress = files.run(answerer=answerer)
    kept = {"a": 5, "b": 5, "c": 6, "d": 0}[variant]
    assert (progress.before, len(answerer.added)) == (kept, 10 - kept)
    assert records(files.target)[:kept] == files.records[:kept]
    files.check()


def start(source: Path, target: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(FAKES), str(source), str(target), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("ordered", [False, True])
def test_b04_killed_ten_times_at_random_moments(tmp_path: Path, ordered: bool) -> None:
    """With both orders, twenty; each time by SIGKILL, some time after it has begun to write."""
    rng, more = random.Random(ordered), ["--pause", "0.002", *(["--ordered"] if ordered else [])]
    source, target = write(tmp_path / "in.jsonl", [request(f"{i}") for i in range(2000)]), tmp_path / "out.jsonl"
    seen = 0
    for _ in range(10):
        process = start(source, target, *more)
        while not target.exists() or target.stat().st_size <= seen:
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.communicate()
        found = target.read_bytes()
        assert found.count(b"\n") < 2000
        seen = len(found)
    kept = target.read_bytes()
    process = start(source, target, *more[2:])
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert target.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert sorted(numbers(target)) == list(range(1, 2001))
    assert not ordered or numbers(target) == list(range(1, 2001))
    undisturbed = tmp_path / "undisturbed.jsonl"
    run(source, undisturbed)
    assert sorted(records(undisturbed)) == sorted(records(target)), "the same seeds, so the same answers"


def test_a_full_disk_leaves_whole_records_and_the_same_command_goes_on(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [request(f"{i}") for i in range(500)]), tmp_path / "out.jsonl"
    process = start(source, target, "--limit", "40000")
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "File too large; what is in it is whole: make room, and the same command goes on" in errors
    kept = target.read_bytes()
    assert 0 < len(kept) <= 40_000
    assert kept.endswith(b"\n")
    run(source, target)
    assert target.read_bytes().startswith(kept)
    assert sorted(numbers(target)) == list(range(1, 501))


def test_b05_duplicates_on_both_sides_of_a_kill(tmp_path: Path) -> None:
    lines = [request("a", "1"), request("b", "2"), request("c", "2"), request("d", "4"), request("e", "5")]
    source, target = write(tmp_path / "in.jsonl", [*lines, request("e", "another")]), tmp_path / "out.jsonl"
    run(source, target, FakeAnswerer(room=3), stop_after=3)
    assert len(records(target)) in (3, 4)
    progress = run(source, target)
    assert (progress.ok, progress.failed) == (5, 1)
    by_line = {int(json.loads(text)["id"].split("_")[2].split("-")[0]): json.loads(text) for text in records(target)}
    assert sorted(by_line) == [1, 2, 3, 4, 5, 6]
    assert [by_line[i]["custom_id"] for i in range(1, 7)] == ["a", "b", "c", "d", "e", "e"]
    message = by_line[6]["response"]["body"]["error"]["message"]
    assert message == "line 6: custom_id 'e' is that of line 5 already"


def test_a_second_job_on_the_same_output_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [request(f"{i}") for i in range(3000)]), tmp_path / "out.jsonl"
    process = start(source, target, "--pause", "0.01")
    while not target.exists() or not target.stat().st_size:
        time.sleep(0.01)
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=f"process {process.pid} is writing this output"):
            run(source, target, overwrite=overwrite)
    process.kill()
    process.communicate()
    assert run(source, target).ok == 3000


def test_a_changed_line_is_found_before_any_work(tmp_path: Path) -> None:
    files = Files(tmp_path)
    write(files.source, [*LINES[:6], request("id-7", "other"), *LINES[7:]])
    with pytest.raises(ConfigError, match=r"line 7 has changed since it was answered.*--overwrite"):
        files.run()
    write(files.source, LINES[:8])
    with pytest.raises(ConfigError, match=r"line 10 was answered, and input .* ends with line 8"):
        files.run()
    assert files.target.read_bytes() == files.whole


def test_lines_may_be_added_at_the_end(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.source.write_bytes(files.source.read_bytes().removesuffix(b"\n"))  # its end is no change of the last line
    assert run_is_done(files)
    write(files.source, [*LINES, request("new")])
    answerer = FakeAnswerer()
    assert files.run(answerer=answerer).ok == 11
    assert answerer.added == ["11"]


def test_another_model_setting_or_order_is_refused_with_both_values(tmp_path: Path) -> None:
    files = Files(tmp_path)
    with pytest.raises(ConfigError, match='begun with model "fake", and now it is "other"'):
        files.run(about={"model": "other"})
    with pytest.raises(ConfigError, match="begun with ordered false, and now it is true"):
        run(files.source, files.target, ordered=True)
    files.run(about={**ABOUT, "unheard": 1})  # of what one of the two does not know nothing is said
    files.run(about={"model": "other"}, overwrite=True)
    assert sorted(numbers(files.target)) == list(range(1, 11))


def test_a_record_changed_by_hand_is_an_error(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.target.write_bytes(files.whole.replace(b"prompt 5", b"prompt 6"))
    with pytest.raises(ConfigError, match=r"was changed since it was written: the record of line 5.*--overwrite"):
        files.run()
    files.target.write_bytes(files.whole + b'{"mine": 1}\n')
    with pytest.raises(ConfigError, match="no record of a job"):
        files.run()
    files.journal.unlink()
    files.target.write_bytes(files.whole + files.records[3])
    with pytest.raises(ConfigError, match="two records of line"):
        files.run()


def test_room_that_was_never_written_is_cut(tmp_path: Path) -> None:
    """As after a power cut: a file has its length, and zeros at its end."""
    files = Files(tmp_path)
    at = len(b"".join(files.records[:7])) + 20
    files.target.write_bytes(files.whole[:at] + bytes(len(files.whole) - at))
    files.run()
    files.check()
    files.target.write_bytes(b"".join(files.records[:7]) + bytes(500))
    files.journal.unlink()
    files.run()
    files.check()


@pytest.mark.parametrize("content", [b"precious", b"precious\n", b'{"id": "batch_req_x"}\n', b"\x1f\x8b, not quite"])
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst"])
def test_a_file_of_somebody_elses_is_refused_and_stays(tmp_path: Path, content: bytes, name: str) -> None:
    source, target = write(tmp_path / "in.jsonl", LINES), tmp_path / name
    target.write_bytes(content)
    with pytest.raises(ConfigError, match=r"output .* exists.*--overwrite"):
        run(source, target)
    assert target.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in.jsonl", name])
    assert run(source, target, overwrite=True).ok == 10


def test_a_journal_of_somebody_elses_is_refused_and_stays(tmp_path: Path) -> None:
    source, mine = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl.journal"
    mine.write_text("Dear diary\n")
    with pytest.raises(ConfigError, match="no journal of a job"):
        run(source, tmp_path / "out.jsonl", overwrite=True)
    assert mine.read_text() == "Dear diary\n"
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_to_be_overwritten_is_there_until_the_job_begins(tmp_path: Path) -> None:
    files = Files(tmp_path)
    Output(files.target, ABOUT, overwrite=True).close()
    assert files.target.read_bytes() == files.whole
    assert run_is_done(files)


def test_an_overwriting_job_killed_before_it_began_stops_nobody(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.journal.unlink()
    killed = "import os, sys; from pathlib import Path; from scheduler.journal import Output; "
    killed += "Output(Path(sys.argv[1]), {}, overwrite=True); os._exit(9)"
    subprocess.run([sys.executable, "-c", killed, str(files.target)], check=False)
    assert files.journal.exists()
    assert run_is_done(files)
    files.check()
    assert not Output(files.target, ABOUT).rebuilt


def test_a_link_to_an_output_has_the_same_journal(tmp_path: Path) -> None:
    files, link = Files(tmp_path), tmp_path / "link.jsonl"
    link.symlink_to(files.target)
    first = Output(files.target, ABOUT)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} is writing this output"):
        run(files.source, link)
    first.close()
    assert run(files.source, link).before == 10


@pytest.mark.parametrize("with_journal", [True, False])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_the_end_of_a_packed_output_that_was_never_written_is_cut(
    tmp_path: Path, suffix: str, with_journal: bool
) -> None:
    """As after a power cut, which leaves zeros."""
    files = Files(tmp_path, suffix)
    for zeros in (8, 20, 60, 200):
        files.target.write_bytes(files.whole[:-zeros] + bytes(zeros))
        if not with_journal:
            files.journal.unlink()
        files.run()
        assert sorted(records(files.target)) == sorted(files.records)


def test_a_job_that_wrote_nothing_leaves_nothing(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    output = Output(target, ABOUT)
    assert target.exists()
    output.close()
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
