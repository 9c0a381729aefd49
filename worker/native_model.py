"""A model on the native kernels: one list of operations, run as a whole for each step.

Llama and Gemma 3 are the same list; the latter has norms of query and key heads and behind each half of a layer, a
scaled embedding, another activation, and layers with a window that have a rotary embedding of their own. The torch
models (worker/models) define what is right.

    embed
    each layer   normed -> qkv -> rotate, write K and V -> attention -> out (-> norm), added to the hidden state
                 normed -> gate and up -> gated -> down (-> norm), added to the hidden state
    gather the rows that sample -> normed -> head -> argmax
"""

from __future__ import annotations

from collections.abc import Mapping

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
    Function,
    Gather,
    Linear,
    Matrix,
    Norm,
    Operation,
    Rotary,
)
from worker.kernels.native import Program
from worker.layers import Rotary as RotaryTables
from worker.model_config import GEMMA3, ModelConfig
from worker.packing import layer_matrix


class NativeModel:
    """A decoder over the pages of one pool.

    parts: packed tensors by name, as worker/packing.py makes them. quantization: int8 or int4 of the matrices, None for
    the dtype of the embedding. Activations are float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        parts: Mapping[str, Tensor],
        pool: KVPool,
        max_model_len: int,
        team: Team,
        quantization: str | None = None,
    ) -> None:
        self._config, self._parts, self._pool, self._team = config, parts, pool, team
        own = str(parts["embedding"].dtype).removeprefix("torch.")
        self._format, self._head_format = quantization or own, head_format(own, quantization)
        dim, float32, cpu = config.head_dim, torch.float32, torch.device("cpu")
        self._rotary = RotaryTables(dim, config.rope_theta, max_model_len, float32, cpu, config.rope_factor)
        self._local_rotary = self._rotary
        if config.architecture == GEMMA3:
            self._local_rotary = RotaryTables(dim, config.local_rope_theta, max_model_len, float32, cpu)
        self._program: Program | None = None
        self._room = (0, 0)

    def step(self, inputs: Inputs, seconds: dict[str, float] | None = None) -> tuple[Tensor, Tensor]:
        """Logits float32 [rows that sample, vocab], and the place of the greatest of each; good until the next step.

        Writes K and V of every token. seconds: the time of each kind of operation is added to it.
        """
        tokens, sampled = len(inputs.token_ids), len(inputs.sampled)
        if tokens > self._room[0] or sampled > self._room[1]:
            self._make_room(max(tokens, self._room[0]), max(sampled, self._room[1]))
        assert self._program is not None
        times = None if seconds is None else torch.zeros(len(self._program.operations), dtype=torch.float64)
        frame = Frame(inputs.token_ids, inputs.positions, inputs.metas, inputs.sampled)
        self._program.run(frame, times)
        if seconds is not None and times is not None:
            for operation, time in zip(self._program.operations, times.tolist(), strict=True):
                name = type(operation).__name__.lower()
                seconds[name] = seconds.get(name, 0.0) + time
        return self._logits[:sampled], self._best[:sampled]

    def _make_room(self, tokens: int, sampled: int) -> None:
        self._room = tokens, sampled
        self._logits = torch.empty(sampled, self._config.vocab_size)
        self._best = torch.empty(sampled, dtype=torch.int64)
        self._program = Program(self._operations(tokens, sampled), self._team)

    def _operations(self, tokens: int, sampled: int) -> list[Operation]:
        config, parts = self._config, self._parts
        hidden, inner, heads, kv_heads = (
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
        )
        dim, eps, gemma3 = config.head_dim, config.rms_norm_eps, config.architecture == GEMMA3
        x, result = torch.empty(tokens, hidden), torch.empty(tokens, hidden)
        qkv, attended = torch.empty(tokens, (heads + 2 * kv_heads) * dim), torch.empty(tokens, heads * dim)
        gate_up = torch.empty(tokens, 2 * inner)
        scale = float(torch.tensor(hidden**0.5).to(parts["embedding"].dtype)) if gemma3 else 1.0
        function: Function = "gelu_tanh" if gemma3 else "silu"
        operations: list[Operation] = [Embed(parts["embedding"], x, scale)]

        def add(source: Tensor, i: int, matrix: str, norm: str, gated: Function | None = None) -> None:
            """Add a linear, for Gemma its norm, to x."""
            linear = layer_matrix(parts, i, matrix, self._format, config)
            operations.append(Linear(source, linear, result if gemma3 else x, add=not gemma3, gated=gated))
            if gemma3:
                operations.append(Norm(result, parts[f"{i}.{norm}"], x, eps))

        for i, (window, (group, pair)) in enumerate(zip(config.layer_windows, self._pool.layout.places, strict=True)):
            kv = KV(self._pool.k[pair], self._pool.v[pair], group)
            rotary = self._rotary if window is None else self._local_rotary
            q_norm, k_norm = parts.get(f"{i}.q_norm"), parts.get(f"{i}.k_norm")
            operations += [
                Linear(
                    x, layer_matrix(parts, i, "qkv", self._format, config), qkv, norm=parts[f"{i}.input_norm"], eps=eps
                ),
                Rotary(qkv, rotary.cos, rotary.sin, heads, kv, q_norm, k_norm, eps),
                Attention(qkv, attended, heads, kv, config.attention_scale, window),
            ]
            add(attended, i, "out", "post_norm")
            norm = parts[f"{i}.pre_mlp_norm" if gemma3 else f"{i}.post_norm"]
            matrix = layer_matrix(parts, i, "gate_up", self._format, config)
            operations.append(Linear(x, matrix, gate_up, norm=norm, eps=eps))
            add(gate_up, i, "down", "post_mlp_norm", function)
        few = torch.empty(sampled, hidden)
        head = Matrix(parts["head"], self._head_format, config.vocab_size, hidden)
        return [
            *operations,
            Gather(x, few),
            Linear(few, head, self._logits, few=True, norm=parts["norm"], eps=eps),
            Argmax(self._logits, self._best),
        ]
