"""What does a cache cost as the batch and the prompt grow? Pages beside DynamicCache, StaticCache and append-last.

    python benchmarks/bench_sweep.py [--quick] [--plot sweep.svg] [--output FILE]

Two sweeps on SmolLM2-135M-Instruct: batch 1, 2, 4 ... 128 with prompts of 128 tokens, and prompts of 100 to 6,400
tokens at batch 1, 32 new tokens each, greedy; prompts are real text (of W4 and W1), different for every row. All are
float32 but `paged, default`, the engine in its default dtype. sweep_sides.py says how each contender runs; caches of
fixed shape have prompt + new slots a row, the least that works. Of each point: the median time of a decode step, which
gives a token to every row; the time to the first token of all rows; the most memory over the loaded model; K and V
held, and held but empty, averaged over decode steps. Contenders have a process each and take turns, one at work at a
time; the first turn warms up. Tokens are compared with DynamicCache's, row by row; where a row differs the gap between
the two best logits there is reported: of a tie it says nothing about the cache.

Then the step of the engine in plain torch, eager and compiled as one graph over block tables of fixed width, with the
number of times that it was compiled again (sweep_compiled.py).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import sweep_compiled
import sweep_plots
from sweep_sides import ORACLE, SIDES, Prompts, Run, serve

from paged.errors import ConfigError
from worker.checkpoints import resolve
from worker.device import pick_dtype, pick_threads

START_S = 300  # to load a model


@dataclass(frozen=True, slots=True)
class Point:
    sweeps: tuple[str, ...]  # that it belongs to
    batch: int
    prompt: int
    new: int


class Child:
    """A contender's process. After it failed it is started again for the next point."""

    def __init__(self, name: str, model: str, threads: int) -> None:
        self.name, self._arguments = name, (name, model, threads)
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["transformers.models.auto.modeling_auto"])  # once, not in each
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def wait_ready(self) -> None:
        if not self._ready:
            _, why = self._answer(START_S)
            if why is not None:
                raise SystemExit(f"{self.name} did not start: {why}")
            self._ready = True

    def begin(self, prompts: Prompts, new: int, limit: float) -> None:
        """A point, for which it may take `limit` seconds."""
        self.wait_ready()
        self.runs: list[Run] = []
        self.failed: str | None = None
        self.left, self.limit = limit, limit
        self._ask("prepare", prompts, new)

    def run(self) -> None:
        """Once more, if it has not failed and there is time for it."""
        longest = max((sum(run.token_s) + run.prefill_s for run in self.runs), default=0.0)
        if self.failed is None and (len(self.runs) < 2 or longest < self.left):
            answer = self._ask("run")
            self.runs += [answer] if answer else []

    def finish(self) -> None:
        if self.failed is None:
            self._ask("release")
        if self.failed is not None:
            self.stop()
            self.start()

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(("end",))
        self._process.join(0 if getattr(self, "failed", None) else 10)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _ask(self, *order: Any) -> Any:
        start = time.perf_counter()
        with contextlib.suppress(BrokenPipeError):  # of a process that is gone, which shows below
            self._pipe.send(order)
        answer, self.failed = self._answer(self.left)
        self.left -= time.perf_counter() - start
        return answer

    def _answer(self, seconds: float) -> tuple[Any, str | None]:
        """What it gave, or why it gave nothing."""
        if not self._pipe.poll(max(seconds, 0)):
            return None, f"more than {getattr(self, 'limit', START_S):g} s"
        try:
            kind, content = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode
            if code is not None and code >= 0:
                raise SystemExit(f"{self.name} ended with code {code}: see above") from None
            return None, f"killed by signal {-(code or 0)}"
        return (None, content) if kind == "failed" else (content, None)


