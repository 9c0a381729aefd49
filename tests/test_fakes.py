"""That the fake worker sees each fault it is there for: the scheduler tests stand on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeExecutor, Rig, SharedWrite, StaleKV, WrongPage, request, solo

from paged import StepError
from worker.step import Reset, Row, SamplingParams, Step


def reset(tokens: list[int], pages: list[int], num_computed: int = 0) -> Reset:
    return Reset(
        np.asarray(tokens, dtype=np.int32), (tuple(pages),), num_computed, SamplingParams(temperature=0), 0, 0, 1
    )


def after(*steps: Step) -> FakeExecutor:
    fake = FakeExecutor(9, 4)
    for step in steps:
        fake.execute(step)
    return fake


FIRST = Step(0, (Row(0, 5, reset=reset([1, 2, 3, 4, 5], [1, 2])),), restart=True)


@pytest.mark.parametrize("history", [[9, 2, 3, 4], [1, 2, 3, 9], [2, 1, 3, 4], [0, 1, 2, 3]])
def test_a_page_of_another_history_is_seen(history: list[int]) -> None:
    """Even where the tokens of the slot that is read last agree."""
    fake = after(FIRST)
    with pytest.raises(StaleKV):
        fake.execute(Step(1, (Row(1, 1, reset=reset([*history, 7], [1, 3], 4)),), finished=(0,)))


def test_a_page_with_the_same_tokens_after_others_is_seen() -> None:
    """K and V depend on all that came before, so equal tokens are not enough."""
    fake = after(Step(0, (Row(0, 8, reset=reset([1, 2, 3, 4, 5, 6, 7, 8], [1, 2])),), restart=True))
    other = Step(1, (Row(1, 4, reset=reset([9, 9, 9, 9], [3])),), finished=(0,))
    fake.execute(other)
    with pytest.raises(StaleKV, match="its token at 4"):
        fake.execute(Step(2, (Row(2, 1, reset=reset([9, 9, 9, 9, 5, 6, 7, 8, 1], [3, 2, 4], 8)),), finished=(1,)))


def test_a_shared_prefix_is_no_fault() -> None:
    fake = after(FIRST)
    result = fake.execute(Step(1, (Row(0, 1), Row(1, 1, reset=reset([1, 2, 3, 4, 7], [1, 3], 4)))))
    assert result.token_ids == (solo([1, 2, 3, 4, 5], 2)[1], solo([1, 2, 3, 4, 7], 1)[0])


def test_a_page_that_another_holds_is_not_written() -> None:
    fake = after(FIRST)
    with pytest.raises(SharedWrite):
        fake.execute(Step(1, (Row(0, 1), Row(1, 4, reset=reset([1, 2, 3, 4], [2])))))


def test_a_page_read_in_the_step_that_computes_it_is_seen() -> None:
    rows = (Row(0, 5, reset=reset([1, 2, 3, 4, 5], [1, 2])), Row(1, 1, reset=reset([1, 2, 3, 4, 7], [1, 3], 4)))
    with pytest.raises(WrongPage):
        after(Step(0, rows, restart=True))


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (Step(2, (Row(0, 1),)), StepError),  # a gap
        (Step(0, (Row(0, 1),)), StepError),  # the same again
        (Step(1, (Row(7, 1),)), StepError),  # unknown
        (Step(1, (Row(0, 2),)), StepError),  # more than it has
        (Step(1, (Row(0, 0),)), StepError),
        (Step(1, (Row(0, 1),), finished=(0,)), StepError),  # forgotten
        (Step(1, (Row(0, 1),), finished=(3,)), KeyError),
        (Step(1, (Row(0, 1),), restart=True), StepError),  # a restart forgets all
        (Step(1, (Row(0, 1, ((0, 2, 0),)),)), WrongPage),  # the null page
        (Step(1, (Row(0, 1, ((0, 2, 9),)),)), WrongPage),  # no such page
        (Step(1, (Row(0, 1, ((0, 2, 1),)),)), WrongPage),  # its own page again
        (Step(1, (Row(0, 1, ((0, 3, 5),)),)), AssertionError),  # a hole in the table
        (Step(1, (Row(0, 1, ((0, 0, 3),)),)), StaleKV),  # another page in the middle
        (Step(1, (Row(0, 1), Row(0, 1))), AssertionError),
        (Step(1, (Row(0, 5, reset=FIRST.rows[0].reset),)), AssertionError),  # known already
    ],
)
def test_a_step_that_does_not_follow_is_refused(step: Step, error: type[Exception]) -> None:
    fake = after(FIRST)
    with pytest.raises(error):
        fake.execute(step)


def test_after_a_step_that_raised_only_a_restart_will_do() -> None:
    fake = FakeExecutor(9, 4, raise_at={0: RuntimeError()})
    with pytest.raises(RuntimeError):
        fake.execute(FIRST)
    with pytest.raises(StepError):
        fake.execute(replace(FIRST, number=1, restart=False))
    assert fake.execute(replace(FIRST, number=2)).number == 2


def dropped(step: Step, change: Callable[[Row], Row]) -> Step:
    return replace(step, rows=tuple(change(row) for row in step.rows))


def loaded() -> Rig:
    rig = Rig.of(16, 4)
    for i in range(3):
        rig.add(request(f"r{i}", [100 * i + j for j in range(9)], 8))
    return rig


def test_a_reset_that_is_lost_is_seen() -> None:
    rig = loaded()
    step = rig.schedule()
    assert step is not None
    with pytest.raises(StepError, match="its row needs a reset"):
        rig.finish(dropped(step, lambda row: replace(row, reset=None)))


def test_new_pages_that_are_lost_are_seen() -> None:
    rig = loaded()
    rig.executor.execute = lambda step: FakeExecutor.execute(  # type: ignore[method-assign]
        rig.executor, dropped(step, lambda row: replace(row, changes=()))
    )
    with pytest.raises(StepError, match="does not fit"):
        rig.run()


def test_a_page_handed_out_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = loaded()
    allocator = rig.scheduler.manager.allocator
    honest = allocator.allocate
    monkeypatch.setattr(allocator, "allocate", lambda n: [page % 4 + 1 for page in honest(n)])
    step = rig.scheduler.schedule()
    assert step is not None
    with pytest.raises(WrongPage):
        rig.executor.execute(step)


def test_a_prefix_hit_on_the_wrong_page_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix cache that compares nothing but the tokens of one page."""
    rig = Rig.of(16, 4)
    cache = rig.scheduler.manager.prefix_cache
    rig.add(request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1))
    rig.add(request("b", [0, 0, 0, 0], 1))
    rig.run()
    by_tokens = {entry.tokens: entry for entry in cache._by_page.values()}
    wanted = np.asarray([0, 0, 0, 0, 5, 6, 7, 8], dtype="<i4")
    chain = [by_tokens[wanted[:4].tobytes()], by_tokens[wanted[4:].tobytes()]]
    monkeypatch.setattr(cache, "match", lambda *_: chain)
    rig.scheduler.add(request("c", [*wanted.tolist(), 9], 1))
    step = rig.scheduler.schedule()
    assert step is not None
    with pytest.raises(StaleKV):
        rig.executor.execute(step)
