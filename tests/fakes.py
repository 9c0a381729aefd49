"""A worker without a model, and the small things that scheduler tests share.

FakeExecutor takes Steps as a worker must: it keeps its own copy of every block table and token history, from resets and
deltas alone. Its "K and V" of a token is a digest of the whole history up to it, computed from what lies in the slot
before, as a decoder's would be. Every slot that a row reads is compared with the row's own history, so a page that is
stale, foreign, or handed out twice is an error here and never just another token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from paged.errors import StepError
from paged.manager import KVCacheManager
from scheduler.engine import Engine
from scheduler.request import Request, Sequence
from scheduler.scheduler import Scheduler
from scheduler.text import Tokenizer
from worker.step import Logprobs, Reset, Row, SamplingParams, Step, StepResult

VOCAB = 1000
GREEDY = SamplingParams(temperature=0)

NextToken = Callable[[int, int], int]


class WrongPage(AssertionError):
    """A page that is not the sequence's to read or to write."""


class StaleKV(WrongPage):
    """A slot does not hold the K and V that the sequence has there."""


class SharedWrite(WrongPage):
    """P2: a page is written that another sequence's table holds."""


def next_token(last: int, position: int) -> int:
    """The fake model: the token after `last`, which stands at `position`."""
    return (7 * last + position) % VOCAB


def with_tokens_at(model: NextToken, at: Mapping[int, int]) -> NextToken:
    """`model`, but the token at each position in `at` is the one given there."""
    return lambda last, position: at.get(position + 1, model(last, position))


def solo(
    prompt: SequenceOf[int], count: int, model: NextToken = next_token, params: SamplingParams = GREEDY, seed: int = 0
) -> list[int]:
    """What a sequence alone generates: the oracle, without pages, steps or a scheduler."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_sample(model, tokens, params, seed, 0))
    return tokens[len(prompt) :]


def _sample(model: NextToken, tokens: SequenceOf[int], params: SamplingParams, seed: int, index: int) -> int:
    token = model(tokens[-1], len(tokens) - 1)
    if not params.greedy:
        token += random.Random(f"{seed} {index} {len(tokens)}").randrange(VOCAB)
    return token % VOCAB


def histories(tokens: Iterable[int]) -> list[int]:
    """The fake K and V of each token: all that came before is in it."""
    result, last = [], 0
    for token in tokens:
        last = _kv(last, token)
        result.append(last)
    return result


def _kv(before: int, token: int) -> int:
    return hash((before, token))


@dataclass
class _Known:
    """The worker's own copy of one sequence."""

    tokens: list[int]
    pages: list[int]
    num_computed: int
    reset: Reset


