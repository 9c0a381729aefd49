"""Inputs: rows of every kind on one flat axis, against the block table's own arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paged import BlockTable, SamplingParams, StepError
from worker.inputs import Inputs, SequenceState, build_inputs
from worker.step import Reset, Row

CPU = torch.device("cpu")


def state(tokens: list[int], pages: list[int], num_computed: int = 0) -> SequenceState:
    return SequenceState(
        Reset(
            np.asarray(tokens, dtype=np.int32),
            (tuple(pages),),
            num_computed,
            SamplingParams(),
            seed=5,
            index=2,
            num_prompt=len(tokens),
        )
    )


def append(one: SequenceState, pages: list[int]) -> None:
    one.change_tables([(0, one.num_pages + i, page) for i, page in enumerate(pages)])


def build(*pairs: tuple[Row, SequenceState], page_size: int = 4) -> Inputs:
    return build_inputs([row for row, _ in pairs], [one for _, one in pairs], page_size, CPU)


def picture() -> Inputs:
    """The one of the module's docstring: a chunk, a decode, a first chunk that does not reach the end."""
    return build(
        (Row(0, 3), state([10, 11, 12, 13, 14, 15, 16], [7, 3], 4)),
        (Row(1, 1), state(list(range(20, 30)), [1, 9, 4], 9)),
        (Row(2, 2, samples=False), state([30, 31, 32], [5])),
    )


def test_tokens_and_positions_of_the_picture() -> None:
    inputs = picture()
    assert inputs.token_ids.tolist() == [14, 15, 16, 29, 30, 31]
    assert inputs.positions.tolist() == [4, 5, 6, 9, 0, 1]


def test_metadata_of_the_picture() -> None:
    (meta,) = picture().metas
    assert meta.query_start.tolist() == [0, 3, 4, 6]
    assert meta.seq_lens.tolist() == [7, 10, 2]
    assert meta.slots.tolist() == [12, 13, 14, 17, 20, 21]


def test_block_tables_are_padded_with_the_null_page() -> None:
    assert picture().metas[0].block_tables.tolist() == [[7, 3, 0], [1, 9, 4], [5, 0, 0]]


def test_only_rows_that_sample_are_sampled_at_their_last_token() -> None:
    assert picture().sampled.tolist() == [2, 3]
    none = build((Row(0, 1, samples=False), state([1, 2], [1])))
    assert none.sampled.tolist() == []


def test_dtypes_are_those_the_model_takes() -> None:
    inputs = picture()
    (meta,) = inputs.metas
    assert {inputs.token_ids.dtype, inputs.positions.dtype, meta.slots.dtype, inputs.sampled.dtype} == {torch.int64}
    assert {meta.query_start.dtype, meta.seq_lens.dtype, meta.block_tables.dtype} == {torch.int32}


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 256])
def test_slots_are_those_of_the_block_table(page_size: int) -> None:
    tokens = list(range(300))
    pages = [int(p) for p in np.random.default_rng(page_size).permutation(400)[: -(-300 // page_size)] + 1]
    inputs = build((Row(0, 290), state(tokens, pages, 10)), page_size=page_size)
    assert inputs.metas[0].slots.tolist() == BlockTable(page_size, pages).slots(10, 300).tolist()


@pytest.mark.parametrize(
    ("row", "one", "message"),
    [
        (Row(3, 0), state([1, 2], [1]), "sequence 3: 0 tokens after 0"),
        (Row(3, 3), state([1, 2], [1]), "3 tokens after 0, it has 2 tokens and 1 pages of 4"),
        (Row(3, 2), state([1] * 5, [1], 4), "2 tokens after 4, it has 5 tokens"),
        (Row(3, 1), state([1] * 5, [1], 4), "1 tokens after 4, it has 5 tokens and 1 pages of 4"),
        (Row(3, 2), state([1] * 3, [1]), "only a row that reaches the last token can sample"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(row: Row, one: SequenceState, message: str) -> None:
    with pytest.raises(StepError, match=message):
        build((row, one))


def test_a_state_grows_by_tokens_and_pages_without_end() -> None:
    one = state([1, 2, 3], [4])
    for i in range(500):
        one.append((i,))
        append(one, [i + 5] if i % 3 else [i + 5, i + 6])
    append(one, [])
    assert one.tokens[: one.num_tokens].tolist() == [1, 2, 3, *range(500)]
    expected = [4] + [page for i in range(500) for page in ([i + 5] if i % 3 else [i + 5, i + 6])]
    assert one.pages[0, : one.num_pages].tolist() == expected


def test_many_pages_at_once_are_appended() -> None:
    one = state([1], [4])
    append(one, list(range(100, 400)))
    assert one.pages[0, : one.num_pages].tolist() == [4, *range(100, 400)]


def test_a_change_in_the_middle_and_one_at_the_end_are_made_in_their_group() -> None:
    reset = Reset(np.arange(9, dtype=np.int32), ((1, 2, 3), (4, 5, 6)), 8, SamplingParams(), 0, 0, 1)
    one = SequenceState(reset)
    one.change_tables([(0, 1, 9), (1, 0, 0), (0, 3, 7), (1, 3, 8)])
    assert one.pages[:, : one.num_pages].tolist() == [[1, 9, 3, 7], [0, 5, 6, 8]]
    inputs = build((Row(0, 1), one))
    assert [meta.block_tables.tolist() for meta in inputs.metas] == [[[1, 9, 3, 7]], [[0, 5, 6, 8]]]
    assert [meta.slots.tolist() for meta in inputs.metas] == [[12], [24]]
    assert inputs.metas[0].seq_lens is inputs.metas[1].seq_lens


def test_a_state_is_the_workers_own_copy() -> None:
    """Scheduling the next step never changes what the current one reads."""
    tokens = np.asarray([1, 2, 3], dtype=np.int32)
    one = SequenceState(Reset(tokens, ((1,),), 0, SamplingParams(), 0, 0, 1))
    tokens[:] = 9
    assert one.tokens[:3].tolist() == [1, 2, 3]


def test_inputs_do_not_change_when_the_state_goes_on() -> None:
    one = state([1, 2, 3], [1])
    inputs = build((Row(0, 3), one))
    kept: list[Any] = [inputs.token_ids.clone(), inputs.metas[0].block_tables.clone(), inputs.metas[0].slots.clone()]
    one.append((9,))
    one.tokens[:3] = 7
    one.pages[0, 0] = 8
    now = [inputs.token_ids, inputs.metas[0].block_tables, inputs.metas[0].slots]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
