"""The operations in plain torch, one by one: what the native ones are held to."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, pad, silu

from paged.attention.reference import paged_attention
from worker import kernels
from worker.kernels import Frame, Matrix, Operation
from worker.layers import rms_norm, rotate

PANEL, GROUP = 16, 32  # outputs of a panel; weights of an output that share a scale


def run(operations: SequenceOf[Operation], frame: Frame) -> None:
    """Run all, in order."""
    for operation in operations:
        run_one(operation, frame)


def run_one(it: Operation, frame: Frame) -> None:
    few = getattr(it, "few", False) or isinstance(it, kernels.SoftCap)
    rows = len(frame.sampled if few else frame.token_ids)
    match it:
        case kernels.Embed():
            it.out[:rows] = it.table[frame.token_ids].float() * it.scale
        case kernels.Norm():
            it.out[:rows] += rms_norm(it.x[:rows], it.weight, it.eps)
        case kernels.Linear():
            y = linear(_rounded(input_of(it, rows), it.matrix.format), unpack(it.matrix), it.bias) * it.scale
            it.out[:rows] = it.out[:rows] + y if it.add else y
        case kernels.Rotary():
            _rotary(it, frame)
        case kernels.Attention():
            dim = it.kv.k.shape[-1]
            q = it.qkv[:rows, : it.heads * dim].reshape(rows, it.heads, dim)
            pages, meta = (it.kv.k, it.kv.v), frame.metas[it.kv.group]
            it.out[:rows] = paged_attention(q, *pages, meta, it.scale, it.window, soft_cap=it.soft_cap).flatten(1)
        case kernels.Gather():
            it.out[: len(frame.sampled)] = it.x[frame.sampled]
        case kernels.SoftCap():
            it.x[:rows] = it.cap * torch.tanh(it.x[:rows] / it.cap)
        case kernels.Argmax():
            it.out[: len(frame.sampled)] = it.x[: len(frame.sampled)].argmax(dim=-1)


def input_of(it: kernels.Linear, rows: int) -> Tensor:
    """What a linear multiplies, before it is rounded: x [rows, k], normed or gated if it says so."""
    if it.norm is not None:
        return rms_norm(it.x[:rows], it.norm, it.eps)
    if it.gated is None:
        return it.x[:rows]
    gate, up = it.x[:rows].chunk(2, dim=-1)
    return (silu(gate) if it.gated == "silu" else gelu(gate, approximate="tanh")) * up


def _rotary(it: kernels.Rotary, frame: Frame) -> None:
    tokens, dim, kv_heads = len(frame.token_ids), it.kv.k.shape[-1], it.kv.k.shape[-2]
    q, k, v = torch.split(it.qkv[:tokens].view(tokens, -1, dim), [it.heads, kv_heads, kv_heads], dim=1)
    if it.q_norm is not None and it.k_norm is not None:
        if it.norm_all:
            q = rms_norm(q.flatten(1), it.q_norm, it.eps).view(q.shape)
            k = rms_norm(k.flatten(1), it.k_norm, it.eps).view(k.shape)
        else:
            q, k = rms_norm(q, it.q_norm, it.eps), rms_norm(k, it.k_norm, it.eps)
    if it.cos is not None and it.sin is not None:
        cos, sin = it.cos[frame.positions][:, None], it.sin[frame.positions][:, None]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    it.qkv[:tokens, : it.heads * dim] = q.flatten(1)
    slots = frame.metas[it.kv.group].slots
    it.kv.k.flatten(0, 1)[slots] = k.to(it.kv.k.dtype)
    it.kv.v.flatten(0, 1)[slots] = v.to(it.kv.v.dtype)


def unpack(matrix: Matrix) -> Tensor:
    """W [n, k] in float32, as it was rounded when it was packed."""
    n, k, packed = matrix.n, matrix.k, matrix.packed
    panels = -(-n // PANEL)
    if matrix.format in ("int8", "int4"):
        quads = 8 if matrix.format == "int8" else 4
        count, size = -(-k // GROUP), quads * PANEL * 4
        panel = packed.view(panels, -1)
        scales = panel[:, count * size : count * (size + 2 * PANEL)].contiguous().view(torch.float16).float()
        scales = scales.view(panels, count, PANEL)
        values = panel[:, : count * size].reshape(panels, count, quads, PANEL, 4).int()
        values = values - 128 if matrix.format == "int8" else torch.cat((values % 16, values // 16), dim=2) - 8
        wide = values.float() * scales[:, :, None, :, None]  # [panels, groups, quads, 16, 4]
        return wide.permute(0, 3, 1, 2, 4).reshape(panels * PANEL, -1)[:n, :k]
    along = 2 if matrix.format == "bfloat16" else 1
    values = packed.view(getattr(torch, matrix.format)).view(panels, -1, PANEL, along).float()
    return values.permute(0, 2, 1, 3).reshape(panels * PANEL, -1)[:n, :k]


def _rounded(x: Tensor, format_: str) -> Tensor:
    """x as the rows of a format are rounded: int8 and int4 take groups of 32 as int8, by their greatest magnitude."""
    if format_ not in ("int8", "int4"):
        return x
    padded = pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    greatest = padded.abs().amax(-1, keepdim=True)
    values = torch.where(greatest > 0, padded * (127 / greatest), 0.0)
    values = values.sign() * (values.abs() + 0.5).floor()
    return (values * (greatest / 127)).flatten(1)[:, : x.shape[1]]