def main() -> None:
    args = parse(sys.argv[1:])
    try:
        with model_of(args) as model:
            figures = measure(args, model)
    except ConfigError as error:
        sys.exit(f"bench_sweep: {error}")
    whole = report.write(report.output(args, "sweep"), **figures)
    if args.plot:
        written = sweep_plots.draw(whole, args.plot)
        print("drawn: " + ", ".join(path.name for path in written))


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few small points of a tiny random model")
    parser.add_argument("--model", help="as the engine takes it [smollm2]")
    parser.add_argument("--batches", type=numbers, help="of the batch sweep [1,2,4,8,16,32,64,128]")
    parser.add_argument("--prompts", type=numbers, help="of the prompt sweep [100,200,400,800,1600,6400]")
    parser.add_argument("--prompt", type=int, help="tokens of each prompt of the batch sweep [128]")
    parser.add_argument("--new", type=int, help="new tokens of each row [32]")
    parser.add_argument("--repeat", type=int, help="runs of each point that count [3]")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for a contender at a point [300]")
    parser.add_argument("--only", action="append", choices=SIDES, help="a contender; several times for several")
    parser.add_argument("--threads", type=int, help="of every contender [what this process may use]")
    parser.add_argument("--plot", type=Path, help="draw FILE-batch and FILE-prompt, .svg and .png, light and dark")
    report.add_output(parser, "sweep")
    args = parser.parse_args(words)
    full = {"batches": [1, 2, 4, 8, 16, 32, 64, 128], "prompts": [100, 200, 400, 800, 1600, 6400], "prompt": 128}
    quick = {"batches": [1, 2], "prompts": [32, 64], "prompt": 32}
    chosen = quick | {"new": 4, "repeat": 1} if args.quick else full | {"new": 32, "repeat": 3}
    for name, value in chosen.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(*args.batches, *args.prompts, args.prompt, args.repeat) < 1 or args.new < 2:
        parser.error("batches, prompts and repeat must be at least 1, new at least 2")
    return args


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


