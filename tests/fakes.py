"""A worker without a model, and the small things that scheduler tests share.

FakeExecutor takes Steps as a worker must: it keeps its own copy of every block table and token history, from resets and
deltas alone. Its "K and V" of a token is a digest of the whole history up to it and of the group. Every slot that a row
reads is compared with the row's own history, so a page that is stale, foreign, or handed out twice is an error here and
never just another token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paged.block_table import Windows
from paged.errors import StepError
from paged.manager import KVCacheManager
from paged.pages import Move
from scheduler.beam import BeamSearchParams
from scheduler.engine import Engine
from scheduler.policy import Limits, Rules
from scheduler.request import Family, Request, Sequence, State
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
    """P2: a page is written that another sequence of the step holds too."""


def next_token(last: int, position: int) -> int:
    """The fake model: the token after `last`, which stands at `position`."""
    return (7 * last + position) % VOCAB


def with_tokens_at(model: NextToken, at: Mapping[int, int]) -> NextToken:
    """`model`, but the token at each position in `at` is the one given there."""
    return lambda last, position: at.get(position + 1, model(last, position))


def solo(
    prompt: SequenceOf[int],
    count: int,
    model: NextToken = next_token,
    params: SamplingParams = GREEDY,
    seed: int = 0,
    index: int = 0,
) -> list[int]:
    """What a sequence alone generates: the oracle, without pages, steps or a scheduler."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_sample(model, tokens, params, seed, index))
    return tokens[len(prompt) :]


def _sample(model: NextToken, tokens: SequenceOf[int], params: SamplingParams, seed: int, index: int) -> int:
    token = model(tokens[-1], len(tokens) - 1)
    if not params.greedy:
        token += random.Random(f"{seed} {index} {len(tokens)}").randrange(VOCAB)
    return token % VOCAB


def score(token: int) -> Logprobs:
    """What the fake worker says of a known token."""
    return Logprobs(-token / VOCAB, 1)


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
    tables: list[list[int]]
    num_computed: int
    reset: Reset


