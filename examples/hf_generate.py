"""transformers' generate() over our pages: a padded batch, beams, several tokens after a past, and what it cost.

    python examples/hf_generate.py

Every answer is compared with that of transformers without a cache.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import paged.hf
from paged.hf import PagedCache
from worker.checkpoints import resolve

PROMPTS = ["The capital of France is", "Once upon a time, in a village by the sea, there lived", "Water boils at"]
QUESTIONS = [" Why is the sky blue?", " What do bees eat?"]


def main() -> None:
    folder = resolve("smollm2").path  # any model that transformers loads
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=paged.hf.NAME
        ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")

    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    cache = PagedCache(model.config, kv_memory="256MiB")
    found = generate(model, batch, cache=cache)
    for text in tokenizer.batch_decode(found, skip_special_tokens=True):
        print(repr(text))
    assert torch.equal(found, generate(model, batch, use_cache=False))
    held = cache.manager.num_used
    print(f"{held} pages hold {cache.get_seq_length()} tokens of the longest row; nothing is held for padding")

    beams = PagedCache(model.config, kv_memory="256MiB")
    found = generate(model, batch, cache=beams, num_beams=4)
    assert torch.equal(found, generate(model, batch, use_cache=False, num_beams=4))
    print(f"4 beams: {beams.pages_copied} pages were copied in {beams.num_steps} steps, the rest is shared")
    print(f"bytes gathered, of all of this: {cache.bytes_gathered + beams.bytes_gathered}")

    # One past, computed once, and two continuations of several tokens each: copies of a cache share its pages.
    past = PagedCache(model.config, kv_memory="256MiB")
    start = tokenizer("You answer in one short sentence.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        model(start, cache=past, use_cache=True)
        for question in QUESTIONS:
            asked = tokenizer(question, return_tensors="pt")["input_ids"]
            logits = model(asked, cache=copy.deepcopy(past), use_cache=True).logits
            whole = model(torch.cat((start, asked), dim=1), use_cache=False).logits[:, start.shape[1] :]
            difference = (logits - whole).abs().max().item()
            assert difference < 1e-3
            print(f"{question!r} after a past of {start.shape[1]} tokens: logits differ by {difference:.0e} at most")


def generate(model: Any, batch: Any, **more: Any) -> torch.Tensor:
    """Greedy, or the best beam: token ids [rows, prompt and 16 new]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result: torch.Tensor = model.generate(**batch, max_new_tokens=16, do_sample=False, **more)
    return result


if __name__ == "__main__":
    main()
