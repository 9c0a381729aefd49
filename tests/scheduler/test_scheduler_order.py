"""Who runs, waits, gives way and comes back, and what is counted."""

from __future__ import annotations

import numpy as np
from fakes import FakeText, Rig, output, request, solo

from scheduler.request import State


def test_no_more_than_max_num_seqs_run() -> None:
    rig = Rig.of(64, 4, max_num_seqs=3)
    for i in range(7):
        rig.add(request(f"r{i}", [i + 1], 4))
    step = rig.schedule()
    assert step is not None
    assert [row.seq_id for row in step.rows] == [0, 1, 2]
    rig.finish(step)
    rig.run()
    assert rig.scheduler.stats.max_running == 3


def test_a_decode_takes_from_the_budget_before_a_new_prompt() -> None:
    rig = Rig.of(64, 4, budget=4)
    rig.add(request("a", [1, 2], 8))
    rig.step()
    rig.add(request("b", list(range(10)), 1))
    step = rig.step()
    assert step is not None
    assert [row.num_tokens for row in step.rows] == [1, 3]


def test_the_one_that_arrived_last_gives_way_and_comes_back_first() -> None:
    rig = Rig.of(10, 4)
    families = [rig.add_family(request(f"r{i}", [100 * i + j for j in range(4)], 30)) for i in range(4)]
    states: list[list[State]] = []
    while rig.step() is not None:
        states.append([family.state for family in families])
    assert rig.scheduler.stats.preemptions > 0
    order = {State.FINISHED: 0, State.RUNNING: 1, State.PREEMPTED: 2, State.WAITING: 3}
    ranks = [[order[state] for state in row] for row in states]
    assert all(row == sorted(row) for row in ranks)
    assert [sequence.request.request_id for sequence in rig.ended] == ["r0", "r1", "r2", "r3"]


def test_nothing_is_admitted_in_the_step_in_which_one_gave_way() -> None:
    rig = Rig.of(10, 4)
    for i in range(3):
        rig.add(request(f"r{i}", [100 * i + j for j in range(4)], 30))
    while rig.scheduler.has_work:
        before = rig.scheduler.stats.preemptions
        step = rig.step()
        assert step is not None
        if rig.scheduler.stats.preemptions > before:
            assert all(row.reset is None for row in step.rows)


def test_a_preempted_sequence_keeps_its_tokens_and_loses_its_pages() -> None:
    rig = Rig.of(10, 4)
    family = rig.add_family(request("r", [1, 2, 3], 9))
    (sequence,) = family.sequences
    for _ in range(4):
        rig.step()
    rig.scheduler._preempt(family)
    assert (sequence.num_tokens, sequence.num_computed, sequence.seq_id in rig.scheduler.manager) == (7, 0, False)
    step = rig.schedule()
    assert step is not None
    assert step.finished == (0,)
    row = step.rows[0]
    assert row.reset is not None
    assert row.reset.tokens.tolist() == [1, 2, 3, *solo([1, 2, 3], 4)]


def test_what_is_computed_twice_is_counted_as_recomputed() -> None:
    rig = Rig.of(10, 4, caching=False)
    family = rig.add_family(request("r", [1, 2, 3], 9))
    for _ in range(4):
        rig.step()
    rig.scheduler._preempt(family)
    rig.run()
    stats = rig.scheduler.stats
    assert (stats.recomputed_tokens, stats.computed_tokens) == (6, 6 + 11)
    assert (stats.preemptions, stats.output_tokens, stats.prompt_tokens) == (1, 9, 3)


def test_equal_prompts_of_one_step_share_nothing_that_is_not_computed() -> None:
    """P4: the second waits while the first computes what both begin with, then hits, as does one that comes later."""
    rig = Rig.of(20, 4)
    families = [rig.add_family(request(name, list(range(9)), 4)) for name in "ab"]
    rig.step()
    assert [family.state for family in families] == [State.RUNNING, State.WAITING]
    families.append(rig.add_family(request("c", list(range(9)), 4)))
    rig.run()
    assert [family.num_cached for family in families] == [0, 8, 8]
    assert [output(family.sequences[0]) for family in families] == [solo(range(9), 4)] * 3


def test_an_abort_leaves_only_computed_pages_in_the_cache() -> None:
    rig = Rig.of(20, 4, budget=8)
    rig.add(request("r", list(range(20)), 4))
    rig.step()
    step = rig.schedule()  # of tokens 8 to 15
    assert step is not None
    rig.abort("r")
    rig.finish(step)
    assert rig.scheduler.manager.match(np.arange(20, dtype=np.int32)) == 8
    rig.assert_idle()


def test_an_abort_of_a_waiting_request_is_no_step() -> None:
    rig = Rig.of(20, 4)
    sequence = rig.add(request("r", [1, 2, 3], 4))
    rig.abort("r")
    assert rig.step() is None
    assert isinstance(sequence.text, FakeText)
    assert sequence.text.finishes == 1


def test_one_is_admitted_only_where_all_have_room_for_a_page_of_growth() -> None:
    """S03: two prompts of two pages would fit five, and would be out of pages a few tokens on."""
    rig = Rig.of(5, 4)
    for i in range(4):
        rig.add(request(f"r{i}", [100 * i + j for j in range(8)], 8))
    step = rig.step()
    assert step is not None
    assert len(step.rows) == 1
    rig.run()
    assert rig.scheduler.stats.preemptions == 0
