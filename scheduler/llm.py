"""LLM: the front door. A model, an engine over it, and text in and out, in one object.

from paged import LLM, SamplingParams

llm = LLM("smollm2")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from paged.errors import CheckpointError, ConfigError, RequestError, shown
from paged.layout import DTYPE_BYTES, KVLayout
from paged.sizing import cuda_memory, host_memory, parse_memory, pool_bytes
from scheduler.beam import BeamSearchParams
from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.outputs import RequestOutput
from scheduler.policy import ORDERS, VICTIMS, Limits, Rules
from scheduler.request import Request
from scheduler.text import Tokenizer, prompt_salt, prompt_tokens
from worker.checkpoints import peek, resolve
from worker.device import pick_backend, pick_device, pick_dtype, pick_threads
from worker.model_config import ModelConfig
from worker.parallel import shards
from worker.step import SamplingParams
from worker.tensors import num_parameters

if TYPE_CHECKING:
    from worker.executor import Executor

# Text, token ids, or vLLM's dicts {"prompt": text} and {"prompt_token_ids": ids}, which may hold a "cache_salt" too.
Prompt: TypeAlias = str | SequenceOf[int] | Mapping[str, Any]
Params: TypeAlias = SamplingParams | SequenceOf[SamplingParams] | None
_QUANTIZED_BYTES = {"int8": 1 + 1 / 16, "int4": 1 / 2 + 1 / 16}  # of a weight; a float16 for each 32


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine with these settings uses on this machine. None where it takes a model that is not here yet."""

    device: str
    dtype: str
    dtype_reason: str
    backend: str
    backend_reason: str
    threads: int
    threads_reason: str
    model_name: str
    model_known: bool
    page_size: int
    max_num_batched_tokens: int
    weight_bytes: int  # of all workers that share this memory; 0 where the model is not known
    kv_bytes: int  # that kv_memory allows, of one worker
    tensor_parallel_size: int = 1
    layout: KVLayout | None = None  # of one worker: of the one with the most KV heads
    num_pages: int | None = None  # the null page counted
    max_model_len: int | None = None
    limits: Limits | None = None

    @property
    def computes(self) -> str:
        """In which number format, and by which kernels: where these differ, so may tokens."""
        return f"in {self.dtype} by {self.backend_reason if self.backend == 'native' else self.backend}"

    @property
    def sizing(self) -> str:
        """In one line, what the pool is and what fits into it."""
        layout, limits, workers = self.layout, self.limits, self.tensor_parallel_size
        if layout is None or limits is None:
            return "pages are not known before the model is here"
        fit = limits.num_pages // limits.pages(limits.max_model_len)
        longest = "" if fit else f", the longest that fits has {limits.longest_prompt:,}"
        return (
            f"{limits.num_pages:,} pages and the null page ({(limits.num_pages + 1) * layout.bytes_per_page:,} bytes"
            f"{f' at each of {workers} workers' if workers > 1 else ''}), "
            f"{limits.num_pages * layout.bytes_per_page // layout.bytes_per_token:,} tokens; "
            f"sequences of max_model_len {limits.max_model_len:,} that fit at once: {fit:,}{longest}"
        )


