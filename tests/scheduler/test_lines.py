"""Lines: the same from every kind of file and pipe, as they come, in bounded memory, with shared prefixes together."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from job_fakes import FakeAnswerer, request, run, write

from paged import ConfigError, RequestError
from scheduler.lines import Line, Source, prefix_key, request_of

CONTENT = b"\xef\xbb\xbfone\n\n  \ntwo\r\n\xff\n" + b"x" * 300_000 + b"\nlast"
LINES = [(1, b"one"), (4, b"two"), (5, b"\xff"), (6, b"x" * 300_000), (7, b"last")]


def taken(name: str) -> list[tuple[int, bytes]]:
    source, lines = Source(name), list[Line]()
    while not source.ended:
        lines += source.take(2, 1 << 20, 5)
    source.close()
    return [(line.number, line.raw) for line in lines]


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


PACKED = {
    "plain": CONTENT,
    "gzip": gzip.compress(CONTENT),
    "two gzip members": gzip.compress(CONTENT[:100]) + gzip.compress(CONTENT[100:]),
    "zstd": zstd(CONTENT),
    "two zstd frames": zstd(CONTENT[:100]) + zstd(CONTENT[100:]),
}


@pytest.mark.parametrize("kind", PACKED)
def test_the_lines_are_those_of_the_file_however_it_is_packed(tmp_path: Path, kind: str) -> None:
    """Told by its first bytes, not by its name."""
    (tmp_path / "in").write_bytes(PACKED[kind])
    assert taken(str(tmp_path / "in")) == LINES
    with fsspec.open("memory://in", "wb") as file:
        file.write(PACKED[kind])
    assert taken("memory://in") == LINES
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(PACKED[kind],), daemon=True)
    writer.start()
    assert taken(str(tmp_path / "pipe")) == LINES
    writer.join()


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_packed_file_that_is_cut_or_damaged_is_an_error_and_not_its_end(tmp_path: Path, kind: str) -> None:
    packed = PACKED[kind]
    for content in (packed[:-20], packed[:40] + b"????" + packed[44:]):
        (tmp_path / "in").write_bytes(content)
        with pytest.raises(ConfigError, match=r"is damaged after line \d"):
            taken(str(tmp_path / "in"))


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    (tmp_path / "in").write_bytes(PACKED["zstd"])
    with pytest.raises(ConfigError, match=r"zstandard: pip install 'paged-kv\[zstd\]'"):
        taken(str(tmp_path / "in"))
    with pytest.raises(ConfigError, match=r"fsspec: pip install 'paged-kv\[urls\]'"):
        taken("s3://bucket/in.jsonl")


@pytest.mark.parametrize("url", ["nope://x/in.jsonl", "memory://not/there.jsonl"])
def test_a_url_that_cannot_be_read_is_one_error(url: str) -> None:
    with pytest.raises(ConfigError, match=url):
        Source(url)


def test_lines_of_a_slow_pipe_are_answered_as_they_come(tmp_path: Path) -> None:
    """Each line is written only when the one before has its record: who waits for a full window waits forever."""
    os.mkfifo(tmp_path / "pipe")
    target, seen = tmp_path / "out.jsonl", list[int]()

    def write_slowly() -> None:
        with (tmp_path / "pipe").open("wb", buffering=0) as pipe:
            for i in range(4):
                pipe.write(request(f"{i}") + b"\n")
                end = time.monotonic() + 30
                while time.monotonic() < end and not (target.exists() and target.read_bytes().count(b"\n") > i):
                    time.sleep(0.01)
                seen.append(target.read_bytes().count(b"\n"))

    writer = threading.Thread(target=write_slowly, daemon=True)
    writer.start()
    assert run(tmp_path / "pipe", target).ok == 4
    writer.join()
    assert seen == [1, 2, 3, 4]


def test_a_pipe_that_changes_is_noticed_on_the_way(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for third, error in (("3", None), ("other", r"line 3 has changed")):
        content = b"\n".join([request("a"), request("b"), request("c", third), request("d")])
        writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,), daemon=True)
        writer.start()
        if error is None:
            assert run(tmp_path / "pipe", tmp_path / "out.jsonl").ok == 4
        else:
            with pytest.raises(ConfigError, match=error):
                run(tmp_path / "pipe", tmp_path / "out.jsonl")
        writer.join()


def test_an_empty_pipe_is_refused_as_an_empty_file_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"\n \n",), daemon=True)
    writer.start()
    with pytest.raises(ConfigError, match="has no request"):
        run(tmp_path / "pipe", tmp_path / "out.jsonl")
    writer.join()
    assert not (tmp_path / "out.jsonl").exists()


# Shared prefixes


def common(texts: Any) -> Any:
    """How all of them begin."""
    return os.path.commonprefix(texts)  # noqa: RUF071  it is not about paths


def body(**fields: Any) -> dict[str, Any]:
    return {"body": fields}


@given(st.lists(st.integers(0, 49151)), st.lists(st.integers(0, 49151)))
def test_keys_of_token_ids_begin_alike_where_the_ids_do(first: list[int], second: list[int]) -> None:
    shared = common([first, second])
    keys = [prefix_key(body(prompt=ids)) for ids in (first, second)]
    assert len(common(keys)) == len(shared)


def test_keys_of_conversations_begin_alike_where_their_messages_do() -> None:
    system = {"role": "system", "content": "Be brief."}
    one, other = ([system, {"role": "user", "content": text}] for text in ("Hi", "Ho"))
    keys = [prefix_key(body(messages=messages)) for messages in (one, other, [*one, system])]
    assert "Be brief." in common(keys[:2])
    assert keys[2].startswith(keys[0])
    assert prefix_key(body(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]))


ODD: list[Any] = [None, 5, "x", [], {"prompt": None}, {"prompt": {}}, {"prompt": [1, "a"]}, {"prompt": [-1]}]
ODD += [{"prompt": [2**70]}, {"prompt": [[1]]}, {"messages": [5]}, {"messages": "x"}, {"messages": [{"role": 1}]}]
ODD += [{"prompt": [True, None]}, {"messages": [[]], "prompt": "x"}, {"prompt": ["a", "b"]}, {"prompt": ["\ud800"]}]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_what_is_no_prompt_has_a_key_too(odd: Any) -> None:
    assert isinstance(prefix_key({"body": odd}), str)


def nested(levels: int) -> bytes:
    return request("a", ["NEST"]).replace(b'"NEST"', b"[" * levels + b"]" * levels)


def test_a_line_may_be_nested_so_deep_and_no_deeper() -> None:
    """Python's own limit is another wherever a line is read, packed or shown."""
    assert request_of(nested(97))["body"]["prompt"]
    for levels in (98, 500, 960, 100_000):
        with pytest.raises(RequestError, match="deep"):
            request_of(nested(levels))
    assert request_of(request("a", "[{" * 500))


