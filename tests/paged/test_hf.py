"""PagedCache under transformers: the tokens and logits of its own caches, whatever is done to a batch."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import tiny
from torch import Tensor
from transformers import DynamicCache, StaticCache

from paged import ConfigError, OutOfPages, PageStateError, hf_attention
from paged.hf import PagedCache
from paged.pool import KVPool

NAMES = ["llama", "gemma3", "gemma2", "mistral", "qwen2", "qwen3", "phi3", "granite"]
WINDOW = 7  # of the tiny models that have one
MASK = torch.tensor([[1] * 11, [0] * 4 + [1] * 7, [0] * 10 + [1]])  # padding on the left


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One of each family, made when it is first asked for."""

    class Made(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self[name] = tiny(name, tmp_path_factory.mktemp(name))
            self[name].generation_config.eos_token_id = None
            return self[name]

    return Made()


def ids(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 131, (rows, count), generator=torch.Generator().manual_seed(seed))


def cache_of(model: Any, **more: Any) -> PagedCache:
    return PagedCache(model.config, **{"kv_memory": "32MiB", "page_size": 4, **more})


def run(model: Any, implementation: str, cache: Any, tokens: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    """Logits of one forward [rows, tokens, vocab]."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        logits: Tensor = model(tokens, attention_mask=mask, cache=cache, use_cache=cache is not None, **more).logits
    return logits


def generated(model: Any, implementation: str, cache: Any, tokens: Tensor, mask: Tensor, new: int, **more: Any) -> Any:
    model.set_attn_implementation(implementation)
    wanted = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "pad_token_id": 0}
    return model.generate(tokens, cache=cache, attention_mask=mask, max_new_tokens=new, **wanted, **more)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


# Against transformers' own caches


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", ["paged", "sdpa", "eager"])
def test_a_padded_batch_generates_what_it_does_with_transformers_cache(
    models: dict[str, Any], name: str, implementation: str
) -> None:
    """With the past and without: past the window, over many pages; gathered for functions that are not ours."""
    if (name, implementation) == ("gemma2", "sdpa"):
        implementation = "eager"  # sdpa does not cap scores
    model, tokens = models[name], ids(3, 11)
    expected = generated(model, "eager", DynamicCache(config=model.config), tokens, MASK, 20)
    cache = cache_of(model)
    found = generated(model, implementation, cache, tokens, MASK, 20)
    uncached = generated(model, implementation, None, tokens, MASK, 20, use_cache=False)
    for each in (found, uncached):
        assert torch.equal(each.sequences, expected.sequences)
        for mine, theirs in zip(each.logits, expected.logits, strict=True):
            close(mine, theirs)
    assert (cache.bytes_gathered == 0) == (implementation == "paged")
    assert (cache.num_steps, cache.pages_copied, cache.get_seq_length()) == (20, 0, 30)
    cache.manager.check()


def test_padding_takes_no_pages_and_windows_give_pages_back(models: dict[str, Any]) -> None:
    cache = cache_of(models["llama"])
    generated(models["llama"], "paged", cache, ids(3, 11), MASK, 20)
    assert cache.manager.num_used == sum(math.ceil(n / 4) for n in (30, 26, 20))
    cache = cache_of(models["gemma3"])  # a group with everything, five with windows of 7, which lie in 3 pages at most
    generated(models["gemma3"], "paged", cache, ids(1, 40), torch.ones(1, 40), 20)
    assert cache.manager.num_used <= math.ceil(59 / 4) + 5 * 3


@pytest.mark.parametrize("backend", ["reference", "sdpa", "native"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_several_new_tokens_after_a_past(models: dict[str, Any], name: str, backend: str, page_size: int) -> None:
    model, tokens = models[name], ids(2, 30)
    expected = run(model, "eager", None, tokens)
    cache = cache_of(model, attention_backend=backend, page_size=page_size)
    parts = [run(model, "paged", cache, part) for part in torch.split(tokens, [5, 9, 1, 15], dim=1)]
    close(torch.cat(parts, dim=1), expected)
    assert cache.bytes_gathered == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_beams_copy_nothing_but_shared_tails(
    models: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = models[name], ids(3, 11)
    chosen: list[tuple[int, list[int]]] = []
    reorder = PagedCache.reorder_cache

    def noted(cache: PagedCache, beam_idx: Tensor) -> None:
        chosen.append((cache.get_seq_length(), beam_idx.tolist()))
        reorder(cache, beam_idx)

    monkeypatch.setattr(PagedCache, "reorder_cache", noted)
    expected = generated(model, "eager", None, tokens, MASK, 20, num_beams=4, output_scores=True)
    cache = cache_of(model)
    found = generated(model, "paged", cache, tokens, MASK, 20, num_beams=4, output_scores=True)
    assert torch.equal(found.sequences, expected.sequences)
    close(found.sequences_scores, expected.sequences_scores)
    assert cache.bytes_gathered == 0
    pads, copies = [0, 4, 10], 0
    for total, rows in chosen[:-1]:  # nobody writes after the last
        for row, count in Counter(rows).items():
            if (total - pads[row // 4]) % 4:  # the last page is not full: all but one of its owners copy it
                copies += (count - 1) * len(cache.manager.windows)
    assert cache.pages_copied == copies > 0
    cache.manager.check()


def test_drafts_are_taken_back(models: dict[str, Any]) -> None:
    """Prompt lookup crops what was not accepted; with windows pages wait for that."""
    for name in ("llama", "gemma3"):
        model = models[name]
        tokens = ids(1, 6).repeat(1, 4)
        expected = generated(model, "eager", None, tokens, torch.ones_like(tokens), 24)
        cache = cache_of(model)
        found = generated(model, "paged", cache, tokens, torch.ones_like(tokens), 24, prompt_lookup_num_tokens=5)
        assert torch.equal(found.sequences, expected.sequences)
        assert cache.num_steps <= 24
        cache.manager.check()


def test_generate_goes_on_with_a_cache_that_has_a_past(models: dict[str, Any]) -> None:
    model, tokens = models["gemma3"], ids(2, 9)
    ones = torch.ones(2, 60, dtype=torch.long)
    cache = cache_of(model)
    first = generated(model, "paged", cache, tokens, ones[:, :9], 10).sequences
    longer = torch.cat((first, ids(2, 5, seed=1)), dim=1)
    second = generated(model, "paged", cache, longer, ones[:, :24], 10)
    assert torch.equal(second.sequences, generated(model, "eager", None, longer, ones[:, :24], 10).sequences)


def test_the_old_name_of_the_argument(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], ids(1, 9)
    model.set_attn_implementation("paged")
    cache = cache_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer transformers call it cache
        found = model.generate(tokens, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, generated(model, "eager", None, tokens, torch.ones_like(tokens), 5).sequences)
    assert cache.num_steps == 5


# Masks


def holes() -> Tensor:
    """Padding on the right of the prompts of three rows, then tokens of all; a hole besides."""
    mask = torch.ones(3, 16, dtype=torch.long)
    mask[0, 8:11] = 0
    mask[1, 5:11] = 0
    mask[1, 2] = 0
    return mask


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2"])
def test_masks_with_holes_are_right_and_gather(models: dict[str, Any], name: str) -> None:
    model, tokens, mask = models[name], ids(3, 16), holes()
    positions = mask.cumsum(1) - 1
    own, theirs = cache_of(model), DynamicCache(config=model.config)
    for part in (slice(0, 11), slice(11, 12), slice(12, 16)):
        given_ = tokens[:, part], mask[:, : part.stop]
        more = {"position_ids": positions[:, part].clamp(min=0)}
        found = run(model, "paged", own, *given_, **more)
        expected = run(model, "eager", theirs, *given_, **more)
        seen = mask[:, part].bool()
        close(found[seen], expected[seen])
    assert own.bytes_gathered > 0


def test_a_mask_of_four_axes_is_taken_as_it_is(models: dict[str, Any]) -> None:
    """A prefix that sees itself whole."""
    model, tokens = models["llama"], ids(1, 12)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[:5, :5] = True
    cache = cache_of(model)
    found = [
        run(model, "paged", cache, tokens[:, :7], mask[None, None, :7, :7]),
        run(model, "paged", cache, tokens[:, 7:], mask[None, None, 7:]),
    ]
    close(torch.cat(found, dim=1), run(model, "sdpa", None, tokens, mask[None, None]))


def test_without_our_cache_the_function_is_transformers(models: dict[str, Any]) -> None:
    for name in ("llama", "gemma3", "gemma2"):
        model, tokens = models[name], ids(3, 11)
        static = StaticCache(config=model.config, max_cache_len=32)
        one = ids(1, 9)  # without padding
        close(
            run(model, "paged", StaticCache(config=model.config, max_cache_len=32), one),
            run(model, "eager", None, one),
        )
        expected = generated(model, "eager", None, tokens, MASK, 8)
        for cache in (static, DynamicCache(config=model.config)):
            found = generated(model, "paged", cache, tokens, MASK, 8, disable_compile=True)
            assert torch.equal(found.sequences, expected.sequences)


# What is done to a batch, at random, against transformers' cache


def ops() -> st.SearchStrategy[tuple[str, Any]]:
    return st.one_of(
        st.tuples(st.just("forward"), st.integers(1, 9)),
        st.tuples(st.just("crop"), st.integers(0, 6)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 99), min_size=6, max_size=6)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 99), min_size=1, max_size=4)),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("copy"), st.none()),
    )


@settings(max_examples=25)
@given(
    name=st.sampled_from(["llama", "gemma3"]),
    implementation=st.sampled_from(["paged", "paged", "eager"]),
    page_size=st.sampled_from([1, 2, 8]),
    pads=st.lists(st.integers(0, 8), min_size=1, max_size=3),
    steps=st.lists(ops(), min_size=1, max_size=12),
)
def test_whatever_is_done_the_logits_are_those_of_transformers_cache(
    models: dict[str, Any], name: str, implementation: str, page_size: int, pads: list[int], steps: list[Any]
) -> None:
    model = models[name]
    own: PagedCache = cache_of(model, page_size=page_size)
    theirs = DynamicCache(config=model.config)
    for cache in (own, theirs):
        cache.activate_past_recording()
    left = torch.tensor(pads)
    total, kept = 0, [own]
    settled = 0  # tokens before which a window's pages may be gone
    for number, (what, value) in enumerate([("forward", 9), *steps]):
        rows = len(left)
        if what == "forward":
            tokens = ids(rows, value, seed=number)
            total += value
            mask = (torch.arange(total)[None] >= left[:, None]).long()
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -value:]
            found = run(model, implementation, own, tokens, mask, position_ids=positions)
            expected = run(model, "eager", theirs, tokens, mask, position_ids=positions)
            seen = mask[:, -value:].bool()
            close(found[seen], expected[seen])
        elif what == "crop":
            if name == "gemma3" and total - 9 < WINDOW:
                continue  # transformers' own cache has no defined past there
            value = min(value, total - (max(settled, 9) if name == "gemma3" else 9))
            total -= value
            for cache in (own, theirs):
                cache.crop(-value)
            settled = total
        elif what == "copy":
            theirs, own = copy.deepcopy(theirs), copy.deepcopy(own)
            kept.append(own)
            settled = total
        else:
            settled = total
            if what == "reorder":
                chosen = [i % rows for i in value[:rows]]
            elif what == "select":
                chosen = [i % rows for i in value]
            else:
                chosen = [i for i in range(rows) for _ in range(2)] if rows < 4 else list(range(rows))
            left = left[chosen]
            for cache in (own, theirs):
                if what == "repeat" and rows < 4:
                    cache.batch_repeat_interleave(2)
                else:
                    (cache.reorder_cache if what == "reorder" else cache.batch_select_indices)(torch.tensor(chosen))
        own.manager.check()
        assert own.get_seq_length() == theirs.get_seq_length() == total
    manager = own.manager
    for cache in kept:
        cache.reset()
    manager.check(idle=True)


def test_the_comparison_sees_a_copy_that_is_not_made(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: two rows write to the page that they share."""
    model = models["llama"]

    def compare(seed: int) -> None:  # another prompt each time: the memory of the last pool may come back as it was
        tokens, cache = ids(1, 5, seed), cache_of(model)
        run(model, "paged", cache, tokens)
        cache.batch_repeat_interleave(2)
        run(model, "paged", cache, torch.tensor([[7], [9]]))
        rows = torch.cat((tokens.repeat(2, 1), torch.tensor([[7, 8], [9, 8]])), dim=1)
        close(run(model, "paged", cache, torch.tensor([[8], [8]])), run(model, "eager", None, rows)[:, -1:])

    compare(0)
    monkeypatch.setattr(KVPool, "apply", lambda *_: None)
    with pytest.raises(AssertionError):
        compare(1)


def test_forwards_that_are_recorded_are_undone_together(models: dict[str, Any]) -> None:
    model, tokens = models["gemma3"], ids(1, 40)
    cache = cache_of(model)
    run(model, "paged", cache, tokens[:, :20])
    cache.activate_past_recording()
    for seed in range(3):
        run(model, "paged", cache, ids(1, 9, seed=seed))
    cache.crop(-27)
    close(run(model, "paged", cache, tokens[:, 20:]), run(model, "eager", None, tokens)[:, 20:])


def test_a_row_of_padding_alone_begins_later_and_a_crop_reaches_into_padding(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], ids(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :9] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = run(model, "eager", None, tokens, mask, position_ids=positions)
    cache = cache_of(model)

    def forward(first: int, last: int) -> None:
        more = {"position_ids": positions[:, first:last]}
        found = run(model, "paged", cache, tokens[:, first:last], pad(last), **more)
        seen = mask[:, first:last].bool()
        close(found[seen], expected[:, first:last][seen])

    def pad(last: int) -> Tensor:  # longer than it must be, which does no harm
        return torch.cat((mask[:, :last], torch.zeros(2, 99 - last, dtype=torch.long)), dim=1)

    forward(0, 5)
    forward(5, 12)
    cache.crop(-7)
    forward(5, 8)
    cache.crop(-8)
    assert cache.manager.num_used == 0
    forward(0, 20)
    assert cache.manager.num_used == math.ceil(20 / 4) + math.ceil(11 / 4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_is_gathered_is_counted_and_free_of_what_was_there_before(models: dict[str, Any], name: str) -> None:
    """Freed pages hold NaN here; tokens beside a row's own must not reach the sums."""
    model, tokens = models[name], ids(2, 9)
    cache = cache_of(model)
    run(model, "eager", cache, ids(2, 30, seed=5))
    config, layout = model.config, cache.pool.layout
    windows = [w or 99 for w in layout.windows for _ in range(layout.num_layers)]
    each = 2 * 2 * config.num_key_value_heads * config.head_dim * 4  # rows, K and V
    assert cache.bytes_gathered == sum(each * 30 for _ in windows)
    cache.reset()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    run(model, "paged", cache, tokens[:, :8], mask[:, :8], position_ids=positions[:, :8])
    found = run(model, "eager", cache, tokens[:, 8:], mask, position_ids=positions[:, 8:])
    close(found, run(model, "eager", None, tokens, mask, position_ids=positions)[:, 8:])


def test_masks_that_see_more_than_the_past_are_made(models: dict[str, Any]) -> None:
    """Both directions within the prompt: nothing is plain then, and two layers may be told differently."""
    model, tokens = copy.deepcopy(models["gemma3"]), ids(2, 12)
    model.config.use_bidirectional_attention = True
    cache = cache_of(model)
    close(run(model, "paged", cache, tokens), run(model, "eager", DynamicCache(config=model.config), tokens))
    assert cache.bytes_gathered > 0
    capped = copy.deepcopy(models["gemma2"])
    capped.config.is_causal = False
    for own in (cache_of(capped), None):
        close(run(capped, "paged", own, tokens), run(capped, "eager", None, tokens))


def test_a_mask_for_each_kind_of_layer(models: dict[str, Any]) -> None:
    """Padding that the first layer is not told of: its mask has four axes, those of other layers are plain."""
    model, tokens, mask = models["gemma3"], ids(3, 11), MASK
    model.set_attn_implementation("paged")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    sees = mask[:, None, None, :].bool() & torch.ones(11, 11, dtype=torch.bool).tril().triu(1 - WINDOW)
    padding = mask.bool()
    for full in (
        hf_attention.paged_mask(
            batch_size=3, q_length=11, kv_length=11, attention_mask=padding, allow_is_causal_skip=True
        ),
        mask[:, None, None, :].bool() & torch.ones(11, 11, dtype=torch.bool).tril(),
    ):
        kinds = {"sliding_attention": sees, "full_attention": full}
        found = run(model, "paged", cache_of(model), tokens, kinds, position_ids=positions)  # type: ignore[arg-type]
        expected = run(model, "eager", None, tokens, mask, position_ids=positions)
        close(found[padding], expected[padding])


def test_a_cache_changes_attention_functions_with_padding_inside(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], ids(3, 14)
    mask = torch.cat((MASK, torch.ones(3, 3, dtype=torch.long)), dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = cache_of(model)
    run(model, "paged", cache, tokens[:, :11], MASK, position_ids=positions[:, :11])
    expected = run(model, "eager", None, tokens, mask, position_ids=positions)
    for i, implementation in ((11, "sdpa"), (12, "eager"), (13, "paged")):
        more = {"position_ids": positions[:, i : i + 1]}
        found = run(model, implementation, cache, tokens[:, i : i + 1], mask[:, : i + 1], **more)
        close(found, expected[:, i : i + 1])


def test_inference_mode_autocast_and_compiled_models(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], ids(2, 12)
    expected = run(model, "eager", None, tokens)
    cache = cache_of(model)
    model.set_attn_implementation("paged")
    with torch.inference_mode():
        model(tokens[:, :8], cache=cache)
    close(run(model, "paged", cache, tokens[:, 8:]), expected[:, 8:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(model, "paged", cache_of(model), tokens)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    torch.compiler.reset()
    compiled, cache = torch.compile(model.forward, backend="eager"), cache_of(model)
    with torch.no_grad():
        found = torch.cat([compiled(part, cache=cache).logits for part in torch.split(tokens, [7, 5], dim=1)], dim=1)  # type: ignore[no-untyped-call]
    torch.compiler.reset()
    close(found, expected)


# Pages, and whose they are


def test_a_copy_shares_pages_and_gives_them_back_when_it_is_gone(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], ids(1, 13)
    cache = cache_of(model)
    run(model, "paged", cache, tokens)
    held = cache.manager.num_used
    other = copy.deepcopy(cache)
    assert (cache.manager.num_used, other.manager) == (held, cache.manager)
    more = ids(1, 3, seed=1)
    expected = run(model, "eager", None, torch.cat((tokens, more), dim=1))[:, -3:]
    close(run(model, "paged", other, more), expected)
    assert (other.pages_copied, cache.get_seq_length()) == (1, 13)
    close(run(model, "paged", cache, more), expected)  # the first is as it was
    gc.disable()
    del other  # no collection is needed
    assert cache.manager.num_used == held
    manager = cache.manager
    del cache
    gc.enable()
    manager.check(idle=True)


def test_a_forward_that_does_not_fit_changes_nothing(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], ids(2, 20)
    bytes_per_page = 2 * 2 * 2 * 16 * 4 * 4
    cache = cache_of(model, kv_memory=bytes_per_page * 9)  # 8 pages of 4 tokens, and the null page
    run(model, "paged", cache, tokens[:, :10])
    with pytest.raises(OutOfPages, match="raise kv_memory"):
        run(model, "paged", cache, tokens[:, 10:])
    assert (cache.get_seq_length(), cache.num_steps) == (10, 1)
    close(run(model, "paged", cache, tokens[:, 10:16]), run(model, "eager", None, tokens[:, :16])[:, 10:])
    cache.reset()
    with pytest.raises(OutOfPages):
        run(model, "paged", cache, ids(9, 4))
    close(run(model, "paged", cache, tokens[:, :16]), run(model, "eager", None, tokens[:, :16]))


def test_a_forward_that_stops_half_way_is_forgotten_by_a_crop(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llama", "gemma3"):
        model, tokens = models[name], ids(2, 20)
        cache = cache_of(model)
        run(model, "paged", cache, tokens[:, :12])
        write, calls = KVPool.write, list[int]()

        def failing(pool: KVPool, layer: int, *more: Any, write: Any = write, calls: list[int] = calls) -> None:
            calls.append(layer)
            if len(calls) == 2:
                raise RuntimeError("planted")
            write(pool, layer, *more)

        with monkeypatch.context() as patch:
            patch.setattr(KVPool, "write", failing)
            with pytest.raises(RuntimeError, match="planted"):
                run(model, "paged", cache, ids(2, 5, seed=3))
        for wrong in (
            partial(run, model, "paged", cache, tokens[:, 12:]),
            partial(cache.crop, -1),
            partial(cache.crop, 0),
        ):
            with pytest.raises(PageStateError, match=r"wrote 1 of \d+ layers: crop\(-5\) forgets"):
                wrong()
        with pytest.raises(PageStateError, match="wrote 1 of"):
            cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-5)
        close(run(model, "paged", cache, tokens[:, 12:]), run(model, "eager", None, tokens)[:, 12:])


# What is refused


def test_misuse_has_a_message_and_costs_nothing(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], ids(3, 11)
    cache = cache_of(model)
    with pytest.raises(PageStateError, match="nothing has been written"):
        _ = cache.manager
    cache.batch_repeat_interleave(2)  # nothing is there yet to be repeated or chosen
    cache.reorder_cache(torch.tensor([1, 0]))
    run(model, "paged", cache, tokens, MASK, position_ids=(MASK.cumsum(1) - 1).clamp(min=0))
    longer = torch.cat((MASK, torch.ones(3, 1, dtype=torch.long)), dim=1)
    shown = longer.clone()
    shown[1, 3] = 1
    one = tokens[:, :1]
    for wrong, error, message in (
        (lambda: run(model, "paged", cache, one), ValueError, "give attention_mask to every forward"),
        (lambda: run(model, "paged", cache, one, MASK), ValueError, "cover all 12 tokens, past and new, not 11"),
        (lambda: run(model, "paged", cache, one, shown), ValueError, "1 tokens of row 1 that were padding"),
        (
            lambda: run(model, "paged", cache, tokens[:2, :1], longer[:2]),
            ValueError,
            "holds 3 rows, and the batch has 2",
        ),
        (lambda: cache.crop(3), ValueError, "as a negative one, not 3"),
        (lambda: cache.crop(-12), ValueError, "12 tokens cannot be removed from 11"),
        (lambda: cache.batch_select_indices(torch.tensor([0, 3])), IndexError, "3"),
        (lambda: cache.batch_repeat_interleave(0), ValueError, "repeats must be at least 1, not 0"),
        (lambda: cache.batch_repeat_interleave(-1), ValueError, "repeats must be at least 1, not -1"),
    ):
        with pytest.raises(error, match=message):
            wrong()
    positions = (longer.cumsum(1) - 1).clamp(min=0)
    found = run(model, "paged", cache, one, longer, position_ids=positions[:, -1:])
    everything = torch.cat((tokens, one), dim=1)
    close(found, run(model, "eager", None, everything, longer, position_ids=positions)[:, -1:])


def test_a_window_that_has_moved_on_cannot_be_cropped_into(models: dict[str, Any]) -> None:
    model, tokens = models["gemma3"], ids(1, 40)
    cache = cache_of(model)
    for part in torch.split(tokens[:, :30], 1, dim=1):
        run(model, "paged", cache, part)
    with pytest.raises(PageStateError, match="call activate_past_recording"):
        cache.crop(-12)
    cache.crop(-1)  # the last forward can always be undone
    close(run(model, "paged", cache, tokens[:, 29:]), run(model, "eager", None, tokens)[:, 29:])


def test_other_models_and_settings_are_refused(models: dict[str, Any]) -> None:
    config = models["llama"].config
    with pytest.raises(ConfigError, match="auto, reference, sdpa, native"):
        PagedCache(config, attention_backend="cuda")
    with pytest.raises(ConfigError, match="not understood"):
        PagedCache(config, kv_memory="much")
    for page_size in (0, 3, 512, "16"):
        with pytest.raises(ConfigError, match="power of two"):
            PagedCache(config, page_size=page_size)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="holds 0 pages"):
        run(models["llama"], "paged", PagedCache(config, kv_memory=100), ids(1, 3))
    changed = copy.deepcopy(config)
    changed.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        PagedCache(changed)
    changed.layer_types = None
    changed.num_kv_shared_layers = 1
    with pytest.raises(ConfigError, match="shares K and V"):
        PagedCache(changed)
    changed.num_kv_shared_layers, changed.attention_chunk_size = 0, 8
    with pytest.raises(ConfigError, match="chunked_attention"):
        PagedCache(changed)


def test_a_model_that_does_not_call_the_attention_function_is_found_out(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["llama"]
    cache = cache_of(model)
    run(model, "paged", cache, ids(1, 3))
    key = torch.zeros(1, 2, 1, 16)
    cache.update(key, key, 0)
    for layer in (0, 1):
        with pytest.raises(PageStateError, match="does the model call its attention function"):
            cache.update(key.clone(), key, layer)
    cache.crop(0)
    handed, value = cache.update(key.clone(), key, 0)
    query = torch.zeros(1, 6, 1, 16)
    hf_attention.paged_attention_forward(model, query, handed, value, None)
    with pytest.raises(PageStateError, match="layers"):  # the same keys again
        hf_attention.paged_attention_forward(model, query, handed, value, None)


def test_k_and_v_that_do_not_fit_cost_nothing(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], ids(1, 12)
    cache = cache_of(copy.deepcopy(model).to(torch.bfloat16))
    run(half := copy.deepcopy(model).to(torch.bfloat16), "paged", cache, tokens[:, :8])
    with pytest.raises(
        ConfigError, match=r"K of layer 0 is torch\.float32, and the pages of this cache hold torch\.bfloat16"
    ):
        run(model, "paged", cache, tokens[:, 8:])
    with pytest.raises(ConfigError, match="K and V of all layers must be alike"):
        run(models["phi3"].to(torch.float32), "paged", cache, tokens[:, 8:])
    assert cache.get_seq_length() == 8
    run(half, "paged", cache, tokens[:, 8:])


def test_a_copy_is_a_cache_of_its_own_and_a_pickle_is_refused(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], ids(1, 12)
    cache = cache_of(model)
    run(model, "paged", cache, tokens)
    other = copy.copy(cache)
    other.crop(-4)
    assert (cache.get_seq_length(), other.get_seq_length()) == (12, 8)
    manager = cache.manager
    del cache
    close(run(model, "paged", other, tokens[:, 8:]), run(model, "eager", None, tokens)[:, 8:])
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(other)
    other.reset()
    manager.check(idle=True)


def test_nothing_piles_up_step_after_step(models: dict[str, Any]) -> None:
    model, cache = models["mistral"], cache_of(models["mistral"])
    for i in range(100):
        run(model, "paged", cache, ids(2, 1, seed=i))
    assert cache.manager.changed(cache._rows) == []
    assert cache.manager.num_used <= 2 * 3


@pytest.mark.parametrize("name", ["s_aux", "position_bias", "output_attentions"])
def test_what_an_attention_function_cannot_do_is_refused(models: dict[str, Any], name: str) -> None:
    cache, key = cache_of(models["llama"]), torch.zeros(1, 2, 3, 16)
    models["llama"].set_attn_implementation("paged")
    handed, value = cache.update(key, key.clone(), 0)
    more: Any = {name: torch.zeros(1) if name != "output_attentions" else True}
    with pytest.raises(ConfigError, match=f"has no {name}"):
        hf_attention.paged_attention_forward(models["llama"], torch.zeros(1, 6, 3, 16), handed, value, None, **more)


def test_dropout_is_refused(models: dict[str, Any]) -> None:
    model = models["llama"]
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    try:
        with pytest.raises(ConfigError, match="no dropout"):
            run(model, "paged", cache_of(model), ids(1, 3))
    finally:
        model.eval()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(models: dict[str, Any], dtype: torch.dtype) -> None:
    """Pages keep what they are given; the native kernels sum in float32."""
    model, tokens = copy.deepcopy(models["qwen3"]).to(dtype), ids(2, 20)
    parts = [run(model, "paged", cache := cache_of(model), tokens[:, :15]), run(model, "paged", cache, tokens[:, 15:])]
    assert cache.pool.k[0].dtype == dtype
    expected = run(model, "eager", None, tokens)
    assert (torch.cat(parts, dim=1) - expected).abs().max() < 0.05 * expected.abs().max()