@dataclass
class FakeExecutor:
    """Implements worker.executor.Executor. `raise_at`: step number -> what running that step raises."""

    num_pages: int
    page_size: int
    model: NextToken = next_token
    raise_at: dict[int, BaseException] = field(default_factory=dict)
    kv: dict[int, int] = field(default_factory=dict)  # slot -> digest
    known: dict[int, _Known] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)  # those that raised too
    closed: bool = False
    _next_number: int | None = None  # None: only a restart will do
    _step: Step | None = None

    def submit(self, step: Step) -> None:
        assert not self.closed
        assert self._step is None or step.restart, "a step is under way"
        self._step = step

    def result(self) -> StepResult:
        assert self._step is not None, "no step is under way"
        step, self._step = self._step, None
        return self.execute(step)

    def close(self) -> None:
        self.closed = True

    def execute(self, step: Step) -> StepResult:
        self.steps.append(step)
        if step.restart:
            self.known.clear()
        elif step.number != self._next_number:
            raise StepError(f"step {step.number} came where {self._next_number} was due")
        self._next_number = None  # until this step is done
        for seq_id in step.finished:
            del self.known[seq_id]  # one that is not known is a fault of the scheduler
        for move in step.moves:
            self._copy(move.source, move.target)
        assert len({row.seq_id for row in step.rows}) == len(step.rows), "a sequence has two rows"
        states = [self._bring_up(row) for row in step.rows]
        for row, state in zip(step.rows, states, strict=True):
            self._check_reads(row, state)
            self._check_writes(row, state)
        if step.number in self.raise_at:
            for row, state in zip(step.rows, states, strict=True):  # half-written K and V are worth nothing
                self.kv.update(dict.fromkeys(self._slots(state, row.num_tokens), -1))
            raise self.raise_at.pop(step.number)
        sampled = [self._run(row, state) for row, state in zip(step.rows, states, strict=True)]
        self._next_number = step.number + 1
        return self._answer(step, sampled)

    def _bring_up(self, row: Row) -> _Known:
        if row.reset is not None:
            assert row.seq_id not in self.known, f"sequence {row.seq_id} is known, and gets a reset"
            assert not row.new_pages
            reset = row.reset
            self.known[row.seq_id] = _Known(reset.tokens.tolist(), list(reset.pages), reset.num_computed, reset)
        if row.seq_id not in self.known:
            raise StepError(f"sequence {row.seq_id} is not known here: its row needs a reset")
        state = self.known[row.seq_id]
        state.pages.extend(row.new_pages)
        last = state.num_computed + row.num_tokens
        if row.num_tokens < 1 or last > len(state.tokens) or last > len(state.pages) * self.page_size:
            raise StepError(f"{row} does not fit {state}")
        assert not row.samples or last == len(state.tokens), "only a row that reaches the last token can sample"
        if len(set(state.pages)) < len(state.pages) or not all(0 < page < self.num_pages for page in state.pages):
            raise WrongPage(f"pages of sequence {row.seq_id}: {state.pages}")
        return state

    def _check_reads(self, row: Row, state: _Known) -> None:
        expected = histories(state.tokens[: state.num_computed])
        for position, digest in enumerate(expected):
            slot = self._slot(state, position)
            if self.kv.get(slot) != digest:
                raise StaleKV(f"sequence {row.seq_id}: slot {slot} does not hold its token at {position}")

    def _check_writes(self, row: Row, state: _Known) -> None:
        written = {slot // self.page_size for slot in self._slots(state, row.num_tokens)}
        for seq_id, other in self.known.items():
            if seq_id != row.seq_id and not written.isdisjoint(other.pages):
                raise SharedWrite(f"sequence {row.seq_id} writes pages {written}, {seq_id} holds {other.pages}")

    def _run(self, row: Row, state: _Known) -> int | None:
        for position, slot in enumerate(self._slots(state, row.num_tokens), state.num_computed):
            before = 0 if position == 0 else self.kv[self._slot(state, position - 1)]
            self.kv[slot] = _kv(before, state.tokens[position])
        state.num_computed += row.num_tokens
        if not row.samples:
            return None
        token = _sample(self.model, state.tokens, state.reset.params, state.reset.seed, state.reset.index)
        state.tokens.append(token)
        return token

    def _answer(self, step: Step, sampled: SequenceOf[int | None]) -> StepResult:
        pairs = [(row.seq_id, token) for row, token in zip(step.rows, sampled, strict=True) if token is not None]
        logprobs = []
        for seq_id, token in pairs:
            count = self.known[seq_id].reset.params.logprobs
            ids = tuple((token + i) % VOCAB for i in range(count or 0))
            logprobs.append(
                None if count is None else Logprobs(-token / VOCAB, 1, ids, tuple(-1.0 - i for i in range(len(ids))))
            )
        return StepResult(
            step.number, tuple(seq_id for seq_id, _ in pairs), tuple(token for _, token in pairs), tuple(logprobs)
        )

    def _slot(self, state: _Known, position: int) -> int:
        return state.pages[position // self.page_size] * self.page_size + position % self.page_size

    def _slots(self, state: _Known, count: int) -> list[int]:
        return [self._slot(state, state.num_computed + i) for i in range(count)]

    def _copy(self, source: int, target: int) -> None:
        for offset in range(self.page_size):
            if (digest := self.kv.get(source * self.page_size + offset)) is not None:
                self.kv[target * self.page_size + offset] = digest


@dataclass
class FakeText:
    """A TextSink that only counts."""

    tokens: list[int] = field(default_factory=list)
    finishes: int = 0
    stop_reason: str | None = None

    def push(self, token_id: int) -> bool:
        assert self.finishes == 0, "a token after the end"
        self.tokens.append(token_id)
        return False

    def finish(self) -> None:
        self.finishes += 1


def request(
    request_id: str,
    prompt: SequenceOf[int],
    max_tokens: int,
    *,
    params: SamplingParams = GREEDY,
    seed: int = 0,
    eos: Iterable[int] = (),
) -> Request:
    tokens = np.asarray(prompt, dtype=np.int32)
    return Request(request_id, None, tokens, params, max_tokens, seed, frozenset(eos))


@dataclass
class Rig:
    """A scheduler over a fake worker, with what happened."""

    scheduler: Scheduler
    executor: FakeExecutor
    ended: list[Sequence] = field(default_factory=list)  # in the order in which they ended

    @classmethod
    def of(
        cls,
        usable: int,
        page_size: int,
        *,
        budget: int = 64,
        max_num_seqs: int = 8,
        caching: bool = True,
        model: NextToken = next_token,
    ) -> Rig:
        manager = KVCacheManager(usable + 1, page_size, caching)
        return cls(Scheduler(manager, max_num_seqs, budget), FakeExecutor(usable + 1, page_size, model))

    def add(self, wanted: Request) -> Sequence:
        return self.scheduler.add(wanted, FakeText())

    def abort(self, request_id: str) -> Sequence | None:
        sequence = self.scheduler.abort(request_id)
        self._note([] if sequence is None else [sequence])
        return sequence

    def schedule(self) -> Step | None:
        """Schedule, and check what holds of every step."""
        scheduler = self.scheduler
        step = scheduler.schedule()
        scheduler.manager.check()
        assert (step is None) == (not scheduler.has_work)
        if step is None:
            return None
        assert 0 < step.num_tokens <= scheduler.max_num_batched_tokens, "S3"
        assert 0 < len(step.rows) <= len(scheduler.running) <= scheduler.max_num_seqs
        by_id = {sequence.seq_id: sequence for sequence in scheduler.running}
        for row in step.rows:
            sequence = by_id[row.seq_id]
            assert sequence.num_computed + row.num_tokens <= sequence.num_tokens, "S3"
        return step

    def finish(self, step: Step) -> None:
        """Execute and update; what the worker raises is told to the scheduler, and raised."""
        try:
            result = self.executor.execute(step)
        except BaseException:
            self.scheduler.fail()
            self.scheduler.check()
            raise
        self._note(self.scheduler.update(result))
        self.scheduler.check()

    def step(self) -> Step | None:
        step = self.schedule()
        if step is not None:
            self.finish(step)
        return step

    def run(self, most: int = 10_000) -> int:
        """Step until nothing is left. Returns the number of steps; at idle nothing may be held."""
        for count in range(most + 1):
            if self.step() is None:
                self.assert_idle()
                return count
        raise AssertionError(f"still at work after {most} steps: {self.scheduler.live_ids()}")

    def assert_idle(self) -> None:
        stats = self.scheduler.stats
        self.scheduler.check()
        assert not self.scheduler.has_work
        assert idle(self.scheduler.manager)
        assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)

    def _note(self, changed: Iterable[Sequence]) -> None:
        for sequence in changed:
            assert sequence not in self.ended, f"{sequence} is heard of after its end"
            if sequence.finish_reason is not None:
                assert isinstance(sequence.text, FakeText)
                assert sequence.text.finishes == 1
                self.ended.append(sequence)


def fake_engine(
    usable: int,
    page_size: int,
    *,
    budget: int = 64,
    seqs: int = 8,
    caching: bool = True,
    eos: SequenceOf[int] = (),
    tokenizer: Tokenizer | None = None,
    executor: FakeExecutor | None = None,
    max_model_len: int = 1024,
    seed: int | None = None,
) -> tuple[Engine, FakeExecutor]:
    """An engine over a fake worker; token ids are 0 to 999."""
    executor = executor or FakeExecutor(usable + 1, page_size)
    engine = Engine(
        executor,
        tokenizer,
        page_size=page_size,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=eos,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        seed=seed,
    )
    return engine, executor


def idle(manager: KVCacheManager) -> bool:
    """Nothing is held, every page can be handed out, and the invariants hold."""
    manager.check()
    return len(manager) == 0 and manager.num_used == 0 and manager.num_available == manager.num_usable


def output(sequence: Sequence) -> list[int]:
    tokens: list[int] = sequence.output_token_ids.tolist()
    return tokens