@dataclass
class FakeExecutor:
    """Implements worker.executor.Executor. `raise_at`: step number -> what running that step raises."""

    num_pages: int
    page_size: int
    model: NextToken = next_token
    windows: Windows = (None,)
    raise_at: dict[int, BaseException] = field(default_factory=dict)
    kv: dict[int, int] = field(default_factory=dict)  # slot -> digest
    seals: dict[int, list[int | None]] = field(default_factory=dict)  # page -> what it must hold
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

    def update_weights(self, path: Path, replaced: Mapping[str, Any]) -> None:
        """`replaced` may hold another `model`."""
        assert self._step is None, "a step is under way"
        self.model = replaced.get("model", self.model)

    def close(self) -> None:
        self.closed = True

    def execute(self, step: Step) -> StepResult:
        self.steps.append(step)
        if step.restart:
            self.known.clear()
            self.seals.clear()
        elif step.number != self._next_number:
            raise StepError(f"step {step.number} came where {self._next_number} was due")
        self._next_number = None  # until this step is done
        for seq_id in step.finished:
            del self.known[seq_id]  # one that is not known is a fault of the scheduler
        for move in step.moves:
            if isinstance(move, Move):
                self._set(move.target, self._content(move.source))
            elif move.what == "poison":
                self.seals.pop(move.page, None)
                self._set(move.page, [None] * self.page_size)
            elif move.what == "seal":
                self.seals[move.page] = self._content(move.page)
            elif self.seals.get(move.page, found := self._content(move.page)) != found:
                raise SharedWrite(f"page {move.page} was written after it was full")
        assert len({row.seq_id for row in step.rows}) == len(step.rows), "a sequence has two rows"
        states = [self._bring_up(row) for row in step.rows]
        for row, state in zip(step.rows, states, strict=True):
            self._check_reads(row, state)
            self._check_writes(row, state, step)
        if step.number in self.raise_at:
            for row, state in zip(step.rows, states, strict=True):  # half-written K and V are worth nothing
                for group in range(len(self.windows)):
                    self.kv.update(dict.fromkeys(self._slots(state, row.num_tokens, group), -1))
            raise self.raise_at.pop(step.number)
        pairs = list(zip(step.rows, states, strict=True))
        scores = [(row.seq_id, self._score(row, state)) for row, state in pairs if row.scores]
        sampled = [self._run(row, state) for row, state in pairs]
        self._next_number = step.number + 1
        return self._answer(step, sampled, tuple(scores))

    def _bring_up(self, row: Row) -> _Known:
        if row.reset is not None:
            assert row.seq_id not in self.known, f"sequence {row.seq_id} is known, and gets a reset"
            assert not row.changes
            assert row.token is None
            reset = row.reset
            tables = list(map(list, reset.tables))
            self.known[row.seq_id] = _Known(reset.tokens.tolist(), tables, reset.num_computed, reset)
        if row.seq_id not in self.known:
            raise StepError(f"sequence {row.seq_id} is not known here: its row needs a reset")
        state = self.known[row.seq_id]
        for group, index, page in row.changes:
            table = state.tables[group]
            assert index <= len(table), "a table has a hole"
            table[index : index + 1] = [page]
        if row.token is not None:
            state.tokens[-1] = row.token
        last = state.num_computed + row.num_tokens
        known = last - len(row.drafts)
        if known <= state.num_computed or known > len(state.tokens) or last > len(state.tables[0]) * self.page_size:
            raise StepError(f"{row} does not fit {state}")
        assert not row.samples or known == len(state.tokens), "only a row that reaches the last token can sample"
        assert row.samples or not row.drafts
        seen = [table[self._first_seen(state, g) // self.page_size :] for g, table in enumerate(state.tables)]
        pages = [page for table in seen for page in table]
        if len(set(pages)) < len(pages) or not all(0 < page < self.num_pages for page in pages):
            raise WrongPage(f"pages of sequence {row.seq_id}: {state.tables}")
        return state

    def _check_reads(self, row: Row, state: _Known) -> None:
        expected = histories(state.tokens[: state.num_computed])
        for group in range(len(self.windows)):
            for position in range(self._first_seen(state, group), state.num_computed):
                slot = self._slot(state, position, group)
                if self.kv.get(slot) != _kv(group, expected[position]):
                    raise StaleKV(f"sequence {row.seq_id}: slot {slot} does not hold its token at {position}")

    def _check_writes(self, row: Row, state: _Known, step: Step) -> None:
        """The tables of sequences that are not in the step may be behind, and are not read."""
        written = {
            slot // self.page_size
            for group in range(len(self.windows))
            for slot in self._slots(state, row.num_tokens, group)
        }
        for seq_id in {other.seq_id for other in step.rows} - {row.seq_id}:
            held = {page for table in self.known[seq_id].tables for page in table} if seq_id in self.known else set()
            if written & held:
                raise SharedWrite(f"sequence {row.seq_id} writes pages {written}, {seq_id} holds {held}")

    def _score(self, row: Row, state: _Known) -> tuple[Logprobs, ...]:
        assert row.scores is not None
        begin, stop = row.scores
        assert state.num_computed < begin < stop <= state.num_computed + row.num_tokens - len(row.drafts) + 1
        return tuple(score(token) for token in state.tokens[begin:stop])

    def _run(self, row: Row, state: _Known) -> list[int]:
        """What the row samples: the token behind each draft that is right, and behind the last known one."""
        guessed = [*state.tokens, *row.drafts]
        digests = histories(guessed)
        for group in range(len(self.windows)):
            for position, slot in enumerate(self._slots(state, row.num_tokens, group), state.num_computed):
                self.kv[slot] = _kv(group, digests[position])
        state.num_computed += row.num_tokens - len(row.drafts)
        if not row.samples:
            return []
        reset, sampled = state.reset, list[int]()
        for draft in (*row.drafts, None):
            token = _sample(self.model, state.tokens, reset.params, reset.seed, reset.index)
            state.tokens.append(token)
            sampled.append(token)
            if token != draft:
                break
            state.num_computed += 1
        return sampled

    def _answer(
        self, step: Step, sampled: SequenceOf[SequenceOf[int]], scores: tuple[tuple[int, tuple[Logprobs, ...]], ...]
    ) -> StepResult:
        rows = [(row.seq_id, tokens) for row, tokens in zip(step.rows, sampled, strict=True) if tokens]
        logprobs = []
        for seq_id, tokens in rows:
            count = self.known[seq_id].reset.num_logprobs
            for token in tokens:
                ids = tuple((token + i) % VOCAB for i in range(count or 0))
                tops = tuple(-1.0 - i for i in range(len(ids)))
                logprobs.append(None if count is None else Logprobs(-token / VOCAB, 1, ids, tops))
        several = any(len(tokens) > 1 for _, tokens in rows)
        return StepResult(
            step.number,
            tuple(seq_id for seq_id, _ in rows),
            tuple(token for _, tokens in rows for token in tokens),
            tuple(logprobs),
            tuple(len(tokens) for _, tokens in rows) if several else (),
            scores,
        )

    def _first_seen(self, state: _Known, group: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, state.num_computed - window + 1)

    def _slot(self, state: _Known, position: int, group: int) -> int:
        return state.tables[group][position // self.page_size] * self.page_size + position % self.page_size

    def _slots(self, state: _Known, count: int, group: int) -> list[int]:
        return [self._slot(state, state.num_computed + i, group) for i in range(count)]

    def _content(self, page: int) -> list[int | None]:
        return [self.kv.get(page * self.page_size + offset) for offset in range(self.page_size)]

    def _set(self, page: int, content: list[int | None]) -> None:
        for slot, digest in enumerate(content, page * self.page_size):
            if digest is None:
                self.kv.pop(slot, None)
            else:
                self.kv[slot] = digest


@dataclass
class FakeText:
    """A TextSink that only counts."""

    tokens: list[int] = field(default_factory=list)
    finishes: int = 0
    stop_reason: str | None = None
    eager: bool = False

    def push(self, token_id: int) -> bool:
        assert self.finishes == 0, "a token after the end"
        self.tokens.append(token_id)
        return False

    def finish(self) -> None:
        self.finishes += 1


class FailingTokenizer:
    """Raises when text is made for the n-th time."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, n: int) -> None:
        self.left = n

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("no text")
        return " ".join(map(str, token_ids))

    def decode_one(self, token_id: int, skip_special_tokens: bool) -> str:
        return self.decode([token_id], skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], False)


def request(
    request_id: str,
    prompt: SequenceOf[int],
    max_tokens: int,
    *,
    params: SamplingParams = GREEDY,
    seed: int = 0,
    eos: Iterable[int] = (),
    cache_salt: str | None = None,
    beams: BeamSearchParams | None = None,
    priority: int = 0,
) -> Request:
    tokens = np.asarray(prompt, dtype=np.int32)
    return Request(request_id, None, tokens, params, max_tokens, seed, frozenset(eos), cache_salt, beams, priority)


@dataclass
class Rig:
    """A scheduler over a fake worker, with what happened."""

    scheduler: Scheduler
    executor: FakeExecutor
    ended: list[Sequence] = field(default_factory=list)  # in the order in which they ended
    families: list[Family] = field(default_factory=list)  # likewise

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
        windows: Windows = (None,),
        rules: Rules | None = None,
    ) -> Rig:
        manager = KVCacheManager(usable + 1, page_size, caching, windows)
        limits = Limits(1 << 20, usable, page_size, windows, max_num_seqs, budget)
        return cls(Scheduler(manager, limits, rules), FakeExecutor(usable + 1, page_size, model, windows))

    def add(self, wanted: Request) -> Sequence:
        """Queue a request; its (first) sequence."""
        return self.add_family(wanted).sequences[0]

    def add_family(self, wanted: Request) -> Family:
        return self.scheduler.add(wanted, FakeText)

    def abort(self, request_id: str) -> Family | None:
        family = self.scheduler.abort(request_id)
        self._note([] if family is None else [family])
        return family

    def schedule(self) -> Step | None:
        """Schedule, and check what holds of every step."""
        scheduler = self.scheduler
        step = scheduler.schedule()
        scheduler.manager.check()
        assert (step is None) == (not scheduler.has_work)
        if step is None:
            return None
        assert 0 < step.num_tokens <= scheduler.limits.max_num_batched_tokens, "S3"
        by_id = {sequence.seq_id: sequence for family in scheduler.running for sequence in family.live}
        assert 0 < len(step.rows) <= len(by_id) <= scheduler.limits.max_num_seqs
        for row in step.rows:
            sequence = by_id[row.seq_id]
            assert sequence.num_computed + row.num_tokens - len(row.drafts) <= sequence.num_tokens, "S3"
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

    def _note(self, changed: Iterable[Family]) -> None:
        for family in changed:
            assert family not in self.families, f"{family} is heard of after its end"
            for sequence in family.sequences:
                if sequence.finish_reason is not None and sequence not in self.ended:
                    if sequence.text is not None:  # beams that were aborted have none
                        assert isinstance(sequence.text, FakeText)
                        assert sequence.text.finishes == 1
                    self.ended.append(sequence)
            if family.state is State.FINISHED:
                assert not family.live
                self.families.append(family)


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
        Limits(max_model_len, executor.num_pages - 1, page_size, executor.windows, seqs, budget),
        vocab_size=VOCAB,
        eos_token_ids=eos,
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
