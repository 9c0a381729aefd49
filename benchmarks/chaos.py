"""Is every line answered exactly once, with the answers of an undisturbed run, whatever is killed meanwhile?

    python benchmarks/chaos.py [--kills N] [--kinds driver,replica,worker,node] [--seed S] [--output FILE]

Each kill is a job of its own: `paged batch` over examples/requests.jsonl (64 requests, SmolLM2 in float32) on Ray, with
two replicas, or for a tensor-parallel worker one of two workers. Between the first and the last answer SIGKILL goes to
one of these, in turn:

    driver   the process of `paged batch`; the same command is given again
    replica  one of two
    worker   one of two workers of a replica, or its first, which is the replica's own process
    node     every process of one of two nodes; then another node comes

Afterwards every line must have one answer, the same as in an undisturbed run of as many workers to a replica, and of
the job no process may be left, nor a file in shared memory. Exit code 1 where that fails; the log says what did.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import report

KINDS = ("driver", "replica", "worker", "node")
REPLICAS = ("--replicas", "2", "--threads", "1")
PARALLEL = ("--replicas", "1", "--tensor-parallel-size", "2", "--threads", "1")
REPLICA, WORKER = "ray::PagedReplica", "ray::RayWorker"  # what Ray calls the processes of actors
DEADLINE = 300.0  # seconds in which an answer must come
GONE, GONE_KILLED = 15.0, 60.0  # seconds in which all of a job is gone that ended by itself, or was killed
MARK = "PAGED_CHAOS"  # in the environment of a process that we start, and so of all that it starts
COMMAND = (sys.executable, "-c", "from scheduler.cli import main; main()", "batch")
OBJECTS = 100 * 2**20  # bytes of a node's object store

Answers = dict[str, Any]


class Broken(Exception):
    """What must not be."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a job is to do. settings: options of `paged batch` that every run of it has."""

    requests: Path
    settings: tuple[str, ...]

    @property
    def total(self) -> int:
        return self.requests.read_bytes().count(b"\n")


SMOLLM2 = Work(Path(__file__).parents[1] / "examples" / "requests.jsonl", ("--dtype", "float32", "--seed", "7"))


# What was answered


def answers(output: Path) -> list[tuple[str, Any]]:
    """Of each record the custom_id, and all that an answer may not differ in: not the time, nor what was cached."""
    found = []
    for line in output.read_text().splitlines():
        record = json.loads(line)
        body = (record["response"] or {}).get("body") or {}
        usage = body.get("usage") or {}
        tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        status = (record["response"] or {}).get("status_code")
        found.append((record["custom_id"], [status, body.get("choices"), body.get("error"), record["error"], *tokens]))
    return found


def compare(wanted: Answers, got: Sequence[tuple[str, Any]]) -> None:
    """Raises Broken, which names the lines, unless each that is wanted was answered once, and so."""
    times = Counter(name for name, _ in got)
    wrong = {
        "answered more than once": [name for name, count in times.items() if count > 1],
        "not answered": [name for name in wanted if name not in times],
        "answered, and in no input": [name for name in times if name not in wanted],
        "answered differently": [name for name, answer in got if name in wanted and answer != wanted[name]],
    }
    said = [f"{what}: {', '.join(names)}" for what, names in wrong.items() if names]
    if said:
        raise Broken("; ".join(said))


def texts(wanted: Answers) -> dict[str, list[tuple[str, str]]]:
    """Only what was said, not the logprobs, whose last digits depend on the number of workers."""
    return {
        name: [
            (one["text"] if "text" in one else one["message"]["content"], one["finish_reason"])
            for one in answer[1] or ()
        ]
        for name, answer in wanted.items()
    }


# Processes


