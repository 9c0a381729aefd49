"""`paged bench offline`: a file of workloads through the engine, beside what the machine can do at most.

A workload is a list of {"prompt": [token ids], "out": n}: greedy, exactly n tokens, all submitted at once. Every one
runs several times, from an empty prefix cache, after the one named WARM. Of each run's steps the least time is known
that its matrix products take: reading the weights once, or multiplying at the rate that was measured for their format,
whichever is more. The share of the ceiling is the sum of those over the wall time; attention is not in it, and has to
come out of the rest.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paged.errors import ConfigError, RequestError
from paged.layout import DTYPE_BYTES
from worker.device import head_format
from worker.step import SamplingParams
from worker.tensors import num_parameters

if TYPE_CHECKING:
    from scheduler.llm import LLM
    from worker.executor import Executor, LocalExecutor
    from worker.step import Step, StepResult

WARM = "WARM"
MAX_RUNNING = 32
Workloads = dict[str, list[dict[str, Any]]]


def read_workloads(path: Path) -> Workloads:
    """Raises ConfigError for a file that is none of workloads."""
    try:
        content: Workloads = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None

    def fits(request: object) -> bool:
        kinds = {key: type(value) for key, value in request.items()} if isinstance(request, dict) else {}
        return kinds == {"prompt": list, "out": int}

    each = content.values() if isinstance(content, dict) else ()
    if not each or not all(isinstance(requests, list) and requests and all(map(fits, requests)) for requests in each):
        raise ConfigError(f'{path} must hold {{"name": [{{"prompt": [token ids], "out": n}}, ...], ...}}')
    return content


def read_reference(workload: Path, given: Path | None, requests: Workloads) -> dict[str, list[list[int]]]:
    """Tokens to compare with: the file that is given, or the one that lies beside the workload; else nothing.

    Raises ConfigError for a file that has not one list of token ids for each request of a workload that it names.
    """
    beside = workload.with_name(workload.stem.replace("workload", "reference") + "_fp32.json")
    path = given or (beside if "workload" in workload.stem and beside.is_file() else None)
    if path is None:
        return {}
    try:
        content: dict[str, list[list[int]]] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    each = content.values() if isinstance(content, dict) else [None]
    if not all(isinstance(answers, list) and all(isinstance(tokens, list) for tokens in answers) for answers in each):
        raise ConfigError(f'{path} must hold {{"name": [[token ids], ...], ...}}')
    for name in requests.keys() & content.keys():
        if len(content[name]) != len(requests[name]):
            raise ConfigError(
                f"{path} has {len(content[name])} answers to the {len(requests[name])} requests of {name}"
            )
    return content


def check(llm: LLM, workloads: Workloads) -> None:
    """Raises ConfigError, which names the workload, for a request that the engine would refuse."""
    for name, requests in workloads.items():
        for i, request in enumerate(requests):
            try:
                llm.engine.resolve(str(i), request["prompt"], _params(request))
            except RequestError as error:
                raise ConfigError(f"request {i + 1} of workload {name} cannot be run: {error}") from None


def _params(request: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=request["out"], ignore_eos=True)


@dataclass(slots=True)
class Sample:
    """One run of a workload; times in seconds."""

    wall_s: float
    first_token_s: float  # of all requests the median
    token_s: float  # between two tokens of a request, the median over requests; 0 where none has two
    least_s: float  # that its matrix products take
    tokens: list[list[int]]
    parts: dict[str, float] = field(default_factory=dict)  # with a profile: where the time went


class _Timed:
    """An executor that adds up its time, and knows the tokens of each step."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.seconds = 0.0
        self.steps: list[tuple[int, int]] = []  # tokens, rows that sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, step: Step) -> None:
        self.steps.append((sum(row.num_tokens for row in step.rows), sum(row.samples for row in step.rows)))
        self._executor.submit(step)

    def result(self) -> StepResult:
        start = time.perf_counter()
        try:
            return self._executor.result()
        finally:
            self.seconds += time.perf_counter() - start


def formats(llm: LLM) -> tuple[str, str]:
    """Of the layers' matrices, and of the head."""
    return llm.config.quantization or llm.plan.dtype, head_format(llm.plan.dtype, llm.config.quantization)


