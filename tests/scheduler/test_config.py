"""EngineConfig: names, bad values, and kv_memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from paged import ConfigError, EngineConfig
from paged.sizing import parse_memory


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("max_seqs", "max_num_seqs"),
        ("blocksize", None),
        ("pagesize", "page_size"),
        ("max_model_length", "max_model_len"),
        ("prefix_caching", "enable_prefix_caching"),
        ("thread", "threads"),
        ("xyzzy", None),
    ],
)
def test_an_unknown_setting_names_the_nearest_or_all(name: str, nearest: str | None) -> None:
    hint = f"did you mean {nearest}" if nearest else "known: model, dtype, quantization, kv_memory"
    with pytest.raises(ConfigError, match=f"unknown setting {name}: {hint}"):
        EngineConfig.from_settings(**{name: 1})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", ["", None, 3]),
        ("dtype", ["float64", "", None, [], "Float32"]),
        ("device", ["gpu", "cuda:0", None]),
        ("attention_backend", ["flash", None]),
        ("enable_prefix_caching", [1, None, "true"]),
        ("deterministic", [1, None, "yes"]),
        ("admission", ["greedy", None]),
        ("policy", ["fifo", None, 3]),
        ("victim", ["oldest", None]),
        ("max_step_ms", [0, -1, math.nan, math.inf, "50", True]),
        ("num_speculative_tokens", [-1, 65, 1.0, None, True]),
        ("page_size", [0, -1, 3, 48, 257, 512, 16.0, "16", True]),
        ("max_model_len", [0, -5, 1.5, "32", False]),
        ("max_num_seqs", [0, None, -1, 2.0, True]),
        ("max_num_batched_tokens", [0, -1, 4.0]),
        ("threads", [0, -2, "2", math.nan, 100_000]),
        ("seed", [1.0, "1", True]),
        ("kv_memory", ["", "lots", None, 0, -1, "0%", "120%", "5 apples", "30 percent", "GiB", "1e9", math.nan, True]),
        ("kv_memory", ["0.1B", "0.3", 0.3, "9" * 400 + "GiB", 10**400, 10**5000]),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=name):
            EngineConfig.from_settings(**{name: value})


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_power_of_two_up_to_256_is_a_page_size(page_size: int) -> None:
    assert EngineConfig(page_size=page_size).page_size == page_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("64kib", 65536),
        (" 10 MB ", 10_000_000),
        ("4096", 4096),
        ("4096B", 4096),
        (123_456, 123_456),
        ("30%", 0.3),
        ("100%", 1.0),
        ("12.5 %", 0.125),
    ],
)
def test_kv_memory_is_bytes_or_a_share(text: str | int, expected: int | float) -> None:
    found = parse_memory(text)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("value", ["101%", "0", "0%", "0GiB", "0.0MB"])
def test_nothing_and_more_than_everything_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="more than nothing and at most 100%"):
        parse_memory(value)


def test_the_config_is_frozen_and_every_setting_has_a_help_text() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().max_num_seqs = 3  # type: ignore[misc]
    assert all(setting.metadata["help"] for setting in dataclasses.fields(EngineConfig))
