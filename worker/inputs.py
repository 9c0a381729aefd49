"""Inputs: a Step, and what the worker remembers of its sequences, as tensors for one packed forward.

Tokens of all rows lie on one flat axis without padding, whether a row is a prompt chunk or a single token:

    rows         A: chunk of 3     B: 1 token   C: chunk of 2
    token_ids    a4 a5 a6          b9           c0 c1
    positions     4  5  6           9            0  1
    query_start  0                 3            4          6
    seq_lens     7                 10           2
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged.attention import AttentionMetadata
from paged.errors import StepError
from paged.manager import TableChange
from worker.logits import Rules
from worker.step import Reset, Row


class SequenceState:
    """The worker's own copy of one sequence: its tokens, its block tables, and how far it is computed."""

    __slots__ = ("num_computed", "num_pages", "num_tokens", "pages", "reset", "rules", "tokens")

    def __init__(self, reset: Reset) -> None:
        self.num_tokens = len(reset.tokens)
        self.tokens = np.empty(self.num_tokens + 64, dtype=np.int32)
        self.tokens[: self.num_tokens] = reset.tokens
        self.num_pages = len(reset.tables[0])
        self.pages = np.zeros((len(reset.tables), self.num_pages + 8), dtype=np.int32)  # [groups, pages and room]
        self.pages[:, : self.num_pages] = reset.tables
        self.num_computed = reset.num_computed
        self.reset = reset  # its parameters
        self.rules = Rules.of(reset)

    def guess(self, token_ids: SequenceOf[int]) -> None:
        """Write tokens after the last, without counting them."""
        end = self.num_tokens + len(token_ids)
        if end > len(self.tokens):
            self.tokens = np.concatenate((self.tokens, np.empty(max(end, len(self.tokens)), dtype=np.int32)))
        self.tokens[self.num_tokens : end] = token_ids

    def append(self, token_ids: SequenceOf[int]) -> None:
        self.guess(token_ids)
        self.num_tokens += len(token_ids)

    def change_tables(self, changes: SequenceOf[TableChange]) -> None:
        for group, index, page in changes:
            if index >= self.pages.shape[1]:
                self.pages = np.concatenate((self.pages, np.zeros_like(self.pages)), axis=1)
            self.pages[group, index] = page
            self.num_pages = max(self.num_pages, index + 1)


@dataclass(frozen=True, slots=True)
class Inputs:
    """One packed forward."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    metas: tuple[AttentionMetadata, ...]  # of each group of layers
    sampled: Tensor  # [logits] int64: flat indices of the tokens whose logits are wanted


def build_inputs(
    rows: SequenceOf[Row], states: SequenceOf[SequenceState], page_size: int, device: torch.device
) -> Inputs:
    """The tensors of `rows`, whose sequences are `states`. Raises StepError where a row does not fit its state.

    Logits are wanted of the last token of each row that samples and of the drafts behind it, in order of the rows, and
    after all those of the tokens before the ones that are scored.
    """
    counts = np.fromiter((row.num_tokens for row in rows), dtype=np.int32, count=len(rows))
    ends = np.cumsum(counts)
    total = int(ends[-1])
    token_ids = np.empty(total, dtype=np.int64)
    groups = len(states[0].pages)
    seq_lens = np.empty(len(rows), dtype=np.int32)
    tables = np.zeros((groups, len(rows), max(state.num_pages for state in states)), dtype=np.int32)
    end = 0
    scored, sampled_before = list[int](), list[tuple[int, int]]()
    for i, (row, state) in enumerate(zip(rows, states, strict=True)):
        first, last = state.num_computed, state.num_computed + row.num_tokens
        drafts = len(row.drafts)
        if row.num_tokens <= drafts or last - drafts > state.num_tokens or last > state.num_pages * page_size:
            raise StepError(
                f"sequence {row.seq_id}: {row.num_tokens} tokens after {first}, it has {state.num_tokens} tokens and "
                f"{state.num_pages} pages of {page_size}"
            )
        if (row.samples or drafts) and last - drafts != state.num_tokens:
            raise StepError(f"sequence {row.seq_id}: only a row that reaches the last token can sample")
        end += row.num_tokens
        if drafts:
            state.guess(row.drafts)
            sampled_before.append((i, drafts))
        if row.scores:
            begin, stop = row.scores
            if not first < begin < stop <= min(last - drafts + 1, state.num_tokens):
                raise StepError(f"sequence {row.seq_id}: tokens {begin} to {stop} cannot be scored after {first}")
            scored += range(end - row.num_tokens + begin - 1 - first, end - row.num_tokens + stop - 1 - first)
        token_ids[end - row.num_tokens : end] = state.tokens[first:last]
        seq_lens[i] = last
        tables[:, i, : state.num_pages] = state.pages[:, : state.num_pages]
    owners = np.repeat(np.arange(len(rows)), counts)  # [tokens]: the row of each
    positions = np.arange(total) + (seq_lens - ends)[owners]
    slots = tables[:, owners, positions // page_size].astype(np.int64) * page_size + positions % page_size
    samples = np.fromiter((row.samples for row in rows), dtype=bool, count=len(rows))
    sampled = (ends - 1)[samples]
    if sampled_before or scored:
        places = samples.astype(np.int64)  # of each row, how many
        for i, drafts in sampled_before:
            places[i] += drafts
        sampled = np.concatenate([np.arange(last - n, last) for last, n in zip(ends, places, strict=True)] + [scored])
    query_start = np.concatenate(([0], ends)).astype(np.int32)

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    starts, lens = tensor(query_start), tensor(seq_lens)
    metas = tuple(AttentionMetadata(starts, lens, tensor(tables[g]), tensor(slots[g])) for g in range(groups))
    return Inputs(tensor(token_ids), tensor(positions), metas, tensor(sampled.astype(np.int64)))