def marked(mark: str) -> list[psutil.Process]:
    """The processes that were started with this mark; not those that have ended and wait for their parent."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def titled(processes: list[psutil.Process], title: str) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(title):
                found.append(process)
    return found


def shared_files(processes: list[psutil.Process]) -> set[Path]:
    """What they have of files in shared memory that still have a name."""
    found = set[Path]()
    for process in processes:
        with suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                place = line.partition("/dev/shm/")[2]
                if place and not place.endswith("(deleted)"):
                    found.add(Path("/dev/shm", place))
    return found


def all_gone(of: Callable[[], list[psutil.Process]], files: set[Path], seconds: float, what: str) -> None:
    """Until no process is left. Raises Broken after so many seconds, and for a file that is left."""
    began = time.monotonic()
    while left := of():
        if time.monotonic() - began > seconds:
            names = [f"{one.pid} {one.name()}" for one in left if one.is_running()]
            for one in left:
                with suppress(psutil.Error):
                    one.kill()
            raise Broken(f"{seconds:g} s after {what} there are processes of it: {', '.join(names)}")
        time.sleep(0.1)
    if kept := [str(file) for file in files if file.exists()]:
        raise Broken(f"after {what} there are files of it: {', '.join(kept)}")


class Job:
    """`paged batch` in a process of its own, and what it has written."""

    def __init__(self, work: Work, output: Path, *options: str) -> None:
        self.output = output
        self.log = output.with_suffix(".log")
        self.command = [*COMMAND, str(work.requests), "-o", str(output), *work.settings, *options]
        self.files = set[Path]()
        self.start()

    def start(self) -> None:
        self.mark = uuid.uuid4().hex
        with self.log.open("ab") as log:
            environ = {**os.environ, MARK: self.mark}
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environ)

    def processes(self) -> list[psutil.Process]:
        return marked(self.mark)

    def answered(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def wait_for(self, count: int) -> None:
        """Until so many lines are answered."""
        end = time.monotonic() + DEADLINE
        while self.answered() < count:
            code = self.process.poll()
            if code is not None and self.answered() < count:
                raise Broken(f"the job ended with {code} after {self.answered()} answers: {self.said()}")
            if time.monotonic() > end:
                raise Broken(f"no answer came for {DEADLINE:g} s: {self.said()}")
            time.sleep(0.01)

    def wait(self) -> None:
        """Until it has ended, and all that it started."""
        try:
            code = self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            raise Broken(f"the job did not end in {DEADLINE:g} s: {self.said()}") from None
        if code not in (0, 3):  # 3: examples/requests.jsonl has lines that must be refused
            raise Broken(f"the job ended with {code}: {self.said()}")
        all_gone(self.processes, self.files, GONE, "the end of the job")

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def end(self) -> None:
        """Whatever has become of it."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()


class Nodes:
    """A Ray of a head that computes nothing and two nodes with a CPU, all on this machine."""

    def __init__(self) -> None:
        from ray._private.authentication import authentication_token_setup as tokens
        from ray.cluster_utils import Cluster

        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as who joins does
        self.mark = os.environ[MARK] = uuid.uuid4().hex
        try:
            self._cluster = Cluster(
                initialize_head=True,
                head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECTS},
            )
            self._nodes = [self._cluster.add_node(num_cpus=1, object_store_memory=OBJECTS) for _ in range(2)]
        finally:
            del os.environ[MARK]
        self.address: str = self._cluster.address

    def processes(self) -> list[psutil.Process]:
        return marked(self.mark)

    def of_jobs(self) -> list[psutil.Process]:
        there = self.processes()
        return titled(there, REPLICA) + titled(there, WORKER)

    def kill(self, chance: random.Random) -> None:
        """Every process of a node, of which each has a replica."""
        node = self._nodes.pop(chance.randrange(len(self._nodes)))
        roots = [psutil.Process(info.process.pid) for infos in node.all_processes.values() for info in infos]
        for process in [one for root in roots for one in (root, *root.children(recursive=True))]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def add(self) -> None:
        os.environ[MARK] = self.mark
        try:
            self._nodes.append(self._cluster.add_node(wait=False, num_cpus=1, object_store_memory=OBJECTS))
        finally:
            del os.environ[MARK]

    def end(self) -> None:
        self._cluster.shutdown()
        all_gone(self.processes, set(), GONE_KILLED, "the end of the nodes")


# Runs


def options_of(kind: str) -> tuple[str, ...]:
    return PARALLEL if kind == "worker" else REPLICAS


def undisturbed(work: Work, kind: str, folder: Path) -> Answers:
    """The answers of as many workers as a replica has at such a kill, in a run in which nothing is killed."""
    job = Job(work, folder / "plain.jsonl", *(PARALLEL if kind == "worker" else ("--threads", "1")))
    try:
        job.wait()
    finally:
        job.end()
    found = answers(job.output)
    compare(dict(found), found)
    if len(found) != work.total:
        raise Broken(f"{len(found)} answers to {work.total} lines without a kill")
    return dict(found)


