"""ChunkLimit: how many prompt tokens a step may have, so that those who decode wait no longer than they should."""

from __future__ import annotations

_WEIGHT = 0.2  # of a new sample in the averages


class ChunkLimit:
    """Learns from the time that steps took what a prompt token adds to one. Takes seconds, has no clock.

    A step is taken to last  decode + token * (tokens of prompts).  Both are running averages: `decode` of steps without
    prompts, `token` of what steps with prompts took beyond that. Until both are known a step has the least chunk.
    """

    def __init__(self, target: float, least: int) -> None:
        self.target = target
        self.least = least
        self._decode: float | None = None
        self._token: float | None = None

    def observe(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
        """A step with so many tokens of both kinds took so long."""
        if num_prompt_tokens == 0:
            self._decode = _average(self._decode, seconds)
        elif num_decodes == 0 or self._decode is not None:
            beyond = max(0.0, seconds - (self._decode or 0.0 if num_decodes else 0.0))
            self._token = _average(self._token, beyond / num_prompt_tokens)

    def tokens(self) -> int:
        """Prompt tokens that the next step may have beside decoding sequences."""
        if self._token is None or self._decode is None:
            return self.least
        room = (self.target - self._decode) / max(self._token, 1e-9)
        return max(self.least, int(min(room, 1e9)))


def _average(before: float | None, sample: float) -> float:
    return sample if before is None else before + _WEIGHT * (sample - before)