@pytest.mark.parametrize(
    "packed", [request("a").decode().encode("utf-16"), b"\0" * 8, b'{"custom_id": "\xed\xa0\x80"}']
)
def test_a_line_in_another_encoding_is_refused(packed: bytes) -> None:
    with pytest.raises(RequestError, match=r"not UTF-8|not JSON"):
        request_of(packed)


def test_files_put_one_after_another_keep_their_byte_order_marks(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes((b"\xef\xbb\xbf" + b"{}\n") * 2 + b"\xef\xbb\xbf\n")
    assert taken(str(tmp_path / "in.jsonl")) == [(1, b"{}"), (2, b"{}")]


def prefixes_in_order(folder: Path, group: bool, count: int = 500) -> list[str]:
    lines = [request(f"{i}", f"prefix {i % 20:02}: {i}") for i in range(count)]
    random.Random(0).shuffle(lines)
    source, answerer = write(folder / "in.jsonl", lines), FakeAnswerer()
    run(source, folder / "out.jsonl", answerer, group=group, overwrite=True)
    prompts = [json.loads(lines[int(key) - 1])["body"]["prompt"] for key in answerer.added]
    return [prompt.split(":")[0] for prompt in prompts]


def test_a_shuffled_file_is_handed_over_with_shared_prefixes_together(tmp_path: Path) -> None:
    def changes(prefixes: list[str]) -> int:
        return sum(one != other for one, other in pairwise(prefixes))

    assert changes(prefixes_in_order(tmp_path, group=True)) == 19
    assert changes(prefixes_in_order(tmp_path, group=False)) > 400
    assert changes(prefixes_in_order(tmp_path, group=True, count=1500)) == 19 + 20  # two windows


# Memory (B06)


def job_of(folder: Path, count: int) -> dict[str, Any]:
    """What job_fakes says of itself after so many lines of 2 kB."""
    source, filler = folder / f"{count}.jsonl", "word " * 370
    with source.open("wb") as file:
        for i in range(count):
            file.write(request(f"request-{i:07}", f"{i * 7919 % count} {filler}", max_tokens=1) + b"\n")
    command = [sys.executable, str(Path(__file__).parents[1] / "job_fakes.py"), str(source), str(folder / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    source.unlink()
    assert (folder / "out.jsonl").read_bytes().count(b"\n") == count
    (folder / "out.jsonl").unlink()
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["read"] == count
    assert found["most_pending"] <= 256
    return found


def test_b06_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    small, big = job_of(tmp_path, 2_000), job_of(tmp_path, 20_000)
    assert big["rss_kb"] - small["rss_kb"] < 40_000, "all lines would be 40 MB, and their records 44"
    assert big["read_at_first"] <= 512


@pytest.mark.slow
def test_b06_two_hundred_thousand_lines(tmp_path: Path) -> None:
    small, big = job_of(tmp_path, 20_000), job_of(tmp_path, 200_000)
    assert big["rss_kb"] - small["rss_kb"] <= 100_000
    assert big["read_at_first"] <= 2_000