class Bench:
    """Runs workloads on one engine. ceilings: as worker/ceilings.py measures them."""

    def __init__(self, llm: LLM, ceilings: Mapping[str, float], profile: bool) -> None:
        self.llm = llm
        self._executor = cast("LocalExecutor", llm.engine.executor)
        self._profile = self._executor.profile() if profile else None
        model = llm.model_config
        embedding = model.vocab_size * model.hidden_size
        matrices = num_parameters(model) - embedding * (1 if model.tie_word_embeddings else 2)
        layers, head = (ceilings[f"{format_}_operations_per_s"] for format_ in formats(llm))
        self._multiply = 2 * matrices / layers, 2 * embedding / head
        # Of an embedding that is not the head itself a step reads few rows.
        apart = llm.plan.backend == "native" or not model.tie_word_embeddings
        tables = llm.plan.tensor_parallel_size if apart else 0
        read = llm.plan.weight_bytes - embedding * DTYPE_BYTES[llm.plan.dtype] * tables
        self._read = read / ceilings["read_bytes_per_s"]

    def run(self, requests: list[dict[str, Any]]) -> Sample:
        engine = self.llm.engine
        engine.reset_prefix_cache()
        timed: Any = _Timed(self._executor)
        engine.executor = timed
        if self._profile is not None:
            self._profile.clear()
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        start = time.perf_counter()
        for i, request in enumerate(requests):
            engine.add(str(i), request["prompt"], _params(request), stream=True)
        while engine.has_work:
            for output in engine.step():
                now = time.perf_counter() - start
                tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
                first.setdefault(output.request_id, now)
                last[output.request_id] = now
        wall = time.perf_counter() - start
        engine.executor = self._executor
        each = [(last[i] - first[i]) / (len(tokens[i]) - 1) for i in first if len(tokens[i]) > 1]
        return Sample(
            wall_s=wall,
            first_token_s=statistics.median(first.values()),
            token_s=statistics.median(each) if each else 0.0,
            least_s=sum(max(self._read, self._multiply[0] * n + self._multiply[1] * few) for n, few in timed.steps),
            tokens=[tokens[str(i)] for i in range(len(requests))],
            parts=self._parts(wall, timed.seconds),
        )

    def _parts(self, wall: float, executor: float) -> dict[str, float]:
        if self._profile is None:
            return {}
        native = dict(self._profile)
        linear, attention = native.pop("linear", 0.0), native.pop("attention", 0.0)
        sums = native.pop("sum", 0.0)  # where there are several workers
        small = sum(native.values())
        return {
            "linears": linear,
            "attention": attention,
            "small operations": small,
            **({"sums over workers": sums} if sums else {}),
            "inputs and sampling": executor - linear - attention - sums - small,
            "scheduling and text": wall - executor,
        }


def run_all(
    llm: LLM,
    workloads: Workloads,
    reference: Mapping[str, list[list[int]]],
    ceilings: Mapping[str, float],
    repeat: int,
    profile: bool,
    report: Callable[[str, int, Sample], None],
) -> dict[str, dict[str, Any]]:
    """Of each workload but WARM the best run's figures and every run's wall time."""
    bench = Bench(llm, ceilings, profile)
    results = {}
    for name, requests in workloads.items():
        if name == WARM:
            continue
        samples = []
        for turn in range(repeat):
            if WARM in workloads:
                bench.run(workloads[WARM])
            samples.append(bench.run(requests))
            report(name, turn, samples[-1])
        best = min(samples, key=lambda sample: sample.wall_s)
        prompt, output = sum(len(r["prompt"]) for r in requests), sum(r["out"] for r in requests)
        wanted = reference.get(name)
        results[name] = {
            "wall_s": best.wall_s,
            "samples": [sample.wall_s for sample in samples],
            "requests": len(requests),
            "output_tokens": output,
            "output_tokens_per_s": output / best.wall_s,
            "total_tokens_per_s": (prompt + output) / best.wall_s,
            "first_token_s": best.first_token_s,
            "token_s": best.token_s,
            "peak_memory_bytes": peak_memory(),
            "share_of_ceiling": best.least_s / best.wall_s,
            "agrees": None if wanted is None else sum(a == b for a, b in zip(best.tokens, wanted, strict=True)),
        } | ({"parts_s": best.parts} if profile else {})
    return results


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The figures of `run_all` as lines."""
    names = {"wall": 9, "output/s": 10, "total/s": 9, "first": 10, "a token": 10, "ceiling": 9, "memory": 10}
    lines = [f"{'':6}{''.join(f'{name:>{width}}' for name, width in names.items())}  agrees"]
    for name, it in results.items():
        agrees = "" if it["agrees"] is None else f"{it['agrees']} of {it['requests']}"
        lines.append(
            f"{name:6}{it['wall_s']:7.2f} s{it['output_tokens_per_s']:10.1f}{it['total_tokens_per_s']:9.1f}"
            f"{it['first_token_s'] * 1000:7.0f} ms{it['token_s'] * 1000:7.1f} ms{it['share_of_ceiling']:8.0%}"
            f"{it['peak_memory_bytes'] / 2**20:6.0f} MiB  {agrees}"
        )
    for name, it in results.items():
        if "parts_s" in it:
            parts = ", ".join(f"{part} {seconds / it['wall_s']:.1%}" for part, seconds in it["parts_s"].items())
            lines.append(f"{name:6}{parts}")
    return lines


def peak_memory() -> int:
    """Most bytes that this process has had in memory at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def command(*words: str) -> str:
    """As it was called, without the folders of this machine."""
    return " ".join(Path(word).name if Path(word).is_absolute() else word for word in words)


def about() -> dict[str, Any]:
    """The machine, the commit (of a checkout), the command."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return {
        "machine": {
            "cpu": names[0].split(":")[1].strip() if names else platform.processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "python": platform.python_version(),
            "load_average": os.getloadavg()[0],
        },
        "commit": done.stdout.strip() or "not a checkout",
        "command": command("paged", *sys.argv[1:]),
    }
