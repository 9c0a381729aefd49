"""Scheduler: which sequences run in a step, and what becomes of them. Continuous batching.

Every step has one budget of tokens. Families (the sequences of one request) that decode take a token a sequence; what
is left goes to chunks of prompts, and then to waiting families, in the order of the rules, as far as pages reach. One
that does not fit is passed by others, until it is overdue. When pages run out, somebody gives its own back and waits
again, in its old place; it keeps its tokens and computes K and V anew.

One running family is the senior: the one that arrived first, when there was none. It stays that until its end, never
gives way, and every step has a token for it; so every request ends (docs/scheduling.md has the bound, and why).

A request whose next page an older one is just computing waits until that is done, and then hits. As that one takes all
that is left of the budget, nobody behind loses by it.

It never sees a tensor, text or a clock. Families are numbered in order of arrival.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from paged.errors import InvariantError, OutOfPages, RequestError
from paged.manager import KVCacheManager
from paged.prefix_cache import namespace
from scheduler import drafts, policy
from scheduler.beam import Beams
from scheduler.chunks import ChunkLimit
from scheduler.outputs import EngineStats, FinishReason
from scheduler.request import Family, Request, Sequence, State, TextSink
from scheduler.waiting import WaitingQueue
from worker.step import Logprobs, Reset, Row, Step, StepResult

_TRIED = 8  # families that are tried in a step and do not fit; prefixes that are looked up
_BELIEVED = 8  # steps for which it is taken that one who lacked pages lacks them still, if none came free
_LOOKED_AT = 64  # families that are looked at: whose turn it is to be tried, and whose prefix may be the longest
_key = attrgetter("key")

Planned = dict[Family, list[tuple[Sequence, int]]]  # of each family that runs: who computes how many tokens


class _Lane:
    """The steady families: single sequences that add one token a step. Handled as arrays, as they are many."""

    def __init__(self, families: list[Family]) -> None:
        self.families = families
        self.sequences = [family.sequences[0] for family in families]
        self.ids = [sequence.seq_id for sequence in self.sequences]
        self.buffers = [sequence.buffer for sequence in self.sequences]
        self.rows = [sequence.row for sequence in self.sequences]
        # Tokens that are computed after the step, int64 [families].
        self.lengths = np.fromiter((sequence.num_tokens for sequence in self.sequences), np.int64, len(families))
        self.peaks = np.fromiter((family.request.peak_tokens for family in families), np.int64, len(families))

    def add(self, family: Family) -> None:
        (sequence,) = family.sequences
        self.families.append(family)
        self.sequences.append(sequence)
        self.ids.append(sequence.seq_id)
        self.buffers.append(sequence.buffer)
        self.rows.append(sequence.row)
        self.lengths = np.append(self.lengths, sequence.num_tokens)
        self.peaks = np.append(self.peaks, family.request.peak_tokens)

    def remove(self, family: Family) -> None:
        i = self.families.index(family)
        for entries in (self.families, self.sequences, self.ids, self.buffers, self.rows):
            del entries[i]
        self.lengths, self.peaks = np.delete(self.lengths, i), np.delete(self.peaks, i)


class Scheduler:
    """Requests go in by `add`; `schedule` and `update` alternate, one step under way at most."""

    def __init__(self, manager: KVCacheManager, limits: policy.Limits, rules: policy.Rules | None = None) -> None:
        self.manager = manager
        self.limits = limits
        self.rules = rules = rules or policy.Rules()
        self.stats = EngineStats(total_pages=manager.num_usable)
        self.running: list[Family] = []  # by key
        self.admitted: list[Family] = []  # by the last schedule(); those that came back too
        self.senior: Family | None = None
        self._waiting = WaitingQueue()
        self._live: dict[str, Family] = {}
        self._by_id: dict[int, tuple[Family, Sequence]] = {}
        self._seats = 0  # of running families
        self._next_seq_id = 0
        self._next_family = 0
        self._next_number = 0
        self._weights = 0  # version
        self._forget: list[int] = []  # sequences that the worker is to forget
        self._under_way: Step | None = None
        self._restart = True
        self._lane: _Lane | None = None  # of all that are steady; None: they are others than before
        self._lane_under_way: _Lane | None = None
        self._least_chunk = least = policy.least_chunk(limits, rules)
        self.chunk_limit = None if rules.max_step_ms is None else ChunkLimit(rules.max_step_ms / 1000, least)
        # In the step that is being planned: tokens that may still be scored, and drafts that may still be brought.
        self._scores_left = self._drafts_left = 0
        # Tokens of the step under way: decoded, of prompts. None: not known, as somebody gave way.
        self._mix: tuple[int, int] | None = None
        # By request, in the texts of families that were ended for it; for the caller to take.
        self.faults: list[tuple[str, Exception]] = []

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
        family.arrived = self._next_number
        family.key = (self._rank(family), family.number)
        self._live[request.request_id] = family
        self._waiting.add(family)
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
                    self.faults.append((request_id, error))
                    sequence.text = None
                    self._end(family, sequence, "abort")
            self._finish(family)
        return family

    def schedule(self) -> Step | None:
        """The next step; None if there is nothing to do."""
        assert self._under_way is None, "update() of the last step is due"
        self.admitted = []
        if self.senior is None and self.running:
            self.senior = min(self.running)
        preemptions = self.stats.preemptions
        self._scores_left = policy.MOST_SCORED
        planned: Planned = {}
        lane, left, num_decodes = self._plan_running(planned)
        if self.stats.preemptions == preemptions:
            self._admit(planned, lane, left)
        rows = self._lane_rows(lane) if lane else []
        for family, shares in planned.items():
            rows += [self._row(family, sequence, num_tokens) for sequence, num_tokens in shares]
        if not rows:
            assert not self._live, "requests wait, and none can run"
            return None
        step = Step(self._next_number, tuple(rows), self.manager.take_moves(), tuple(self._forget), self._restart)
        self._next_number += 1
        self._forget.clear()
        self._restart = False
        self._under_way, self._lane_under_way = step, lane
        known = self.chunk_limit is not None and self.stats.preemptions == preemptions
        self._mix = (num_decodes, step.num_tokens - num_decodes) if known else None
        self.stats.num_steps += 1
        self.stats.max_running = max(self.stats.max_running, len(rows))
        self._count_pages()
        self.stats.peak_pages = max(self.stats.peak_pages, self.stats.used_pages)
        self.stats.waste_sum += self._waste(lane)
        return step

    def update(self, result: StepResult) -> list[Family]:
        """Take in what a step gave. Returns the families that have a new token or have ended.

        If the text of a family cannot be made of its tokens, that one ends as aborted, without text, and what was
        raised is put in `faults`.
        """
        step, self._under_way = self._under_way, None
        lane, self._lane_under_way = self._lane_under_way, None
        assert step is not None, "no step is under way"
        assert step.number == result.number, f"result {result.number} came for step {step.number}"
        self.manager.confirm_moves(step.moves)
        changed: dict[Family, None] = {}
        count = 0
        if lane is not None:
            count = len(lane.ids)
            self._update_lane(lane, result, changed)
        sampled = _places(result, count)
        scores = dict(result.scores)
        for row in step.rows[count:]:
            family, sequence = self._by_id.get(row.seq_id, (None, None))
            if family is None or sequence is None:
                continue  # aborted while the step was under way
            self._computed(family, sequence, row.num_tokens - len(row.drafts))
            family.scores += scores.get(row.seq_id, ())
            try:
                if family.search is None:
                    new = self._take(family, sequence, row, result, sampled.get(row.seq_id))
                elif row.samples and sequence is family.sequences[-1]:  # the beams' last row
                    self._search(family, [result.logprobs[sampled[beam.seq_id].start] for beam in family.sequences])
                    new = family.state is State.FINISHED
                else:
                    new = False
            except Exception as error:  # noqa: BLE001  whatever a tokenizer raises; Engine.step raises it again
                self._fault(family, error)
                new = True
            if new:
                changed[family] = None
                if self._is_steady(family):
                    family.steady = True
                    if self._lane is not None:
                        self._lane.add(family)
        self._count_pages()
        return list(changed)

    def took(self, seconds: float) -> None:
        """How long the step under way took to execute: chunks adapt to it."""
        if self.chunk_limit is not None and self._mix is not None:
            self.chunk_limit.observe(seconds, *self._mix)

    def fail(self) -> list[str]:
        """A step raised. What it would have computed is given up; every running sequence recomputes.

        Returns the ids of the requests that it had rows of.
        """
        step, self._under_way = self._under_way, None
        self._lane = self._lane_under_way = None
        if step is not None:  # else schedule() or update() itself raised: what the worker knows is not known here
            self.manager.confirm_moves(step.moves)
        self.manager.confirm_moves(self.manager.take_moves())
        for family in tuple(self.running):
            self._preempt(family)
        self._restart = True
        self._forget.clear()
        owners = [self._by_id[row.seq_id][0] for row in (step.rows if step else ()) if row.seq_id in self._by_id]
        return list(dict.fromkeys(family.request.request_id for family in owners))

    def new_weights(self) -> None:
        """The weights are others from now on: nothing that was computed counts, and running requests recompute."""
        assert self._under_way is None, "update() of the last step is due"
        for family in tuple(self.running):
            self._preempt(family)
        self._weights += 1
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.manager.reset()
        self._count_pages()

    def namespace(self, cache_salt: str | None) -> bytes:
        """Within what pages are shared, as the weights are now."""
        return namespace(cache_salt, weights=self._weights)

    def check(self) -> None:
        """Prove the manager's invariants, and that exactly the running families hold pages."""
        self.manager.check(idle=not self.running)
        running = {sequence.seq_id for family in self.running for sequence in family.holders}
        holders = {seq_id for seq_id in self._by_id if seq_id in self.manager}
        if holders != running or len(self.manager) != len(running):
            raise InvariantError(f"P1: sequences {holders} of {len(self.manager)} hold pages, {running} run")
        assert all(family.state is State.RUNNING for family in self.running)
        assert self.running == sorted(self.running, key=_key)
        assert len(self.running) + len(self._waiting) == len(self._live)
        assert self._seats == sum(family.seated for family in self.running) <= self.limits.max_num_seqs
        assert all(family.seated == family.seats for family in self.running)
        if self.senior is not None:
            assert self.is_live(self.senior.request.request_id)
        if self._lane is not None and self._under_way is None:
            assert sorted(self._lane.families, key=_key) == [family for family in self.running if family.steady]
            assert self._lane.lengths.tolist() == [sequence.num_tokens for sequence in self._lane.sequences]

    def _new_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id - 1

    def _is_overdue(self, family: Family) -> bool:
        return self._next_number - family.arrived >= self.rules.patience

    # What runs in a step

    def _plan_running(self, planned: Planned) -> tuple[_Lane | None, int, int]:
        """Make room for what running families compute: in the lane, or in `planned`.

        Returns the lane, the tokens that are left for prompts, and how many are decoded.
        """
        budget, senior, preemptions = self.limits.max_num_batched_tokens, self.senior, self.stats.preemptions
        others = [family for family in self.running if not family.steady]
        others.sort(key=lambda family: family is not senior)
        for family in others:
            self._fork(family)
        decoding = [family for family in others if family.decodes]
        chunks = [family for family in others if not family.decodes]
        room = budget - (self._least_chunk if chunks else 0)
        used = 0
        # Drafts take no token from another family, be it one that waits.
        self._drafts_left = room - sum(len(family.live) for family in decoding)
        self._drafts_left -= self._least_chunk if self._waiting and not chunks else 0
        if decoding and decoding[0] is senior:
            room = max(room, len(senior.live))
            used += self._plan(senior, room, planned)
        if senior is not None and senior.steady:
            room = max(room, 1)
        if self._lane is None:
            self._lane = _Lane([family for family in self.running if family.steady])
        lane = self._lane
        if len(lane.ids) > room - used:
            first = sorted(lane.families, key=lambda family: (family is not senior, family.key))
            lane = _Lane(first[: room - used])
        while lane.ids:
            try:
                self.manager.extend_all(lane.ids, lane.lengths)
                break
            except OutOfPages:
                self._give_way(planned)
                lane = _Lane([family for family in lane.families if family.steady])
        used += len(lane.ids)
        for family in decoding:
            if family.state is State.RUNNING and family not in planned:
                used += self._plan(family, room - used, planned)
        left = budget - used
        if self.chunk_limit is not None and used:
            left = min(left, self.chunk_limit.tokens())
        for family in chunks:
            if family.state is State.RUNNING:
                left -= self._plan(family, left, planned)
        if self.stats.preemptions > preemptions:
            lane = _Lane([family for family in lane.families if family.steady])
        return (lane if lane.ids else None), left, used

    def _fork(self, family: Family) -> None:
        """Where only the prompt's last token is missing, every live sequence has pages from now on."""
        first, *others = family.live
        if not family.forked and first.num_computed == first.num_prompt - 1:
            for other in others:
                self.manager.fork(first.seq_id, other.seq_id)
                other.num_computed = first.num_computed
                other.most_computed = max(other.most_computed, other.num_computed)
            family.forked = True

    def _plan(self, family: Family, room: int, planned: Planned) -> int:
        """Make room for a family's rows of at most `room` tokens. Returns how many they have, which may be none."""
        if scoring := family.scored < len(family.request.prompt_token_ids):
            room = min(room, self._scores_left)
        shares = family.shares(room) if room > 0 else []
        if self.rules.num_speculative_tokens and family.search is None and family.decodes:
            shares = self._with_drafts(shares, room)
        if not shares:
            return 0
        while True:
            try:
                for sequence, num_tokens in shares:
                    self.manager.extend(sequence.seq_id, sequence.num_computed + num_tokens)
                break
            except OutOfPages:
                if any(sequence.drafts for sequence, _ in shares):
                    shares = [(sequence, num_tokens - len(sequence.drafts)) for sequence, num_tokens in shares]
                    for sequence, _ in shares:
                        sequence.drafts = ()
                elif self._give_way(planned) is family:
                    return 0
        planned[family] = shares
        total = sum(num_tokens for _, num_tokens in shares)
        self._scores_left -= total * scoring
        return total

    def _with_drafts(self, shares: list[tuple[Sequence, int]], room: int) -> list[tuple[Sequence, int]]:
        """The same with drafts, as far as there is room: for a sequence's own length, and in the step."""
        result, left = [], min(room - sum(num_tokens for _, num_tokens in shares), self._drafts_left)
        for sequence, num_tokens in shares:
            most = min(sequence.draft_len, left, sequence.end_at - sequence.num_tokens - 1)
            sequence.drafts = tuple(drafts.propose(sequence.tokens, most)) if most > 0 else ()
            left -= len(sequence.drafts)
            self._drafts_left -= len(sequence.drafts)
            result.append((sequence, num_tokens + len(sequence.drafts)))
        return result

    def _give_way(self, planned: Planned) -> Family:
        """Pages have run out: somebody gives its own back. Never the senior; whoever is overdue only for older ones."""
        others = [family for family in self.running if family is not self.senior]
        assert others, "the senior does not fit by itself"
        young = [policy.Candidate(family, self.manager) for family in others if not self._is_overdue(family)]
        loser = self.rules.victim(young) if young else max(others)
        self._preempt(loser)
        planned.pop(loser, None)
        return loser

    # Who is admitted

    def _admit(self, planned: Planned, lane: _Lane | None, left: int) -> None:
        """Let in waiting families, in their order, as far as they fit; `left` tokens may be computed of them."""
        tried, spare = 0, None
        for family, nobody_passes in self._queue():
            if left <= 0 or self._seats >= self.limits.max_num_seqs:
                return
            if spare is None and self.rules.admission == "optimistic":
                spare = self._spare(lane)
            lacks = self._lacks(family, spare)
            if lacks or not self._enter(family, left, spare or 0):
                tried += not lacks
                if nobody_passes or tried == _TRIED:
                    return
                continue
            if spare is not None:
                spare += self._wanted(family)
            self._fork(family)
            left -= self._plan(family, left, planned)

    def _queue(self) -> Iterator[tuple[Family, bool]]:
        """Waiting families in the order in which they are tried, and whether nobody may pass them.

        Whoever takes one of those must let it in, or stop.
        """
        waiting = self._waiting
        if self.senior is not None and self.senior.state is not State.RUNNING:  # a step has failed
            yield self.senior, True
        while len(waiting) and self._is_overdue(waiting.oldest):
            yield waiting.oldest, True
        ahead = waiting.first(_LOOKED_AT)
        if self.rules.order is policy.longest_prefix:
            for family in sorted(ahead, key=lambda family: family.looked_at)[:_TRIED]:
                family.looked_at = self._next_number
                family.cached_guess = self.manager.match(
                    family.common[: family.scored], self.namespace(family.request.cache_salt)
                )
            ahead.sort(key=self._rank)
        for family in ahead:
            yield family, False

    def _rank(self, family: Family) -> float:
        """The step at whose arrivals it takes its place."""
        return family.arrived + self.rules.patience * self.rules.order(family, self.limits)

    def _lacks(self, family: Family, spare: int | None) -> bool:
        """Whether it was tried lately, and what it lacked then has not come free since."""
        if family.shortage is None or self._next_number - family.shortage[2] >= _BELIEVED:
            return False
        lacked, before, _ = family.shortage
        if spare is None:  # guaranteed: the peak goes down when somebody ends
            return self.stats.finished == before
        return self.manager.num_available - spare - before < lacked

    def _enter(self, family: Family, left: int, spare: int) -> bool:
        """Let a waiting family run, if it fits."""
        first, request = family.live[0], family.request
        if self._seats + family.seats > self.limits.max_num_seqs or self._waits_for_older(family):
            return False
        optimistic = self.rules.admission == "optimistic"
        if not optimistic and self._peak_with(family) > self.manager.num_usable:
            family.shortage = 1, self.stats.finished, self._next_number
            return False
        scored = family.scored
        try:
            cached = self.manager.allocate(
                first.seq_id,
                family.common,
                min(left, self._scores_left) if scored < first.num_prompt else left,
                room=policy.room_wanted(family, self.limits) if optimistic else 0,
                spare=spare,
                namespace=self.namespace(request.cache_salt),
                label=request.request_id,
                most_cached=scored - 1 if scored < first.num_prompt else None,
            )
        except OutOfPages as error:
            family.shortage = error.wanted - error.available, self.manager.num_available - spare, self._next_number
            return False
        self._waiting.remove(family)
        family.move_to(State.RUNNING)
        family.forked = len(family.live) == 1
        first.num_computed = cached
        insort(self.running, family, key=_key)  # a preempted one comes back before those that arrived after it
        self.admitted.append(family)
        family.seated = family.seats
        self._seats += family.seated
        self.stats.waiting -= 1
        self.stats.running += 1
        if self.senior is None and len(self.running) == 1:
            self.senior = family
        if family.num_cached is None:
            family.num_cached = cached
            self.stats.prompt_tokens += first.num_prompt
            self.stats.cached_tokens += cached
        return True

    def _waits_for_older(self, family: Family) -> bool:
        """Whether a family that arrived before is just computing a page of this one's prompt."""
        other = self.manager.computing(family.common, self.namespace(family.request.cache_salt))
        return other is not None and self._by_id[other][0] < family

    def _wanted(self, family: Family) -> int:
        """Pages that a running family is still to take."""
        held = self.manager.num_held([sequence.seq_id for sequence in family.holders])
        return max(0, policy.room_wanted(family, self.limits) - held)

    def _spare(self, lane: _Lane | None) -> int:
        """Pages that running families are still to take."""
        others, result = self.running, 0
        if lane is not None and lane is self._lane:
            others = [family for family in self.running if not family.steady]
            room = self.limits.pages_each(np.minimum(lane.lengths + self.limits.page_size, lane.peaks))
            result = int(np.maximum(room - self.manager.num_held_each(lane.ids), 0).sum())
        return result + sum(self._wanted(family) for family in others)

    def _peak_with(self, newcomer: Family) -> int:
        """Most pages that running families and a new one will hold at once, if each goes on to its max_tokens."""
        families = [*self.running, newcomer]
        seqs = np.array([family.seats for family in families])
        prompts = np.array([len(family.request.prompt_token_ids) for family in families])
        known = np.array([max(sequence.num_tokens for sequence in family.live) for family in families])
        peak = np.array([family.request.peak_tokens for family in families])
        left = np.array([family.tokens_left for family in families])
        missing = sum(max(sequence.num_missing - 1, 0) for family in families for sequence in family.live)
        scoring = any(family.scored < len(family.request.prompt_token_ids) for family in families)
        least = min(self._least_chunk, policy.MOST_SCORED) if scoring else self._least_chunk
        # Chunks go on at least so fast, and hold up only whoever waits for his; the others get a token in every step.
        ends = left + np.where([family.decodes for family in families], 0, -(-missing // least))
        if seqs.sum() > self.limits.max_num_batched_tokens - least:
            known = peak  # some may have to wait for tokens: nobody's end is sure
        shared = np.maximum(prompts - 1, 0) // self.limits.page_size * self.limits.windows.count(None)

        def pages(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            total: npt.NDArray[np.int64] = seqs * self.limits.pages_each(lengths) - (seqs - 1) * shared
            return total

        return policy.running_peak(known, peak, ends, pages, 1 + self.rules.num_speculative_tokens)

    # Rows

    def _lane_rows(self, lane: _Lane) -> list[Row]:
        rows = list(lane.rows)
        for i in self.manager.changed(lane.ids):
            rows[i] = Row(lane.ids[i], 1, self.manager.take_changes(lane.ids[i]))
        return rows

    def _row(self, family: Family, sequence: Sequence, num_tokens: int) -> Row:
        guesses, sequence.drafts = sequence.drafts, ()
        samples = num_tokens - len(guesses) == sequence.num_missing and sequence.request.max_tokens > 0
        mask = sequence.grammar.mask if samples and sequence.grammar is not None else None
        changes = self.manager.take_changes(sequence.seq_id)
        first, stop = family.scored, min(sequence.num_computed + num_tokens + 1, sequence.num_prompt)
        scores = (first, stop) if first < stop else None
        if sequence.known_to_worker:
            token = int(sequence.tokens[-1]) if sequence.replaced else None
            sequence.replaced = False
            return Row(
                sequence.seq_id, num_tokens, changes, samples, token=token, drafts=guesses, mask=mask, scores=scores
            )
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
        return Row(sequence.seq_id, num_tokens, (), samples, reset, drafts=guesses, mask=mask, scores=scores)

    # What a step gave

    def _update_lane(self, lane: _Lane, result: StepResult, changed: dict[Family, None]) -> None:
        """A token for each of its sequences that has not been aborted meanwhile."""
        families, sequences, ids, buffers, lengths = (
            lane.families,
            lane.sequences,
            lane.ids,
            lane.buffers,
            lane.lengths,
        )
        token_ids, entries = result.token_ids[: len(ids)], result.logprobs[: len(ids)]
        if self._lane is not lane:  # it was not all of them, or some have ended
            self._lane = None
            alive = [i for i, sequence in enumerate(sequences) if sequence.finish_reason is None]
            families, sequences = [families[i] for i in alive], [sequences[i] for i in alive]
            ids, buffers, lengths = [ids[i] for i in alive], [buffers[i] for i in alive], lengths[alive]
            token_ids, entries = tuple(token_ids[i] for i in alive), tuple(entries[i] for i in alive if entries)
        self.manager.commit_all(ids, buffers, lengths)
        for sequence, entry in zip(sequences, entries, strict=False):
            if entry is not None:
                sequence.logprobs.append(entry)
        ending = []
        for i, (sequence, token) in enumerate(zip(sequences, token_ids, strict=True)):
            n = sequence.num_tokens
            sequence.buffer[n] = token
            sequence.num_computed, sequence.num_tokens = n, n + 1
            if sequence.eager or n + 1 == sequence.end_at or token in sequence.stops:
                ending.append(i)
        lane.lengths += 1
        to_look_at = [(families[i], sequences[i], token_ids[i]) for i in ending]
        self.stats.computed_tokens += len(ids)
        self.stats.output_tokens += len(ids)
        changed.update(dict.fromkeys(families))
        for family, sequence, token in to_look_at:
            try:
                reason = sequence.ending(token)
                if reason is not None:
                    self._end(family, sequence, reason)
                    self._finish(family)
            except Exception as error:  # noqa: BLE001  as in update()
                self._fault(family, error)

    def _fault(self, family: Family, error: Exception) -> None:
        """Its text cannot be made: it ends without."""
        self.faults.append((family.request.request_id, error))
        for sequence in family.sequences:
            sequence.text = None
            del sequence.logprobs[sequence.num_output :]  # of a token that was not taken
        self.abort(family.request.request_id)

    def _is_steady(self, family: Family) -> bool:
        """Whether nothing but one token a step is to be expected of a family, whatever is sampled."""
        if family.state is not State.RUNNING or len(family.sequences) > 1 or family.search:
            return False
        (sequence,) = family.sequences
        return sequence.num_missing == 1 and sequence.grammar is None and not self.rules.num_speculative_tokens

    def _computed(self, family: Family, sequence: Sequence, num_tokens: int) -> None:
        before = sequence.num_computed
        sequence.num_computed += num_tokens
        self.manager.commit(sequence.seq_id, sequence.tokens, sequence.num_computed)
        self.stats.computed_tokens += num_tokens
        again = max(0, min(sequence.most_computed, sequence.num_computed) - before)
        self.stats.recomputed_tokens += again
        family.num_recomputed += again
        sequence.most_computed = max(sequence.most_computed, sequence.num_computed)

    def _take(self, family: Family, sequence: Sequence, row: Row, result: StepResult, place: slice | None) -> bool:
        """Give a sequence its tokens of the result, if it has any. True if it has a new one or has ended."""
        reason: FinishReason | None = None
        if place is not None:
            tokens, entries = result.token_ids[place], result.logprobs[place]
            for i, token in enumerate(tokens):
                if i:
                    self._computed(family, sequence, 1)  # an accepted draft
                if entries and (entry := entries[i]) is not None:
                    sequence.logprobs.append(entry)  # before the token, at whose text a tokenizer may raise
                self.stats.output_tokens += 1
                reason = sequence.append(token)
                if reason is not None:
                    break
            if row.drafts:
                most, proposed, accepted = self.rules.num_speculative_tokens, len(row.drafts), len(tokens) - 1
                sequence.draft_len = drafts.next_length(sequence.draft_len, proposed, accepted, most)
                self.stats.draft_tokens += proposed
                self.stats.accepted_tokens += accepted
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
            sequence.hides_last = found.finish_reason == "stop"
            sequence.finish_text()
            family.sequences.append(sequence)
        self._finish(family)

    def _preempt(self, family: Family) -> None:
        for sequence in family.live:
            sequence.most_computed = max(sequence.most_computed, sequence.num_computed)
            self._leave(sequence)
            sequence.num_computed, sequence.drafts = 0, ()  # drafts too: it may have been planned for this step
        self._leave_lane(family)
        family.move_to(State.PREEMPTED)
        family.num_preemptions += 1
        family.forked = False
        self.running.remove(family)
        self._waiting.add(family)
        self._seats -= family.seated
        self.stats.running -= 1
        self.stats.waiting += 1
        self.stats.preemptions += 1

    def _end(self, family: Family, sequence: Sequence, reason: FinishReason) -> None:
        """The only way to an end of a sequence, once for each."""
        assert sequence.finish_reason is None, f"{sequence} has ended"
        sequence.finish_text()  # if it raises, the sequence has not ended
        self._leave(sequence)
        sequence.finish_reason = reason
        del self._by_id[sequence.seq_id]
        if family.state is State.RUNNING and family.search is None:
            family.seated -= 1
            self._seats -= 1

    def _finish(self, family: Family) -> None:
        """The only way to an end of a family: once, or the transition is refused."""
        if family.state is State.RUNNING:
            self.running.remove(family)
            self._leave_lane(family)
            self._seats -= family.seated
            self.stats.running -= 1
        else:
            self._waiting.remove(family)
            self.stats.waiting -= 1
        family.move_to(State.FINISHED)
        if self.senior is family:
            self.senior = None
        del self._live[family.request.request_id]
        self.stats.finished += 1

    def _leave_lane(self, family: Family) -> None:
        if family.steady:
            family.steady = False
            if self._under_way is not None:
                self._lane = None  # what it was when the step was made is still wanted
            elif self._lane is not None:
                self._lane.remove(family)

    def _leave(self, sequence: Sequence) -> None:
        """Its pages are given back, if it has any, and the worker forgets it."""
        if sequence.seq_id not in self.manager:
            return
        self.manager.free(sequence.seq_id)
        if sequence.known_to_worker:
            self._forget.append(sequence.seq_id)
            sequence.known_to_worker = False
        self._count_pages()

    def _count_pages(self) -> None:
        self.stats.used_pages, self.stats.cached_pages = self.manager.num_used, self.manager.num_cached

    def _waste(self, lane: _Lane | None) -> float:
        """Room without a token over room with one, in the pages held once this step is done.

        Only the last pages of a sequence can have room, and those are its own.
        """
        manager = self.manager
        in_lane = lane is not None and lane is self._lane
        sequences = [s for family in self.running if not (in_lane and family.steady) for s in family.holders]
        ids = [sequence.seq_id for sequence in sequences]
        lengths = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64)
        if in_lane and lane:
            ids, lengths = [*lane.ids, *ids], np.concatenate((lane.lengths, lengths))
        rooms = manager.rooms(ids)
        empty = int((rooms - np.minimum(rooms, lengths)).sum()) * len(manager.windows)
        held = manager.num_used * manager.page_size
        return empty / (held - empty) if held > empty else 0.0


def _places(result: StepResult, first: int) -> dict[int, slice]:
    """Of each sequence of the result from the `first` on: where its tokens lie. Those before have one each."""
    if not result.counts:
        return {seq_id: slice(i, i + 1) for i, seq_id in enumerate(result.seq_ids[first:], first)}
    places, begin = {}, 0
    for seq_id, count in zip(result.seq_ids, result.counts, strict=True):
        places[seq_id] = slice(begin, begin + count)
        begin += count
    return places
