"""KVLayout's arithmetic (case M01)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paged import ConfigError, KVLayout

MIB = 2**20
# hidden 640, 4 heads: the wrong width would be 160
GEMMA = KVLayout(num_layers=18, kv_heads=1, head_dim=256, dtype="bfloat16", page_size=16)
SMOLLM2 = KVLayout(num_layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", page_size=16)


@pytest.mark.parametrize(
    ("layout", "token", "page", "pages"),
    [
        pytest.param(GEMMA, 18_432, 294_912, 355, id="gemma-3-270m"),
        pytest.param(SMOLLM2, 23_040, 368_640, 284, id="smollm2"),
        pytest.param(replace(SMOLLM2, dtype="float16"), 23_040, 368_640, 284, id="smollm2-float16"),
        pytest.param(replace(SMOLLM2, dtype="float32"), 46_080, 737_280, 142, id="smollm2-float32"),
    ],
)
def test_m01_bytes_of_a_token_and_a_page_and_pages_in_100_mib(
    layout: KVLayout, token: int, page: int, pages: int
) -> None:
    assert (layout.bytes_per_token, layout.bytes_per_page, layout.pages_in(100 * MIB)) == (token, page, pages)


def test_pages_never_take_more_than_the_bytes_given() -> None:
    exact = 7 * GEMMA.bytes_per_page
    assert [GEMMA.pages_in(exact + more) for more in (-1, 0, 1)] == [6, 7, 7]


@pytest.mark.parametrize("pages", [0, 1])
def test_memory_for_less_than_the_null_page_and_one_more_is_refused_with_the_numbers(pages: int) -> None:
    with pytest.raises(ConfigError, match=f"holds {pages} pages of 294,912 bytes, 2 are the least: raise kv_memory"):
        GEMMA.pages_in(pages * GEMMA.bytes_per_page)


def test_the_null_page_and_one_more_are_enough() -> None:
    assert GEMMA.pages_in(2 * GEMMA.bytes_per_page) == 2
