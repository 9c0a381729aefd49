"""GGUF: a file of llama.cpp's format as a Hugging Face folder, which is what everything else here reads.

Tensors of any type that the gguf library dequantises become float32, written one at a time. Of some architectures
llama.cpp stores the rows of q and k in another order (the two halves of each head interleaved), or norms with 1 added;
they are put back. What the file says of the model becomes config.json in gguf_config.py.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged.errors import CheckpointError
from worker.gguf_config import ARCHITECTURES, Metadata, Shape, hf_config, tensor_names

Report = Callable[[str], None]
_REPORT_SECONDS = 5.0  # between lines on how far writing is
# Ways of cutting text before the merges of a byte-level tokenizer, by tokenizer.ggml.pre, that are known to come out as
# in llama.cpp: for another, transformers would take GPT-2's, and give other tokens without a word.
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken", "pixtral"}  # a word in the vocabulary is not cut further
_SINGLE_DIGITS = {"smollm", "refact", "starcoder"}  # before GPT-2's way
_CUTS = _WHOLE_WORDS | _SINGLE_DIGITS | {"gpt-2", "olmo", "qwen2", "deepseek-r1-qwen", "smaug-bpe", "dbrx", "gpt-4o"}


class GGUFFile:
    """An opened file. Raises CheckpointError where it is damaged, or holds what is not supported."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged, or no GGUF file: {error}") from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = self.field("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{path} is of architecture {self.architecture!r}, and only {known} are supported")
        if (parts := self.field("split.count") or 1) != 1:
            raise CheckpointError(f"{path} is one of {parts} parts: join them with llama.cpp's gguf-split --merge")
        self._factors: set[str] = set()
        self._config = self._read_config()
        self._names = self._hf_names()

    def field(self, name: str) -> Any:
        """The value of a metadata field; None where there is none."""
        field = self._reader.get_field(name)
        return None if field is None else field.contents()

    def config(self) -> dict[str, Any]:
        """What config.json of the same model says."""
        return self._config

    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor, [out, in], by its Hugging Face name, in the order of the file."""
        return dict(self._names.values())

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Every tensor, float32, with its Hugging Face name; one at a time, for together they may not fit memory."""
        kind = ARCHITECTURES[self.architecture]
        heads = {"attn_q": self._config["num_attention_heads"], "attn_k": self._config["num_key_value_heads"]}
        for name, (hf_name, _) in self._names.items():
            values = self._dequantised(name)
            part = name.split(".")[-2]
            if kind.permuted and part in heads:
                values = unpermute(values, heads[part])
            if kind.norms_plus_one and part.endswith("norm"):
                values = values - np.float32(1)
            yield hf_name, values

    def _read_config(self) -> dict[str, Any]:
        shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        meta = Metadata(self.path, list(self._reader.fields), self.field)
        return hf_config(meta, shapes, self._read_factors)

    def _read_factors(self, name: str) -> list[float]:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        self._factors.add(name)
        return [float(value) for value in self._dequantised(name).ravel()]

    def _hf_names(self) -> dict[str, tuple[str, Shape]]:
        """By the name of each tensor of the file, its Hugging Face name and shape; all of a model, and no others."""
        from gguf.quants import dequantize

        names = tensor_names(self.architecture, self._config)
        for name, tensor in self._tensors.items():
            if name in self._factors:
                continue
            if name not in names:
                raise CheckpointError(f"{self.path}: tensor {name} is not part of a model that is supported")
            if _shape(tensor) != names[name][1]:
                expected = " x ".join(map(str, names[name][1]))
                raise CheckpointError(f"{self.path}: tensor {name} is {_shape(tensor)}, not {expected}")
            try:
                dequantize(tensor.data[:1], tensor.tensor_type)
            except NotImplementedError:
                type_name = tensor.tensor_type.name
                raise CheckpointError(
                    f"{self.path}: tensor {name} has type {type_name}, which cannot be read"
                ) from None
        if missing := names.keys() - self._tensors.keys():
            raise CheckpointError(f"{self.path} has no tensor {min(missing)}")
        return {name: names[name] for name in self._tensors if name in names}

    def _dequantised(self, name: str) -> npt.NDArray[np.float32]:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type)
        return np.ascontiguousarray(values.reshape(_shape(tensor)), dtype=np.float32)


def _shape(tensor: Any) -> Shape:
    return tuple(int(n) for n in reversed(tensor.shape))