def victim(kind: str, job: Job, nodes: Nodes | None, chance: random.Random) -> tuple[str, Callable[[], Any]]:
    """Who is to be killed, in words, and what does it."""
    if nodes is not None:
        return "node", lambda: nodes.kill(chance)
    if kind == "driver":
        return "driver", job.process.kill
    there = job.processes()
    found = titled(there, REPLICA) + titled(there, WORKER)
    if len(found) != 2:
        raise Broken(f"{len(found)} processes of replicas and workers are there, and should be 2: {job.said()}")
    picked = chance.randrange(2)
    return f"rank {picked}" if kind == "worker" else "replica", found[picked].kill


def disturbed(work: Work, kind: str, after: int, folder: Path, chance: random.Random, found: dict[str, Any]) -> Path:
    """One job, and one kill in it, once so many lines are answered; what came of it goes to `found`. The output.

    Raises Broken.
    """
    nodes = Nodes() if kind == "node" else None
    job: Job | None = None
    try:
        place = () if nodes is None else ("--address", nodes.address)
        job = Job(work, folder / "out.jsonl", *options_of(kind), *place)
        job.wait_for(after)
        job.files = shared_files(job.processes() + (nodes.of_jobs() if nodes else []))
        found["whom"], strike = victim(kind, job, nodes, chance)
        strike()
        killed = time.monotonic()
        before = found["answers_before"] = job.answered()
        if not 1 <= before < work.total:
            raise Broken(f"killed after {before} of {work.total} answers, so not between the first and the last")
        if kind == "driver":
            found["left_s"] = restart(job)
        if nodes is not None:
            nodes.add()
        job.wait_for(before + 1)
        found["recovered_s"] = round(time.monotonic() - killed, 2)
        job.wait()
        found["end_s"] = round(time.monotonic() - killed, 2)
        if nodes is not None:
            all_gone(nodes.of_jobs, job.files, GONE, "the end of the job on nodes")
    finally:
        if job is not None:
            job.end()
        if nodes is not None:
            nodes.end()
    return job.output


def restart(job: Job) -> float:
    """Give the command of a job that was killed again, at once; how long the last of its processes was there."""
    old, began = job.mark, time.monotonic()
    job.process.wait()
    job.start()
    all_gone(lambda: marked(old), job.files, GONE_KILLED, "the kill of the driver")
    job.files = set()
    return round(time.monotonic() - began, 2)


def chaos(work: Work, kinds: Sequence[str], kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """So many kills, of these kinds in turn; the log of them."""
    chance, wanted, log = random.Random(seed), dict[str, Answers](), list[dict[str, Any]]()
    for number in range(kills):
        kind = kinds[number % len(kinds)]
        workers = "parallel" if kind == "worker" else "single"
        place = folder / str(number)
        place.mkdir()
        found: dict[str, Any] = {"kind": kind}
        log.append(found)
        try:
            if workers not in wanted:
                wanted[workers] = undisturbed(work, kind, place)
            output = disturbed(work, kind, chance.randint(1, work.total // 2), place, chance, found)
            compare(wanted[workers], answers(output))
            found["result"] = "each line answered once, as without the kill"
        except Broken as error:
            found["result"], found["broken"] = str(error), True
        print(f"{number + 1}. {', '.join(f'{name} {value}' for name, value in found.items())}", flush=True)
    same = texts(wanted["single"]) == texts(wanted["parallel"]) if len(wanted) == 2 else None
    return {"requests": work.total, "kills": log, "two_workers_equal_one": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=len(KINDS))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=KINDS, help="which, with commas")
    parser.add_argument("--seed", type=int, default=0, help="of when and whom")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "chaos.json")
    args = parser.parse_args()
    if not set(args.kinds) <= set(KINDS):
        parser.error(f"kinds are {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory() as folder:
        found = chaos(SMOLLM2, args.kinds, args.kills, args.seed, Path(folder))
    print(f"the texts of two workers are those of one: {found['two_workers_equal_one']}")
    report.write(args.output, seed=args.seed, **found)
    broken = sum("broken" in one for one in found["kills"])
    sys.exit(f"{broken} of {args.kills} kills broke something: see {args.output}" if broken else 0)


if __name__ == "__main__":
    main()
