"""Request and Sequence: what a user submits, and its continuation while it lives.

    WAITING ----> RUNNING ----> FINISHED
       |          |     ^           ^
       |          v     |           |
       |        PREEMPTED ----------|      a preempted sequence has lost its pages, not its tokens
       '----------------------------'      (abort)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler.outputs import FinishReason
from worker.step import Logprobs, SamplingParams


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

    @property
    def peak_tokens(self) -> int:
        """Most tokens whose K and V are stored at once: the last token generated is never fed back."""
        return len(self.prompt_token_ids) + max(self.max_tokens - 1, 0)


class Sequence:
    """The continuation of a request. num_computed counts the tokens whose K and V are in pages."""

    def __init__(self, seq_id: int, request: Request, text: TextSink | None, index: int = 0) -> None:
        self.seq_id = seq_id
        self.request = request
        self.text = text
        self.index = index
        self.state = State.WAITING
        self.num_prompt = self.num_tokens = len(request.prompt_token_ids)
        self._tokens = np.empty(self.num_prompt + request.max_tokens, dtype=np.int32)
        self._tokens[: self.num_prompt] = request.prompt_token_ids
        self.num_computed = 0
        self.most_computed = 0  # before any preemption
        self.num_cached: int | None = None  # prompt tokens found in the prefix cache at first admission
        self.known_to_worker = False
        self.logprobs: list[Logprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.state.value}, {self.num_computed} of {self.num_tokens} computed)"

    def __lt__(self, other: Sequence) -> bool:
        return self.seq_id < other.seq_id  # ids are given in order of arrival

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and generated tokens, int32 [num_tokens]."""
        return self._tokens[: self.num_tokens]

    @property
    def output_token_ids(self) -> npt.NDArray[np.int32]:
        return self._tokens[self.num_prompt : self.num_tokens]

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Tokens that are known but not computed."""
        return self.num_tokens - self.num_computed

    def move_to(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self} cannot become {state.value}"
        self.state = state

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token. The one place where the end of a sequence is detected."""
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        params = self.request.params
        by_id = token_id in (params.stop_token_ids or ())
        if by_id or token_id in self.request.eos_token_ids:
            self.stop_reason = token_id if by_id else None
            if self.text is not None and params.include_stop_str_in_output:
                self.text.push(token_id)
            return "stop"
        if self.text is not None and self.text.push(token_id):
            self.stop_reason = self.text.stop_reason
            return "stop"
        return "length" if self.num_output == self.request.max_tokens else None
