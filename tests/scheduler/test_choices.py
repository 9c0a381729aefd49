"""What each rule does in a load made for it: who passes whom, who comes first, who gives way, how large chunks are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as SequenceOf

import pytest
from fakes import GREEDY, Rig, output, request, solo

from paged import SamplingParams
from scheduler import policy
from scheduler.policy import PATIENCE, Rules
from scheduler.request import Family, State


def distinct(number: int, length: int) -> list[int]:
    return [(number * 131 + i * 7) % 900 for i in range(length)]


def admitted(rig: Rig) -> list[str]:
    return [family.request.request_id for family in rig.scheduler.admitted]


def run_noting_admissions(rig: Rig) -> list[str]:
    """To the end; ids in the order in which they were admitted, those that came back too."""
    names = []
    while rig.step() is not None:
        names += admitted(rig)
    rig.assert_idle()
    return names


def check_answers(families: SequenceOf[Family]) -> None:
    for family in families:
        wanted = family.request
        for sequence in family.sequences:
            prompt = wanted.prompt_token_ids.tolist()
            assert output(sequence) == solo(prompt, wanted.max_tokens, params=wanted.params, index=sequence.index)


# Passing


def blocked(patience: int) -> Rig:
    """A long request runs, and a big one waits for its pages. Both fit the pool, but never at once."""
    rig = Rig.of(12, 4, rules=Rules(patience=patience))
    rig.add(request("runs", distinct(0, 4), 30))
    rig.step()
    rig.add(request("big", distinct(1, 40), 4))
    rig.step()
    return rig


def test_a_small_request_passes_a_big_one_that_does_not_fit() -> None:
    rig = blocked(PATIENCE)
    assert rig.scheduler.stats.waiting == 1
    small = rig.add_family(request("small", distinct(2, 4), 2))
    rig.step()
    assert small.state is State.RUNNING
    rig.run()
    assert [family.request.request_id for family in rig.families] == ["small", "runs", "big"]
    check_answers(rig.families)


def test_nobody_passes_one_that_is_overdue() -> None:
    patience = 6
    rig = blocked(patience)
    (big,) = (family for family in rig.scheduler._live.values() if family.request.request_id == "big")
    came, passed = [], list[str]()
    while rig.scheduler.has_work:
        number = rig.scheduler._next_number
        if big.state is State.WAITING:
            came.append(number)
            rig.add(request(f"s{number}", distinct(number, 3), 1))
        rig.step()
        if big.state is State.WAITING:
            passed += admitted(rig)
    assert passed == [f"s{number}" for number in came if number - big.arrived < patience]
    assert len(passed) < len(came) - 10, "it waited much longer"
    check_answers(rig.families)


def test_no_more_than_a_few_are_tried_in_a_step() -> None:
    """Else a long queue of what does not fit would cost every step its length."""
    rig = blocked(PATIENCE)
    for i in range(40):
        rig.add(request(f"b{i}", distinct(3 + i, 40), 4))
    last = rig.add_family(request("small", distinct(99, 3), 2))
    rig.step()
    assert last.state is State.WAITING
    check_answers(rig.families)
    rig.run()


# Admission


def growing_load(rules: Rules, seed: int = 0) -> Rig:
    """Short prompts whose outputs do not all fit at once."""
    rng, rig = random.Random(seed), Rig.of(16, 4, budget=16, rules=rules)
    for i in range(8):
        rig.add(request(f"r{i}", distinct(i, rng.randint(2, 6)), rng.randint(15, 40), priority=rng.randint(-10, 10)))
    rig.run()
    check_answers(rig.families)
    return rig


@pytest.mark.parametrize("order", policy.ORDERS)
@pytest.mark.parametrize("victim", policy.VICTIMS)
def test_guaranteed_never_preempts_where_optimistic_does(order: str, victim: str) -> None:
    rules = policy.ORDERS[order], policy.VICTIMS[victim]
    assert growing_load(Rules("optimistic", *rules)).scheduler.stats.preemptions > 0
    stats = growing_load(Rules("guaranteed", *rules)).scheduler.stats
    assert (stats.preemptions, stats.recomputed_tokens) == (0, 0)
    assert stats.max_running > 1, "it is no one-at-a-time"


@pytest.mark.parametrize("drafts", [0, 4])
def test_guaranteed_never_preempts_whatever_requests_grow_to(drafts: int) -> None:
    for seed in range(10):
        stats = growing_load(Rules("guaranteed", num_speculative_tokens=drafts), seed).scheduler.stats
        assert stats.preemptions == 0


def test_guaranteed_fills_the_pool_to_the_last_page() -> None:
    """Two that need half of it each begin together; with a page less the second waits."""
    for usable, together in ((12, 2), (11, 1)):
        rig = Rig.of(usable, 4, rules=Rules("guaranteed"))
        for i in range(2):
            rig.add(request(f"r{i}", distinct(i, 8), 17))  # 24 tokens at their peaks
        step = rig.step()
        assert step is not None
        assert len(step.rows) == together
        rig.run()
        assert rig.scheduler.stats.preemptions == 0


def test_guaranteed_lets_one_in_that_ends_before_the_other_has_grown() -> None:
    """Their peaks together are more than there is, but do not come together."""
    rig = Rig.of(12, 4, rules=Rules("guaranteed"))
    rig.add(request("long", distinct(0, 4), 37))  # 10 pages at its end
    rig.add(request("short", distinct(1, 12), 5))  # 4 pages at its end, five steps on, when the other has 3
    step = rig.step()
    assert step is not None
    assert len(step.rows) == 2
    rig.run()
    assert rig.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("usable", range(70, 130, 4))
def test_guaranteed_counts_how_slowly_a_prompt_with_log_probabilities_is_computed(
    usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are smaller than the least chunk, so the others grow longer beside it."""
    monkeypatch.setattr(policy, "MOST_SCORED", 4)
    rig = Rig.of(usable, 1, budget=64, caching=False, rules=Rules("guaranteed"))
    for i in range(6):
        rig.add(request(f"r{i}", [i], 20))
    rig.step()
    for name in ("scored", "scored too")[: 1 + usable % 8 // 4]:
        rig.add(request(name, distinct(9, 30), 1, params=SamplingParams(temperature=0, prompt_logprobs=0)))
    rig.run()
    assert rig.scheduler.stats.preemptions == 0


# Orders


def one_by_one(order: str, wanted: SequenceOf[tuple[int, int, int]]) -> list[str]:
    """Ids in the order of admission where one runs at a time. wanted: prompt, max_tokens, priority of each."""
    rig = Rig.of(64, 4, max_num_seqs=1, rules=Rules(order=policy.ORDERS[order]))
    rig.add(request("first", [1, 2, 3], 3))
    rig.step()
    for i, (length, max_tokens, priority) in enumerate(wanted):
        rig.add(request(f"r{i}", distinct(i, length), max_tokens, priority=priority))
    names = run_noting_admissions(rig)
    check_answers(rig.families)
    return names


LOAD = [(9, 12, 3), (30, 2, 0), (5, 30, -10), (8, 5, 10), (20, 20, -2)]


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", [0, 1, 2, 3, 4]), ("priority", [2, 4, 1, 0, 3]), ("shortest", [1, 3, 0, 4, 2])]
)
def test_those_who_wait_come_in_the_order_of_the_policy(order: str, expected: list[int]) -> None:
    assert one_by_one(order, LOAD) == [f"r{i}" for i in expected]


