"""Scheduler: which sequences run in a step, and what becomes of them. Continuous batching, first come, first served.

Every step has one budget of tokens. Running families (the sequences of one request) take from it in order of arrival,
one token to decode or a chunk of what they still miss; what is left goes to waiting ones, in order of arrival, as far
as pages reach. When pages run out, the running family that arrived last gives its own back and waits again, in its old
place; it keeps its tokens and computes K and V anew. So the oldest always gets on, and as what can never fit was
refused, every request ends.

A request whose next page an older one is just computing waits until that is done, and then hits. As that one takes all
that is left of the budget, nobody behind loses by it.

It never sees a tensor or text. Families are numbered in order of arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from paged.errors import InvariantError, OutOfPages, RequestError
from paged.manager import KVCacheManager
from paged.prefix_cache import namespace
from scheduler import policy
from scheduler.beam import Beams
from scheduler.outputs import EngineStats, FinishReason
from scheduler.request import Family, Request, Sequence, State, TextSink
from worker.step import Logprobs, Reset, Row, Step, StepResult


class Scheduler:
    """Requests go in by `add`; `schedule` and `update` alternate, one step under way at most."""

    def __init__(self, manager: KVCacheManager, limits: policy.Limits) -> None:
        self.manager = manager
        self.limits = limits
        self.stats = EngineStats(total_pages=manager.num_usable)
        self.running: list[Family] = []  # in order of arrival
        self._waiting: list[Family] = []  # a heap by arrival; may still hold finished ones
        self._live: dict[str, Family] = {}
        self._by_id: dict[int, tuple[Family, Sequence]] = {}
        self._next_seq_id = 0
        self._next_family = 0
        self._next_number = 0
        self._weights = 0  # version
        self._forget: list[int] = []  # sequences that the worker is to forget
        self._under_way: Step | None = None
        self._restart = True
        self.faults: list[Exception] = []  # in the texts of families that were ended for it; for the caller to take

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    def live_ids(self) -> list[str]:
        """Ids of the requests that have not ended, in order of arrival."""
        return list(self._live)

    def add(self, request: Request, text: Callable[[], TextSink] | None = None) -> Family:
        """Queue a request; `text` makes what takes the text of each sequence. Raises RequestError if its id is used."""
        if request.request_id in self._live:
            raise RequestError(
                f"request id {request.request_id!r} is in use: wait for its end, or take another", "request_id"
            )
        search = None if request.beams is None else Beams(request.beams, request.eos_token_ids)
        family = Family(self._next_family, request, search, text)
        self._next_family += 1
        for index in range(1 if search else request.params.n):
            sequence = Sequence(self._new_id(), request, text() if text else None, index)
            family.sequences.append(sequence)
            self._by_id[sequence.seq_id] = family, sequence
        self._live[request.request_id] = family
        heapq.heappush(self._waiting, family)
        self.stats.waiting += 1
        return family

    def abort(self, request_id: str) -> Family | None:
        """End a request, at any moment. None if it is not known or has ended already."""
        family = self._live.get(request_id)
        if family is not None:
            for sequence in family.live:
                try:
                    self._end(family, sequence, "abort")
                except Exception as error:  # noqa: BLE001  of a tokenizer, as in update()
                    self.faults.append(error)
                    sequence.text = None
                    self._end(family, sequence, "abort")
            self._finish(family)
        return family

    def schedule(self) -> Step | None:
        """The next step; None if there is nothing to do."""
        assert self._under_way is None, "update() of the last step is due"
        rows: list[Row] = []
        budget = self.limits.max_num_batched_tokens
        preemptions = self.stats.preemptions
        for family in tuple(self.running):
            if budget == 0:
                break
            if family.state is State.RUNNING:
                new = self._continue(family, budget)
                rows += new
                budget -= sum(row.num_tokens for row in new)
        while budget > 0 and self.stats.preemptions == preemptions:
            admitted = self._admit(budget)
            if admitted is None:
                break
            rows += admitted
            budget -= sum(row.num_tokens for row in admitted)
        if not rows:
            assert not self._live, "requests wait, and none can run"
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

    def update(self, result: StepResult) -> list[Family]:
        """Take in what a step gave. Returns the families that have a new token or have ended.

        If the text of a family cannot be made of its tokens, that one ends as aborted, without text, and what was
        raised is put in `faults`.
        """
        step, self._under_way = self._under_way, None
        assert step is not None, "no step is under way"
        assert step.number == result.number, f"result {result.number} came for step {step.number}"
        self.manager.confirm_moves(step.moves)
        sampled = {seq_id: i for i, seq_id in enumerate(result.seq_ids)}
        changed: dict[Family, None] = {}
        for row in step.rows:
            family, sequence = self._by_id.get(row.seq_id, (None, None))
            if family is None or sequence is None:
                continue  # aborted while the step was under way
            self._computed(family, sequence, row.num_tokens)
            try:
                if family.search is None:
                    new = self._take(family, sequence, result, sampled.get(row.seq_id))
                elif row.samples and sequence is family.sequences[-1]:  # the beams' last row
                    self._search(family, [result.logprobs[sampled[beam.seq_id]] for beam in family.sequences])
                    new = family.state is State.FINISHED
                else:
                    new = False
            except Exception as error:  # noqa: BLE001  whatever a tokenizer raises; Engine.step raises it again
                self.faults.append(error)
                for other in family.sequences:
                    other.text = None
                self.abort(family.request.request_id)
                new = True
            if new:
                changed[family] = None
        return list(changed)

    def fail(self) -> None:
        """A step raised. What it would have computed is given up; every running sequence recomputes."""
        step, self._under_way = self._under_way, None
        if step is not None:  # else schedule() or update() itself raised: what the worker knows is not known here
            self.manager.confirm_moves(step.moves)
        self.manager.confirm_moves(self.manager.take_moves())
        for family in tuple(self.running):
            self._preempt(family)
        self._restart = True
        self._forget.clear()

    def new_weights(self) -> None:
        """The weights are others from now on: nothing that was computed counts, and running requests recompute."""
        assert self._under_way is None, "update() of the last step is due"
        for family in tuple(self.running):
            self._preempt(family)
        self._weights += 1
        self.manager.reset()

    def namespace(self, cache_salt: str | None) -> bytes:
        """Within what pages are shared, as the weights are now."""
        return namespace(cache_salt, weights=self._weights)

    def check(self) -> None:
        """Prove the manager's invariants, and that exactly the running families hold pages."""
        self.manager.check(idle=not self.running)
        running = {sequence.seq_id for family in self.running for sequence in self._holders(family)}
        holders = {seq_id for seq_id in self._by_id if seq_id in self.manager}
        if holders != running or len(self.manager) != len(running):
            raise InvariantError(f"P1: sequences {holders} of {len(self.manager)} hold pages, {running} run")
        assert all(family.state is State.RUNNING for family in self.running)
        assert self.running == sorted(self.running)

    def _new_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id - 1

    def _holders(self, family: Family) -> list[Sequence]:
        """Those of a running family that have pages."""
        return family.live if family.forked else family.live[:1]

    def _continue(self, family: Family, budget: int) -> list[Row]:
        """The rows of a running family; none if its turn has not come, or it had to give way itself."""
        first, *others = family.live
        if not family.forked and first.num_computed == first.num_prompt - 1:
            for other in others:
                self.manager.fork(first.seq_id, other.seq_id)
                other.num_computed = first.num_computed
                other.most_computed = max(other.most_computed, other.num_computed)
            family.forked = True
        shares = family.shares(budget)
        while True:
            try:
                for sequence, num_tokens in shares:
                    self.manager.extend(sequence.seq_id, sequence.num_computed + num_tokens)
                break
            except OutOfPages:
                gives_way = policy.victim(self.running)
                self._preempt(gives_way)
                if gives_way is family:
                    return []
        return [self._row(sequence, num_tokens) for sequence, num_tokens in shares]

    def _admit(self, budget: int) -> list[Row] | None:
        """Rows for the family that has waited longest; None if there is none, or its time has not come."""
        while self._waiting and self._waiting[0].state is State.FINISHED:
            heapq.heappop(self._waiting)
        if not self._waiting:
            return None
        family = self._waiting[0]
        seats = sum(other.seats for other in self.running)
        if seats + family.seats > self.limits.max_num_seqs or self._waits_for_older(family):
            return None
        first, request = family.live[0], family.request
        try:
            cached = self.manager.allocate(
                first.seq_id,
                family.common,
                budget,
                room=policy.room_wanted(family, self.limits),
                spare=sum(self._wanted(other) for other in self.running),
                namespace=self.namespace(request.cache_salt),
                label=request.request_id,
            )
        except OutOfPages:
            return None
        heapq.heappop(self._waiting)
        family.move_to(State.RUNNING)
        family.forked = len(family.live) == 1
        first.num_computed = cached
        self.running.append(family)
        self.running.sort()  # a preempted one comes back before those that arrived after it
        self.stats.waiting -= 1
        self.stats.running += 1
        if family.num_cached is None:
            family.num_cached = cached
            self.stats.prompt_tokens += first.num_prompt
            self.stats.cached_tokens += cached
        return self._continue(family, budget)

    def _waits_for_older(self, family: Family) -> bool:
        """Whether a family that arrived before is just computing a page of this one's prompt."""
        other = self.manager.computing(family.common, self.namespace(family.request.cache_salt))
        return other is not None and self._by_id[other][0] < family

    def _wanted(self, family: Family) -> int:
        """Pages that a running family is still to take."""
        held = self.manager.num_held([sequence.seq_id for sequence in self._holders(family)])
        return max(0, policy.room_wanted(family, self.limits) - held)

    def _row(self, sequence: Sequence, num_tokens: int) -> Row:
        family, _ = self._by_id[sequence.seq_id]
        samples = num_tokens == sequence.num_missing and sequence.request.max_tokens > 0
        changes = self.manager.take_changes(sequence.seq_id)
        if sequence.known_to_worker:
            token = int(sequence.tokens[-1]) if sequence.replaced else None
            sequence.replaced = False
            return Row(sequence.seq_id, num_tokens, changes, samples, token=token)
        sequence.known_to_worker, sequence.replaced = True, False
        request = sequence.request
        params = request.params
        ends = (*request.eos_token_ids, *(params.stop_token_ids or ())) if params.min_tokens else ()
        reset = Reset(
            sequence.tokens.copy(),
            tuple(tuple(self.manager.table(sequence.seq_id, g).pages) for g in range(len(self.manager.windows))),
            sequence.num_computed,
            params,
            request.seed,
            sequence.index,
            sequence.num_prompt,
            family.search.num_candidates if family.search else params.logprobs,
            end_token_ids=ends,
            bad_phrases=request.bad_phrases,
        )
        return Row(sequence.seq_id, num_tokens, (), samples, reset)

    def _computed(self, family: Family, sequence: Sequence, num_tokens: int) -> None:
        before = sequence.num_computed
        sequence.num_computed += num_tokens
        self.manager.commit(sequence.seq_id, sequence.tokens, sequence.num_computed)
        self.stats.computed_tokens += num_tokens
        self.stats.recomputed_tokens += max(0, min(sequence.most_computed, sequence.num_computed) - before)
        sequence.most_computed = max(sequence.most_computed, sequence.num_computed)

    def _take(self, family: Family, sequence: Sequence, result: StepResult, i: int | None) -> bool:
        """Give a sequence its entry of the result, if it has one. True if it has a new token or has ended."""
        reason: FinishReason | None
        if i is not None:
            reason = sequence.append(result.token_ids[i])
            self.stats.output_tokens += 1
            if result.logprobs and (logprobs := result.logprobs[i]) is not None:
                sequence.logprobs.append(logprobs)
        elif sequence.num_missing == 0:
            reason = "length"  # max_tokens is 0
        else:
            return False
        if reason is not None:
            self._end(family, sequence, reason)
            if not family.live:
                self._finish(family)
        return True

    def _search(self, family: Family, logprobs: list[Logprobs | None]) -> None:
        """All beams have their candidates: let the search say which go on, and with what token."""
        assert family.search is not None
        beams, going_on = family.sequences, list[tuple[Sequence, int]]()
        candidates = [list(zip(entry.top_ids, entry.top_logprobs, strict=True)) for entry in logprobs if entry]
        taken: set[int] = set()
        for branch in family.search.advance(candidates):
            beam = beams[branch.parent]
            if branch.parent in taken:
                beam = beam.branch(self._new_id())
                self.manager.fork(beams[branch.parent].seq_id, beam.seq_id)
                self._by_id[beam.seq_id] = family, beam
            taken.add(branch.parent)
            going_on.append((beam, branch.token))
        for i, beam in enumerate(beams):
            if i not in taken:
                self._leave(beam)
                del self._by_id[beam.seq_id]
        for index, (beam, token) in enumerate(going_on):
            beam.extend((token,))
            beam.index, beam.replaced = index, True
        self.stats.output_tokens += len(going_on)
        family.sequences = [beam for beam, _ in going_on]
        if not going_on:
            self._finish_search(family)

    def _finish_search(self, family: Family) -> None:
        assert family.search is not None
        for index, found in enumerate(family.search.results()):
            sequence = Sequence(self._new_id(), family.request, family.text() if family.text else None, index)
            sequence.extend(found.tokens)
            sequence.cumulative_logprob, sequence.score = found.cumulative_logprob, found.score
            sequence.finish_reason = found.finish_reason
            if sequence.text is not None:
                for token in found.tokens[: -1 if found.finish_reason == "stop" else None]:
                    sequence.text.push(token)
                sequence.text.finish()
            family.sequences.append(sequence)
        self._finish(family)

    def _preempt(self, family: Family) -> None:
        for sequence in family.live:
            self._leave(sequence)
            sequence.num_computed = 0
        family.move_to(State.PREEMPTED)
        family.forked = False
        self.running.remove(family)
        heapq.heappush(self._waiting, family)
        self.stats.running -= 1
        self.stats.waiting += 1
        self.stats.preemptions += 1

    def _end(self, family: Family, sequence: Sequence, reason: FinishReason) -> None:
        """The only way to an end of a sequence, once for each."""
        assert sequence.finish_reason is None, f"{sequence} has ended"
        if sequence.text is not None:
            sequence.text.finish()  # if it raises, the sequence has not ended
        self._leave(sequence)
        sequence.finish_reason = reason
        del self._by_id[sequence.seq_id]

    def _finish(self, family: Family) -> None:
        """The only way to an end of a family: once, or the transition is refused."""
        if family.state is State.RUNNING:
            self.running.remove(family)
            self.stats.running -= 1
        else:
            self.stats.waiting -= 1
        family.move_to(State.FINISHED)
        del self._live[family.request.request_id]
        self.stats.finished += 1

    def _leave(self, sequence: Sequence) -> None:
        """Its pages are given back, if it has any, and the worker forgets it."""
        if sequence.seq_id not in self.manager:
            return
        self.manager.free(sequence.seq_id)
        if sequence.known_to_worker:
            self._forget.append(sequence.seq_id)
            sequence.known_to_worker = False
        self.stats.used_pages = self.manager.num_used

    def _waste(self) -> float:
        """Room without a token over room with one, in the pages held once this step is done.

        Only the last pages of a sequence can have room, and those are its own.
        """
        manager = self.manager
        empty = 0
        for family in self.running:
            for sequence in self._holders(family):
                room = manager.room(sequence.seq_id)
                empty += (room - min(room, sequence.num_tokens)) * len(manager.windows)
        held = manager.num_used * manager.page_size
        return empty / (held - empty) if held > empty else 0.0
