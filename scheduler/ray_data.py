"""Generate: an LLM in each actor of a Ray Data pipeline.

    answers = ray.data.read_json("prompts.jsonl").map_batches(
        Generate,
        fn_constructor_kwargs={"sampling_params": SamplingParams(max_tokens=64), "kv_memory": "2GiB"},
        compute=ray.data.ActorPoolStrategy(size=2), num_cpus=4, batch_format="pyarrow", batch_size=256,
    )

Rows keep their columns and get the answer's. What is wrong with a row stands in its column `error`, and costs no other
row anything. The requests of a batch run together, so at its end few are left: take batches of several times
max_num_seqs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paged.errors import ConfigError, PagedError
from scheduler.config import EngineConfig
from scheduler.desk import Desk, PromptRequest
from scheduler.llm import LLM
from scheduler.outputs import RequestOutput
from worker.step import SamplingParams


class Generate:
    """For `ray.data.Dataset.map_batches`: answers the prompts in a column.

    model, settings: as of LLM. An actor computes with the threads that `num_cpus` of map_batches gives it, unless
    `threads` is set; actors on one machine share its memory, so set kv_memory. prompt_column: texts, lists of token
    ids, or vLLM's dicts. messages_column: conversations, instead. New columns: `output_column`, and beside it
    prompt_tokens and output_tokens (int, 0 where there is no answer), finish_reason, and error, which is None or says
    what is wrong.

    Raises ConfigError and CheckpointError as LLM does; a batch without the column raises KeyError, and a worker that
    fails what it raises. Ray's own settings say what becomes of the job then.
    """

    def __init__(
        self,
        model: str = "smollm2",
        sampling_params: SamplingParams | None = None,
        *,
        prompt_column: str = "prompt",
        messages_column: str | None = None,
        output_column: str = "text",
        **settings: Any,
    ) -> None:
        if sampling_params is not None and sampling_params.n > 1:
            raise ConfigError(f"n is {sampling_params.n}, and a row has room for one answer: make a row for each")
        if "threads" not in settings:
            settings["threads"] = _threads()
        config = EngineConfig.from_settings(model=model, **settings)
        self._params, self._output = sampling_params, output_column
        self._chat = messages_column is not None
        self._input = prompt_column if messages_column is None else messages_column
        self._desk = Desk(LLM.from_config(config))

    def __call__(self, batch: Any) -> Any:
        """Answer a batch in any of Ray's formats (dict of arrays, pandas, pyarrow); the same format comes back.

        Ray pickles conversations in a dict of arrays that comes back, and reads no file with such columns: take
        batch_format="pyarrow" for them.
        """
        if isinstance(batch, Mapping):
            return {**batch, **{name: _array(values) for name, values in self._columns(batch[self._input]).items()}}
        if hasattr(batch, "assign"):  # pandas
            columns = self._columns(batch[self._input])
            return batch.assign(**{name: _array(values) for name, values in columns.items()})
        import pyarrow

        for name, values in self._columns(batch[self._input].to_pylist()).items():
            kind = pyarrow.int64() if name.endswith("_tokens") else pyarrow.string()
            made = pyarrow.array(values, kind)
            at = batch.schema.get_field_index(name)
            batch = batch.append_column(name, made) if at < 0 else batch.set_column(at, name, made)
        return batch

    def _columns(self, prompts: Any) -> dict[str, list[Any]]:
        """The new columns, in order."""
        answers = self._answers([_plain(prompt) for prompt in prompts])
        columns: dict[str, list[Any]] = {
            name: [] for name in (self._output, "prompt_tokens", "output_tokens", "finish_reason", "error")
        }
        for answer in answers:
            row: tuple[Any, ...] = (None, 0, 0, None, str(answer))
            if isinstance(answer, RequestOutput):
                only = answer.outputs[0]
                tokens = len(answer.prompt_token_ids), answer.num_output_tokens
                row = (only.text, *tokens, only.finish_reason, None)
            for values, value in zip(columns.values(), row, strict=True):
                values.append(value)
        return columns

    def _answers(self, prompts: list[Any]) -> list[RequestOutput | PagedError]:
        desk, answers = self._desk, dict[str, Any]()
        keys = [str(i) for i in range(len(prompts))]
        try:
            for key, prompt in zip(keys, prompts, strict=True):
                desk.add(key, PromptRequest(prompt, self._params, self._chat))
            while len(desk):
                answers.update(desk.step())
        except BaseException:
            desk.abort(keys)  # Ray may give this actor another batch
            raise
        return [answers[key] for key in keys]


def _threads() -> int:
    """As many as Ray has given this actor CPUs."""
    try:
        import ray
    except ImportError:
        raise ConfigError("Generate needs Ray: pip install 'paged-kv[ray]'") from None
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))


def _plain(value: Any) -> Any:
    """Lists again where Ray has made them arrays of objects; token ids may stay an array."""
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value


def _array(values: list[Any]) -> np.ndarray[Any, Any]:
    """int64, or object where there may be text."""
    return np.array(values, dtype=np.int64 if values and isinstance(values[0], int) else object)
