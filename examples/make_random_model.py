"""A Llama with random weights of about any size, as a Hugging Face folder: to try sizes, not to get answers.

    python examples/make_random_model.py --params 1.1B -o big
    paged generate --model ./big "x" --max-tokens 8

1.1B is TinyLlama's shape, and other sizes have its proportions. No more than one file of at most 512 MB is in memory.
Needs torch, safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LEAST, MOST = 200_000, 100_000_000_000  # parameters
SHARD_BYTES = 512_000_000
HEAD_DIM = 64
STD = 0.02  # of the initial weights, as in transformers
BOS, EOS = "<s>", "</s>"  # ids 0 and 1

Shapes = dict[str, tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a Llama with random weights as a Hugging Face folder.")
    parser.add_argument("--params", type=number, required=True, help="parameters, about: 1.1B, 135M, 500K")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder, new or empty")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder: Path = args.output
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        sys.exit(f"make_random_model: {folder} exists and is not an empty folder: give another, or remove it")
    folder.mkdir(parents=True, exist_ok=True)

    config = shape(args.params)
    shapes = tensors(config)
    say(
        f"{count(config):,} parameters: {config['num_hidden_layers']} layers, "
        f"hidden {config['hidden_size']}, vocabulary {config['vocab_size']}"
    )
    tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": BOS, "eos_token": EOS})
    write_weights(folder, shapes, config["num_hidden_layers"], args.seed)
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    write_json(folder / "config.json", config)  # last: a folder without it is taken for no model


def number(text: str) -> int:
    """1.1B, 135M or 500K as a number."""
    factor = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper(), 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number as 1.1B, 135M or 500K") from None
    if not LEAST <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not between 200K and 100B")
    return round(value)


def shape(params: int) -> dict[str, Any]:
    """The config of a model with about so many parameters: TinyLlama made wider or narrower, then as deep as fits."""
    scale = (params / 1.1e9) ** (1 / 3)
    heads = 8 * round(4 * scale) if scale > 0.25 else max(1, round(32 * scale))  # to each key/value head eight, or all
    hidden = heads * HEAD_DIM
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": max(320, min(32000, 64 * round(500 * scale**2))),
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": 0,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 8),
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "initializer_range": STD,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }
    outside = count(config)
    layers = max(1, round((params - outside) / (count(config | {"num_hidden_layers": 1}) - outside)))
    config["num_hidden_layers"] = layers
    # a layer more or less is much of a small model: the inner size makes up for it
    inner = config["intermediate_size"] + (params - count(config)) / (3 * hidden * layers)
    return config | {"intermediate_size": max(16, 16 * round(inner / 16))}


def count(config: dict[str, Any]) -> int:
    """Its parameters."""
    return sum(map(math.prod, tensors(config).values()))


def tensors(config: dict[str, Any]) -> Shapes:
    """Name and shape, [out, in], of every tensor."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    key = config["num_key_value_heads"] * HEAD_DIM
    layer: Shapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": size for name, size in layer.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write_weights(folder: Path, shapes: Shapes, num_layers: int, seed: int) -> None:
    """bfloat16, in as many files as it takes, one after the other, and the index of what is where."""
    generator = torch.Generator().manual_seed(seed)
    shards = list(split(shapes))
    places: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        say(f"writing {file}")
        weights = {name: torch.empty(shapes[name], dtype=torch.bfloat16) for name in names}
        for name, weight in weights.items():
            if len(weight.shape) == 1:  # a norm
                weight.fill_(1.0)
                continue
            # What is added to the residual stream is made smaller, so that it does not grow with the depth.
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            weight.normal_(0.0, STD / math.sqrt(2 * num_layers) if into_residual else STD, generator=generator)
        save_file(weights, folder / file, metadata={"format": "pt"})
        del weights, weight  # before the next ones are made
        places |= dict.fromkeys(names, file)
    total = 2 * sum(map(math.prod, shapes.values()))
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def split(shapes: Shapes) -> Iterator[list[str]]:
    """The names of each file's tensors."""
    names: list[str] = []
    size = 0
    for name, dims in shapes.items():
        if names and size + 2 * math.prod(dims) > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += 2 * math.prod(dims)
    yield names


def tokenizer(vocab_size: int) -> Tokenizer:
    """Text in, a token for each byte; any token out, of which those that are no byte are made-up words."""
    words = [BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"\u0120{word(i)}" for i in range(vocab_size - len(words))]  # that is how a space is written there
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (BOS, EOS)])
    return made


def word(i: int) -> str:
    """Two syllables or more, another word for each number."""
    text = ""
    while i or len(text) < 4:
        i, rest = divmod(i, 100)
        text = "bcdfghjklmnprstvwxyz"[rest // 5] + "aeiou"[rest % 5] + text
    return text


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


def say(line: str) -> None:
    print(f"make_random_model: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
