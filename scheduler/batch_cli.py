"""`paged batch`: a job on files, pipes or URLs, answered by an LLM here or by a cluster."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from paged.errors import ConfigError
from scheduler.config import EngineConfig
from scheduler.job_files import JobFiles, about
from scheduler.jobs import Answerer, Job, JobProgress, LocalAnswerer, Stop, Stopped
from scheduler.lines import filesystem, is_url

if TYPE_CHECKING:
    from scheduler.llm import LLM

SOME_FAILED = 3  # exit code of a job that finished, with lines that were refused
BY_SIGNAL = 128  # and the signal's number: exit code of a job that a signal stopped, as in a shell


@dataclass(frozen=True, slots=True)
class Where:
    """What answers: a cluster that runs (its name), one of so many replicas made for the job, or an LLM here."""

    cluster: str | None = None
    replicas: int | None = None
    address: str | None = None

    def check(self, config: EngineConfig, metrics: Path | None) -> None:
        """Raises ConfigError for options that do not go together."""
        if self.address is not None and self.cluster is None and self.replicas is None:
            raise ConfigError("--address is that of a Ray cluster: give --cluster NAME or --replicas N with it")
        if self.cluster is not None and self.replicas is not None:
            raise ConfigError("--cluster has its replicas, and --replicas makes new ones: give one of them")
        if metrics is not None and not self.here:
            raise ConfigError("--metrics are those of an engine in this process: leave it out with a cluster")
        if self.cluster is not None:
            defaults = EngineConfig()
            given = [f.name for f in fields(config) if getattr(config, f.name) != getattr(defaults, f.name)]
            given = [f"--{name.replace('_', '-')}" for name in given if name != "seed"]
            if given:
                raise ConfigError(
                    f"{', '.join(given)}: settings are those that the cluster was launched with: leave them out"
                )

    @property
    def here(self) -> bool:
        return self.cluster is None and self.replicas is None


def run(files: JobFiles, url: str | None, config: EngineConfig, where: Where, metrics: Path | None) -> int:
    """The exit code. url: where the output is uploaded to at the end. Raises ConfigError, and OSError."""
    where.check(config, metrics)
    if metrics is not None:
        from scheduler import prometheus

        prometheus.check(metrics, *(Path(name) for name in (files.input, files.output) if not is_url(name)))
    with ExitStack() as stack:
        stop = stack.enter_context(Stop())
        try:
            return _run(stack, stop, files, url, config, where, metrics)
        except (Stopped, SystemExit) as stopped:  # the latter while Ray has SIGTERM
            _say("stopped")
            return BY_SIGNAL + (stopped.number if isinstance(stopped, Stopped) else signal.SIGTERM)


def _run(
    stack: ExitStack,
    stop: Stop,
    files: JobFiles,
    url: str | None,
    config: EngineConfig,
    where: Where,
    metrics: Path | None,
) -> int:
    answerer: Answerer | None = None
    if where.cluster is not None:
        from scheduler.cluster import Cluster

        cluster = Cluster.connect(where.cluster, address=where.address)
        stack.callback(cluster.close)
        answerer = cluster
    depends = about(config) if answerer is None else {"model": answerer.model_name, "seed": config.seed}
    job = Job(files, depends, config.seed)
    stack.callback(job.close)
    _say_before(job)
    if job.is_done:
        _say(f"all lines ({job.total}) are answered already: {job.answered.ok} ok, {job.answered.failed} failed")
        _upload(job, url)
        return SOME_FAILED if job.answered.failed else 0
    llm: LLM | None = None
    if where.replicas is not None:
        from scheduler.cluster import Cluster

        cluster = Cluster.launch_config(config, replicas=where.replicas, address=where.address)
        stack.callback(cluster.close)
        answerer = cluster
    if answerer is None:
        from scheduler.llm import LLM

        llm = LLM.from_config(config)
        _say(llm.plan.sizing)
        answerer = LocalAnswerer(llm)
    with Bar(job.total) as bar:
        progress = job.run(answerer, bar.update, stop)
    _print_summary(progress, llm, url or files.output)
    if metrics is not None and llm is not None:
        from scheduler import prometheus

        prometheus.write(llm.engine.metrics, metrics)
    if progress.stopped is not None:
        of = "" if job.total is None else f" of {job.total}"
        on = "" if files.streams else "; the same command goes on"
        _say(f"stopped after {progress.ok + progress.failed}{of} lines{on}")
        return BY_SIGNAL + progress.stopped
    _upload(job, url)
    return SOME_FAILED if progress.failed else 0


def _say(text: str) -> None:
    print(f"paged: {text}", file=sys.stderr, flush=True)


def _lines(count: int | None) -> str:
    return "1 line" if count == 1 else f"{count} lines"


def _say_before(job: Job) -> None:
    """What of the job is done already."""
    if job.output.rebuilt:
        _say(f"the journal of {job.files.output} is lost: it was made again from the records there")
    if job.answered and not job.is_done:
        of = _lines(job.total) if job.total is not None else "the lines"
        _say(f"going on: {len(job.answered)} of {of} are answered already")
    if job.old is not None:
        index = job.old.index
        _say(f"{_lines(index.failed)} of {job.files.retry_failed} failed and are run again; {index.ok} are copied")


def local_output(url: str, overwrite: bool) -> Path:
    """Where the output of a job is kept until it is uploaded to `url`, and after. Raises ConfigError."""
    from worker.checkpoints import default_cache

    files, place = filesystem(url)
    folder = default_cache().parent / "jobs"
    name = Path(place).name
    path = folder / f"{blake2b(url.encode(), digest_size=8).hexdigest()}-{name}"
    try:
        if not path.exists() and not overwrite and files.exists(place):
            raise ConfigError(f"output {url} exists: name another place, or give --overwrite")
    except OSError as error:
        raise ConfigError(f"output {url} cannot be reached: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    return path


def _upload(job: Job, url: str | None) -> None:
    if url is None:
        return
    files, place = filesystem(url)
    with Path(job.files.output).open("rb") as source, files.open(place, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _say(f"uploaded to {url}; {job.files.output} stays for the same command to know, and may be deleted")


class Bar:
    """Progress on stderr: a bar on a terminal, else a line every few seconds. total: None where it is not known."""

    EVERY = 5.0  # seconds

    def __init__(self, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._total = total
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=total, state="")
        self._next = time.monotonic() + self.EVERY

    def __enter__(self) -> Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, progress: JobProgress) -> None:
        stats, done = progress.stats, progress.ok + progress.failed
        state = (
            f"{progress.tokens_per_second:.0f} tokens/s, {stats.running} running, "
            f"{stats.used_pages} of {stats.total_pages} pages"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=done, state=state)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + self.EVERY
            of = "" if self._total is None else f" of {self._total}"
            _say(f"{done}{of} requests, {state}")


def _print_summary(progress: JobProgress, llm: LLM | None, output: str) -> None:
    earlier = f", {progress.before} of them before" if progress.before else ""
    copied = f", {progress.copied} copied" if progress.copied else ""
    rows = [
        ("answered", f"{progress.ok} ok, {progress.failed} failed{earlier}{copied}"),
        ("prompt tokens", f"{progress.prompt_tokens:,}"),
        ("output tokens", f"{progress.output_tokens:,}"),
        ("time", f"{progress.seconds:.1f} s, {progress.tokens_per_second:.1f} output tokens/s"),
        *([] if llm is None else llm.engine.metrics.summary().rows()),
        ("output", "stdout" if output == "-" else output),
    ]
    for name, value in rows:
        print(f"{name:14} {value}", file=sys.stderr)
