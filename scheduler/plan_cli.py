"""`paged plan`: a trace, a cost model and settings in; a table and a report out."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paged.errors import ConfigError
from scheduler import plan_report
from scheduler.bench import about
from scheduler.config import EngineConfig
from scheduler.cost import CostModel, parse_cost
from scheduler.plan_report import memory, seconds
from scheduler.planner import Capacity, Planner, Run, Targets
from scheduler.simulate import refusal
from scheduler.traces import Trace, read_trace

if TYPE_CHECKING:
    from scheduler.llm import Plan


def run(
    config: EngineConfig,
    trace_path: Path,
    output: Path | None,
    ttft_p99: float,
    itl_p99: float,
    max_replicas: int,
    cost: str | None,
    save_cost: Path | None,
) -> None:
    """Raises ConfigError for what cannot work."""
    for name, value in (("ttft-p99", ttft_p99), ("itl-p99", itl_p99)):
        if not 0 < value < math.inf:
            raise ConfigError(f"--{name} must be seconds, more than 0, not {value}")
    given = None if cost is None else parse_cost(cost)
    if config.num_speculative_tokens:
        raise ConfigError("a trace has no text to look drafts up in: leave num_speculative_tokens out")
    if given is not None and save_cost is not None:
        raise ConfigError("--save-cost writes what is measured, and with --cost nothing is: leave one out")
    trace = read_trace(trace_path)
    for path in (output, save_cost):
        _check_writable(path, trace_path)

    from scheduler.llm import plan, rules
    from worker.checkpoints import resolve

    it = plan(config, resolve(config.model).config, runs_here=False)
    assert it.limits is not None
    assert it.layout is not None
    refused = Counter(refusal(request, it.limits) for request in trace.requests)
    if None not in refused:
        why = ", ".join(f"{number:,} {reason}" for reason, number in refused.items())
        raise ConfigError(f"no request of trace {trace_path} can be served: {why}")
    _say(_described(trace))
    model = _measured(config, it) if given is None else given
    _say(f"cost of a step: {model}" + ("" if model.error is None else f", off by {model.error:.1%} in median"))
    if save_cost is not None:
        model.save(save_cost)
    start = time.monotonic()

    def tell(run: Run) -> None:
        replay = run.replay
        _say(
            f"{time.monotonic() - start:4.0f} s: {replay.replicas} x {memory(run.kv_bytes)}: first token p99 "
            f"{seconds(replay.first_token(99))}, between tokens {seconds(replay.between_tokens(99))}"
        )

    with Planner(
        trace,
        it.limits,
        it.layout.bytes_per_page,
        model,
        Targets(ttft_p99, itl_p99),
        prefix_caching=config.enable_prefix_caching,
        rules=rules(config),
        max_replicas=max_replicas,
        processes=it.threads,
        on_run=tell,
    ) as planner:
        capacity = planner.run()
    notes = [_described(trace), *_notes(capacity, it)]
    for line in (*notes, "", *plan_report.table(capacity), "", *plan_report.answers(capacity)):
        print(line)
    if output is not None:
        output.write_text(plan_report.page(capacity, _settings(config, it, model), notes), encoding="utf-8")
        _say(f"report: {output}")


def _say(text: str) -> None:
    print(f"paged: {text}", file=sys.stderr, flush=True)


def _check_writable(path: Path | None, trace: Path) -> None:
    if path is None:
        return
    if path.exists() and path.samefile(trace):
        raise ConfigError(f"{path} is the trace: name another file")
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None


def _described(trace: Trace) -> str:
    prompt, output = (sum(getattr(r, f"{name}_tokens") for r in trace.requests) for name in ("prompt", "output"))
    return (
        f"{trace.name}: {len(trace.requests):,} requests in {trace.span:,.0f} s, {prompt:,} tokens of prompts and "
        f"{output:,} of answers"
    )


def _measured(config: EngineConfig, it: Plan) -> CostModel:
    from scheduler.calibrate import MOST_CONTEXT, calibrate
    from scheduler.llm import LLM

    assert it.limits is not None
    assert it.layout is not None
    # Room for all that is measured and for the longest request; this machine need not have what is planned for.
    tokens = max(MOST_CONTEXT, it.limits.max_model_len) + it.limits.page_size
    least = tokens * it.layout.bytes_per_token + it.layout.bytes_per_page
    pages = (it.limits.num_pages + 1) * it.layout.bytes_per_page
    _say("measuring steps of the model, about 20 s")
    llm = LLM.from_config(replace(config, kv_memory=min(least, pages)))
    model = calibrate(llm)
    llm.close()
    return model


def _notes(capacity: Capacity, it: Plan) -> list[str]:
    trace, refused = capacity.trace, capacity.base.replay.refused
    notes = [f"refused, as an engine would: {number:,} {why}" for why, number in refused.items()]
    if trace.out_of_order:
        notes.append(f"{trace.out_of_order:,} lines were out of order: requests are sorted by time")
    if not trace.has_content:
        notes.append("the trace does not say which prompts begin alike: no prefix can be found, and the cache is off")
    notes.append(f"a replica is an engine of its own on a machine like this, {it.threads} threads")
    return notes


def _settings(config: EngineConfig, it: Plan, model: CostModel) -> list[tuple[str, str]]:
    limits = it.limits
    assert limits is not None
    known = {
        "dtype": it.dtype,
        "page_size": limits.page_size,
        "max_model_len": limits.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "threads": it.threads,
        "device": it.device,
        "attention_backend": it.backend,
    }
    rows = [(field.name, str(known.get(field.name, getattr(config, field.name)))) for field in fields(EngineConfig)]
    rows.append(("cost of a step", str(model)))
    if model.measured:
        rows.append(("measured", f"{model.measured}, off by {model.error or 0:.1%} in median"))
    machine = about()["machine"]
    return [*rows, ("machine", f"{machine['cpu']}, {machine['cores']} cores")]
