"""GGUF: a file of llama.cpp's format as a Hugging Face folder, which is what everything else here reads.

Only the `llama` architecture. Tensors of any type that the gguf library dequantises become float32. llama.cpp stores
the rows of q and k in another order (the two halves of each head interleaved); they are put back.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged.errors import CheckpointError

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUFFile:
    """An opened file. Raises CheckpointError where it is damaged, or holds what is not supported."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged, or no GGUF file: {error}") from None
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise CheckpointError(f"{path} is of architecture {architecture!r}, and only 'llama' is supported")
        for name in self._reader.fields:
            # A factor without a type is linear scaling to llama.cpp; 0 and 1 are none.
            if name.startswith("llama.rope.scal") and (value := self._field(name)) not in ("none", 0, 1):
                raise CheckpointError(f"{path} scales its rotary embedding ({name} {value}), which is not supported")

    def config(self) -> dict[str, Any]:
        """What config.json of the same model says."""
        hidden, heads = self._number("embedding_length"), self._number("attention.head_count")
        head_dim = self._number("attention.key_length", self._number("rope.dimension_count", hidden // heads))
        rotated = self._number("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise CheckpointError(f"{self.path} rotates {rotated} of {head_dim} dimensions, which is not supported")
        names = {tensor.name for tensor in self._reader.tensors}
        embedding = next((t for t in self._reader.tensors if t.name == "token_embd.weight"), None)
        if embedding is None:
            raise CheckpointError(f"{self.path} has no token_embd.weight")
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": int(embedding.shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": float(self._field("llama.attention.layer_norm_rms_epsilon")),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": float(self._field("llama.rope.freq_base", 10000.0)),
            },
            "max_position_embeddings": self._number("context_length"),
            "tie_word_embeddings": "output.weight" not in names,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", None),
            "dtype": "float32",
        }
        return {name: value for name, value in config.items() if value is not None}

    def tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        """Every tensor, float32 [out, in], by its Hugging Face name."""
        config = self.config()
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        result = {}
        for tensor in self._reader.tensors:
            name, part = self._hf_name(tensor.name)
            values = self._dequantised(tensor)
            if part in heads and values.shape[0] % (2 * heads[part]):
                raise CheckpointError(f"{self.path}: {tensor.name}, {values.shape[0]} rows, is not {heads[part]} heads")
            result[name] = unpermute(values, heads[part]) if part in heads else values
        return result

    def _hf_name(self, name: str) -> tuple[str, str]:
        """The Hugging Face name of a tensor, and its part of a layer."""
        parts = name.split(".")
        if len(parts) == 2 and parts[0] in _OUTER and parts[1] == "weight":
            return f"{_OUTER[parts[0]]}.weight", ""
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _NAMES and parts[3] == "weight":
            return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight", parts[2]
        raise CheckpointError(f"{self.path}: tensor {name} is not part of a model that is supported")

    def _dequantised(self, tensor: Any) -> npt.NDArray[np.float32]:
        from gguf.quants import dequantize

        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise CheckpointError(f"{self.path}: tensor {tensor.name} has type {kind}, which cannot be read") from None
        shape = tuple(int(n) for n in reversed(tensor.shape))
        return np.ascontiguousarray(values.reshape(shape), dtype=np.float32)

    def _number(self, name: str, default: int | None = None) -> int:
        value = self._field(f"llama.{name}", default)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path}: llama.{name} must be a whole number of at least 1, not {value!r:.80}")
        return value

    def _field(self, name: str, *default: Any) -> Any:
        field = self._reader.get_field(name)
        if field is not None:
            return field.contents()
        if not default or (default[0] is None and name.startswith("llama.")):
            raise CheckpointError(f"{self.path} says nothing of {name}")
        return default[0]


def unpermute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k, [heads * head_dim, in], from llama.cpp's order (pairs side by side) to halves."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def convert_gguf(file: Path, folder: Path, report: Callable[[str], None]) -> None:
    """Write config, weights, tokenizer and chat template of a GGUF file into the existing `folder`."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    report(f"reading {file.name}")
    opened = GGUFFile(file)
    config = opened.config()
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = opened.tensors()
    report(f"writing {sum(t.nbytes for t in tensors.values()) / 2**20:.0f} MiB of float32 weights")
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, say
        raise CheckpointError(f"{folder}: the weights cannot be written: {error}") from None
    report("converting the tokenizer")
    _convert_tokenizer(file, folder)


def _convert_tokenizer(file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer  # the only place that needs transformers to load a model

    # In a folder of its own: from one that holds another tokenizer, transformers would take that.
    alone = folder / "source"
    alone.mkdir()
    (alone / "model.gguf").symlink_to(file.resolve())
    try:
        AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf").save_pretrained(folder)
    except Exception as error:  # whatever transformers raises over a tokenizer that it does not know
        raise CheckpointError(f"{file}: its tokenizer cannot be converted: {error!r:.300}") from error
    shutil.rmtree(alone)
