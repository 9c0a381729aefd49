"""Jobs: a file of OpenAI batch lines in, a file of OpenAI batch output lines out, each line answered exactly once.

Lines are read as they are needed and answers are written as they finish, so neither file is ever held whole. A line
that cannot be answered costs one error record and nobody else anything; only blank lines have no record. What answers
is an `Answerer`: an LLM in this process, or a cluster. docs/jobs.md says what is promised.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from paged.errors import ConfigError, RequestError, shown
from scheduler import openai
from scheduler.desk import Desk, LineRequest, Response
from scheduler.job_files import JobFiles, Stream, about
from scheduler.journal import Index, OldOutput, Output
from scheduler.lines import CustomIds, Line, Source, is_pipe, is_url, no_request, prefix_key, request_of
from scheduler.llm import LLM
from scheduler.outputs import EngineStats

ROOM = 4  # requests in the engine at once, as a multiple of max_num_seqs
FIRST_WINDOW, MOST_WINDOW = 512, 16_384  # lines among which shared prefixes are brought together
WINDOW_BYTES = 32 << 20
COUNTED_BYTES = 256 << 20  # of the input, read before the job to count its lines: takes about a second
WAIT_S = 0.2  # for lines, or for answers, between two looks at whether we are to stop


class Answerer(Protocol):
    """What answers requests under keys. None of its methods raises for what is wrong with a request."""

    @property
    def model_name(self) -> str: ...

    @property
    def room(self) -> int:
        """Most requests that are to be with it and not answered; it may change."""

    @property
    def stats(self) -> EngineStats: ...

    def add(self, key: str, request: LineRequest) -> None: ...

    def take(self, timeout: float) -> list[tuple[str, Response]]:
        """What is answered; waits at most so many seconds for it, or runs a step."""

    def abort(self, keys: Collection[str]) -> None: ...


class LocalAnswerer:
    """Implements Answerer over an LLM in this process."""

    def __init__(self, llm: LLM) -> None:
        self._desk = Desk(llm)
        self.model_name = llm.model_name
        self.room = ROOM * llm.config.max_num_seqs
        self.stats = llm.engine.stats

    def add(self, key: str, request: LineRequest) -> None:
        self._desk.add(key, request)

    def take(self, timeout: float) -> list[tuple[str, Response]]:
        results = self._desk.step()
        while not len(self._desk) and self._desk.has_work:  # what is left of requests that failed
            results += self._desk.step()
        return [(key, result) for key, result in results if isinstance(result, Response)]

    def abort(self, keys: Collection[str]) -> None:
        self._desk.abort(list(keys))


@dataclass(slots=True)
class JobProgress:
    """How far a job is."""

    stats: EngineStats  # of now
    ok: int = 0  # lines that have an answer, those of earlier runs of the job included
    failed: int = 0  # lines that have an error record, likewise
    before: int = 0  # of both, from earlier runs
    copied: int = 0  # of ok, from the output that --retry-failed names
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    output_before: int = 0  # tokens that the engine had generated before the job
    stopped: int | None = None  # the signal that stopped the job

    @property
    def tokens_per_second(self) -> float:
        """Generated since the job began, those of unfinished requests included."""
        return (self.stats.output_tokens - self.output_before) / self.seconds if self.seconds else 0.0


class Stopped(KeyboardInterrupt):
    """A signal that stops us at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stop:
    """As a context: SIGINT and SIGTERM end a job after its step. A second one, or one outside of a job, raises."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal that came
        self.gently = False  # whether somebody looks at `number`

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._came) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, _: object) -> None:
        if self.number is not None or not self.gently:
            raise Stopped(number)
        self.number = number


@dataclass(frozen=True, slots=True)
class _Pending:
    """A line whose answer is being computed."""

    line: int
    digest: str
    custom_id: str | None


class Job:
    """A job on its files: opened, locked and recovered before a model is loaded, then run once, then closed.

    depends: the model and the settings that the tokens depend on, by name. seed: draws those of lines without one.
    total: lines that are not blank, None where the input cannot be read twice, or is too long to be.
    Raises ConfigError for files that cannot be used, and where a line has changed since it was answered.
    """

    def __init__(self, files: JobFiles, depends: dict[str, Any], seed: int | None = None) -> None:
        self.files = files
        described = depends | {
            "ordered": files.ordered,
            "retry_failed": None if files.retry_failed is None else str(Path(files.retry_failed).resolve()),
            "_input": files.input,
            "_seeds": random.getrandbits(63) if seed is None else seed,
        }
        with ExitStack() as opened:
            self.old: OldOutput | None = None
            if files.retry_failed is not None:
                self.old = OldOutput(Path(files.retry_failed))
                opened.callback(self.old.close)
            if files.streams:
                self.output: Output | Stream = Stream(files.output, described)
            else:
                self.output = Output(Path(files.output), described, files.overwrite)
            opened.callback(self.output.close)
            self.answered = self.output.index
            self._known = [index for index in (self.answered, self.old.index if self.old else Index()) if index]
            # Before it every line has its record, unless what is there was not written in order.
            self._in_order = self.answered.last if files.ordered else 0
            self.total = self._looked_through()
            if not files.overwrite:
                self.output.start()
            self.close = opened.pop_all().close

    @property
    def is_done(self) -> bool:
        """Whether every line has its record already."""
        return self.total is not None and len(self.answered) == self.total

    def _looked_through(self) -> int | None:
        """Count the lines, and compare those that are answered."""
        if is_pipe(self.files.input):
            return None
        source = Source(self.files.input)
        try:
            return self._counted(source)
        finally:
            source.close()

    def _counted(self, source: Source) -> int | None:
        total, last = 0, max((index.last for index in self._known), default=0)
        number = size = 0
        while not source.ended:
            for line in source.take(1024, WINDOW_BYTES, 0):
                total, number, size = total + 1, line.number, size + len(line.raw)
                self.check(line)
            if number > last and not source.ended and (size > COUNTED_BYTES or is_url(self.files.input)):
                return None
        if total == 0:
            raise no_request(self.files.input)
        if number < last:
            raise ConfigError(
                f"line {last} was answered, and input {self.files.input} ends with line {number} now: give the same "
                "input, --overwrite, or another output"
            )
        return total

    def check(self, line: Line) -> None:
        """Raises ConfigError if it has changed since it was answered, or its answer would come too late."""
        for index in self._known:
            if line.number in index and index.digest(line.number) != line.digest:
                raise ConfigError(
                    f"line {line.number} has changed since it was answered: it begins {shown(line.raw[:60])[1:]} now. "
                    "Give the same input, --overwrite, or another output"
                )
        if line.number < self._in_order and line.number not in self.answered:
            raise ConfigError(
                f"output {self.files.output} has line {self._in_order} and not line {line.number}, so it was not begun "
                "with --ordered: leave it out, or give --overwrite"
            )

    def run(
        self,
        answerer: Answerer,
        on_progress: Callable[[JobProgress], None] = lambda progress: None,
        stop: Stop | None = None,
    ) -> JobProgress:
        """Answer every line that has no record; `on_progress` is called after every step.

        If a step raises, so does this; answers written stay. Raises OSError where the output cannot be written.
        """
        return _Run(self, answerer, on_progress, stop or Stop()).run()


class _Run:
    def __init__(self, job: Job, answerer: Answerer, on_progress: Callable[[JobProgress], None], stop: Stop) -> None:
        self.job, self.files, self.output, self.answerer = job, job.files, job.output, answerer
        self.on_progress, self.stop = on_progress, stop
        known, stats = job.answered, answerer.stats
        self.progress = JobProgress(stats, known.ok, known.failed, before=len(known), output_before=stats.output_tokens)
        self.source = Source(job.files.input)
        self.window: deque[tuple[Line, str]] = deque()  # to be handed over: line and custom_id
        self.limit = FIRST_WINDOW
        self.pending: dict[str, _Pending] = {}
        self.ids = CustomIds()
        self.order: deque[int] = deque()  # with --ordered: lines that were read and have no record
        self.held: dict[int, tuple[str, int | str, bytes]] = {}  # and records that wait for an earlier one

    def run(self) -> JobProgress:
        start = time.perf_counter()
        self.output.start()
        self.stop.gently = True
        try:
            while self.stop.number is None:
                self.hand_over()
                if not self.pending and not self.window and self.source.ended:
                    break
                if self.pending or self.window:
                    for key, response in self.answerer.take(WAIT_S):
                        self.answer(self.pending.pop(key), response)
                self.output.flush()
                self.progress.stats = self.answerer.stats
                self.progress.seconds = time.perf_counter() - start
                self.on_progress(self.progress)
            self.output.flush(force=True)
        except BaseException:
            with suppress(OSError):
                self.output.flush(force=True)
            raise
        finally:
            self.stop.gently = False
            self.progress.stopped = self.stop.number
            self.progress.seconds = time.perf_counter() - start
            self.source.close()
            self.answerer.abort(self.pending.keys())  # a step raised, or we are to stop
        if self.progress.stopped is None and not self.progress.ok + self.progress.failed:
            raise no_request(self.files.input)
        return self.progress

    def hand_over(self) -> None:
        """Fill what room there is."""
        while self.stop.number is None and len(self.pending) < max(1, self.answerer.room):
            if not self.window:
                behind = self.files.ordered and len(self.order) > FIRST_WINDOW
                if self.source.ended or behind or not self.refill(0 if self.pending else WAIT_S):
                    return
                continue
            line, custom_id = self.window.popleft()
            request = request_of(line.raw)
            body = request.get("body")
            if isinstance(body, dict) and body.get("seed") is None:
                body["seed"] = self.seed(line.number)
            key = str(line.number)
            self.pending[key] = _Pending(line.number, line.digest, custom_id)
            self.answerer.add(key, LineRequest(request.get("method"), request.get("url"), body))

    def seed(self, number: int) -> int:
        """The same for a line whatever is restarted."""
        text = f"{self.output.about['_seeds']} {number}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def refill(self, wait: float) -> bool:
        """Read the next window; whether there was anything to read."""
        # In order, nothing is written while the first of a window waits: so it is no more than what is in flight.
        limit = min(FIRST_WINDOW, max(1, self.answerer.room)) if self.files.ordered else self.limit
        lines = self.source.take(limit, WINDOW_BYTES, wait)
        self.limit = min(2 * self.limit, MOST_WINDOW)
        found = [(key, line, custom_id) for line in lines for key, custom_id in self.accept(line)]
        if self.files.group:
            found.sort(key=lambda one: one[0])
        self.window.extend((line, custom_id) for _, line, custom_id in found)
        self.output.flush()
        return bool(lines)

    def accept(self, line: Line) -> list[tuple[str, str]]:
        """Its prompt as `prefix_key` has it, and its custom_id; nothing of a line that gets its record here."""
        job, request, given, refused = self.job, dict[str, Any](), None, None
        job.check(line)
        try:
            request = request_of(line.raw)
            given = request.get("custom_id")
            self.ids.check(given, line.number)
        except RequestError as error:
            refused = error
        if line.number in job.answered:
            return []
        if self.files.ordered:
            self.order.append(line.number)
        if job.old is not None and job.old.index.is_ok(line.number):
            self.progress.copied += 1
            self.finish(line.number, line.digest, 200, job.old.record(line.number))
        elif refused is not None:
            body = openai.error_body(f"line {line.number}: {refused}", refused.param)
            custom_id = given if isinstance(given, str) else None
            self.record(_Pending(line.number, line.digest, custom_id), Response(400, body))
        else:
            assert isinstance(given, str)
            return [(prefix_key(request) if self.files.group else "", given)]
        return []

    def answer(self, one: _Pending, response: Response) -> None:
        self.progress.prompt_tokens += response.prompt_tokens
        self.progress.output_tokens += response.output_tokens
        if response.body is not None and "error" in response.body:
            error = response.body["error"]
            error["message"] = f"line {one.line}: {error['message']}"
        self.record(one, response)

    def record(self, one: _Pending, response: Response) -> None:
        answered = response.body is not None
        record = {
            "id": f"batch_req_{one.line}-{one.digest}",
            "custom_id": one.custom_id,
            "response": {"status_code": response.status, "request_id": f"line-{one.line}", "body": response.body}
            if answered
            else None,
            "error": None if answered else {"code": response.status, "message": response.message},
        }
        # Half of a surrogate pair, which JSON can hold and UTF-8 cannot, is written as JSON's own escape.
        text = json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        self.finish(one.line, one.digest, response.status, text)

    def finish(self, number: int, digest: str, status: int | str, record: bytes) -> None:
        """Write a record when its turn comes."""
        if not self.files.ordered:
            self.write(number, digest, status, record)
            return
        self.held[number] = digest, status, record
        while self.order and (one := self.held.pop(self.order[0], None)) is not None:
            self.write(self.order.popleft(), *one)

    def write(self, number: int, digest: str, status: int | str, record: bytes) -> None:
        self.output.add(number, digest, status, record)
        if status == 200:
            self.progress.ok += 1
        else:
            self.progress.failed += 1


def run_job(
    llm: LLM,
    input_path: Path | str,
    output_path: Path | str,
    *,
    overwrite: bool = False,
    ordered: bool = False,
    group: bool = True,
    retry_failed: Path | str | None = None,
    on_progress: Callable[[JobProgress], None] = lambda progress: None,
) -> JobProgress:
    """Answer every line of a file with an LLM, as `paged batch` does; called again it goes on where it was stopped.

    `on_progress` is called after every step. Raises ConfigError for files that cannot be used. If a step raises, so
    does this; answers written stay.
    """
    old = None if retry_failed is None else str(retry_failed)
    files = JobFiles(str(input_path), str(output_path), overwrite, ordered, group, old)
    job = Job(files, about(llm.config), llm.config.seed)
    try:
        return job.run(LocalAnswerer(llm), on_progress)
    finally:
        job.close()