@contextlib.contextmanager
def model_of(args: argparse.Namespace) -> Iterator[str]:
    """The model that is asked for; for a quick run a random one, made for it."""
    if args.model or not args.quick:
        yield args.model or "smollm2"
        return
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).parent.parent / "examples" / "make_random_model.py"
        made = Path(folder) / "random"
        command = [sys.executable, str(script), "--params", "300K", "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True)
        yield str(made)


def measure(args: argparse.Namespace, model: str) -> dict[str, Any]:
    if args.plot:
        sweep_plots.check()  # before the work is done
    if not Path("/proc/self/clear_refs").exists():
        raise ConfigError("the peak of memory is read and reset in /proc/self, which is Linux's: run this on Linux")
    checkpoint, wanted = resolve(model), points(args)
    longest = max(point.prompt for point in wanted) + 2 * args.new + 32  # with what the engine's rows live longer
    if longest > checkpoint.config.max_model_len:
        raise ConfigError(
            f"{longest} tokens are needed for the longest prompt, and the model's positions end at "
            f"{checkpoint.config.max_model_len}: lower --prompts"
        )
    threads = pick_threads(args.threads)[0]
    names = args.only or list(SIDES)
    children = [Child(name, model, threads) for name in names]
    results = []
    try:
        for child in children:
            child.wait_ready()
        for point in wanted:
            results += do(point, children, prompts(point, checkpoint.config.vocab_size), args.repeat, args.limit_s)
    finally:
        for child in children:
            child.stop()
    print("the engine's step, eager and compiled", file=sys.stderr, flush=True)
    batch = max((b for b in args.batches if b <= 8), default=min(args.batches))
    new = min(4 * args.new, checkpoint.config.max_model_len - args.prompt)
    some = prompts(Point((), batch, args.prompt, new), checkpoint.config.vocab_size)
    compiled = sweep_compiled.measure(model, some, new, threads, args.repeat)
    print(compiled_line(compiled))
    return {
        "model": "a random model, 300K" if args.quick and not args.model else model,
        "default_dtype": pick_dtype("auto", "cpu")[0],
        "threads": threads,
        "limit_s": args.limit_s,
        "points": results,
        "compiled_engine": compiled,
    }


def points(args: argparse.Namespace) -> list[Point]:
    """Both sweeps; what belongs to both is done once."""
    sweeps: dict[tuple[int, int], list[str]] = {}
    for batch in args.batches:
        sweeps.setdefault((batch, args.prompt), []).append("batch")
    for prompt in args.prompts:
        sweeps.setdefault((1, prompt), []).append("prompt")
    return [Point(tuple(names), batch, prompt, args.new) for (batch, prompt), names in sweeps.items()]


def prompts(point: Point, vocab_size: int) -> Prompts:
    """Pieces of one long text, that of W4 and W1, one after another; they overlap only where it is too short."""
    text = [token for name in ("W4", "W1") for request in report.workload(name) for token in request["prompt"]]
    room = len(text) - point.prompt
    if room < 0:
        raise ConfigError(f"the text has {len(text)} tokens, and the prompt {point.prompt}: lower --prompts")
    stride = min(point.prompt, room // max(point.batch - 1, 1))
    if stride == 0 and point.batch > 1:
        raise ConfigError(f"the text has {len(text)} tokens, too few for {point.batch} prompts of {point.prompt}")
    starts = [i * stride for i in range(point.batch)]
    return [[token % vocab_size for token in text[start : start + point.prompt]] for start in starts]


def do(point: Point, children: list[Child], rows: Prompts, repeat: int, limit_s: float) -> list[dict[str, Any]]:
    """One point, by all in turn; the entries of it."""
    for child in children:
        child.begin(rows, point.new, limit_s)
    for _ in range(1 + repeat):
        for child in children:
            time.sleep(0.05)  # in which the threads of the one before stop to spin
            child.run()
    oracle = next((child.runs[0] for child in children if child.name == ORACLE and child.runs), None)
    entries = []
    for child in children:
        it = entry(child.runs, point, oracle)
        if not it["token_s"]:
            it["not_finished"] = child.failed or f"more than {limit_s:g} s"
        child.finish()
        print(line(child.name, it), file=sys.stderr, flush=True)
        entries += [{"contender": child.name, "sweep": sweep} | it for sweep in point.sweeps]
    return entries


def entry(runs: list[Run], point: Point, oracle: Run | None) -> dict[str, Any]:
    """The figures of a point; of its runs the first was to warm up."""
    counted = runs[1:]
    it: dict[str, Any] = {"batch": point.batch, "prompt": point.prompt, "new": point.new}
    it["token_s"] = [round(seconds, 7) for run in counted for seconds in run.token_s]
    it["prefill_s"] = [round(run.prefill_s, 6) for run in counted]
    if not counted:
        return it
    it["peak_bytes"] = max(run.peak_bytes for run in runs)
    it["kv_held_bytes"] = round(statistics.mean(counted[0].held_bytes))
    it["kv_empty_bytes"] = round(statistics.mean(counted[0].empty_bytes))
    it["agrees"] = None if oracle is None else agreement(counted[0].tokens, oracle)
    return it


def agreement(tokens: list[list[int]], oracle: Run) -> dict[str, Any]:
    """Rows with the oracle's tokens; of the others the gap of the oracle's two best logits where they part."""
    gaps = []
    for found, wanted, gap in zip(tokens, oracle.tokens, oracle.gaps, strict=True):
        if found != wanted:
            gaps.append(gap[next(i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1])])
    return {"rows": len(tokens) - len(gaps), "of": len(tokens), "gaps_where_not": gaps}


def line(name: str, it: dict[str, Any]) -> str:
    head = f"batch {it['batch']:3}  prompt {it['prompt']:5}  {name:21}"
    if "not_finished" in it:
        return f"{head}not finished: {it['not_finished']}"
    agrees = "" if it["agrees"] is None else f"  {it['agrees']['rows']} of {it['agrees']['of']} rows agree"
    step, first = statistics.median(it["token_s"]) * 1000, statistics.median(it["prefill_s"])
    peak, held, empty = (it[name] / 2**20 for name in ("peak_bytes", "kv_held_bytes", "kv_empty_bytes"))
    return (
        f"{head}{step:9.2f} ms a token  first {first:7.3f} s  peak {peak:7.1f} MiB  "
        f"K/V {held:7.2f} MiB, {empty / held:5.1%} empty{agrees}"
    )


def compiled_line(it: dict[str, Any]) -> str:
    if "not_run" in it:
        return f"the engine's compiled step was not run: {it['not_run']}"
    eager, compiled = (statistics.median(it[f"{name}_token_s"]) * 1000 for name in ("eager", "compiled"))
    return (
        f"the engine's step in torch, batch {it['batch']}, over {it['page_boundaries']} page boundaries: "
        f"eager {eager:.2f} ms, compiled {compiled:.2f} ms, {it['recompiles']} recompiles, "
        f"{it['agrees']} of {it['batch']} rows agree"
    )


if __name__ == "__main__":
    main()
