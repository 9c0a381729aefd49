"""Jobs: a file of OpenAI batch lines in, a file of OpenAI batch output lines out.

Lines are read as they are needed and answers are written as they finish, so neither file is ever held whole. A line
that cannot be answered costs one error record and nobody else anything; only blank lines have no record.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paged.errors import ConfigError, RequestError, shown
from scheduler import openai
from scheduler.llm import LLM
from scheduler.outputs import EngineStats, RequestOutput
from worker.step import SamplingParams

WINDOW = 4  # requests in the engine at once, as a multiple of max_num_seqs


@dataclass(slots=True)
class JobProgress:
    """How far a job is; `stats` are the engine's, and go on changing."""

    stats: EngineStats
    ok: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    output_before: int = 0  # tokens that the engine had generated before the job

    @property
    def tokens_per_second(self) -> float:
        """Generated since the job began, those of unfinished requests included."""
        return (self.stats.output_tokens - self.output_before) / self.seconds if self.seconds else 0.0


def check_paths(input_path: Path, output_path: Path, overwrite: bool) -> int:
    """Refuse what cannot work before a model is loaded. Returns the number of requests. Raises ConfigError."""
    if not input_path.is_file():
        raise ConfigError(f"input {input_path} {'is no file' if input_path.exists() else 'does not exist'}")
    if output_path.is_dir() or not output_path.parent.is_dir():
        raise ConfigError(f"output {output_path} is a folder, or in a folder that does not exist")
    if output_path.exists():
        if output_path.samefile(input_path):
            raise ConfigError(f"output {output_path} is the input: name another file")
        if not overwrite:
            raise ConfigError(f"output {output_path} exists: name another file, or give --overwrite")
    if not os.access(input_path, os.R_OK):
        raise ConfigError(f"input {input_path} may not be read by this user")
    if not os.access(output_path if output_path.exists() else output_path.parent, os.W_OK):
        raise ConfigError(f"output {output_path} may not be written by this user: name another place")
    with input_path.open("rb") as lines:
        number = sum(1 for _ in _filled(lines))
    if number == 0:
        raise ConfigError(f"input {input_path} has no request: write one JSON object a line, in OpenAI's batch format")
    return number


