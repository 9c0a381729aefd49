"""Orders, victims and the running peak as the pure functions that they are."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from fakes import GREEDY, request
from hypothesis import given
from hypothesis import strategies as st

from paged import KVCacheManager, SamplingParams
from paged.block_table import Windows
from scheduler import policy
from scheduler.policy import PATIENCE, PRIORITIES, Candidate, Limits
from scheduler.request import Family, Sequence

LIMITS = Limits(1 << 20, 1000, 4, (None,), 8, 64)


def family(
    number: int, prompt: int = 4, max_tokens: int = 10, *, arrived: int = 0, priority: int = 0, n: int = 1
) -> Family:
    wanted = request(str(number), [1] * prompt, max_tokens, params=SamplingParams(n=n), priority=priority)
    made = Family(number, wanted)
    made.sequences = [Sequence(10 * number + i, wanted, None, i) for i in range(n)]
    made.arrived = arrived
    made.forked = n == 1
    return made


def sorted_by(order: str, *families: Family) -> list[int]:
    """As the scheduler ranks them."""
    rule = policy.ORDERS[order]
    return [one.number for one in sorted(families, key=lambda f: (f.arrived + PATIENCE * rule(f, LIMITS), f.number))]


# Orders


@given(
    st.sampled_from(sorted(policy.ORDERS)),
    st.integers(-PRIORITIES, PRIORITIES),
    st.integers(1, 5000),
    st.integers(0, 5000),
    st.data(),
)
def test_an_order_is_a_share_of_the_patience(
    order: str, priority: int, prompt: int, max_tokens: int, data: st.DataObject
) -> None:
    one = family(0, prompt, max_tokens, priority=priority)
    one.cached_guess = data.draw(st.integers(0, prompt - 1))
    assert 0 <= policy.ORDERS[order](one, LIMITS) <= 1


def test_fcfs_is_the_order_of_arrival_whatever_they_ask_for() -> None:
    assert sorted_by("fcfs", family(2, priority=-10), family(0, 900, 900), family(1, priority=10)) == [0, 1, 2]


def test_priority_is_by_class_and_within_one_by_arrival() -> None:
    classes = [3, -10, 0, 3, 10, -10, 0]
    order = sorted_by("priority", *(family(i, priority=p) for i, p in enumerate(classes)))
    assert order == [1, 5, 2, 6, 0, 3, 4]


def test_the_last_class_comes_before_the_first_one_that_arrives_a_patience_later() -> None:
    old, first = family(0, priority=PRIORITIES), -PRIORITIES
    assert sorted_by("priority", family(1, arrived=PATIENCE - 1, priority=first), old) == [1, 0]
    assert sorted_by("priority", family(1, arrived=PATIENCE, priority=first), old) == [0, 1]
    assert sorted_by("priority", family(1, arrived=PATIENCE + 1, priority=first), old) == [0, 1]


def test_each_class_waits_for_the_next_its_part_of_the_patience() -> None:
    part = PATIENCE / (2 * PRIORITIES)
    for better in range(-PRIORITIES, PRIORITIES):
        old, late = family(0, priority=better + 1), int(part) + 1
        assert sorted_by("priority", old, family(1, arrived=int(part) - 1, priority=better)) == [1, 0]
        assert sorted_by("priority", old, family(1, arrived=late, priority=better)) == [0, 1]


def test_shortest_is_by_steps_of_the_prompt_and_of_the_output() -> None:
    assert sorted_by("shortest", family(0, 4, 100), family(1, 4, 10), family(2, 4, 50)) == [1, 2, 0]
    assert sorted_by("shortest", family(0, 640, 10), family(1, 4, 15), family(2, 64, 10)) == [2, 1, 0]


def test_shortest_lets_nobody_wait_longer_than_the_patience() -> None:
    long = family(0, 4, 5000)
    assert sorted_by("shortest", long, family(1, 1, 0, arrived=PATIENCE + 1)) == [0, 1]
    assert sorted_by("shortest", long, family(1, 1, 0, arrived=PATIENCE - 1)) == [1, 0]


def test_longest_prefix_is_by_the_share_that_is_cached() -> None:
    families = [family(i, prompt) for i, prompt in enumerate((10, 20, 40, 8))]
    for one, cached in zip(families, (4, 16, 16, 0), strict=True):
        one.cached_guess = cached
    assert sorted_by("longest_prefix", *families) == [1, 0, 2, 3]


# Victims


def held(*lengths: int, computed: tuple[int, ...] = ()) -> list[Candidate]:
    """Families numbered from 0 that hold pages of 4 for so many tokens, all of them computed unless it is said."""
    manager = KVCacheManager(1000, 4)
    result = []
    for number, length in enumerate(lengths):
        one = family(number, length)
        (sequence,) = one.sequences
        manager.allocate(sequence.seq_id, np.full(length, 100 + number, dtype=np.int32), length)
        sequence.num_computed = computed[number] if computed else length
        result.append(Candidate(one, manager))
    return result


@pytest.mark.parametrize("turned", list(itertools.permutations(range(3))))
@pytest.mark.parametrize(
    ("victim", "computed", "number"),
    [
        ("youngest", (9, 5, 30), 2),
        ("cheapest", (9, 5, 30), 1),
        ("cheapest", (5, 5, 30), 1),  # of equals the youngest
        ("cheapest", (0, 5, 0), 2),
        ("largest", (9, 5, 30), 0),
    ],
)
def test_a_victim_is_chosen_whatever_order_they_come_in(
    victim: str, computed: tuple[int, ...], number: int, turned: tuple[int, ...]
) -> None:
    """They hold 10, 3 and 8 pages."""
    candidates = held(40, 12, 30, computed=computed)
    assert policy.VICTIMS[victim]([candidates[i] for i in turned]).number == number


def test_of_equally_large_ones_the_youngest_gives_way() -> None:
    assert policy.largest(held(12, 9, 10, 4)).number == 2


def test_what_is_shared_frees_nothing() -> None:
    """Two sequences with 8 common pages hold more than a third, and their end frees less."""
    manager, common = KVCacheManager(100, 4), list(range(500, 532))
    prompts = [[*common, 1], [*common, 2], list(range(20))]
    candidates = []
    for number, tokens in enumerate(prompts):
        one, array = family(number, len(tokens)), np.array(tokens, dtype=np.int32)
        manager.allocate(one.sequences[0].seq_id, array, len(tokens))
        manager.commit(one.sequences[0].seq_id, array, len(tokens))
        candidates.append(Candidate(one, manager))
    assert [one.num_freed for one in candidates] == [1, 1, 5]
    assert policy.largest(candidates).number == 2


def test_what_a_family_shares_within_itself_is_freed_with_it() -> None:
    """Before its sequences fork only the first has pages; after that they share, and free the prompt's together."""
    manager, one = KVCacheManager(100, 4), family(0, 9, n=2)
    first, second = one.sequences
    tokens = first.tokens
    manager.allocate(first.seq_id, tokens, 8)
    manager.commit(first.seq_id, tokens, 8)
    candidate = Candidate(one, manager)
    assert candidate.num_freed == 2
    manager.fork(first.seq_id, second.seq_id)
    one.forked = True
    for sequence in one.sequences:
        manager.extend(sequence.seq_id, 9)
        sequence.num_computed = 8
    assert (candidate.num_freed, candidate.num_computed) == (4, 16)


