"""An Answerer without an engine, and a job over it as a program of its own, which tests kill, stop and starve.

python job_fakes.py IN OUT [--ordered] [--pause S] [--limit BYTES] prints a line of JSON about the run.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from scheduler.desk import LineRequest, Response
from scheduler.job_files import JobFiles
from scheduler.jobs import Job, JobProgress, Stop
from scheduler.lines import Line, Source
from scheduler.outputs import EngineStats


class FakeAnswerer:
    """Implements Answerer. Its answer to a request is a function of its body alone, the seed in it included."""

    model_name = "fake"

    def __init__(self, room: int = 8, per_take: int = 3, pause: float = 0.0) -> None:
        self.room, self.per_take, self.pause = room, per_take, pause
        self.stats = EngineStats()
        self.pending: dict[str, LineRequest] = {}
        self.added: list[str] = []
        self.most_pending = 0
        self.broken: str | None = None  # a code, once it can answer nothing any more
        self._random = random.Random(0)

    def add(self, key: str, request: LineRequest) -> None:
        assert key not in self.pending
        self.pending[key] = request
        self.added.append(key)
        self.most_pending = max(self.most_pending, len(self.pending))

    def take(self, timeout: float) -> list[tuple[str, Response]]:
        time.sleep(self.pause)
        if self.broken:
            keys = list(self.pending)
        else:
            keys = self._random.sample(sorted(self.pending), min(self.per_take, len(self.pending)))
        return [(key, self._answer(self.pending.pop(key))) for key in keys]

    def _answer(self, request: LineRequest) -> Response:
        if self.broken:
            return Response(self.broken, None, "nobody is there")
        if request.body.get("prompt") == "bad":
            return Response(400, {"error": {"message": "no", "type": "t", "param": "prompt", "code": None}})
        if request.body.get("prompt") == "lost":
            return Response("request_kills_worker", None, "it did so twice")
        return Response(200, {"text": f"{request.body['prompt']} \u00e4\u20ac {request.body['seed']}"}, "", 1, 1)

    def abort(self, keys: Collection[str]) -> None:
        for key in list(keys):
            self.pending.pop(key, None)


ABOUT: dict[str, Any] = {"model": "fake"}


def run(
    source: Path | str,
    target: Path | str,
    answerer: FakeAnswerer | None = None,
    *,
    stop_after: int | None = None,
    about: dict[str, Any] = ABOUT,
    seed: int | None = 1,
    **more: Any,
) -> JobProgress:
    """A job, in this process. stop_after: stop as after Ctrl-C when so many lines have records."""
    stop = Stop()

    def on_progress(progress: JobProgress) -> None:
        if stop_after is not None and progress.ok + progress.failed >= stop_after:
            stop.number = 2

    job = Job(JobFiles(str(source), str(target), **more), about, seed)
    try:
        return job.run(answerer or FakeAnswerer(), on_progress, stop)
    finally:
        job.close()


def request(custom_id: Any, prompt: Any = "x", **body: Any) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}
    return json.dumps(line).encode()


def write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--ordered", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    if args.limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (args.limit, args.limit))
    answerer = FakeAnswerer(room=256, per_take=64) if not args.pause else FakeAnswerer(pause=args.pause)
    read, first = 0, None

    honest = Source.take

    def counting(self: Source, count: int, num_bytes: int, wait: float) -> list[Line]:
        nonlocal read
        lines = honest(self, count, num_bytes, wait)
        read += len(lines)
        return lines

    job = Job(JobFiles(args.source, args.target, ordered=args.ordered), ABOUT, 1)
    Source.take = counting  # type: ignore[method-assign]  # after the lines were counted

    def on_progress(progress: JobProgress) -> None:
        nonlocal first
        if first is None and Path(args.target).stat().st_size:
            first = read

    try:
        job.run(answerer, on_progress)
    finally:
        job.close()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"rss_kb": rss, "read_at_first": first, "read": read, "most_pending": answerer.most_pending}))


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{error.errno} {error.strerror}")
