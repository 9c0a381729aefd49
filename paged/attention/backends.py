"""The backends that are here, by the name that `attention_backend` has for them."""

from __future__ import annotations

from paged.attention import PagedAttention, cpu, reference, sdpa

BACKENDS: dict[str, PagedAttention] = {
    "reference": reference.paged_attention,
    "sdpa": sdpa.paged_attention,
    "native": cpu.paged_attention,
}