def test_those_with_the_longest_cached_prefix_come_first() -> None:
    rig = Rig.of(64, 4, max_num_seqs=1, rules=Rules(order=policy.longest_prefix))
    rig.add(request("warm", distinct(0, 33), 1))
    rig.run()
    rig.add(request("first", distinct(1, 5), 3))
    rig.step()
    prompts = {"none": distinct(2, 20), "half": distinct(0, 20)[:8] + distinct(3, 8), "all": distinct(0, 33)}
    for name, prompt in prompts.items():
        rig.add(request(name, prompt, 2))
    assert run_noting_admissions(rig) == ["all", "half", "none"]
    assert {family.request.request_id: family.num_cached for family in rig.families[-3:]} == {
        "all": 32,
        "half": 8,
        "none": 0,
    }


def test_a_prefix_that_is_cached_while_they_wait_counts_too() -> None:
    """The one that runs is what the last one begins with; nobody knew when that one came."""
    rig = Rig.of(64, 4, max_num_seqs=1, rules=Rules(order=policy.longest_prefix))
    rig.add(request("first", distinct(0, 33), 4))
    rig.add(request("other", distinct(1, 20), 2))
    rig.add(request("same", distinct(0, 33), 2))
    assert run_noting_admissions(rig) == ["first", "same", "other"]


