"""Scheduler: which sequences run in a step, and what becomes of them. Continuous batching, first come, first served.

Every step has one budget of tokens. Running sequences take from it in order of arrival, one token to decode or a chunk
of what they still miss; what is left goes to waiting ones, in order of arrival, as far as pages reach. When pages run
out, the running sequence that arrived last gives its own back and waits again, in its old place; it keeps its tokens
and computes K and V anew. So the oldest always gets on, and as what can never fit was refused, every sequence ends.

It never sees a tensor or text. Sequences are numbered in order of arrival.
"""

from __future__ import annotations

import heapq

from paged.errors import OutOfPages, RequestError
from paged.manager import KVCacheManager
from scheduler import policy
from scheduler.outputs import EngineStats, FinishReason
from scheduler.request import Request, Sequence, State, TextSink
from worker.step import Reset, Row, Step, StepResult


class Scheduler:
    """Requests go in by `add`; `schedule` and `update` alternate, one step under way at most."""

    def __init__(self, manager: KVCacheManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.stats = EngineStats(total_pages=manager.num_usable)
        self.running: list[Sequence] = []  # in order of arrival
        self._waiting: list[Sequence] = []  # a heap by arrival; may still hold finished ones
        self._live: dict[str, Sequence] = {}
        self._by_id: dict[int, Sequence] = {}
        self._next_seq_id = 0
        self._next_number = 0
        self._forget: list[int] = []  # sequences that the worker is to forget
        self._under_way: Step | None = None
        self._restart = True

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def live_ids(self) -> list[str]:
        """Ids of the requests that have not ended, in order of arrival."""
        return list(self._live)

    def add(self, request: Request, text: TextSink | None = None) -> Sequence:
        """Queue a request. Raises RequestError if its id is in use."""
        if request.request_id in self._live:
            raise RequestError(
                f"request id {request.request_id!r} is in use: wait for its end, or take another", "request_id"
            )
        sequence = Sequence(self._next_seq_id, request, text)
        self._next_seq_id += 1
        self._live[request.request_id] = self._by_id[sequence.seq_id] = sequence
        heapq.heappush(self._waiting, sequence)
        self.stats.waiting += 1
        return sequence

    def abort(self, request_id: str) -> Sequence | None:
        """End a request, at any moment. None if it is not known or has ended already."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")
        return sequence

    def schedule(self) -> Step | None:
        """The next step; None if there is nothing to do."""
        assert self._under_way is None, "update() of the last step is due"
        rows: list[Row] = []
        budget = self.max_num_batched_tokens
        preemptions = self.stats.preemptions
        for sequence in tuple(self.running):
            if budget == 0:
                break
            if sequence.state is State.RUNNING and (row := self._continue(sequence, budget)) is not None:
                rows.append(row)
                budget -= row.num_tokens
        while budget > 0 and self.stats.preemptions == preemptions and (row := self._admit(budget)) is not None:
            rows.append(row)
            budget -= row.num_tokens
        if not rows:
            assert not self._live, "sequences wait, and none can run"
            return None
        step = Step(self._next_number, tuple(rows), self.manager.take_moves(), tuple(self._forget), self._restart)
        self._next_number += 1
        self._forget.clear()
        self._restart = False
        self._under_way = step
        self.stats.num_steps += 1
        self.stats.max_running = max(self.stats.max_running, len(rows))
        self.stats.used_pages = self.manager.num_used
        self.stats.peak_pages = max(self.stats.peak_pages, self.stats.used_pages)
        self.stats.waste_sum += self._waste()
        return step

    def update(self, result: StepResult) -> list[Sequence]:
        """Take in what a step gave. Returns the sequences that have a new token or have ended."""
        step, self._under_way = self._under_way, None
        assert step is not None, "no step is under way"
        assert step.number == result.number, f"result {result.number} came for step {step.number}"
        self.manager.confirm_moves(step.moves)
        sampled = {seq_id: i for i, seq_id in enumerate(result.seq_ids)}
        changed = []
        for row in step.rows:
            sequence = self._by_id.get(row.seq_id)
            if sequence is None:
                continue  # aborted while the step was under way
            self._computed(sequence, row.num_tokens)
            if row.samples:
                i = sampled[row.seq_id]
                reason = sequence.append(result.token_ids[i])
                self.stats.output_tokens += 1
                if result.logprobs and (logprobs := result.logprobs[i]) is not None:
                    sequence.logprobs.append(logprobs)
            elif sequence.num_missing == 0:
                reason = "length"  # max_tokens is 0
            else:
                continue
            if reason is not None:
                self._finish(sequence, reason)
            changed.append(sequence)
        return changed

    def fail(self) -> None:
        """A step raised. What it would have computed is given up; every running sequence recomputes."""
        step, self._under_way = self._under_way, None
        if step is not None:  # else schedule() or update() itself raised: what the worker knows is not known here
            self.manager.confirm_moves(step.moves)
        for sequence in tuple(self.running):
            self._preempt(sequence)
        self._restart = True
        self._forget.clear()

    def check(self) -> None:
        """Prove the manager's invariants, and that exactly the running sequences hold pages."""
        self.manager.check()
        holders = {sequence.seq_id for sequence in self._by_id.values() if sequence.seq_id in self.manager}
        running = {sequence.seq_id for sequence in self.running}
        assert holders == running, f"{holders} hold pages, {running} run"
        assert len(self.manager) == len(running), "a sequence that is gone holds pages"
        assert all(sequence.state is State.RUNNING for sequence in self.running)

    def _continue(self, sequence: Sequence, budget: int) -> Row | None:
        """A row for a running sequence; None if it had to give way itself."""
        num_tokens = min(sequence.num_missing, budget)
        while True:
            try:
                pages = self.manager.extend(sequence.seq_id, sequence.num_computed + num_tokens)
                break
            except OutOfPages:
                gives_way = policy.victim(self.running)
                self._preempt(gives_way)
                if gives_way is sequence:
                    return None
        return self._row(sequence, num_tokens, tuple(pages))

    def _admit(self, budget: int) -> Row | None:
        """A row for the sequence that has waited longest; None if there is none, or no room for it yet."""
        while self._waiting and self._waiting[0].state is State.FINISHED:
            heapq.heappop(self._waiting)
        if not self._waiting or len(self.running) >= self.max_num_seqs:
            return None
        sequence, page_size = self._waiting[0], self.manager.page_size
        tables = ((other, len(self.manager.table(other.seq_id))) for other in self.running)
        try:
            cached = self.manager.allocate(
                sequence.seq_id,
                sequence.tokens,
                budget,
                room_for=policy.room_wanted(sequence, page_size),
                spare=policy.spare_pages(tables, page_size),
            )
        except OutOfPages:
            return None
        heapq.heappop(self._waiting)
        sequence.move_to(State.RUNNING)
        sequence.num_computed = cached
        self.running.append(sequence)
        self.running.sort()  # a preempted one comes back before those that arrived after it
        self.stats.waiting -= 1
        self.stats.running += 1
        if sequence.num_cached is None:
            sequence.num_cached = cached
            self.stats.prompt_tokens += sequence.num_prompt
            self.stats.cached_tokens += cached
        return self._row(sequence, min(sequence.num_missing, budget), ())

    def _row(self, sequence: Sequence, num_tokens: int, pages: tuple[int, ...]) -> Row:
        samples = num_tokens == sequence.num_missing and sequence.request.max_tokens > 0
        if sequence.known_to_worker:
            return Row(sequence.seq_id, num_tokens, pages, samples)
        sequence.known_to_worker = True
        reset = Reset(
            sequence.tokens.copy(),
            tuple(self.manager.table(sequence.seq_id).pages),
            sequence.num_computed,
            sequence.request.params,
            sequence.request.seed,
            sequence.index,
        )
        return Row(sequence.seq_id, num_tokens, (), samples, reset)

    def _computed(self, sequence: Sequence, num_tokens: int) -> None:
        before = sequence.num_computed
        sequence.num_computed += num_tokens
        self.manager.commit(sequence.seq_id, sequence.tokens, sequence.num_computed)
        self.stats.computed_tokens += num_tokens
        self.stats.recomputed_tokens += max(0, min(sequence.most_computed, sequence.num_computed) - before)
        sequence.most_computed = max(sequence.most_computed, sequence.num_computed)

    def _preempt(self, sequence: Sequence) -> None:
        sequence.move_to(State.PREEMPTED)
        self._leave(sequence)
        sequence.num_computed = 0
        heapq.heappush(self._waiting, sequence)
        self.stats.waiting += 1
        self.stats.preemptions += 1

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The only way to an end: once for every sequence, or the transition is refused."""
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        else:
            self.stats.waiting -= 1
        sequence.move_to(State.FINISHED)
        sequence.finish_reason = reason
        if sequence.text is not None:
            sequence.text.finish()
        del self._live[sequence.request.request_id], self._by_id[sequence.seq_id]
        self.stats.finished += 1

    def _leave(self, sequence: Sequence) -> None:
        """Out of the running ones: its pages are given back, and the worker forgets it."""
        self.running.remove(sequence)
        self.manager.free(sequence.seq_id)
        if sequence.known_to_worker:
            self._forget.append(sequence.seq_id)
            sequence.known_to_worker = False
        self.stats.running -= 1
        self.stats.used_pages = self.manager.num_used

    def _waste(self) -> float:
        """Room without a token over room with one, in the pages held once this step is done.

        Only the last pages of a sequence can have room, and those are its own.
        """
        size = self.manager.page_size
        empty = 0
        for sequence in self.running:
            table = self.manager.table(sequence.seq_id)
            empty += table.capacity - min(table.capacity, sequence.num_tokens)
        held = self.manager.num_used * size
        return empty / (held - empty) if held > empty else 0.0
