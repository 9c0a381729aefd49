"""Request, Sequence, Family: what a user submits, its continuations, and those of one request together.

    WAITING ----> RUNNING ----> FINISHED
       |          |     ^           ^
       |          v     |           |
       |        PREEMPTED ----------|      a preempted family has lost its pages, not its tokens
       '----------------------------'      (abort)

With n > 1 the prompt is computed once, by the first sequence that lives; where only the prompt's last token is missing
the others fork from it, and each computes that token itself, with random numbers of its own. A beam search has one
sequence until its first step; from then on the search says which beams go on.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler.beam import Beams, BeamSearchParams
from scheduler.grammar import Grammar
from scheduler.outputs import FinishReason
from worker.step import Logprobs, Row, SamplingParams


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.RUNNING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class TextSink(Protocol):
    """What a sequence needs of its text: scheduler.text.TextStream is one."""

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found."""

    @property
    def eager(self) -> bool:
        """Whether it wants tokens as they come; else all at the end will do."""

    def push(self, token_id: int) -> bool:
        """Take a token; True when a stop string is complete."""

    def finish(self) -> None:
        """No more tokens: release what is held back."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a user submitted, after every default is resolved."""

    request_id: str
    prompt: str | None
    prompt_token_ids: npt.NDArray[np.int32]  # [n], n >= 1
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: frozenset[int]  # the model's own; empty with ignore_eos
    cache_salt: str | None = None  # pages are shared only with requests of the same salt
    beams: BeamSearchParams | None = None
    priority: int = 0  # class, the lower the earlier
    bad_phrases: tuple[tuple[int, ...], ...] = ()  # bad_words in tokens
    grammar: Grammar | None = None  # structured_outputs compiled

    @property
    def peak_tokens(self) -> int:
        """Most tokens whose K and V are stored at once: the last token generated is never fed back."""
        return len(self.prompt_token_ids) + max(self.max_tokens - 1, 0)

    @property
    def num_sequences(self) -> int:
        """Most sequences that it has at once."""
        return self.beams.beam_width if self.beams else self.params.n


class Sequence:
    """One continuation of a request. num_computed counts the tokens whose K and V are in pages."""

    __slots__ = (
        "buffer",
        "cumulative_logprob",
        "draft_len",
        "drafts",
        "eager",
        "end_at",
        "finish_reason",
        "grammar",
        "hides_last",
        "index",
        "known_to_worker",
        "logprobs",
        "most_computed",
        "num_computed",
        "num_prompt",
        "num_pushed",
        "num_tokens",
        "replaced",
        "request",
        "row",
        "score",
        "seq_id",
        "stop_reason",
        "stops",
        "text",
    )

    def __init__(self, seq_id: int, request: Request, text: TextSink | None, index: int = 0) -> None:
        self.seq_id = seq_id
        self.request = request
        self.text = text
        self.eager = text is not None and text.eager
        self.index = index
        self.num_prompt = self.num_tokens = len(request.prompt_token_ids)
        self.end_at = self.num_prompt + request.max_tokens  # tokens
        self.buffer = np.empty(self.end_at, dtype=np.int32)  # tokens, and room for those to come
        self.buffer[: self.num_prompt] = request.prompt_token_ids
        self.stops = request.eos_token_ids.union(request.params.stop_token_ids or ())
        self.num_computed = 0
        self.most_computed = 0  # before any preemption
        self.num_pushed = 0  # generated tokens that the text has
        self.hides_last = False  # the last token ended it, and is no text
        self.known_to_worker = False
        self.replaced = False  # the last token is not the one that the worker sampled
        self.row = Row(seq_id, 1)  # of a step in which it only computes its last token and samples the next
        self.drafts: tuple[int, ...] = ()  # of the row that is being planned
        self.grammar = None if request.grammar is None else request.grammar.matcher(request.eos_token_ids)
        # Most drafts of its next row. A row has one mask, which is right for one place only.
        self.draft_len = 1 if self.grammar is None else 0
        self.logprobs: list[Logprobs] = []
        self.cumulative_logprob: float | None = None  # of a finished beam, and its score
        self.score: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.num_computed} of {self.num_tokens} computed, {self.finish_reason})"

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and generated tokens, int32 [num_tokens]."""
        return self.buffer[: self.num_tokens]

    @property
    def output_token_ids(self) -> npt.NDArray[np.int32]:
        return self.buffer[self.num_prompt : self.num_tokens]

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Tokens that are known but not computed."""
        return self.num_tokens - self.num_computed

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token. Returns why it ends the sequence, if it does.

        Raises RequestFailed, and takes nothing, where the grammar cannot go on; and whatever the text raises.
        """
        if self.grammar is not None:
            self.grammar.take(token_id)
        self.buffer[self.num_tokens] = token_id
        self.num_tokens += 1
        return self.ending(token_id)

    def ending(self, token_id: int) -> FinishReason | None:
        """The one place where the end of a sequence is detected: `token_id` is its last token."""
        if token_id in self.stops:
            params = self.request.params
            self.stop_reason = token_id if token_id in (params.stop_token_ids or ()) else None
            self.hides_last = not params.include_stop_str_in_output
            return "stop"
        if self.text is not None and self.eager and self.push_text():
            self.stop_reason = self.text.stop_reason
            return "stop"
        if self.grammar is not None and self.grammar.ended:
            return "stop"
        return "length" if self.num_tokens == self.end_at else None

    def push_text(self) -> bool:
        """Give the text the tokens that it has not. True when a stop string is complete."""
        assert self.text is not None
        first, self.num_pushed = self.num_pushed, self.num_output - self.hides_last
        return any(self.text.push(token) for token in self.output_token_ids[first : self.num_pushed].tolist())

    def finish_text(self) -> None:
        """No more tokens: let the text show all there is."""
        if self.text is not None:
            self.push_text()
            self.text.finish()

    def extend(self, token_ids: SequenceOf[int] | npt.NDArray[np.int32]) -> None:
        """Take tokens as they are."""
        end = self.num_tokens + len(token_ids)
        self.buffer[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def branch(self, seq_id: int) -> Sequence:
        """Another one with the same tokens, as far computed."""
        copy = Sequence(seq_id, self.request, None)
        copy.extend(self.output_token_ids)
        copy.num_computed, copy.most_computed = self.num_computed, self.most_computed
        return copy


@dataclass(slots=True)
class Timing:
    """Moments of a family, in seconds of the clock of its engine's metrics, which alone writes them."""

    arrived: float
    admitted: float | None = None  # first
    first: float | None = None  # token
    last: float | None = None
    longest: float = 0.0  # between two steps that gave it tokens
    ended: float | None = None


