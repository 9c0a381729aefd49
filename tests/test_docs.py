"""What the docs show is what is there: the tutorial's code is the example's, and the examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paged import KVCacheManager
from paged.prefix_cache import Tokens

HOME = Path(__file__).parent.parent
EXAMPLES = [HOME / "examples" / name for name in ("allocator.py", "tiny_server.py")]


def test_the_tutorials_code_is_that_of_the_example() -> None:
    text = (HOME / "docs" / "tutorial.md").read_text()
    code = (HOME / "examples" / "tiny_server.py").read_text()
    lines = [line.split("  #")[0].rstrip() for line in code.splitlines()]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        wanted = [line.split("  #")[0].rstrip() for line in block.rstrip("\n").splitlines()]
        assert any(lines[i : i + len(wanted)] == wanted for i in range(len(lines))), block


EMBEDDING = [  # of each snippet, by its section, what it prints last
    ("The manager alone", "96 tokens are there already"),
    ("An engine in a thread", "' Paris."),
    ("AsyncLLM", "[8, 8]"),
    ("An executor of your own", "[10, 11, 12, 13, 14]"),
    ("transformers over our pages", "2 pages hold both, gathered: 0 bytes"),
    ("A policy of your own", "['paid-1'"),
]


def snippets() -> dict[str, str]:
    """The code of docs/embedding.md by the heading above it."""
    text = (HOME / "docs" / "embedding.md").read_text()
    found = re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert text.count("```python") == len(found)
    return dict(found)


def test_every_snippet_of_embedding_is_run() -> None:
    assert list(snippets()) == [title for title, _ in EMBEDDING]


@pytest.mark.parametrize(("title", "last"), EMBEDDING, ids=[title for title, _ in EMBEDDING])
def test_a_snippet_of_embedding_runs_as_it_is(capsys: pytest.CaptureFixture[str], title: str, last: str) -> None:
    exec(compile(snippets()[title], title, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.rstrip("\n").splitlines()[-1].startswith(last)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_without_torch(example: Path) -> None:
    """Both are about the memory half, which needs none."""
    blocked = "import sys; sys.modules['torch'] = None; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", blocked, str(example)], capture_output=True, text=True, check=False, cwd=HOME
    )
    assert done.returncode == 0, done.stderr
    assert "at the end: BlockAllocator(" in done.stdout


def pool() -> KVCacheManager:
    """What docs/memory.svg shows: two chats and one that has ended, an essay forked twice, and something older."""
    rng = np.random.default_rng(0)

    def draw(length: int) -> Tokens:
        return rng.integers(0, 1000, length, dtype=np.int32)

    manager, system = KVCacheManager(97, 16, poison=False), draw(100)
    chats = [np.concatenate((system, draw(length))) for length in (60, 150, 30)]
    for seq_id, tokens, label in [
        *((i, chat, f"chat-{i}") for i, chat in enumerate(chats)),
        (9, draw(180), "old"),
        (5, draw(75), "essay"),
    ]:
        manager.allocate(seq_id, tokens, len(tokens), label=label)
        manager.commit(seq_id, tokens, len(tokens))
    for seq_id in (6, 7):
        manager.fork(5, seq_id)
    for seq_id in (5, 6, 7):
        manager.extend(seq_id, 140)
    manager.confirm_moves(manager.take_moves())
    for seq_id in (9, 2):
        manager.free(seq_id)
    return manager


def test_the_drawing_in_the_tutorial_is_what_explain_draws() -> None:
    assert (HOME / "docs" / "memory.svg").read_text() == pool().explain().svg() + "\n"


def test_explain_names_holders_as_data_and_as_text() -> None:
    found = pool().explain()
    assert found.held_by()["chat-0 (sequence 0)"] == list(range(1, 11))
    assert sum(use.state == "cached" for use in found.pages) == 13
    text = found.text()
    assert text.startswith("96 pages of 16 tokens: 39 referenced, 13 cached, 44 free")
    assert "essay (sequence 6): 36-39, 46-50" in text
    assert found.pages[0].findable
