"""ModelRunner: applies a Step. Owns the pool, the model, and the worker's copy of every sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paged.attention import PagedAttention
from paged.errors import StepError
from paged.pool import KVPool
from worker.inputs import Inputs, SequenceState, build_inputs
from worker.models.decoder import Decoder
from worker.native_model import NativeModel
from worker.sampler import Draw, draw, logprobs
from worker.step import Logprobs, Row, Step, StepResult

Model = Decoder | NativeModel


@dataclass(frozen=True, slots=True)
class Work:
    """A step that was begun. inputs: None if it has no rows."""

    step: Step
    states: list[SequenceState]  # of its rows
    inputs: Inputs | None


class ModelRunner:
    """Runs steps, in order of their numbers, on one device: `execute`, or one after another `begin`, `compute`, and
    `finish`, or `learn` where another worker finishes it.
    """

    def __init__(self, model: Model, pool: KVPool, attention: PagedAttention) -> None:
        self.model = model
        self.pool = pool
        self.attention = attention
        self._states: dict[int, SequenceState] = {}
        self._next_number = 0
        self.seconds: dict[str, float] | None = None  # of each kind of native operation, where somebody wants to know

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Run one step. Raises StepError for a gap in the numbers, an unknown sequence, or a row that does not fit.

        What a step that raised has computed is worth nothing; the next one must be a restart.
        """
        work = self.begin(step)
        return self.finish(work, *self.compute(work))

    def begin(self, step: Step) -> Work:
        """Take in what a step says, before anything is computed. Raises as `execute`."""
        if step.restart:
            self._states.clear()
            self.pool.forget_seals()
        elif step.number != self._next_number:
            raise StepError(f"step {step.number} came where {self._next_number} was due")
        self._next_number = step.number + 1
        for seq_id in step.finished:
            self._states.pop(seq_id, None)
        self.pool.apply(step.moves)
        states = [self._state(row) for row in step.rows]
        if not states:
            return Work(step, states, None)
        return Work(step, states, build_inputs(step.rows, states, self.pool.layout.page_size, self.pool.k[0].device))

    def compute(self, work: Work) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [len(work.inputs.sampled), vocab], and where it comes with them the place of the greatest."""
        return (torch.empty(0, 0), None) if work.inputs is None else self._compute(work.inputs)

    def finish(self, work: Work, logits: Tensor, best: Tensor | None) -> StepResult:
        """Sample, and bring the sequences up to it."""
        step, states = work.step, work.states
        draws = [
            Draw(state, state.num_tokens + i, row.mask)
            for row, state in zip(step.rows, states, strict=True)
            if row.samples
            for i in range(1 + len(row.drafts))
        ]
        tokens = draw(logits[: len(draws)], draws, None if best is None else best[: len(draws)])
        counts = [draw.state.reset.num_logprobs for draw in draws]
        wanted = any(count is not None for count in counts)
        entries = logprobs(logits[: len(draws)], tokens, counts) if wanted else []
        result = self._answer(step, tokens, entries, self._scores(step, states, logits[len(draws) :]))
        self.learn(work, result)
        return result

    def learn(self, work: Work, result: StepResult) -> None:
        """Bring the sequences up to what was sampled, here or elsewhere."""
        place, counts = 0, iter(result.counts)
        for row, state in zip(work.step.rows, work.states, strict=True):
            state.num_computed += row.num_tokens - len(row.drafts)
            if row.samples:
                count = next(counts, 1)
                state.append(result.token_ids[place : place + count])
                state.num_computed += count - 1
                place += count

    def _answer(
        self,
        step: Step,
        tokens: list[int],
        entries: list[Logprobs | None],
        scores: tuple[tuple[int, tuple[Logprobs, ...]], ...],
    ) -> StepResult:
        """What counts of the tokens sampled at every place: of drafts those up to the first that was not."""
        seq_ids, counts, kept, place = list[int](), list[int](), list[int](), 0
        for row in step.rows:
            if not row.samples:
                continue
            accepted = 0
            while accepted < len(row.drafts) and tokens[place + accepted] == row.drafts[accepted]:
                accepted += 1
            seq_ids.append(row.seq_id)
            counts.append(accepted + 1)
            kept += range(place, place + accepted + 1)
            place += 1 + len(row.drafts)
        if len(kept) < len(tokens):
            tokens, entries = [tokens[i] for i in kept], [entries[i] for i in kept] if entries else []
        several = () if len(kept) == len(seq_ids) else tuple(counts)
        return StepResult(step.number, tuple(seq_ids), tuple(tokens), tuple(entries), several, scores)

    def _scores(
        self, step: Step, states: list[SequenceState], logits: Tensor
    ) -> tuple[tuple[int, tuple[Logprobs, ...]], ...]:
        """What rows want to know of their known tokens; logits float32 [tokens of all of them, vocab]."""
        result, place = list[tuple[int, tuple[Logprobs, ...]]](), 0
        for row, state in zip(step.rows, states, strict=True):
            if row.scores:
                known: list[int] = state.tokens[slice(*row.scores)].tolist()
                count = state.reset.params.prompt_logprobs or 0
                entries = logprobs(logits[place : place + len(known)], known, [count] * len(known))
                result.append((row.seq_id, tuple(entry for entry in entries if entry)))
                place += len(known)
        return tuple(result)

    def _compute(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.model, NativeModel):
            return self.model.step(inputs, self.seconds)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, inputs.metas, self.pool, self.attention)
        return self.model.logits(hidden[inputs.sampled]), None

    def _state(self, row: Row) -> SequenceState:
        """The sequence of a row, brought up to what the row says."""
        if row.reset is not None:
            self._states[row.seq_id] = SequenceState(row.reset)
        state = self._states.get(row.seq_id)
        if state is None:
            raise StepError(f"sequence {row.seq_id} is not known here: its row needs a reset")
        state.change_tables(row.changes)
        if row.token is not None:
            state.tokens[state.num_tokens - 1] = row.token
        return state
