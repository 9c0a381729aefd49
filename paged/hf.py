"""PagedCache: a transformers Cache whose K and V lie in pages.

    import paged.hf                                    # registers the attention function "paged" with transformers

    model.set_attn_implementation("paged")             # attention reads pages in place; without it K and V are gathered
    cache = paged.hf.PagedCache(model.config)
    model.generate(**inputs, past_key_values=cache)    # or a loop of your own: model(ids, past_key_values=cache)

Every row of the batch is a sequence with a block table. Padding on the left takes no pages: a row holds the tokens
after it. Beams, repeats, selections and copies of a cache are operations on block tables; K and V are copied only
where two rows write to a page that they share, each its own next token.

One forward, layer by layer: `update` gets the new K and V. At the first layer room is made in every block table. Where
the model's attention function is ours, `update` hands K and V through, and the function writes them and attends over
the pages. Where it is another, `update` writes them and gathers all that the layer sees into one tensor, which is what
such a function wants; so does our own for a mask that pages cannot express (holes, or four axes of the caller's own).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from paged.attention.backends import BACKENDS
from paged.block_table import Windows, first_page
from paged.errors import ConfigError, PageStateError
from paged.hf_attention import NAME, Handle, Mask, Settings, dense
from paged.manager import KVCacheManager
from paged.pool import KVPool
from paged.rows import RowPages, RowStep, unknown
from paged.sizing import parse_memory

__all__ = ["NAME", "PagedCache"]


class PagedCache(Cache):  # type: ignore[misc]  # transformers is not typed for us
    """K and V of a batch in pages, for models whose layers attend to everything or to a sliding window.

    config: the model's. kv_memory: bytes for pages, as `2GiB`, or a share of memory for pages and model; taken as
    pages are first written. page_size: tokens of a page, a power of two from 1 to 256. attention_backend: auto, native,
    sdpa or reference. K and V keep the dtype in which they come: float32, bfloat16 or float16.

    A call that raises before the first layer has written leaves everything as it was. No gradient flows through pages.
    `copy.copy` and `copy.deepcopy` make a cache that shares this one's pages, as the prefix of another continuation.
    A cache and its copies are for one thread at a time.

    Counters, over the life of the cache: `num_steps` forwards; `bytes_gathered`, of K and V that were copied out of
    pages for an attention function; `pages_copied`, because a row wrote to a page that others share.

    Raises ConfigError for a model with other layers, and for settings that cannot work; OutOfPages where a forward
    does not fit; PageStateError for calls out of order.
    """

    def __init__(
        self, config: Any, *, kv_memory: str | int = "30%", page_size: int = 16, attention_backend: str = "auto"
    ) -> None:
        self._config = config.get_text_config(decoder=True)
        self._windows = _layer_windows(self._config)
        if attention_backend not in ("auto", *BACKENDS):
            raise ConfigError(f"attention_backend must be auto, {', '.join(BACKENDS)}, not {attention_backend!r}")
        if type(page_size) is not int or not 1 <= page_size <= 256 or page_size & (page_size - 1):
            raise ConfigError(f"page_size must be a power of two from 1 to 256, not {page_size!r}")
        self._settings = parse_memory(kv_memory), page_size, attention_backend
        self._store: RowPages | None = None
        self._start()

    def _start(self) -> None:
        this: Any = weakref.proxy(self)  # or pages would stay until the garbage is collected
        super().__init__(layers=[_Layer(this, i, window) for i, window in enumerate(self._windows)])
        self._rows: list[int] = []  # of each row its sequence
        self._pads = np.zeros(0, dtype=np.int64)  # [rows]: tokens on the left that are no tokens
        self._total = 0  # tokens of each row, padding and those of the forward under way counted
        self._step: RowStep | None = None  # the forward under way, or the last one
        self._asked: int | None = None  # the layer whose K and V our attention function is due to get
        self._recording = False
        self.num_steps = self.bytes_gathered = self.pages_copied = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        self._settle()
        copy = object.__new__(type(self))
        copy._config, copy._windows, copy._settings = self._config, self._windows, self._settings
        copy._store = self._store
        copy._start()
        if self._store is not None:
            copy._rows += self._store.fork(self._rows)
            copy._pads, copy._total, copy._recording = self._pads.copy(), self._total, self._recording
            weakref.finalize(copy, self._store.free, copy._rows).atexit = False
        return copy

    def __copy__(self) -> PagedCache:
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        raise TypeError("a PagedCache cannot be pickled: its pages belong to this process")

    def __repr__(self) -> str:
        return f"PagedCache({len(self._rows)} rows of {self._total} tokens)"

    @property
    def manager(self) -> KVCacheManager:
        """Who holds which pages. Raises PageStateError before the first forward."""
        return self._opened().manager

    @property
    def pool(self) -> KVPool:
        """The pages themselves. Raises PageStateError before the first forward."""
        return self._opened().pool

    @property
    def batch_size(self) -> int:
        return len(self._rows) or -1

    @property
    def is_initialized(self) -> bool:
        return self._total > 0

    # What transformers does to a whole cache

    def reset(self) -> None:
        """Forget every token."""
        if self._store is not None:
            self._store.free(self._rows)
        self._pads, self._total, self._step, self._asked = np.zeros(0, dtype=np.int64), 0, None, None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row; `tokens_to_remove` is negative, -3 for three, as transformers has it.

        Raises ValueError for a positive number and for more than there are, PageStateError where pages that a sliding
        window needs again are gone. The last forward can be undone as long as nothing else was done to the cache; of
        several, `activate_past_recording` before them keeps the pages, until a crop, or until rows are reordered,
        selected, repeated or copied.
        """
        tokens_to_remove = operator.index(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative one, not {tokens_to_remove}")
        total = self._total + tokens_to_remove
        if total < 0:
            raise ValueError(f"{-tokens_to_remove} tokens cannot be removed from {self._total}")
        if self._store is None:
            return
        if self._step is not None and -tokens_to_remove < self._step.count:
            self._check_whole()
        manager, pads = self._store.manager, np.minimum(self._pads, total)
        lengths = total - pads
        for seq_id, length in zip(self._rows, lengths.tolist(), strict=True):
            for window in self._store.manager.windows:
                first, kept = (first_page(n, window, manager.page_size) for n in (length, manager.num_computed(seq_id)))
                if first < kept:
                    raise PageStateError(
                        f"{-tokens_to_remove} tokens cannot be removed: pages of the sliding window of {window} before "
                        "them are gone; call activate_past_recording() before the forwards that are to be undone, and "
                        "undo them before rows are reordered, selected, repeated or copied"
                    )
        for seq_id, length in zip(self._rows, lengths.tolist(), strict=True):
            if length > manager.num_computed(seq_id):
                manager.commit(seq_id, unknown(length), length)
            manager.truncate(seq_id, length)
        self._pads, self._total, self._step, self._asked = pads, total, None, None

    def activate_past_recording(self) -> None:
        """Keep pages that leave a sliding window until the next `crop`."""
        self._recording = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues what row beam_idx[i] has, int64 [rows]. As `batch_select_indices`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after another. Raises ValueError below 1."""
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, not {repeats}: reset() forgets all rows")
        self._select([i for i in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, int64 [new rows] or bool [rows]. Raises IndexError for a row that is not there."""
        if self._rows:  # as transformers' own caches, nothing where there is nothing yet
            self._select(torch.arange(len(self._rows))[indices.cpu()].tolist())

    def _select(self, sources: list[int]) -> None:
        if self._store is None:
            return
        self._settle()
        forks = self._store.fork([self._rows[i] for i in sources])
        self._store.free(self._rows)
        self._rows += forks
        self._pads = self._pads[sources]

    # What a layer is asked

    def _length(self) -> int:
        return self._total

    def _mask_sizes(self, count: int, window: int | None) -> tuple[int, int]:
        """Keys that `count` tokens more will see in a layer, and the position of the first."""
        offset = 0 if window is None else max(0, self._total - window + 1)
        return self._total + count - offset, offset

    def _take(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """New K and V [rows, kv_heads, tokens, head_dim] of a layer; what its attention function is to be given."""
        if layer > 0 or self._asked is not None:
            self._expect(layer)
        if self._config._attn_implementation == NAME:
            self._asked = layer
            key.paged = Handle(self, layer)  # type: ignore[attr-defined]  # read by `paged_attention_forward`
            return key, value
        if layer == 0:
            self._begin(key, value, None, plain=False)
        self._write(key, value, layer)
        return self._gather(layer)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, settings: Settings) -> Tensor:
        """Write K and V, and attend. As our attention function, which see; returns [rows, tokens, heads, head_dim]."""
        plain = mask is None or (isinstance(mask, Mask) and mask.is_plain)
        padding = mask.padding if plain and mask is not None else None
        self._asked = None
        if layer == 0:
            self._begin(key, value, padding, plain)
        self._expect(layer)
        self._write(key, value, layer)
        step, store = self._under_way(), self._opened()
        if not plain or step.has_holes or not step.has_padding(padding):
            return dense(query, *self._gather(layer), mask, settings)
        group, i = store.layout.places[layer]
        q = step.packed(query)
        out = store.attention(
            q, store.pool.k[i], store.pool.v[i], step.metas[group], settings.scale, self._windows[layer],
            soft_cap=settings.soft_cap,
        )  # fmt: skip
        rows, heads, count, dim = query.shape
        if step.taken is not None:
            padded = out.new_zeros(rows * count, heads, dim)
            padded[step.taken] = out
            out = padded
        return out.view(rows, count, heads, dim)

    # One forward

    def _begin(self, key: Tensor, value: Tensor, padding: Tensor | None, plain: bool = True) -> None:
        """Make room for a forward's tokens in every row. padding: bool [rows, tokens so far and new], False is none."""
        self._check_whole()
        rows, _, count, _ = key.shape
        if self._store is not None:
            self._store.fits(key, value, 0)
        if self._store is None:
            self._store = RowPages(self._windows, *self._settings, key, value)
            weakref.finalize(self, self._store.free, self._rows).atexit = False
        store = self._store
        if not self._total:
            store.free(self._rows)
            self._rows += store.new(rows)
            self._pads = np.zeros(rows, dtype=np.int64)
        if len(self._rows) != rows:
            raise ValueError(
                f"the cache holds {len(self._rows)} rows, and the batch has {rows}: reset() it, or make another"
            )
        total = self._total + count
        pads, has_holes = self._padding(padding, total) if plain else (self._pads, False)
        before, lengths = self._total - self._pads, total - pads
        if not self._recording:
            store.commit(self._rows, before)
        self.pages_copied += store.extend(self._rows, lengths)
        self._step = RowStep.of(store, self._rows, before, lengths, count, key.device)
        self._step.padding, self._step.has_holes = padding, has_holes
        self._pads, self._total = pads, total
        self.num_steps += 1

    def _padding(self, padding: Tensor | None, total: int) -> tuple[npt.NDArray[np.int64], bool]:
        """Padding on the left of each row, and whether there is more elsewhere."""
        if padding is None:
            if self._pads.any():
                raise ValueError("rows of this cache have padding on the left: give attention_mask to every forward")
            return self._pads, False
        if padding.ndim != 2 or len(padding) != len(self._pads):
            raise ValueError(f"attention_mask must be [{len(self._pads)} rows, tokens], not {list(padding.shape)}")
        if padding.shape[1] < total:
            raise ValueError(f"attention_mask must cover all {total} tokens, past and new, not {padding.shape[1]}")
        seen = padding[:, :total]
        left = (seen.cumsum(1) == 0).sum(1).cpu().numpy()
        # A row without tokens yet may turn out to have more padding.
        pads = np.where(self._pads >= self._total, left, self._pads)
        if (left < self._pads).any():
            i = int((left < self._pads).argmax())
            raise ValueError(
                f"attention_mask shows {self._pads[i] - left[i]} tokens of row {i} that were padding when they were "
                "computed, and were not kept: keep the mask, or reset() the cache"
            )
        return pads, bool((seen.sum(1) + torch.from_numpy(pads).to(seen.device) < total).any())

    def _write(self, key: Tensor, value: Tensor, layer: int) -> None:
        step, store = self._under_way(), self._opened()
        store.fits(key, value, layer)
        group, i = store.layout.places[layer]
        k, v = (step.packed(tensor.detach()).to(store.pool.k[i].dtype) for tensor in (key, value))
        store.pool.write(i, k, v, step.metas[group].slots)
        step.layers += 1

    def _gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V that a layer sees, [rows, kv_heads, tokens, head_dim]; zeros where there is padding."""
        step, store, window = self._under_way(), self._opened(), self._windows[layer]
        group, i = store.layout.places[layer]
        offset = 0 if window is None else max(0, self._total - step.count - window + 1)
        positions = np.arange(offset, self._total)[None, :] - self._pads[:, None]  # [rows, seen]; in the row's tokens
        tables, size = store.manager.tables(self._rows, group), store.manager.page_size
        pages = np.take_along_axis(tables, np.maximum(positions, 0) // size, axis=1).astype(np.int64)
        slots = torch.from_numpy(pages * size + positions % size).to(step.device)
        kv = store.pool.read(i, slots)
        missing = torch.from_numpy(positions < 0).to(step.device)[:, :, None, None]
        k, v = (t.masked_fill(missing, 0).transpose(1, 2) if self._pads.any() else t.transpose(1, 2) for t in kv)
        self.bytes_gathered += k.nbytes + v.nbytes
        return k, v

    def _expect(self, layer: int) -> None:
        """Layers come one after another, each of them served."""
        due = self._asked
        if due is None:
            due = 0 if self._step is None else self._step.layers % len(self._windows)
        if due != layer or self._asked is not None:
            raise PageStateError(
                f"layer {layer} came where {due} was due: does the model call its attention function "
                f'("{self._config._attn_implementation}") in every layer?'
            )

    def _check_whole(self) -> None:
        step = self._step
        if step is not None and step.layers < len(self._windows):
            raise PageStateError(
                f"the last forward wrote {step.layers} of {len(self._windows)} layers: "
                f"crop(-{step.count}) forgets its tokens"
            )

    def _settle(self) -> None:
        """What the last forward wrote is there for good."""
        self._check_whole()
        if self._store is not None:
            self._store.commit(self._rows, self._total - self._pads)

    def _opened(self) -> RowPages:
        if self._store is None:
            raise PageStateError("nothing has been written to this cache yet, so it has no pages")
        return self._store

    def _under_way(self) -> RowStep:
        if self._step is None:
            raise PageStateError("no forward is under way: one begins with layer 0")
        return self._step


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed for us
    """One layer of a PagedCache, as transformers asks for it."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int, window: int | None) -> None:
        super().__init__()
        self._cache, self._index, self._window = cache, index, window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first forward makes the pages of all layers."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # pages are handed out in Python
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._cache._take(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache._mask_sizes(query_length, self._window)

    def get_seq_length(self) -> int:
        return self._cache._length()

    def get_max_length(self) -> int:
        return -1 if self._window is None else self._window


def _layer_windows(config: Any) -> Windows:
    """Of each layer the tokens that a query sees, its own included; None is all. config: of the decoder.

    Raises ConfigError for a model with layers of another kind.
    """
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds: Sequence[str] = getattr(config, "layer_types", None) or (
        ["chunked_attention" if getattr(config, "attention_chunk_size", None) else
         "sliding_attention" if window else "full_attention"] * count
    )  # fmt: skip
    if getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", 0):
        raise ConfigError(f"{config.model_type} shares K and V between layers, which PagedCache does not")
    if other := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"{config.model_type} has layers of {', '.join(sorted(other))}: PagedCache holds full and sliding"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