def plan(config: EngineConfig, model: ModelConfig | None = None, *, runs_here: bool = True) -> Plan:
    """Resolve `config` against this machine and the model, as far as it is known. Downloads and loads nothing.

    runs_here: whether this machine has to have the memory; else kv_memory in bytes is taken as it is.
    Of several workers each has as many pages as the one whose pages are the largest. Bytes of kv_memory are of each; a
    share is of all together where they share a memory, as on a CPU.
    Raises ConfigError for what cannot work here.
    """
    model = model or peek(config.model)
    device = pick_device(config.device)
    dtype, dtype_reason = pick_dtype(config.dtype, device)
    workers = config.tensor_parallel_size
    if workers > 1 and find_spec("ray") is None:
        raise ConfigError("tensor_parallel_size above 1 needs Ray: pip install 'paged-kv[ray]'")
    threads, threads_reason = pick_threads(config.threads)
    if workers > 1 and config.threads is None:
        threads, threads_reason = max(1, threads // workers), f"{threads_reason}, for {workers} workers"
    page_size = config.page_size or (64 if device == "cuda" else 16)
    backend, reason = pick_backend(config.attention_backend, config.quantization, device)
    if config.deterministic and backend != "native":
        raise ConfigError(
            f"deterministic needs the native kernels, as only their rows keep their bits in any batch, and the backend "
            f"is {backend} ({reason}): leave deterministic out, or attention_backend and device at auto"
        )
    parts = [] if model is None else [shard.config(model) for shard in shards(model, workers)]
    each = [
        _weight_bytes(part, dtype, config.quantization, backend == "native", head=not rank)
        for rank, part in enumerate(parts)
    ]
    sharing = 1 if device == "cuda" else workers  # a memory
    weights = max(each, default=0) if sharing == 1 else sum(each)
    wanted = parse_memory(config.kv_memory)
    memory = cuda_memory() if device == "cuda" else host_memory()
    wanted = wanted if isinstance(wanted, float) else wanted * sharing
    kv_bytes = pool_bytes(wanted, memory if runs_here or isinstance(wanted, float) else None, weights) // sharing
    budget = config.max_num_batched_tokens or (4096 if device == "cuda" else 512)
    known: dict[str, Any] = {}
    if model is not None:
        layout = kv_layout(max(parts, key=lambda part: part.num_kv_heads), dtype, page_size)
        max_model_len = config.max_model_len or model.default_max_model_len
        if max_model_len > model.max_model_len:
            raise ConfigError(
                f"max_model_len is {max_model_len}, and the model's positions end at {model.max_model_len}: lower it"
            )
        limits = Limits(
            max_model_len, layout.pages_in(kv_bytes) - 1, page_size, layout.windows, config.max_num_seqs, budget
        )
        one = limits.pages(max_model_len)
        # More pages than the longest sequences of a full step take would never be used.
        limits = replace(limits, num_pages=min(limits.num_pages, config.max_num_seqs * one))
        if config.max_model_len and limits.num_pages < one:  # the model's own may be too long: requests are refused
            raise ConfigError(
                f"max_model_len {max_model_len:,} needs {(one + 1) * layout.bytes_per_page:,} bytes of pages, and "
                f"kv_memory gives {kv_bytes:,}: lower it to {limits.longest_prompt:,}, the longest that fits, or raise "
                "kv_memory"
            )
        known = {
            "layout": layout,
            "num_pages": limits.num_pages + 1,
            "max_model_len": max_model_len,
            "limits": limits,
        }
    return Plan(
        device=device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        backend=backend,
        backend_reason=reason,
        threads=threads,
        threads_reason=threads_reason,
        model_name=config.model,
        model_known=model is not None,
        page_size=page_size,
        max_num_batched_tokens=budget,
        weight_bytes=weights,
        kv_bytes=kv_bytes,
        tensor_parallel_size=workers,
        **known,
    )


def rules(config: EngineConfig) -> Rules:
    """How requests are scheduled."""
    return Rules(
        config.admission,
        ORDERS[config.policy],
        VICTIMS[config.victim],
        max_step_ms=config.max_step_ms,
        num_speculative_tokens=config.num_speculative_tokens,
    )


def _weight_bytes(model: ModelConfig, dtype: str, quantization: str | None, native: bool, head: bool = True) -> int:
    """What the weights take. Native kernels have the head packed, beside the embedding that it may be tied to.

    model: may be a shard's; head: whether it is there.
    """
    embedding = model.vocab_size * model.hidden_size
    apart = not model.tie_word_embeddings
    rest = num_parameters(model) - embedding * (1 + apart)
    size = DTYPE_BYTES[dtype]
    if not native:
        return (rest + embedding * (1 + (apart and head))) * size
    matrices, heads = (_QUANTIZED_BYTES[quantization], _QUANTIZED_BYTES["int8"]) if quantization else (size, size)
    return int(rest * matrices + embedding * (size + (heads if head else 0)))


def kv_layout(model: ModelConfig, dtype: str, page_size: int) -> KVLayout:
    return KVLayout.of(model.layer_windows, model.num_kv_heads, model.head_dim, dtype, page_size)


class LLM:
    """A loaded model behind an engine. Settings are those of EngineConfig, by name.

    Raises ConfigError for a bad setting, CheckpointError for a model that cannot be had.
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        self._start(EngineConfig.from_settings(model=model, **settings))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        plan(config)  # refuses what cannot work before anything is downloaded
        checkpoint = resolve(config.model)
        self.config = config
        self.plan = plan(config, checkpoint.config)
        self.model_name = checkpoint.name
        self._path, self.model_config = checkpoint.path, checkpoint.config
        self.tokenizer = Tokenizer.from_dir(checkpoint.path)
        layout, limits = self.plan.layout, self.plan.limits
        assert layout is not None
        assert limits is not None

        self.engine = Engine(
            self._executor(layout, limits),
            self.tokenizer,
            limits,
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.config.eos_token_ids,
            enable_prefix_caching=config.enable_prefix_caching,
            rules=rules(config),
            seed=config.seed,
        )
        self._ids = itertools.count()
        self._mail: dict[str, list[RequestOutput]] = {}

    def _executor(self, layout: KVLayout, limits: Limits) -> Executor:
        """What runs the model; layout: of its largest worker."""
        settings: dict[str, Any] = {
            "num_pages": limits.num_pages + 1,
            "max_model_len": limits.max_model_len,
            "positions": min(limits.max_model_len, limits.longest_prompt + 1),
            "device": self.plan.device,
            "backend": self.plan.backend,
            "quantization": self.config.quantization,
            "threads": self.plan.threads,
        }
        size = self.config.tensor_parallel_size
        if size > 1:
            from worker.ray_executor import RayExecutor

            return RayExecutor(self._path, self.model_config, layout, size, **settings)
        from worker.loading import load_executor  # imports torch: 1.2 s

        return load_executor(self._path, self.model_config, layout, **settings)

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: Params = None,
        *,
        priority: int | SequenceOf[int] = 0,
    ) -> list[RequestOutput]:
        """Continue each prompt; the answers in the order of the prompts.

        prompts: one or a list of texts or lists of token ids. sampling_params: one for all, or one for each. priority:
        likewise; with the policy `priority` the lower come first, from -10 to 10. Raises RequestError, which names the
        prompt, before anything runs.
        """
        return self._in_order(self._requests(prompts, sampling_params, chat=False, priority=priority))

    def generate_iter(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: Params = None,
        *,
        priority: int | SequenceOf[int] = 0,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields each answer as it is finished; its request_id is the number of its prompt."""
        return self._run(self._requests(prompts, sampling_params, chat=False, priority=priority))

    def chat(
        self, messages: SequenceOf[Any], sampling_params: Params = None, *, priority: int | SequenceOf[int] = 0
    ) -> list[RequestOutput]:
        """Answer a conversation, a list of {"role": ..., "content": ...}, or a list of conversations."""
        return self._in_order(self._requests(messages, sampling_params, chat=True, priority=priority))

    def beam_search(self, prompts: Prompt | SequenceOf[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """The `beam_width` likeliest continuations that a beam search finds for each prompt, best first.

        Scores and order are those of transformers' `num_beams`. Beams share the pages of what they have in common.
        """
        return self._in_order(self._requests(prompts, params, chat=False))

    def update_weights(self, weights: str | Path | Mapping[str, Any]) -> None:
        """Replace the weights, as after a training step: the folder of a checkpoint, or tensors by Hugging Face name.

        Tensors take the place of those of the checkpoint loaded last; what is not named is as it is there. Prefixes
        cached with the old weights are never used again, and requests under way recompute theirs. Raises
        CheckpointError, and changes nothing, for another architecture, a name or a shape that is not the model's.
        """
        if isinstance(weights, Mapping):
            self.engine.update_weights(self._path, weights)
            return
        checkpoint = resolve(str(weights))
        if replace(checkpoint.config, dtype=self.model_config.dtype) != self.model_config:
            raise CheckpointError(f"{weights} is not a checkpoint of the model that is loaded: its config differs")
        self.engine.update_weights(checkpoint.path, {})
        self._path = checkpoint.path

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.reset_prefix_cache()

    def pin(self, prompt: Prompt, seconds: float) -> int:
        """Keep what is cached of a prompt's beginning for so long, if anything else can be given up instead.

        Returns how many tokens of it are cached.
        """
        _, tokens = self.tokens(prompt, chat=False)
        return self.engine.pin(tokens, seconds, prompt_salt(prompt))

    def stream(
        self, prompt: Prompt | SequenceOf[Any], sampling_params: SamplingParams | None = None, *, chat: bool = False
    ) -> Iterator[RequestOutput]:
        """Continue one prompt (or with `chat` one conversation); yields what is new after every step."""
        request = self._requests([prompt], sampling_params, chat)
        return self._run(request, stream=True)

    def close(self) -> None:
        """Let go of the model and its memory."""
        self.engine.close()

    def _requests(
        self,
        prompts: Any,
        sampling_params: Params | BeamSearchParams,
        chat: bool,
        priority: int | SequenceOf[int] = 0,
    ) -> list[Request]:
        """Every prompt tokenised and checked, before the first is queued."""
        if not isinstance(prompts, (str, Mapping, SequenceOf, np.ndarray)):
            raise RequestError(f"prompts must be a prompt or a list of prompts, not {shown(prompts)}")
        items = [prompts] if is_one_prompt(prompts, chat) else list(prompts)
        params: list[SamplingParams | BeamSearchParams]
        if isinstance(sampling_params, (SamplingParams, BeamSearchParams)) or sampling_params is None:
            params = [sampling_params or SamplingParams()] * len(items)
        else:
            if not isinstance(sampling_params, (list, tuple)):
                raise RequestError(f"sampling_params must be SamplingParams, or a list, not {shown(sampling_params)}")
            params = list(sampling_params)
        if len(params) != len(items):
            raise RequestError(f"{len(items)} prompts and {len(params)} sampling_params: give one, or one for each")
        classes = priority if isinstance(priority, (list, tuple)) else [priority] * len(items)
        if len(classes) != len(items):
            raise RequestError(
                f"{len(items)} prompts and {len(classes)} priorities: give one, or one for each", "priority"
            )
        wanted = []
        for i, (item, param, class_) in enumerate(zip(items, params, classes, strict=True)):
            try:
                text, tokens = self.tokens(item, chat)
                request = self.engine.resolve(
                    "", tokens, param, prompt=text, chat=chat, cache_salt=prompt_salt(item), priority=class_
                )
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}", error.param) from None
            wanted.append(request)
        return wanted

    def tokens(self, prompt: Any, chat: bool) -> tuple[str | None, Any]:
        """The text of a prompt, where it is one, and its token ids."""
        return prompt_tokens(prompt, chat, self.tokenizer, self.engine.max_prompt_tokens)

    def collect(self, request_ids: Collection[str]) -> list[RequestOutput]:
        """What is new of these requests, which came in through `engine.add` or `queue`: runs a step if nothing is here.

        Every caller gets its own, however many take turns. Raises RequestError for a request that has ended and whose
        output somebody else has taken, from `Engine.abort` or `Engine.step`.
        """
        if not any(one in request_ids for one in self._mail):
            for output in self.engine.step():
                self._mail.setdefault(output.request_id, []).append(output)
        found = [output for one in list(self._mail) if one in request_ids for output in self._mail.pop(one)]
        gone = [one for one in request_ids if not self.engine.is_live(one)] if not found else []
        if gone:
            raise RequestError(
                f"{len(gone)} of {len(request_ids)} requests have ended, and somebody else took their outputs: they "
                "were aborted, the engine was closed, or its steps were run by hand"
            )
        return found

    def new_id(self) -> str:
        """A request id that nobody has here."""
        return f"llm-{next(self._ids)}"

    def _in_order(self, wanted: list[Request]) -> list[RequestOutput]:
        return sorted(self._run(wanted), key=lambda output: int(output.request_id))

    def _run(self, wanted: list[Request], stream: bool = False) -> Iterator[RequestOutput]:
        """Queue all, and yield outputs as they come. Left early, or by an error, it aborts what has not ended."""
        numbers: dict[str, int] = {}
        try:
            for i, request in enumerate(wanted):
                request_id = self.new_id()
                self.engine.queue(replace(request, request_id=request_id), stream)
                numbers[request_id] = i
            while numbers:
                for output in self.collect(numbers):
                    number = numbers.pop(output.request_id) if output.finished else numbers[output.request_id]
                    yield replace(output, request_id=str(number))
        finally:
            for request_id in numbers:
                self.engine.abort(request_id)
                self._mail.pop(request_id, None)


def is_one_prompt(prompts: Any, chat: bool) -> bool:
    """Whether this is one prompt (or conversation), not a list of them."""
    if isinstance(prompts, (str, Mapping, np.ndarray)):
        return True
    first = prompts[0] if len(prompts) else None
    return isinstance(first, Mapping) if chat else isinstance(first, (int, np.integer))
