"""Case A13 and more: scheduler, manager and a fake worker under random use, every invariant proved after each step.

Submit (of a few shared beginnings, n of 1 to 3, sometimes a beam search, sometimes another salt), step, abort, preempt,
fail, reset, new weights, pin; over page sizes 1, 4 and 16, with one group and with two. The worker compares every slot
that it reads with the whole history of its sequence, and every answer is compared with what the request gives alone.
Forks and truncations that no request makes are the manager's: `test_manager_stateful.py`, and the walk below.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from fakes import GREEDY, VOCAB, Rig, output, request, solo

from paged import KVCacheManager, Move, OutOfPages
from paged.block_table import Windows
from scheduler.beam import BeamSearchParams
from scheduler.request import Family, State
from worker.step import SamplingParams

SEEDS, STEPS = range(50), 2000
GROUPS: list[Windows] = [(None,), (None, 6)]
PAGE_SIZES = [1, 4, 16]


class Walk:
    """One random walk over a scheduler."""

    def __init__(self, seed: int, page_size: int, windows: Windows) -> None:
        self.rng = rng = random.Random(f"{seed} {page_size} {windows}")
        usable = 24 * len(windows)
        self.rig = Rig.of(usable, page_size, budget=rng.choice([4, 9, 32]), max_num_seqs=6, windows=windows)
        self.room = 24 * page_size  # tokens that one sequence can have
        longest = min(40, self.room // 3)
        self.prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(6)]
        self.families: dict[str, Family] = {}
        self.failed = 0

    def run(self, steps: int) -> None:
        for number in range(steps):
            action = self.rng.random()
            if action < 0.25 and len(self.families) - len(self.rig.families) < 8:
                self.submit(f"r{number}")
            elif action < 0.28 and (live := self.rig.scheduler.live_ids()):
                self.rig.abort(self.rng.choice(live))
            elif action < 0.31 and self.rig.scheduler.running:
                self.rig.scheduler._preempt(self.rng.choice(self.rig.scheduler.running))
            elif action < 0.32:
                self.rig.scheduler.manager.reset()
            elif action < 0.325:
                self.rig.scheduler.new_weights()
            elif action < 0.34:
                tokens = np.array(self.rng.choice(self.prefixes), dtype=np.int32)
                self.rig.scheduler.manager.pin(tokens, number + 20, self.rig.scheduler.namespace(None))
            else:
                self.step(number)
            self.rig.scheduler.manager.expire(number)
            self.rig.scheduler.check()
        self.rig.run()
        self.compare()

    def submit(self, request_id: str) -> None:
        rng = self.rng
        prompt = rng.choice(self.prefixes) + [rng.randrange(3) for _ in range(rng.randint(0, 3))]
        n, max_tokens = rng.choice([1, 1, 2, 3]), rng.randint(0, 12)
        params = SamplingParams(temperature=rng.choice([0.0, 1.0]), n=n)
        beams = None
        if rng.random() < 0.2:
            beams, params = BeamSearchParams(beam_width=n, max_tokens=max(1, max_tokens)), GREEDY
        most = self.rig.scheduler.limits.longest(len(prompt), n) - len(prompt)
        wanted = request(
            request_id,
            prompt,
            min(beams.max_tokens if beams else max_tokens, most),
            params=params,
            seed=rng.randrange(1000),
            cache_salt=rng.choice([None, None, "other"]),
            beams=None if beams is None else BeamSearchParams(n, min(beams.max_tokens, most)),
        )
        self.families[request_id] = self.rig.add_family(wanted)

    def step(self, number: int) -> None:
        step = self.rig.schedule()
        if step is None:
            return
        if self.rng.random() < 0.02:
            self.rig.executor.raise_at[step.number] = RuntimeError(f"step {number}")
            with pytest.raises(RuntimeError, match=f"step {number}"):
                self.rig.finish(step)
            self.failed += 1
        else:
            self.rig.finish(step)

    def compare(self) -> None:
        assert len(self.rig.families) == len(self.families)
        for family in self.families.values():
            assert family.state is State.FINISHED
            wanted = family.request
            for sequence in family.sequences:
                if sequence.finish_reason == "abort" or family.search:
                    continue
                prompt, index = wanted.prompt_token_ids.tolist(), sequence.index
                alone = solo(prompt, wanted.max_tokens, params=wanted.params, seed=wanted.seed, index=index)
                assert output(sequence) == alone


def manager_walk(seed: int, page_size: int, windows: Windows, steps: int) -> None:
    """The manager alone: allocate, extend, commit, fork, truncate, free, reset; each as a caller might."""
    rng = random.Random(f"manager {seed} {page_size} {windows}")
    manager = KVCacheManager(24 * len(windows) + 1, page_size, windows=windows)
    prefixes = [[rng.randrange(3) for _ in range(rng.randint(1, 5 * page_size))] for _ in range(6)]
    held: dict[int, list[int]] = {}
    for number in range(steps):
        action, some = rng.random(), rng.choice([*held, None])
        try:
            if action < 0.2 or some is None:
                tokens = [*rng.choice(prefixes), rng.randrange(3)]
                manager.allocate(number, np.array(tokens, dtype=np.int32), rng.randint(1, len(tokens)))
                held[number] = tokens
            elif action < 0.6:
                stop = rng.randint(manager.num_computed(some), len(held[some]) + 1)
                held[some] += [rng.randrange(3)] * (stop - len(held[some]))
                manager.extend(some, stop)
                manager.confirm_moves(move for move in manager.take_moves() if isinstance(move, Move))
                manager.commit(some, np.array(held[some], dtype=np.int32), stop)
            elif action < 0.7:
                manager.fork(some, number)
                held[number] = held[some][: manager.num_computed(some)] or held[some][:1]
            elif action < 0.8:
                kept = manager.truncate(some, rng.randint(0, manager.num_computed(some)))
                held[some] = held[some][: max(kept, 1)]
            elif action < 0.98:
                manager.free(some)
                del held[some]
            else:
                manager.reset()
        except OutOfPages:
            if held:
                gone = rng.choice(list(held))
                manager.free(gone)
                del held[gone]
        manager.check()
    for seq_id in held:
        manager.free(seq_id)
    manager.confirm_moves(manager.take_moves())
    manager.check(idle=True)


@pytest.mark.parametrize("windows", GROUPS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", range(5))
def test_a13_nothing_is_lost_or_counted_twice_under_random_use(seed: int, page_size: int, windows: Windows) -> None:
    Walk(seed, page_size, windows).run(200)
    manager_walk(seed, page_size, windows, 200)


@pytest.mark.slow
@pytest.mark.parametrize("windows", GROUPS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a13_nothing_is_lost_or_counted_twice_in_2000_steps(seed: int, page_size: int, windows: Windows) -> None:
    Walk(seed, page_size, windows).run(STEPS)
    manager_walk(seed, page_size, windows, STEPS)
