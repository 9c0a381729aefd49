"""Traces: who asked when, for how much. Three formats, told apart by what is in the file, read line by line.

    ours      JSONL: {"timestamp": seconds, "prompt_tokens": n, "output_tokens": n}, and where prompts begin alike
              "hash_ids": [ids], each standing for the next "block_tokens" (512 unless given) tokens of the prompt
    Mooncake  JSONL: {"timestamp": milliseconds, "input_length": n, "output_length": n, "hash_ids": [ids of 512 tokens]}
    Azure     CSV: TIMESTAMP,ContextTokens,GeneratedTokens; times as 2023-11-16 18:15:46.6805900

Equal ids stand for equal tokens. What of a prompt has no id is like no other request's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged.errors import ConfigError

BLOCK_TOKENS = 512
AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. arrival: seconds after the first one's."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()  # numbered in the order in which the trace first names them
    block_tokens: int = BLOCK_TOKENS

    def tokens(self, number: int) -> npt.NDArray[np.int32]:
        """The prompt as made-up token ids, int32 [prompt_tokens], equal where ids are; the rest is only `number`'s."""
        tokens = np.full(self.prompt_tokens, -1 - number, dtype=np.int32)
        known = np.repeat(np.array(self.hash_ids, dtype=np.int32), self.block_tokens)[: self.prompt_tokens]
        tokens[: len(known)] = known
        return tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """A file's requests in order of arrival. out_of_order: lines whose time was before that of the line above."""

    name: str
    requests: tuple[TraceRequest, ...]
    out_of_order: int = 0

    @property
    def has_content(self) -> bool:
        """Whether it says which prompts begin alike; else nothing can be found in a prefix cache."""
        return any(request.hash_ids for request in self.requests)

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival


def read_trace(path: Path) -> Trace:
    """Read a whole trace. Raises ConfigError, with the number of the line, for what is not understood."""
    if not path.is_file():
        raise ConfigError(f"trace {path} {'is no file' if path.exists() else 'does not exist'}")
    found: list[TraceRequest] = []
    numbers: dict[int, int] = {}
    out_of_order = 0
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, record in _records(path, lines):
            try:
                request = _request(record, numbers)
            except (ValueError, TypeError, KeyError) as error:
                why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
                raise ConfigError(f"trace {path}, line {number}: {why}") from None
            out_of_order += bool(found) and request.arrival < found[-1].arrival
            found.append(request)
    if not found:
        raise ConfigError(f"trace {path} has no request")
    found.sort(key=lambda request: request.arrival)  # stable: equal times stay in the order of the file
    first = found[0].arrival
    shifted = (
        TraceRequest(r.arrival - first, r.prompt_tokens, r.output_tokens, r.hash_ids, r.block_tokens) for r in found
    )
    return Trace(path.name, tuple(shifted), out_of_order)


def _records(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each filled line and what it says by name."""
    csv = False
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        if text.split(",")[0] == AZURE[0] and not csv:
            if text.split(",") != AZURE:
                raise ConfigError(f"trace {path}, line {number}: a CSV trace has the columns {','.join(AZURE)}")
            csv = True
        elif csv:
            cells = text.split(",")
            if len(cells) != len(AZURE):
                raise ConfigError(f"trace {path}, line {number}: {len(cells)} cells where {len(AZURE)} are wanted")
            yield number, dict(zip(AZURE, cells, strict=True))
        else:
            try:
                record = json.loads(text)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise ConfigError(
                    f"trace {path}, line {number} is no JSON object, and no CSV of Azure's was begun: {text:.60}"
                )
            yield number, record


def _request(record: dict[str, Any], numbers: dict[int, int]) -> TraceRequest:
    """Raises ValueError, TypeError or KeyError. numbers: of the ids so far; those of this one are added."""
    if AZURE[0] in record:
        time = datetime.fromisoformat(record[AZURE[0]])
        counts = [_count(name, record[name], text=True) for name in AZURE[1:]]
        # Without a zone any will do, as long as it is the same for all: local time may jump.
        zero = datetime(1970, 1, 1, tzinfo=time.tzinfo)
        return TraceRequest((time - zero).total_seconds(), *_checked(counts))
    mooncake = "input_length" in record
    names = ("input_length", "output_length") if mooncake else ("prompt_tokens", "output_tokens")
    counts = [_count(name, record[name]) for name in names]
    time = record["timestamp"]
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < math.inf:
        raise ValueError(f"timestamp must be a number of at least 0, not {time!r:.40}")
    block = BLOCK_TOKENS if mooncake else _count("block_tokens", record.get("block_tokens", BLOCK_TOKENS))
    if block < 1:
        raise ValueError("block_tokens must be at least 1")
    given = record.get("hash_ids", [])
    if not isinstance(given, list) or not all(type(one) is int for one in given):
        raise ValueError("hash_ids must be a list of whole numbers")
    prompt, output = _checked(counts)
    if (len(given) - 1) * block >= prompt:
        raise ValueError(f"{len(given)} hash_ids of {block} tokens are more than a prompt of {prompt} tokens has")
    ids = tuple(numbers.setdefault(one, len(numbers)) for one in given)
    return TraceRequest(time / 1000 if mooncake else float(time), prompt, output, ids, block)


def _count(name: str, value: Any, text: bool = False) -> int:
    if text and isinstance(value, str) and value.strip().lstrip("-").isdigit():
        value = int(value)
    if type(value) is not int or not 0 <= value <= MOST_TOKENS:
        raise ValueError(f"{name} must be a whole number of at least 0, not {value!r:.40}")
    return value


def _checked(counts: list[int]) -> tuple[int, int]:
    prompt, output = counts
    if prompt < 1:
        raise ValueError("a prompt has at least one token")
    return prompt, output