def run_job(
    llm: LLM,
    input_path: Path,
    output_path: Path,
    *,
    overwrite: bool = False,
    on_progress: Callable[[JobProgress], None] = lambda progress: None,
) -> JobProgress:
    """Answer every line of the input; `on_progress` is called after every step.

    Raises ConfigError for paths that cannot work. If a step raises, so does this; answers written stay.
    """
    check_paths(input_path, output_path, overwrite)
    with input_path.open("rb") as lines, output_path.open("wb") as output:
        return _Job(llm, output).run(lines, on_progress)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A line whose answer is being computed."""

    record_id: str
    custom_id: str
    chat: bool
    params: SamplingParams


class _Job:
    def __init__(self, llm: LLM, output: BinaryIO) -> None:
        self.llm = llm
        self.output = output
        self.progress = JobProgress(llm.engine.stats, output_before=llm.engine.stats.output_tokens)
        self.pending: dict[str, _Pending] = {}
        self.ended: set[str] = set()  # without an answer, and whose empty outputs are still to come
        self.first_lines: dict[str, int] = {}  # of each custom_id
        self.records = 0

    def run(self, lines: BinaryIO, on_progress: Callable[[JobProgress], None]) -> JobProgress:
        start = time.perf_counter()
        engine, window = self.llm.engine, WINDOW * self.llm.config.max_num_seqs
        source = _filled(lines)
        try:
            while True:
                while len(self.pending) < window and (line := next(source, None)) is not None:
                    self.accept(*line)
                if not self.pending and not self.ended:
                    return self.progress
                try:
                    for output in self.llm.collect((*self.pending, *self.ended)):
                        if output.request_id in self.ended:
                            self.ended.remove(output.request_id)  # it has its record
                        else:
                            self.answer(output)
                except Exception as error:
                    ended = [one for one in engine.failed if one in self.pending and not engine.is_live(one)]
                    if not ended:
                        raise  # the step itself failed, or an answer cannot be written
                    for request_id in ended:
                        self.fail(request_id, error)
                self.progress.seconds = time.perf_counter() - start
                on_progress(self.progress)
        finally:
            self.progress.seconds = time.perf_counter() - start
            for request_id in self.pending:  # a step raised, or the user stopped us
                engine.abort(request_id)

    def accept(self, number: int, raw: bytes) -> None:
        """Queue the request of a line, or write its error record."""
        record_id, custom_id = f"line-{number}", None
        try:
            line = _object(raw)
            given = line.get("custom_id")
            custom_id = given if isinstance(given, str) else None
            self.queue(record_id, self.checked_id(given, number), line)
        except RequestError as error:
            self.progress.failed += 1
            body = openai.error_body(f"line {number}: {error}", error.param)
            self.write(custom_id, 400, record_id, body)

    def checked_id(self, custom_id: object, number: int) -> str:
        if not isinstance(custom_id, str) or not custom_id:
            raise RequestError(f"custom_id must be a text, not {shown(custom_id)}", "custom_id")
        first = self.first_lines.setdefault(custom_id, number)
        if first != number:
            raise RequestError(f"custom_id {shown(custom_id)} is that of line {first} already", "custom_id")
        return custom_id

    def queue(self, record_id: str, custom_id: str, line: dict[str, Any]) -> None:
        if line.get("method") != "POST":
            raise RequestError(f"method must be POST, not {shown(line.get('method'))}", "method")
        url, body = line.get("url"), line.get("body")
        if url not in (openai.COMPLETIONS, openai.CHAT):
            raise RequestError(f"url must be {openai.COMPLETIONS} or {openai.CHAT}, not {shown(url)}", "url")
        if not isinstance(body, dict):
            raise RequestError("body is missing, or is no object", "body")
        name, chat = self.llm.model_name, url == openai.CHAT
        if body.get("model") not in (None, name):
            raise RequestError(f"model {shown(body['model'])} is not the one of this job, {name!r}", "model")
        params = openai.sampling_params(body, chat)
        text, tokens = self.llm.tokens(body.get("messages") if chat else openai.completion_prompt(body), chat)
        engine_id = self.llm.new_id()
        priority = 0 if body.get("priority") is None else body["priority"]
        try:
            self.llm.engine.add(engine_id, tokens, params, prompt=text, chat=chat, priority=priority)
        except RequestError as error:
            raise openai.refused(error, body) from None
        self.pending[engine_id] = _Pending(record_id, custom_id, chat, params)

    def answer(self, output: RequestOutput) -> None:
        one = self.pending.pop(output.request_id)
        self.progress.ok += 1
        self.progress.prompt_tokens += len(output.prompt_token_ids)
        self.progress.output_tokens += output.num_output_tokens
        body = openai.answer_body(output, one.params, one.chat, self.llm.model_name, self.llm.tokenizer)
        self.write(one.custom_id, 200, one.record_id, body)

    def fail(self, request_id: str, error: Exception) -> None:
        """The record of a request that ended without an answer: its text, or its constraint, cannot go on."""
        one = self.pending.pop(request_id)
        self.ended.add(request_id)
        self.progress.failed += 1
        body = openai.error_body(f"{one.record_id.replace('-', ' ')}: {error}", None, "server_error")
        self.write(one.custom_id, 500, one.record_id, body)

    def write(self, custom_id: str | None, status: int, request_id: str, body: dict[str, Any]) -> None:
        self.records += 1
        record = {
            "id": f"batch_req_{self.records}",
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None,
        }
        # Half of a surrogate pair, which JSON can hold and UTF-8 cannot, is written as JSON's own escape.
        self.output.write(json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        self.output.flush()


def _filled(lines: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and content of the lines that are not blank; a byte order mark at the beginning is dropped."""
    for number, raw in enumerate(lines, 1):
        content = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        if content.strip():
            yield number, content


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"must be a JSON object, not {type(value).__name__}")
    return value
