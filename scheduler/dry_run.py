"""`paged batch --dry-run`: every line checked as an engine would, and what the job would take. Nothing is written.

The engine that checks has all limits of the real one, and no model behind it. The time is that of the cost model that
`calibrate` fits to this machine in some 20 seconds (scheduler/cost.py), if every answer comes to its most tokens and no
prefix is shared: so it is too long where answers end earlier or prompts begin alike.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from paged.errors import RequestError
from scheduler.config import EngineConfig
from scheduler.cost import CostModel
from scheduler.desk import Desk, LineRequest, Response
from scheduler.engine import Engine
from scheduler.jobs import WINDOW_BYTES
from scheduler.lines import CustomIds, Source, no_request, request_of
from scheduler.llm import LLM, plan
from scheduler.policy import Limits
from scheduler.request import Request
from scheduler.text import Tokenizer

SHOWN = 5  # refused lines that are printed


@dataclass(slots=True)
class Work:
    """What lines ask for, in sums over those that would be accepted. Attention is in tokens read and in pairs, as
    scheduler/cost.py has them."""

    requests: int = 0
    sequences: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0  # at most
    pages: int = 0
    largest_pages: int = 0
    largest_line: int = 0
    read: float = 0.0
    pairs: float = 0.0

    def add(self, line: int, prompt: int, output: int, n: int, limits: Limits) -> None:
        """A request of n sequences, each of at most `output` tokens after `prompt` others."""
        pages = limits.pages(prompt + max(output - 1, 0), prompt, n)
        if pages > self.largest_pages:
            self.largest_pages, self.largest_line = pages, line
        self.requests, self.sequences, self.pages = self.requests + 1, self.sequences + n, self.pages + pages
        self.prompt_tokens, self.output_tokens = self.prompt_tokens + prompt, self.output_tokens + n * output
        decoded = n * output * (prompt + output / 2)  # the context of each token, summed
        self.read += decoded + prompt**2 / (2 * limits.max_num_batched_tokens)
        self.pairs += decoded + prompt**2 / 2

    def seconds(self, cost: CostModel, limits: Limits) -> float:
        """If steps hold as many sequences as their pages allow."""
        if not self.requests:
            return 0.0
        at_once = max(1.0, min(limits.max_num_seqs, limits.num_pages * self.sequences / max(1, self.pages)))
        tokens = self.prompt_tokens + self.output_tokens
        steps = max(1.0, self.output_tokens / min(at_once, self.sequences), tokens / limits.max_num_batched_tokens)
        return steps * cost.seconds(tokens / steps, self.output_tokens / steps, self.read / steps, self.pairs / steps)


class _CheckingEngine(Engine):
    """Resolves requests, and forgets them."""

    request: Request | None = None

    def queue(self, request: Request, stream: bool = False) -> None:
        self.request = request


class _CheckingLLM(LLM):
    """Everything of an LLM but what loads a model."""

    def _start(self, config: EngineConfig) -> None:
        from worker.checkpoints import resolve

        checkpoint = resolve(config.model)
        self.config, self.plan = config, plan(config, checkpoint.config)
        self.model_name, self.model_config = checkpoint.name, checkpoint.config
        self.tokenizer = Tokenizer.from_dir(checkpoint.path)
        limits = self.plan.limits
        assert limits is not None
        never_run: Any = SimpleNamespace(num_pages=2)
        self.checking = _CheckingEngine(
            never_run,
            self.tokenizer,
            limits,
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.config.eos_token_ids,
        )
        self.engine = self.checking
        self._ids, self._mail = itertools.count(), {}
        self.limits = limits


@dataclass(slots=True)
class Checked:
    """lines: those that are not blank. refused: the first few, as text; num_refused counts all."""

    lines: int
    refused: list[str]
    num_refused: int
    work: Work


def check(name: str, llm: _CheckingLLM) -> Checked:
    """Every line of an input. Raises ConfigError where there is none."""
    source, ids, desk, found = Source(name), CustomIds(), Desk(llm), Checked(0, [], 0, Work())
    while not source.ended:
        for line in source.take(1024, WINDOW_BYTES, 1.0):
            found.lines += 1
            try:
                _check(line.number, request_of(line.raw), ids, desk, llm, found.work)
            except RequestError as error:
                found.num_refused += 1
                if len(found.refused) < SHOWN:
                    found.refused.append(f"line {line.number}: {error}")
    source.close()
    if not found.lines:
        raise no_request(name)
    return found


def _check(number: int, request: dict[str, Any], ids: CustomIds, desk: Desk, llm: _CheckingLLM, work: Work) -> None:
    ids.check(request.get("custom_id"), number)
    key, llm.checking.request = str(number), None
    desk.add(key, LineRequest(request.get("method"), request.get("url"), request.get("body")))
    made = llm.checking.request
    if made is None:
        ((_, response),) = desk.step()  # what was refused is there without a step
        assert isinstance(response, Response)
        assert response.body is not None
        raise RequestError(response.body["error"]["message"])
    desk.abort([key])
    work.add(number, len(made.prompt_token_ids), made.max_tokens, made.params.n, llm.limits)


def run(name: str, config: EngineConfig) -> int:
    """Print what is found; the exit code: 3 if lines would be refused."""
    llm = _CheckingLLM.from_config(config)
    assert isinstance(llm, _CheckingLLM)
    found = check(name, llm)
    work, limits = found.work, llm.limits
    for text in found.refused:
        print(f"refused        {text}")
    if found.num_refused > len(found.refused):
        print(f"refused        and {found.num_refused - len(found.refused):,} more")
    largest = f"{work.largest_pages:,} pages (line {work.largest_line})" if work.requests else "none"
    for title, text in (
        ("lines", f"{found.lines:,}, of which {found.num_refused:,} would be refused"),
        ("prompt tokens", f"{work.prompt_tokens:,}"),
        ("output tokens", f"{work.output_tokens:,} at most"),
        ("largest", f"{largest}; the pool has {limits.num_pages:,}"),
    ):
        print(f"{title:14} {text}", flush=True)
    if work.requests:
        print(f"{'time':14} {_estimate(work, config, limits)}")
    return 3 if found.num_refused else 0


def _estimate(work: Work, config: EngineConfig, limits: Limits) -> str:
    from scheduler.calibrate import calibrate

    print("paged: measuring steps of the model, about 20 s", file=sys.stderr, flush=True)
    llm = LLM.from_config(config)
    seconds = work.seconds(calibrate(llm), limits)
    llm.close()
    units = ((1, "s"), (60, "min"), (3600, "h"))
    size, unit = next((one for one in units if seconds < 600 * one[0]), units[-1])
    return f"about {seconds / size:,.0f} {unit} and loading, if answers have their most tokens and share no prefix"
