"""Traces: three formats, one kind of request, and an error with its line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paged import ConfigError
from scheduler.traces import TraceRequest, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
OURS = '{"timestamp": 0, "prompt_tokens": 3, "output_tokens": 2}'


def trace(folder: Path, *lines: str) -> Path:
    file = folder / "trace"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_azures_csv_gives_seconds_from_the_first_request(tmp_path: Path) -> None:
    first, second = "2023-11-16 18:15:59.5000000,374,44", "2023-11-16 18:16:01.7500000,396,109"
    found = read_trace(trace(tmp_path, AZURE, first, second))
    assert found.requests == (TraceRequest(0.0, 374, 44), TraceRequest(2.25, 396, 109))
    assert not found.has_content
    assert found.span == 2.25


def test_mooncakes_times_are_milliseconds_and_its_ids_stand_for_512_tokens(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [70, 9]},
        {"timestamp": 4500, "input_length": 512, "output_length": 1, "hash_ids": [70]},
    ]
    found = read_trace(trace(tmp_path, *map(json.dumps, lines)))
    one, two = found.requests
    assert (one.arrival, two.arrival) == (0.0, 3.5)
    assert (one.hash_ids, two.hash_ids) == ((0, 1), (0,))  # numbered as they come: no number of a file is too large
    assert one.tokens(0).tolist() == [0] * 512 + [1] * 88
    assert two.tokens(1).tolist() == [0] * 512


def test_of_our_prompts_what_has_no_id_is_like_nobody_elses(tmp_path: Path) -> None:
    line = '{"timestamp": 0.5, "prompt_tokens": 5, "output_tokens": 2, "hash_ids": [8], "block_tokens": 3}'
    one, two = read_trace(trace(tmp_path, line, line)).requests
    assert one.tokens(0).tolist() == [0, 0, 0, -1, -1]
    assert two.tokens(1).tolist() == [0, 0, 0, -2, -2]


def test_lines_out_of_order_are_sorted_and_counted(tmp_path: Path) -> None:
    lines = [json.dumps({"timestamp": t, "prompt_tokens": n, "output_tokens": 1}) for t, n in ((5, 1), (3, 2), (4, 3))]
    found = read_trace(trace(tmp_path, *lines, ""))
    assert [(r.arrival, r.prompt_tokens) for r in found.requests] == [(0.0, 2), (1.0, 3), (2.0, 1)]
    assert found.out_of_order == 1


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], "has no request"),
        (["", "  "], "has no request"),
        ([AZURE], "has no request"),
        ([OURS, "{broken"], "line 2 is no JSON object"),
        ([OURS, "[1]"], "line 2 is no JSON object"),
        (["1,2,3"], "line 1 is no JSON object"),
        ([OURS, '{"timestamp": 1, "prompt_tokens": -3, "output_tokens": 2}'], "line 2: prompt_tokens .* at least 0"),
        (['{"timestamp": 1, "prompt_tokens": 0, "output_tokens": 2}'], "line 1: a prompt has at least one token"),
        (['{"timestamp": 1, "prompt_tokens": 2.5, "output_tokens": 2}'], "prompt_tokens must be a whole number"),
        (['{"timestamp": -1, "prompt_tokens": 3, "output_tokens": 2}'], "timestamp must be a number of at least 0"),
        (['{"timestamp": "1", "prompt_tokens": 3, "output_tokens": 2}'], "timestamp must be a number"),
        (['{"timestamp": NaN, "prompt_tokens": 3, "output_tokens": 2}'], "timestamp must be a number"),
        (['{"timestamp": 1, "prompt_tokens": 3}'], "line 1: output_tokens is missing"),
        (['{"timestamp": 1, "input_length": 3, "output_length": -2}'], "output_length must be"),
        (['{"timestamp": 1, "input_length": 3, "output_length": 2, "hash_ids": [0, 1]}'], "2 hash_ids of 512 tokens"),
        (['{"timestamp": 1, "input_length": 3, "output_length": 2, "hash_ids": "x"}'], "hash_ids must be a list"),
        ([AZURE, "2023-11-16 18:15:46.68,374"], "line 2: 2 cells where 3 are wanted"),
        ([AZURE, "yesterday,374,5"], "line 2: .*yesterday"),
        ([AZURE, "2023-11-16 18:15:46.68,374,many"], "line 2: GeneratedTokens must be a whole number"),
        ([AZURE, "2023-11-16 18:15:46.68,-4,3"], "line 2: ContextTokens must be .* at least 0, not -4"),
        (["TIMESTAMP,Tokens"], "line 1: a CSV trace has the columns"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, lines: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_trace(trace(tmp_path, *lines))


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="is no file"):
        read_trace(tmp_path)
