"""What tests of sampling share: a sequence as the worker knows it, and rows that are drawn together."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paged import SamplingParams
from worker.inputs import SequenceState
from worker.sampler import Draw, draw, filtered
from worker.step import Reset


def state(
    params: SamplingParams, prompt: SequenceOf[int] = (0,), output: SequenceOf[int] = (), **more: Any
) -> SequenceState:
    """A sequence of these tokens; its seed and index are 0 unless `more` says so."""
    more = {"seed": 0, "index": 0, "num_prompt": len(prompt)} | more
    return SequenceState(Reset(np.asarray([*prompt, *output], dtype=np.int32), ((1,),), 0, params, **more))


def draw_at(
    logits: torch.Tensor, params: SequenceOf[SamplingParams], seeds: SequenceOf[int], position: int = 5
) -> list[int]:
    """The tokens of rows that run together, each with its seed, at one position."""
    states = [state(one, range(position), seed=seed) for one, seed in zip(params, seeds, strict=True)]
    return draw(logits, [Draw(one, position) for one in states])


def weights_of(logits: Any, **params: Any) -> npt.NDArray[np.float64]:
    """What the filters leave of a row, float64 [vocab], 0 where nothing."""
    row = np.asarray(logits, dtype=np.float32)
    ids, weights = filtered(row, SamplingParams(**params))
    result = np.zeros(len(row))
    result[slice(None) if ids is None else ids] = weights
    return result
