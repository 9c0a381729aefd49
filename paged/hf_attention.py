"""The attention function "paged" of transformers, and its mask function; importing this registers both.

With a PagedCache (hf.py) the keys that its `update` returned say so: then K and V are written to pages, and read there.
With another cache, or none, K and V come as tensors, and transformers' own function attends over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from paged.errors import ConfigError

NAME = "paged"


class Attends(Protocol):
    """A cache that attends over what it holds."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, settings: Settings
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Handle:
    """Goes from `update` to the attention function, on the keys."""

    cache: Attends
    layer: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What an attention function is given beside tensors."""

    module: Any
    scale: float
    soft_cap: float
    more: dict[str, Any]  # for transformers' own function


class Mask:
    """A mask that is not made unless somebody needs it. padding: bool [rows, keys], or None where there is none.

    is_plain: causal, perhaps within a sliding window, and nothing else but padding.
    """

    ndim = 4  # to transformers a mask that is made already

    def __init__(self, padding: Tensor | None, is_plain: bool, given: dict[str, Any]) -> None:
        self.padding, self.is_plain, self._given = padding, is_plain, given
        self._kept: dict[bool, Tensor | None] = {}

    def made(self, needed: bool) -> Tensor | None:
        """bool [rows, 1, tokens, keys]; unless it is `needed` None where transformers' function does without."""
        if needed not in self._kept:
            skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False} if needed else {}
            self._kept[needed] = sdpa_mask(**(self._given | skips))
        return self._kept[needed]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # pages and masks are handed over in Python
def paged_mask(**given: Any) -> Mask:
    """The mask function of "paged". Arguments as transformers gives them to one."""
    padding = given.get("attention_mask")
    if isinstance(padding, Mask):
        return padding
    is_plain = bool(given.get("allow_is_causal_skip")) and not given.get("use_vmap")
    return Mask(padding, is_plain, given)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # pages and masks are handed over in Python
def paged_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention function "paged": over the pages of a PagedCache in place, over tensors without one.

    query: [rows, heads, tokens, head_dim]; key, value: [rows, kv_heads, tokens, head_dim], with a PagedCache the new
    ones alone. Returns [rows, tokens, heads, head_dim]. Raises ConfigError for what it does not do: sinks, returning
    weights; with a PagedCache or capped scores dropout and position biases.
    """
    handle: Handle | None = getattr(key, "paged", None)
    plain = handle is None and not softcap  # transformers' function has the rest
    for name in ("s_aux", "output_attentions", *(() if plain else ("position_bias", "dropout"))):
        if (found := more.get(name)) is not None and (isinstance(found, Tensor) or found):
            raise ConfigError(f'the attention function "paged" has no {name}: set another for this model')
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    settings = Settings(module, scale, softcap or 0.0, more)
    if handle is None:
        return dense(query, key, value, attention_mask, settings), None
    return handle.cache.attend(handle.layer, query, key, value, attention_mask, settings), None


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Any, settings: Settings) -> Tensor:
    """Attention over K and V as tensors, by transformers' function; by our own formula where scores are capped."""
    made = mask.made(bool(settings.soft_cap)) if isinstance(mask, Mask) else mask
    if not settings.soft_cap:
        out: Tensor = sdpa_attention_forward(
            settings.module, query, key, value, made, scaling=settings.scale, **settings.more
        )[0]
        return out
    if made is None:
        made = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        made = made.tril(key.shape[2] - query.shape[2])
    k, v = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    scores = settings.soft_cap * torch.tanh(query @ k.transpose(2, 3) * (settings.scale / settings.soft_cap))
    scores = scores.masked_fill(~made, float("-inf")) if made.dtype == torch.bool else scores + made
    return (scores.float().softmax(-1).nan_to_num().to(v.dtype) @ v).transpose(1, 2)


AttentionInterface.register(NAME, paged_attention_forward)
AttentionMaskInterface.register(NAME, paged_mask)
