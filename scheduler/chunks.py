"""ChunkLimit: how many prompt tokens a step may have, so that those who decode wait no longer than they should."""

from __future__ import annotations

_WEIGHT = 0.2  # of a new sample in the averages


class ChunkLimit:
    """Learns from the time that steps took what a prompt token adds to one. Takes seconds, has no clock.

    A step is taken to last  decode + token * (tokens of prompts).  `decode` is the running average of steps without
    prompts, `token` that of what steps with prompts took beyond it, over that of their tokens: so a chunk of one token,
    as a cached prompt leaves, weighs little. Until both are known chunks begin with the least, and double while steps
    hold the target.
    """

    def __init__(self, target: float, least: int) -> None:
        self.target = target
        self.least = self._first = least
        self._decode: float | None = None
        self._beyond: float | None = None
        self._tokens: float | None = None

    def observe(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
        """A step with so many tokens of both kinds took so long."""
        if num_prompt_tokens == 0:
            self._decode = _average(self._decode, seconds)
        elif num_decodes and self._decode is None:
            self._first = min(2 * self._first, 1 << 20) if seconds < self.target else max(self._first // 2, self.least)
        else:
            beyond = max(0.0, seconds - (self._decode or 0.0 if num_decodes else 0.0))
            self._beyond = _average(self._beyond, beyond)
            self._tokens = _average(self._tokens, num_prompt_tokens)

    def tokens(self) -> int:
        """Prompt tokens that the next step may have beside decoding sequences."""
        if self._beyond is None or self._tokens is None or self._decode is None:
            return self._first
        room = (self.target - self._decode) * self._tokens / max(self._beyond, 1e-9)
        return max(self.least, int(min(room, 1e9)))


def _average(before: float | None, sample: float) -> float:
    return sample if before is None else before + _WEIGHT * (sample - before)
