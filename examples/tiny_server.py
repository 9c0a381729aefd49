"""A serving loop on the memory manager alone, as docs/tutorial.md builds it: continuous batching in about 60 lines.

    python examples/tiny_server.py

The model is made up: the K and V of a token are the sum of all tokens so far, and the next token depends on them alone.
So every answer can be checked, and a page that is stale or not one's own would show.
"""

from __future__ import annotations

import numpy as np

from paged import KVCacheManager, OutOfPages, export

PAGE_SIZE, NUM_PAGES, MOST = 4, 24, 12  # tokens a page, pages with the null page, tokens of an answer
pool = np.zeros(NUM_PAGES * PAGE_SIZE, dtype=np.int64)  # K and V of every slot


class Sequence:
    def __init__(self, seq_id: int, prompt: list[int]) -> None:
        self.seq_id, self.prompt, self.tokens, self.computed = seq_id, prompt, list(prompt), 0

    @property
    def array(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array(self.tokens, dtype=np.int32)


def model(history: int) -> int:
    """The next token after a history."""
    return history * 31 % 1009 + 1


def forward(manager: KVCacheManager, batch: list[Sequence]) -> list[int]:
    """Writes K and V of what each sequence misses, and samples its next token: a worker's part of a step."""
    ids, lengths = [s.seq_id for s in batch], [len(s.tokens) for s in batch]
    for move in manager.take_moves():  # copies of shared pages, before anything is written; here none ever is
        raise AssertionError(f"nobody forks, and yet {move}")
    tables, _ = export.padded(manager, ids, lengths)  # what an attention kernel reads
    slots = export.slots(manager, ids, [s.computed for s in batch], lengths)  # where K and V are written
    written, sampled = iter(slots.tolist()), []
    for sequence, table in zip(batch, tables, strict=True):
        for position in range(sequence.computed, len(sequence.tokens)):
            page, offset = table[(position - 1) // PAGE_SIZE], (position - 1) % PAGE_SIZE  # of the token before
            before = pool[page * PAGE_SIZE + offset] if position else 0
            slot = next(written)
            pool[slot] = before + sequence.tokens[position]
        sampled.append(model(int(pool[slot])))
    return sampled


def serve(prompts: list[list[int]]) -> list[list[int]]:
    """The answers to all prompts, as many at once as there are pages for."""
    manager = KVCacheManager(NUM_PAGES, PAGE_SIZE)
    waiting = [Sequence(i, prompt) for i, prompt in enumerate(prompts)]
    running: list[Sequence] = []
    answers: dict[int, list[int]] = {}
    while waiting or running:
        for sequence in list(running):  # room for one more token each; the last to come gives way
            while sequence in running:
                try:
                    manager.extend(sequence.seq_id, len(sequence.tokens))
                    break
                except OutOfPages:
                    victim = running.pop()
                    manager.free(victim.seq_id)
                    waiting.insert(0, victim)
                    print(f"  {victim.seq_id} gives way")
        while waiting:
            first = waiting[0]
            if manager.computing(first.array) is not None:
                break  # somebody is just computing what this one begins with: in the next step it is there
            try:  # a page to grow into for everybody who runs, so that the newcomer is not thrown out at once
                cached = manager.allocate(first.seq_id, first.array, len(first.tokens), spare=len(running))
            except OutOfPages:
                break
            first.computed = cached
            running.append(waiting.pop(0))
            print(f"  {first.seq_id} runs, {cached} of its {len(first.tokens)} tokens were cached")
        for sequence, token in zip(list(running), forward(manager, running), strict=True):
            sequence.computed = len(sequence.tokens)
            manager.commit(sequence.seq_id, sequence.array, sequence.computed)  # full pages can be found from now on
            sequence.tokens.append(token)
            if len(sequence.tokens) == len(sequence.prompt) + MOST:
                manager.free(sequence.seq_id)
                running.remove(sequence)
                answers[sequence.seq_id] = sequence.tokens[len(sequence.prompt) :]
        manager.check()
    manager.check(idle=True)
    print(f"at the end: {manager.allocator}")
    return [answers[i] for i in range(len(prompts))]


def alone(prompt: list[int]) -> list[int]:
    """The same without pages."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + MOST:
        tokens.append(model(sum(tokens)))
    return tokens[len(prompt) :]


if __name__ == "__main__":
    system = [7, 7, 7, 3, 1, 4, 1, 5, 9]  # what most prompts begin with
    requests = [[*system, 100 + i] for i in range(6)] + [[2, 7, 1], [8] * 20]
    assert serve(requests) == [alone(prompt) for prompt in requests]
    print(f"{len(requests)} answers, each the same as alone")
