"""Hypothesis strategies, kept in one place."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

NUM_FAMILIES = 3


def family(number: int, length: int) -> list[int]:
    """The first tokens of one of a few endless prompts: two prompts of a family share the shorter one's length."""
    return [(number + 1) * 1000 + i for i in range(length)]


@st.composite
def prompts(draw: st.DrawFn, page_size: int) -> list[int]:
    """A prompt whose beginning other prompts are likely to share, up to anywhere in a page; one to five pages long."""
    tokens = family(draw(st.integers(0, NUM_FAMILIES - 1)), draw(st.integers(0, 4 * page_size)))
    return tokens + draw(st.lists(st.integers(1, 3), min_size=0 if tokens else 1, max_size=page_size))


def new_tokens(page_size: int) -> SearchStrategy[list[int]]:
    """What a sequence appends: few different tokens, so that branches sometimes agree."""
    return st.lists(st.integers(1, 3), min_size=1, max_size=page_size + 1)


def page_sizes() -> SearchStrategy[int]:
    return st.sampled_from([1, 4, 16])
