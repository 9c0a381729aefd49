"""ModelRunner: applies a Step. Owns the pool, the model, and the worker's copy of every sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from paged.attention import PagedAttention
from paged.errors import StepError
from paged.pool import KVPool
from worker.inputs import Inputs, SequenceState, build_inputs
from worker.models.decoder import Decoder
from worker.native_model import NativeModel
from worker.sampler import logprobs, sample, uniform
from worker.step import Row, Step, StepResult

Model = Decoder | NativeModel


class ModelRunner:
    """Runs steps, in order of their numbers, on one device."""

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
        if step.restart:
            self._states.clear()
            self.pool.forget_seals()
        elif step.number != self._next_number:
            raise StepError(f"step {step.number} came where {self._next_number} was due")
        self._next_number = step.number + 1
        for seq_id in step.finished:
            self._states.pop(seq_id, None)
        self.pool.apply(step.moves)
        if not step.rows:
            return StepResult(step.number, (), ())
        states = [self._state(row) for row in step.rows]
        inputs = build_inputs(step.rows, states, self.pool.layout.page_size, self.pool.k[0].device)
        logits, best = self._compute(inputs)
        for row, state in zip(step.rows, states, strict=True):
            state.num_computed += row.num_tokens
        sampling = [(row.seq_id, state) for row, state in zip(step.rows, states, strict=True) if row.samples]
        if not sampling:
            return StepResult(step.number, (), ())
        params = [state.params for _, state in sampling]
        uniforms = [
            0.0 if state.params.greedy else uniform(state.seed, state.index, state.num_tokens) for _, state in sampling
        ]
        tokens = sample(logits, params, uniforms, best)
        for (_, state), token in zip(sampling, tokens, strict=True):
            state.append_token(token)
        counts = [state.num_logprobs for _, state in sampling]
        wanted = any(count is not None for count in counts)
        return StepResult(
            step.number,
            tuple(seq_id for seq_id, _ in sampling),
            tuple(tokens),
            tuple(logprobs(logits, tokens, counts)) if wanted else (),
        )

    def _compute(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [rows that sample, vocab], and where it comes with them the place of the greatest."""
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
