"""A model on the native kernels: one list of operations, run as a whole for each step.

Every family is the same list with other parameters; worker/models/decoder.py defines what is right.

    embed
    each layer   (normed ->) qkv -> rotate, write K and V -> attention -> out (-> norm), added to the hidden state
                 (normed ->) gate and up -> gated -> down (-> norm), added to the hidden state
    gather the rows that sample -> normed -> head (-> soft cap) -> argmax

Of a shard the list is cut behind `out` and `down`: there what all workers computed is summed, and then normed or added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paged.kernels import Team
from paged.pool import KVPool
from worker.device import head_format
from worker.inputs import Inputs
from worker.kernels import (
    KV,
    Argmax,
    Attention,
    Embed,
    Frame,
    Gather,
    Linear,
    Matrix,
    Norm,
    Operation,
    Rotary,
    SoftCap,
)
from worker.kernels.native import Program
from worker.layers import Rotary as RotaryTables
from worker.model_config import ModelConfig
from worker.tensors import matrix_shapes


class NativeModel:
    """A decoder over the pages of one pool.

    parts: packed tensors by name, as worker/packing.py makes them. quantization: int8 or int4 of the matrices, None for
    the dtype of the embedding. positions: that a sequence can reach, None is max_model_len. Activations are float32.
    total: where this is one shard of several, gives the sum of what all of them computed, float32 [tokens, hidden];
    config and parts are the shard's, and only rank 0 has a head.
    """

    def __init__(
        self,
        config: ModelConfig,
        parts: Mapping[str, Tensor],
        pool: KVPool,
        max_model_len: int,
        team: Team,
        quantization: str | None = None,
        positions: int | None = None,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._total = total
        self._config, self._parts, self._pool, self._team = config, parts, pool, team
        own = str(parts["embedding"].dtype).removeprefix("torch.")
        self._format, self._head_format = quantization or own, head_format(own, quantization)
        self._rotaries = {
            rope: RotaryTables(rope, max_model_len, torch.float32, torch.device("cpu"), positions)
            for rope in config.layer_ropes
            if rope is not None
        }
        self._program: Program | None = None
        self._room = (0, 0)

    def step(self, inputs: Inputs, seconds: dict[str, float] | None = None) -> tuple[Tensor, Tensor]:
        """Logits float32 [rows that sample, vocab], and the place of the greatest of each; good until the next step.

        Writes K and V of every token. seconds: the time of each kind of operation is added to it. Without a head both
        are empty.
        """
        tokens, sampled = len(inputs.token_ids), len(inputs.sampled)
        if tokens > self._room[0] or sampled > self._room[1]:
            self._make_room(max(tokens, self._room[0]), max(sampled, self._room[1]))
        assert self._program is not None
        times = None if seconds is None else torch.zeros(len(self._program.operations), dtype=torch.float64)
        frame = Frame(inputs.token_ids, inputs.positions, inputs.metas, inputs.sampled)
        if self._total is None:
            self._program.run(frame, times)
        else:
            self._program.run(frame, times, lambda number: self._sum(number, tokens, seconds))
        if seconds is not None and times is not None:
            for operation, spent in zip(self._program.operations, times.tolist(), strict=True):
                name = type(operation).__name__.lower()
                seconds[name] = seconds.get(name, 0.0) + spent
        return self._logits[:sampled], self._best[:sampled]

    @property
    def layer_bytes(self) -> int:
        """What the weights of the layers take."""
        return sum(part.nbytes for name, part in self._parts.items() if name not in ("embedding", "norm", "head"))

    def _sum(self, number: int, tokens: int, seconds: dict[str, float] | None) -> None:
        """What stands at a cut: the first rows of a buffer become the sum, or it is added to another."""
        assert self._total is not None
        began = time.perf_counter()
        part, added_to = self._sums[number]
        total = self._total(part[:tokens])
        if added_to is None:
            part[:tokens] = total
        else:
            added_to[:tokens] += total
        if seconds is not None:
            seconds["sum"] = seconds.get("sum", 0.0) + time.perf_counter() - began

    def _make_room(self, tokens: int, sampled: int) -> None:
        self._room = tokens, sampled
        self._logits = torch.empty(sampled, self._config.vocab_size if "head" in self._parts else 0)
        self._best = torch.empty(sampled, dtype=torch.int64)
        self._cuts, self._sums = list[int](), list[tuple[Tensor, Tensor | None]]()
        self._program = Program(self._operations(tokens, sampled), self._team, self._cuts)

    def _operations(self, tokens: int, sampled: int) -> list[Operation]:
        config, parts = self._config, self._parts
        hidden, inner, heads, kv_heads = (
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
        )
        dim, eps = config.head_dim, config.rms_norm_eps
        x, behind = torch.empty(tokens, hidden), torch.empty(tokens, hidden)
        qkv, attended = torch.empty(tokens, (heads + 2 * kv_heads) * dim), torch.empty(tokens, heads * dim)
        gate_up = torch.empty(tokens, 2 * inner)
        scale = float(torch.tensor(config.embedding_scale).to(parts["embedding"].dtype))
        operations: list[Operation] = [Embed(parts["embedding"], x, scale)]

        def into(source: Tensor, i: int, matrix: str, out: Tensor, norm: str) -> Linear:
            """source, normed if the family does that there, times a matrix."""
            weight, bias = parts.get(f"{i}.{norm}"), parts.get(f"{i}.{matrix}_bias")
            return Linear(source, self._matrix(i, matrix), out, norm=weight, eps=eps, bias=bias)

        def add(source: Tensor, i: int, matrix: str, norm: str, gated: bool = False) -> None:
            """Add a linear, normed if the family does that behind it, to x."""
            weight, bias = parts.get(f"{i}.{norm}"), parts.get(f"{i}.{matrix}_bias")
            function, scale = config.activation if gated else None, config.residual_scale
            packed = self._matrix(i, matrix)
            if weight is None and self._total is None:
                operations.append(Linear(source, packed, x, add=True, gated=function, bias=bias, scale=scale))
                return
            operations.append(Linear(source, packed, behind, gated=function, bias=bias, scale=scale))
            if self._total is not None:
                self._cuts.append(len(operations))
                self._sums.append((behind, x if weight is None else None))
            if weight is not None:
                assert scale == 1.0
                operations.append(Norm(behind, weight, x, eps))

        layers = zip(config.layer_windows, config.layer_ropes, self._pool.layout.places, strict=True)
        for i, (window, rope, (group, pair)) in enumerate(layers):
            kv = KV(self._pool.k[pair], self._pool.v[pair], group)
            cos, sin = (None, None) if rope is None else (self._rotaries[rope].cos, self._rotaries[rope].sin)
            q_norm, k_norm = parts.get(f"{i}.q_norm"), parts.get(f"{i}.k_norm")
            operations += [
                into(x, i, "qkv", qkv, "input_norm"),
                Rotary(qkv, cos, sin, heads, kv, q_norm, k_norm, eps, config.qk_norm == "all"),
                Attention(qkv, attended, heads, kv, config.attention_scale, window, config.attention_soft_cap),
            ]
            add(attended, i, "out", "attention_norm")
            operations.append(into(x, i, "gate_up", gate_up, "mlp_norm"))
            add(gate_up, i, "down", "down_norm", gated=True)
        if "head" not in parts:
            return operations
        few = torch.empty(sampled, hidden)
        head, divisor = Matrix(parts["head"], self._head_format, config.vocab_size, hidden), config.logits_divisor
        operations += [
            Gather(x, few),
            Linear(few, head, self._logits, few=True, norm=parts["norm"], eps=eps, scale=1.0 / divisor),
        ]
        if config.logits_soft_cap:
            operations.append(SoftCap(self._logits, config.logits_soft_cap))
        return [*operations, Argmax(self._logits, self._best)]

    def _matrix(self, i: int, name: str) -> Matrix:
        return Matrix(self._parts[f"{i}.{name}"], self._format, *matrix_shapes(self._config)[name])
