"""Drafts by prompt look-up: what came after the last few tokens when they came before, in the sequence itself.

Saxena's prompt lookup decoding (2023): where an answer repeats its prompt, a continuation can be read off there. The
worker samples at every place anyway and keeps drafts only while they are what it sampled, so they change no token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LONGEST, SHORTEST = 3, 2  # tokens that must be equal


def propose(tokens: npt.NDArray[np.int32], most: int) -> list[int]:
    """Up to `most` tokens that may come after `tokens`, int32 [n]; none where their end did not come before.

    Of several places the last one counts; a longer equal end counts more.
    """
    raw = tokens.tobytes()
    for length in range(LONGEST, SHORTEST - 1, -1):
        if len(tokens) <= length:
            continue
        end = raw[-4 * length :]
        at = raw.rfind(end, 0, -4)
        while at > 0 and at % 4:  # bytes of two tokens
            at = raw.rfind(end, 0, at + len(end) - 1)
        if at >= 0:
            first = at // 4 + length
            found: list[int] = tokens[first : first + most].tolist()
            return found
    return []


def next_length(length: int, proposed: int, accepted: int, most: int) -> int:
    """How many drafts a sequence may bring next: more after all were right, fewer after most were wrong."""
    if accepted == proposed:
        return min(2 * length, most)
    return max(1, accepted, length // 2) if 2 * accepted < proposed else length