def unpermute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k, [heads * head_dim, in], or their bias, from llama.cpp's order (pairs side by side) to halves."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def convert_gguf(file: Path, folder: Path, report: Report) -> None:
    """Write config, weights, tokenizer and chat template of a GGUF file into the existing `folder`."""
    report(f"reading {file.name}")
    opened = GGUFFile(file)
    (folder / "config.json").write_text(json.dumps(opened.config(), indent=1) + "\n")
    try:
        write_safetensors(folder / "model.safetensors", opened.shapes(), opened.tensors(), report)
    except OSError as error:  # a full disk, say
        raise CheckpointError(f"{folder}: the weights cannot be written: {error}") from None
    report("converting the tokenizer")
    _convert_tokenizer(opened, folder)


def write_safetensors(
    file: Path,
    shapes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, npt.NDArray[np.float32]]],
    report: Report,
) -> None:
    """Write float32 tensors as they come, in the order of `shapes`.

    The format: the length of the header (8 bytes, little-endian), the header as JSON (for each tensor its type, shape,
    and where its bytes lie in what follows), the tensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the data are aligned
    mebibytes = end / 2**20
    report(f"writing {mebibytes:.0f} MiB of float32 weights")
    told = time.monotonic()
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        begin = out.tell()
        for (name, shape), (given, values) in zip(shapes.items(), tensors, strict=True):
            assert (given, values.shape, values.dtype.kind) == (name, shape, "f"), (given, values.shape, name, shape)
            out.write(np.ascontiguousarray(values, dtype="<f4").data)
            if time.monotonic() - told >= _REPORT_SECONDS:
                told = time.monotonic()
                report(f"{(out.tell() - begin) / 2**20:.0f} of {mebibytes:.0f} MiB written")


def _convert_tokenizer(opened: GGUFFile, folder: Path) -> None:
    # The only place that needs transformers to load a model. Not AutoTokenizer, which knows fewer architectures.
    from transformers import PreTrainedTokenizerFast

    # In a folder of its own: from one that holds another tokenizer, transformers would take that.
    alone = folder / "source"
    alone.mkdir()
    (alone / "model.gguf").symlink_to(opened.path.resolve())
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(alone, gguf_file="model.gguf")
        words = opened.field("tokenizer.ggml.tokens")
        for name, short in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
            if (token := opened.field(f"tokenizer.ggml.{name}_token_id")) is not None:
                setattr(tokenizer, f"{short}_token", words[token])  # which templates may use by name
        if opened.field("tokenizer.ggml.model") == "gpt2":
            _as_llama_cpp_bytes(opened, tokenizer)
        elif not opened.architecture.startswith("gemma"):
            _as_llama_cpp_spaces(opened, tokenizer)
        tokenizer.save_pretrained(folder)
    except CheckpointError:
        raise
    except Exception as error:  # whatever transformers raises over a tokenizer that it does not know
        raise CheckpointError(f"{opened.path}: its tokenizer cannot be converted: {error!r:.300}") from error
    shutil.rmtree(alone)


def _as_llama_cpp_bytes(opened: GGUFFile, tokenizer: Any) -> None:
    """What transformers leaves out for a byte-level tokenizer."""
    from tokenizers import decoders, pre_tokenizers

    cut = opened.field("tokenizer.ggml.pre")
    if cut not in _CUTS:
        raise CheckpointError(f"{opened.path}: tokenizer.ggml.pre {cut!r}, how its text is cut, is not supported")
    backend = tokenizer.backend_tokenizer
    backend.normalizer, backend.decoder = None, decoders.ByteLevel()  # nothing of SentencePiece's
    if cut in _WHOLE_WORDS:
        backend.model.ignore_merges = True
        if opened.field("tokenizer.ggml.add_bos_token") is None:
            tokenizer.add_bos_token = True
    elif cut in _SINGLE_DIGITS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _as_llama_cpp_spaces(opened: GGUFFile, tokenizer: Any) -> None:
    """A SentencePiece tokenizer puts one more space in front, also of text that begins with one; or never."""
    from tokenizers import decoders, normalizers

    backend = tokenizer.backend_tokenizer
    space = normalizers.Replace(" ", "\u2581")
    prefixed = opened.field("tokenizer.ggml.add_space_prefix") is not False
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space] if prefixed else [space])
    backend.pre_tokenizer = None
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
