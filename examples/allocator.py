"""Pages, block tables and the prefix cache on their own: no model, no tensors, no torch.

python examples/allocator.py
"""

from __future__ import annotations

import numpy as np

from paged import KVCacheManager, Move, OutOfPages

PAGE_SIZE = 4  # tokens to a page; small, so that everything fits on a screen
manager = KVCacheManager(num_pages=9, page_size=PAGE_SIZE)  # page 0 is never handed out, so 8 can be used


def tokens(text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A letter is a token here; to the manager tokens are only numbers."""
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def picture(title: str, **texts: str) -> None:
    """Each sequence's pages with its tokens in them, and what every page of the pool is used for."""
    print(f"\n{title}")
    for name, text in texts.items():
        pages = manager.table(ord(name)).pages
        cells = [f"{page}:[{text[i * PAGE_SIZE :][:PAGE_SIZE]:.<{PAGE_SIZE}}]" for i, page in enumerate(pages)]
        print(f"  {name}     {'  '.join(cells)}")
    cached = set(manager.prefix_cache.idle_pages())  # content that can be found again, without an owner
    counts = {page: manager.allocator.ref_count(page) for page in range(1, manager.num_usable + 1)}
    marks = [str(count) if count else "c" if page in cached else "-" for page, count in counts.items()]
    print(f"  pool  {' '.join(marks)}   (references of pages 1 to {len(marks)}; c cached, - free)")


# A first prompt of nine tokens: nothing is cached, so three pages are taken for it.
prompt = "once upon"
hit = manager.allocate(ord("A"), tokens(prompt), num_new=len(prompt))
print(f"A: {hit} of {len(prompt)} tokens were cached")
print(f"A: positions 2 to 5 lie in slots {manager.table(ord('A')).slots(2, 6).tolist()}")
# Here a model would compute K and V and write them to those slots. Only then can the full pages be found by others.
manager.commit(ord("A"), tokens(prompt), num_computed=len(prompt))

# A second prompt with the same beginning shares the two full pages; the rest is its own.
other = "once upon a hill"
hit = manager.allocate(ord("B"), tokens(other), num_new=len(other))
print(f"B: {hit} of {len(other)} tokens were cached")
manager.commit(ord("B"), tokens(other), len(other))
picture("Two prompts, one prefix", A=prompt, B=other)

# A fork shares every page and takes none.
manager.fork(ord("A"), ord("F"))
picture("F is forked from A", A=prompt, F=prompt)

# The half-full page is shared too, so whoever writes first gets a copy: a move, which the model's side applies.
manager.extend(ord("F"), len(prompt) + 1)
moves = [move for move in manager.take_moves() if isinstance(move, Move)]
print(f"\nF writes a comma, so first: {', '.join(f'copy page {move.source} to {move.target}' for move in moves)}")
manager.confirm_moves(moves)  # done, so the source is A's alone
manager.commit(ord("F"), tokens(prompt + ","), len(prompt) + 1)
picture("F has a tail of its own", A=prompt, F=prompt + ",")

# A sequence that ends gives its pages back. Full ones stay cached until the room is needed.
manager.free(ord("B"))
picture("B has ended", A=prompt, F=prompt + ",")
print(f"  a prompt that begins like B would find {manager.match(tokens('once upon a hill, far off'))} tokens")

# What does not fit is refused with the numbers, and nothing has changed.
try:
    manager.allocate(ord("C"), tokens("a prompt of 28 tokens ......"), num_new=28)
except OutOfPages as error:
    print(f"\nC: {error}")

# At any moment every page is free, cached, or counted by exactly the tables that hold it. check() proves it.
manager.check()
print(f"\nsound: {manager.allocator}")
for name in "AF":
    manager.free(ord(name))
manager.check()
print(f"at the end: {manager.allocator}")
