"""What comes back: RequestOutput and its parts, named as in vLLM's offline API, and the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability in the raw distribution of the model, and its rank in it (1 is the likeliest)."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One continuation.

    token_ids holds every generated token, the one that ended it (an end token, or the last of a stop string)
    included; text leaves that ending out. In a stream, text, token_ids and logprobs hold what is new.
    logprobs has one dict a token, id -> Logprob: the chosen token first, then the alternatives asked for.
    stop_reason is the stop string or stop token id of the request that ended it; None for the model's own end tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None  # of a beam: its cumulative log-probability over its length, to the length penalty


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """How a request fared, in seconds; None for what did not come about. docs/metrics.md has the formulas."""

    arrived: float  # when it was queued, by the clock of the engine's metrics
    queue_s: float | None  # until it was first admitted
    first_token_s: float | None  # until its first token, waiting included
    mean_between_s: float | None  # from one token to the next, of its longest continuation
    max_between_s: float | None  # longest pause between two steps that gave it tokens
    e2e_s: float  # until its end
    num_cached: int  # prompt tokens found in the prefix cache at first admission
    num_recomputed: int  # tokens computed again after a preemption, in all continuations
    num_preemptions: int


@dataclass(slots=True)
class RequestOutput:
    """The answer to one request, or in a stream the part of it that is new.

    outputs holds every continuation, in order of index (beams best first); in a stream those that have something new.
    prompt_logprobs, where they were asked for, has an entry a prompt token, as CompletionOutput.logprobs; the first
    is None. In a stream they come with the end.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens whose K and V were found in the prefix cache at first admission
    num_output_tokens: int = 0  # generated so far in all continuations, in a stream too
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None  # of a request that has ended


def join(first: RequestOutput, later: RequestOutput) -> None:
    """Put into an output of a stream what came later in the same stream."""
    parts = {part.index: part for part in first.outputs}
    for new in later.outputs:
        part = parts.get(new.index)
        if part is None:
            first.outputs.append(new)
            continue
        part.text += new.text
        part.token_ids += new.token_ids
        if part.logprobs is not None and new.logprobs is not None:
            part.logprobs += new.logprobs
        part.cumulative_logprob = new.cumulative_logprob
        part.finish_reason, part.stop_reason = new.finish_reason, new.stop_reason
    first.outputs.sort(key=lambda part: part.index)
    first.finished, first.num_output_tokens = later.finished, later.num_output_tokens
    first.num_cached_tokens, first.metrics = later.num_cached_tokens, later.metrics
    first.prompt_logprobs = later.prompt_logprobs


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine began; `running`, `waiting` (requests) and the page counts are of now."""

    num_steps: int = 0
    running: int = 0
    waiting: int = 0
    finished: int = 0
    max_running: int = 0  # most sequences in one step
    total_pages: int = 0  # that can be handed out, so without the null page
    used_pages: int = 0  # by sequences
    cached_pages: int = 0  # by none, and a prefix can find them
    peak_pages: int = 0
    prompt_tokens: int = 0  # of requests that were admitted, each counted once
    cached_tokens: int = 0  # of those, found in the prefix cache at first admission
    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0  # of those, computed before and lost to a preemption
    preemptions: int = 0
    draft_tokens: int = 0  # of speculation
    accepted_tokens: int = 0  # of those
    waste_sum: float = field(default=0.0, repr=False)  # see `waste`

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in the prefix cache; each request counts once."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self.total_pages - self.used_pages - self.cached_pages

    @property
    def recomputed_share(self) -> float:
        """Share of the computed tokens that had been computed before and were lost to a preemption."""
        return self.recomputed_tokens / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def waste(self) -> float:
        """Bytes of pages held minus bytes of tokens in them, over bytes of tokens, averaged over the steps."""
        return self.waste_sum / self.num_steps if self.num_steps else 0.0
