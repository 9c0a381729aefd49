"""The newest K and V in the last slot: a cache of fixed shape under transformers, for comparison with pages.

After the idea of "Append current KV last" (accelerated-pytorch-transformers-generation, pull request 10). K and V of a
layer are [batch, kv_heads, max_len, head_dim] from the beginning. A decode step writes the new token's K and V to the
last slot, wherever in the sequence it is, and attends over the whole shape with a mask over what is empty; afterwards
the last slot is copied to the first empty one. So no shape ever changes, and torch.compile(fullgraph=True) sees one
graph. Rows have equal lengths.

    slots      0 1 2 3 4 5 6 7          the fourth decode step after a prompt of two
    before     p p a b c . . c          what was moved is still in the last slot, and is written over
    attention  p p a b c . . d          d reads itself there; the dots are masked
    after      p p a b c d . d
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class AppendLastLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed for us
    is_compileable = True
    is_sliding = False

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self.max_len = max_len

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, kv_heads, _, dim = key_states.shape
        self.keys = key_states.new_zeros(batch, kv_heads, self.max_len, dim)
        self.values = value_states.new_zeros(batch, kv_heads, self.max_len, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Of one token to the last slot; of a prompt, for which the cache must be empty, to the first ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        if count > 1:  # a prompt attends to itself alone
            self.keys[:, :, :count].copy_(key_states)
            self.values[:, :, :count].copy_(value_states)
            return key_states, value_states
        self.keys[:, :, -1:].copy_(key_states)
        self.values[:, :, -1:].copy_(value_states)
        return self.keys, self.values

    def move(self, place: Tensor) -> None:
        """The last slot to the slot `place`, int64 [1], which may be the last one."""
        self.keys.index_copy_(2, place, self.keys[:, :, -1:].clone())
        self.values.index_copy_(2, place, self.values[:, :, -1:].clone())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.max_len, 0) if query_length == 1 else (query_length, 0)

    def get_seq_length(self) -> int:
        """Nothing: an empty cache is all that transformers asks about, as a decode step brings its own positions."""
        return 0

    def get_max_length(self) -> int:
        return self.max_len


class AppendLastCache(Cache):  # type: ignore[misc]  # transformers is not typed for us
    """For models whose layers all attend to everything. max_len: of prompt and answer together.

    `prefill` once, then `decode` as often as there is room; `decode` is what may be compiled.
    """

    def __init__(self, config: Any, max_len: int) -> None:
        super().__init__(layers=[AppendLastLayer(max_len) for _ in range(config.num_hidden_layers)])
        self.max_len = max_len
        # A tensor, which may change without another graph; Python's number would be compiled in.
        self.length = torch.zeros(1, dtype=torch.int64)

    def mask(self) -> Tensor:
        """What a decode step sees: the filled slots and the last one, bool [1, 1, 1, max_len]."""
        slots = torch.arange(self.max_len)
        return ((slots < self.length) | (slots == self.max_len - 1))[None, None, None]

    def reset(self) -> None:
        self.length.zero_()


def prefill(model: Any, ids: Tensor, cache: AppendLastCache) -> Tensor:
    """Logits behind the last token of prompts, int64 [batch, tokens], [batch, vocab]."""
    if ids.shape[1] == 1:
        return decode(model, ids, cache)
    logits: Tensor = model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    cache.length += ids.shape[1]
    return logits


def decode(model: Any, ids: Tensor, cache: AppendLastCache) -> Tensor:
    """Logits behind one more token of each row, int64 [batch, 1], [batch, vocab]."""
    position = cache.length.clone()
    output = model(ids, attention_mask=cache.mask(), position_ids=position[None], cache=cache, use_cache=True)
    for layer in cache.layers:
        layer.move(position)
    cache.length += 1
    logits: Tensor = output.logits[:, -1]
    return logits