class Family:
    """The sequences of one request. They run, are preempted and resume together.

    sequences: with n > 1 by index; of a beam search the live beams, best first, and at its end the results.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        search: Beams | None = None,
        text: Callable[[], TextSink] | None = None,
    ) -> None:
        self.number = number  # in order of arrival
        self.request = request
        self.sequences: list[Sequence] = []
        self.search = search
        self.text = text  # makes what takes the text of a sequence
        self.state = State.WAITING
        self.forked = False  # every live sequence has pages
        self.num_cached: int | None = None  # prompt tokens found in the prefix cache at first admission
        # For the scheduler, which sets them:
        self.arrived = 0  # in which step
        self.key = (0.0, number)  # by which it is ordered
        self.seated = 0  # seats that it has while it runs
        self.steady = False  # its only sequence has a plain token to compute in every step from now on
        # When it was tried last: pages that it lacked, pages that there were (or requests that had ended), which step.
        self.shortage: tuple[int, int, int] | None = None
        self.cached_guess = 0  # tokens of it that were cached when somebody looked last
        self.looked_at = -1  # in which step that was
        self.scores: list[Logprobs] = []  # of prompt tokens, from the second on
        self.num_recomputed = 0  # tokens computed before and lost to a preemption
        self.num_preemptions = 0
        self.timing: Timing | None = None  # once metrics has heard of it

    def __repr__(self) -> str:
        return f"Family({self.request.request_id!r}, {self.state.value}, {self.sequences})"

    def __lt__(self, other: Family) -> bool:
        return self.number < other.number

    @property
    def live(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def holders(self) -> list[Sequence]:
        """Those that have pages while it runs."""
        return self.live if self.forked else self.live[:1]

    @property
    def seats(self) -> int:
        """Most sequences that it may still have at once: a beam search that has one may soon have all."""
        return self.request.num_sequences if self.search else len(self.live)

    @property
    def tokens_left(self) -> int:
        """Steps that it decodes at most, from when all its known tokens are computed."""
        return max(self.request.max_tokens - min(sequence.num_output for sequence in self.live), 0)

    @property
    def decodes(self) -> bool:
        """Whether every live sequence has one token to compute."""
        return (self.forked or len(self.live) == 1) and all(sequence.num_missing == 1 for sequence in self.live)

    @property
    def scored(self) -> int:
        """Tokens from the beginning whose log-probability nobody wants to know any more."""
        wanted = self.request.params.prompt_logprobs is not None
        return 1 + len(self.scores) if wanted else len(self.request.prompt_token_ids)

    @property
    def common(self) -> npt.NDArray[np.int32]:
        """Tokens with which every live sequence begins, int32 [n]: all of an only one, else the prompt."""
        live = self.live
        return live[0].tokens if len(live) == 1 else self.request.prompt_token_ids

    def move_to(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self} cannot become {state.value}"
        self.state = state

    def shares(self, budget: int) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens in a step that has room for `budget`.

        Until they fork, the first computes the prompt but for its last token. Beams take their last tokens all in one
        step, as only then the search can go on.
        """
        live = self.live
        if not self.forked and len(live) > 1:
            rest = len(self.request.prompt_token_ids) - 1 - live[0].num_computed
            return [(live[0], min(rest, budget))]
        together = self.search is not None and len(live) > 1
        if together and all(sequence.num_missing == 1 for sequence in live):
            return [(sequence, 1) for sequence in live] if len(live) <= budget else []
        result = []
        for sequence in live:
            num_tokens = min(sequence.num_missing - together, budget)
            if num_tokens > 0:
                result.append((sequence, num_tokens))
                budget -= num_tokens
        return result
