"""EngineConfig: every setting of the engine, once. The command line and LLM(...) take the same names."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from typing import Any

from paged.errors import ConfigError
from paged.sizing import parse_memory

MOST_THREADS = 1024
MOST_DRAFTS = 64


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of one engine; None where the value depends on the model or the machine.

    Raises ConfigError for a value that cannot work, before anything is loaded.
    """

    model: str = _setting("smollm2", "built-in name, directory, .gguf file, or hub id")
    dtype: str = _setting("auto", "auto, float32, bfloat16 or float16; auto is bfloat16 where native")
    quantization: str | None = _setting(None, "int8 or int4 weights, on CPU [the dtype's]")
    kv_memory: str | int = _setting("30%", "bytes for pages: 2GiB, or a share of memory for pages and model: 30%")
    page_size: int | None = _setting(None, "tokens a page, a power of two from 1 to 256 [16 on CPU, 64 on CUDA]")
    max_model_len: int | None = _setting(None, "longest sequence, prompt and output [the model's]")
    max_num_seqs: int = _setting(64, "most sequences in a step")
    max_num_batched_tokens: int | None = _setting(None, "token budget of a step [512 on CPU, 4096 on CUDA]")
    enable_prefix_caching: bool = _setting(True, "find the pages of equal prefixes again")
    tensor_parallel_size: int = _setting(1, "workers that divide the model's heads among them, on one machine")
    threads: int | None = _setting(None, "CPU threads a worker [what the cgroup and the affinity allow, divided]")
    device: str = _setting("auto", "auto, cpu or cuda")
    attention_backend: str = _setting("auto", "auto, native, sdpa or reference")
    admission: str = _setting("optimistic", "optimistic, or guaranteed: nobody ever gives way for want of pages")
    policy: str = _setting("fcfs", "who comes first: fcfs, priority, longest_prefix or shortest")
    victim: str = _setting("youngest", "who gives way when pages run out: youngest, cheapest or largest")
    max_step_ms: float | None = _setting(None, "time between tokens that chunks of prompts adapt to [no limit]")
    num_speculative_tokens: int = _setting(0, "drafts a sequence and step, by look-up in its own text [off]")
    deterministic: bool = _setting(False, "promise the same bits of logits in any batch, or refuse to start")
    seed: int | None = _setting(None, "draws the seeds of requests that bring none")

    @classmethod
    def from_settings(cls, **settings: Any) -> EngineConfig:
        """The config of these settings. Raises ConfigError, with the nearest known name, for an unknown one."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"unknown setting {name}: {hint}")
        return cls(**settings)

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("quantization", self.quantization, (None, "int8", "int4"))
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("attention_backend", self.attention_backend, ("auto", "native", "sdpa", "reference"))
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a name or a path, not {self.model!r}")
        _one_of("admission", self.admission, ("optimistic", "guaranteed"))
        _one_of("policy", self.policy, ("fcfs", "priority", "longest_prefix", "shortest"))
        _one_of("victim", self.victim, ("youngest", "cheapest", "largest"))
        for name in ("enable_prefix_caching", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")
        given = self.max_step_ms
        if given is not None and (
            not isinstance(given, (int, float)) or isinstance(given, bool) or not 0 < given < 1e9
        ):
            raise ConfigError(f"max_step_ms must be a number of milliseconds above 0, not {given!r}")
        drafts = self.num_speculative_tokens
        if not isinstance(drafts, int) or isinstance(drafts, bool) or not 0 <= drafts <= MOST_DRAFTS:
            raise ConfigError(f"num_speculative_tokens must be a whole number from 0 to {MOST_DRAFTS}, not {drafts!r}")
        if isinstance(self.threads, int) and self.threads > MOST_THREADS:
            raise ConfigError(
                f"threads is {self.threads:,}, and at most {MOST_THREADS:,} make sense: the CPUs there are"
            )
        counts = "page_size", "max_model_len", "max_num_batched_tokens", "threads"
        for name in ("max_num_seqs", "tensor_parallel_size", *counts):
            value = getattr(self, name)
            if value is None and name in counts:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.page_size is not None and (self.page_size > 256 or self.page_size & (self.page_size - 1)):
            raise ConfigError(f"page_size must be a power of two from 1 to 256, not {self.page_size}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ConfigError(f"seed must be a whole number, not {self.seed!r}")
        parse_memory(self.kv_memory)


def _one_of(name: str, value: object, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(str(one) for one in allowed)}, not {value!r}")