def test_classes_do_not_hold_one_back_for_longer_than_the_patience() -> None:
    """First class arrives in every step; the last class still gets its turn, when its age outweighs them."""
    patience = 20
    rig = Rig.of(64, 4, max_num_seqs=1, rules=Rules(order=policy.by_priority, patience=patience))
    last = rig.add_family(request("last", distinct(0, 3), 1, priority=10))
    rig.add(request("f", distinct(1, 3), 1, priority=-10))
    number = 0
    while last.state is not State.FINISHED:
        rig.add(request(f"f{number}", distinct(number, 3), 1, priority=-10))
        assert rig.step() is not None
        number += 1
        assert number <= patience + 3
    assert number > patience / 2, "they came first, for a while"


# Victims


def crowd(victim: str) -> tuple[Rig, list[Family]]:
    """A senior, and three of different size and age, until one of them has given way."""
    rig = Rig.of(22, 4, caching=False, rules=Rules(victim=policy.VICTIMS[victim]))
    senior = request("senior", distinct(0, 4), 60)
    families = [rig.add_family(senior)]
    rig.step()
    for i, length in enumerate((30, 5, 12), 1):
        families.append(rig.add_family(request(f"r{i}", distinct(i, length), 40)))
        rig.step()
    while rig.scheduler.stats.preemptions == 0:
        rig.step()
    return rig, families


@pytest.mark.parametrize(("victim", "loser"), [("youngest", 3), ("cheapest", 2), ("largest", 1)])
def test_the_victim_is_the_one_of_the_rule(victim: str, loser: int) -> None:
    rig, families = crowd(victim)
    assert [family.state for family in families].index(State.PREEMPTED) == loser
    rig.run()
    check_answers(families)


@pytest.mark.parametrize("victim", policy.VICTIMS)
@pytest.mark.parametrize("overdue", [False, True])
def test_the_senior_never_gives_way(victim: str, overdue: bool) -> None:
    """It is the largest here, and the cheapest, and under another order the youngest may come before it."""
    rules = Rules(order=policy.by_priority, victim=policy.VICTIMS[victim], patience=0 if overdue else PATIENCE)
    rig = Rig.of(14, 4, rules=rules)
    families = [rig.add_family(request("senior", distinct(0, 20), 20, priority=10))]
    rig.step()
    families += [rig.add_family(request(f"r{i}", distinct(i, 3), 40, priority=-10)) for i in range(1, 5)]
    turns = []
    while rig.step() is not None:
        turns.append(rig.scheduler.senior)
    assert rig.scheduler.stats.preemptions > 0
    seniors = {family for family in turns if family is not None}
    for family in seniors:
        first = turns.index(family)
        assert turns[first : first + turns.count(family)] == [family] * turns.count(family), "once, until its end"
    assert families[0].num_preemptions == 0
    check_answers(families)


def test_victims_may_be_chosen_while_a_prompt_of_several_sequences_is_computed() -> None:
    """Only its first sequence has pages then."""
    for victim, usable in itertools.product(policy.VICTIMS, range(22, 30, 3)):
        rig = Rig.of(usable, 4, budget=4, rules=Rules(victim=policy.VICTIMS[victim]))
        families = [rig.add_family(request(f"r{i}", [1 + i], 60)) for i in range(3)]
        for _ in range(4):
            rig.step()
        families.append(rig.add_family(request("n", distinct(5, 40), 2, params=SamplingParams(temperature=0, n=2))))
        rig.run()
        assert rig.scheduler.stats.preemptions > 0
        check_answers(families)


# The budget


def test_prompts_do_not_starve_those_who_decode() -> None:
    """Long prompts come in one after another; whoever decodes has a token in every step."""
    rig = Rig.of(400, 4, budget=16, max_num_seqs=8)
    decoders = [rig.add(request(f"d{i}", [i], 40)) for i in range(4)]
    rig.step()
    for i in range(4):
        rig.add(request(f"p{i}", distinct(i, 100), 1))
    for _ in range(30):
        step = rig.step()
        assert step is not None
        assert {sequence.seq_id for sequence in decoders} <= {row.seq_id for row in step.rows}
        assert step.num_tokens == 16, "what is left of the budget goes to prompts"


