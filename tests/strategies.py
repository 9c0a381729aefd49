"""Hypothesis strategies, kept in one place."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

NUM_FAMILIES = 2


def family(number: int, length: int) -> list[int]:
    """The first tokens of one of a few endless prompts: two prompts of a family share the shorter one's length."""
    return [(number + 1) * 1000 + i for i in range(length)]


@st.composite
def prompts(draw: st.DrawFn, page_size: int) -> list[int]:
    """A prompt whose beginning other prompts are likely to share, often up to the end of a page; up to five pages."""
    length = draw(st.sampled_from(range(5))) * page_size + draw(st.sampled_from([0, 0, 1, page_size // 2]))
    tokens = family(draw(st.sampled_from(range(NUM_FAMILIES))), length)
    return tokens + draw(st.lists(st.integers(1, 2), min_size=0 if tokens else 1, max_size=page_size))


def new_tokens(page_size: int) -> SearchStrategy[list[int]]:
    """What a sequence appends: few different tokens, so that branches sometimes agree."""
    return st.lists(st.integers(1, 3), min_size=1, max_size=page_size + 1)


def page_sizes() -> SearchStrategy[int]:
    return st.sampled_from([1, 4, 16])
