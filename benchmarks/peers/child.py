"""What the children of bench_peers.py share: load a model once, then answer what is asked, in lines of JSON.

A child is a script that is called as `python SCRIPT MODEL --dtype D --threads N --max-len N`, by its peer's own
interpreter; nothing of paged is needed. When the model is loaded it says `{"ready": {what it runs with}}`. Then of each

    {"requests": [{"prompt": [token ids], "out": n}, ...], "renew": true where its prefix cache must be empty}

    {"wall_s": seconds, "tokens": [[token ids], ...], "first_token_s": median over the requests, null if not known}

is the answer: greedy, no end at an end token, exactly `out` tokens, at most 32 requests at once. What goes wrong is a
traceback on stderr and the end of the process. Between two runs it waits in a read, and so takes no time from others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

MAX_RUNNING = 32
KV_BYTES = 2 * 2**30  # for pages, of those that take a size
Request = dict[str, Any]
# Tokens of each request; seconds from the start to its first token, for each, or nothing if that is not known
Answer = tuple[list[list[int]], list[float]]


class Peer(Protocol):
    about: dict[str, Any]  # what it runs with

    def renew(self) -> None:
        """Forget every prefix."""

    def prepare(self, requests: list[Request]) -> Callable[[], Answer]:
        """All that need not be timed; what it returns is run once, under the clock."""


def parser(text: str | None) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("model", help="folder or file")
    result.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "int8"))
    result.add_argument("--threads", type=int, required=True)
    result.add_argument("--max-len", type=int, required=True, help="of the longest sequence, prompt and output")
    return result


def serve(load: Callable[[], Peer]) -> None:
    """Answer until stdin ends. What libraries print goes to stderr, so that stdout holds answers alone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    peer = load()
    say({"ready": peer.about})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("renew"):
            peer.renew()
        run = peer.prepare(asked["requests"])
        start = time.perf_counter()
        tokens, firsts = run()
        wall = time.perf_counter() - start
        first = statistics.median(firsts) if firsts else None
        say({"wall_s": wall, "tokens": tokens, "first_token_s": first})