# Pages and peaks

WINDOWS: list[Windows] = [(None,), (8,), (None, 6), (1, None, 20), (2, 3), (None, None, 512)]


@given(
    st.sampled_from(WINDOWS),
    st.sampled_from([1, 4, 16, 256]),
    st.integers(1, 300),
    st.lists(st.integers(0, 5000), max_size=20),
)
def test_pages_of_many_are_the_pages_of_each(windows: Windows, page_size: int, budget: int, lengths: list[int]) -> None:
    limits = Limits(1 << 20, 1000, page_size, windows, 8, budget)
    many = limits.pages_each(np.array(lengths, dtype=np.int64))
    assert many.tolist() == [limits.pages(length) for length in lengths]


def test_pages_of_many_keep_their_shape() -> None:
    lengths = np.arange(24, dtype=np.int64).reshape(2, 3, 4)
    assert LIMITS.pages_each(lengths).tolist() == (-(-lengths // 4)).tolist()


Load = list[tuple[int, int, int]]  # of each request: tokens now, tokens to come, steps to its end


def peak_of(load: Load, page_size: int, growth: int) -> int:
    known, more, ends = (np.array(column, dtype=np.int64) for column in zip(*load, strict=True))
    return policy.running_peak(known, known + more, ends, lambda n: -(-n // page_size), growth)


def simulated(load: Load, page_size: int, growth: int) -> int:
    """Most pages held, whatever the requests do: in each step each grows by up to `growth`, and may end after it."""

    @cache
    def most(step: int, lengths: tuple[int | None, ...]) -> int:
        best = sum(-(-length // page_size) for length in lengths if length is not None)
        choices = list[list[int | None]]()
        for (known, more, last), length in zip(load, lengths, strict=True):
            if length is None or step == last:  # it has ended, at the latest now
                choices.append([None])
            else:
                grown = {min(length + g, known + more) for g in range(growth + 1)}
                choices.append([None, *sorted(grown)])
        if all(choice == [None] for choice in choices):
            return best
        return max(best, *(most(step + 1, after) for after in itertools.product(*choices)))

    return most(0, tuple(known for known, _, _ in load))


def in_lockstep(load: Load, page_size: int, growth: int) -> int:
    """Most pages held if each grows as fast as it may and ends as late as it may: counted step by step."""
    result = 0
    for step in range(1 + max(last for _, _, last in load)):
        lengths = [min(known + growth * step, known + more) for known, more, last in load if step <= last]
        result = max(result, sum(-(-length // page_size) for length in lengths))
    return result


SMALL = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=3)
ANY = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=12)


@given(SMALL, st.sampled_from([1, 2, 4]), st.integers(1, 2))
def test_nothing_that_requests_can_do_exceeds_the_running_peak(load: Load, page_size: int, growth: int) -> None:
    assert simulated(load, page_size, growth) <= peak_of(load, page_size, growth)


@given(ANY, st.sampled_from([1, 4, 16]), st.integers(1, 5))
def test_the_running_peak_is_what_they_hold_in_lockstep(load: Load, page_size: int, growth: int) -> None:
    assert peak_of(load, page_size, growth) == in_lockstep(load, page_size, growth)


def test_nobody_holds_nothing() -> None:
    none = np.array([], dtype=np.int64)
    assert policy.running_peak(none, none, none, lambda n: n) == 0


def test_those_who_end_first_make_room_for_those_who_grow() -> None:
    """Two of 10 and 10 tokens, of which one ends at once: never 40 together, but 21 at its end, then 20."""
    assert peak_of([(10, 10, 10), (10, 0, 1)], 1, 1) == 21
    assert peak_of([(10, 10, 10), (10, 10, 10)], 1, 1) == 40


@pytest.mark.parametrize(("scored", "chunks"), [(False, 4), (True, 8)])
def test_steps_alone_are_chunks_and_tokens(scored: bool, chunks: int) -> None:
    """A prompt of 1000 tokens and 24 more to compute, in chunks of 256, or of 128 where log-probabilities are asked."""
    limits, params = Limits(1 << 20, 1000, 4, (None,), 8, 1024), SamplingParams(prompt_logprobs=0) if scored else GREEDY
    wanted = request("r", [1] * 1000, 25, params=params)
    assert policy.least_chunk(limits, policy.Rules()) == 256
    assert policy.steps_alone(wanted, limits, policy.Rules()) == chunks + 25
    assert policy.least_chunk(limits, policy.Rules(max_step_ms=50.0)) == 32
    assert policy.least_chunk(Limits(8, 8, 4, (None,), 1, 3), policy.Rules()) == 1