@pytest.mark.parametrize("budget", [4, 8, 16, 31])
def test_those_who_decode_leave_prompts_the_least_chunk(budget: int) -> None:
    """More decode than the budget has tokens for: prompts have a quarter of it all the same."""
    rig = Rig.of(400, 4, budget=budget, max_num_seqs=40)
    for i in range(budget - 1):
        rig.add(request(f"d{i}", [i], 60))
        rig.step()
    prompt = rig.add(request("p", distinct(7, 20), 1))
    least = policy.least_chunk(rig.scheduler.limits, rig.scheduler.rules)
    assert least == max(1, budget // 4)
    first = True
    while prompt.num_computed < 20:
        before = prompt.num_computed
        step = rig.step()
        assert step is not None
        assert len(step.rows) > 1
        if not first and prompt.finish_reason is None:
            assert prompt.num_computed - before >= min(least, 20 - before)
        first = first and prompt.num_computed == 0
        assert len(rig.executor.steps) < 500
    rig.run()


def prompt_tokens(rig: Rig, seconds_a_token: float, seconds_a_step: float) -> int:
    """A step of a machine that takes so long. Tokens of prompts that it had."""
    step = rig.schedule()
    assert step is not None
    assert rig.scheduler._mix is not None
    _, tokens = rig.scheduler._mix
    rig.scheduler.took(seconds_a_step + seconds_a_token * tokens)
    rig.finish(step)
    return tokens


def test_chunks_shrink_to_hold_the_time_of_a_step_and_grow_again() -> None:
    """One decodes, 100 ms are wanted, 20 of them are the decode's; then the machine becomes slow, then quick."""
    rig = Rig.of(300, 16, budget=1024, caching=False, rules=Rules(max_step_ms=100.0))
    rig.add(request("d", [1], 400))

    def chunks(seconds_a_token: float) -> list[int]:
        """Chunks of prompts that come one after another, each beside a decode, and steps without one between."""
        result = []
        for _ in range(25):
            rig.add(request(f"p{rig.scheduler._next_number}", distinct(rig.scheduler._next_number, 700), 1))
            result.append(prompt_tokens(rig, seconds_a_token, 0.02))
            while rig.scheduler.stats.running + rig.scheduler.stats.waiting > 1:
                rig.abort(rig.scheduler.live_ids()[-1])
            prompt_tokens(rig, seconds_a_token, 0.02)
        return result

    prompt_tokens(rig, 0.0004, 0.02)
    quick, slow, again = chunks(0.0004), chunks(0.002), chunks(0.0004)
    assert quick[0] == 32, "the least, as long as nothing is known"
    assert quick[-1] == pytest.approx(200, abs=4)
    assert slow[-1] == pytest.approx(40, abs=4)
    assert again[-1] == pytest.approx(200, abs=10)
    assert slow == sorted(slow, reverse=True)
    assert again == sorted(again)
    assert all(0.02 + 0.0004 * chunk <= 0.101 for chunk in quick)


def test_chunks_are_never_less_than_the_least_and_whole_where_nobody_decodes() -> None:
    rig = Rig.of(4000, 16, budget=256, rules=Rules(max_step_ms=1.0))
    rig.add(request("p", distinct(0, 700), 20))
    assert [prompt_tokens(rig, 0.001, 0.5) for _ in range(3)] == [256, 256, 188]
    prompt_tokens(rig, 0.001, 0.5)
    rig.add(request("q", distinct(1, 100), 1))
    assert [prompt_tokens(rig, 0.001, 0.5) for _ in range(4)] == [32, 32, 32, 4]


def test_without_a_target_the_clock_changes_nothing() -> None:
    rig = Rig.of(400, 16, budget=64)
    rig.add(request("d", [1], 30))
    rig.step()
    rig.add(request("p", distinct(0, 126), 1, params=GREEDY))
    sizes = []
    for _ in range(2):
        step = rig.schedule()
        assert step is not None
        rig.scheduler.took(1000.0)
        sizes.append(step.num_tokens)
        rig.finish(step)
    assert sizes == [64, 64]
