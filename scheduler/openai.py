"""OpenAI's request bodies to ours, and our answers to OpenAI's: completions and chat completions."""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paged.errors import RequestError, shown
from scheduler.outputs import CompletionOutput, Logprob, RequestOutput
from scheduler.text import TextStream, Tokenizer
from worker.step import SamplingParams, StructuredOutputsParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# Fields that mean the same here, by our name; vLLM's additions to OpenAI's included.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens"),
    *("include_stop_str_in_output", "skip_special_tokens", "n", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens"),
    "prompt_logprobs",
)
# Fields of which only the value that changes nothing is supported.
_FIXED: dict[str, Any] = {"stream": False}
_FIXED_COMPLETIONS: dict[str, Any] = {"echo": False, "best_of": 1, "suffix": ""}
_CONSTRAINTS = ("response_format", "structured_outputs")  # OpenAI's, and vLLM's
_IGNORED = ("model", "user", "metadata", "store")


def sampling_params(body: Mapping[str, Any], chat: bool) -> SamplingParams:
    """The parameters in a body; null means absent. Raises RequestError, which names the field."""
    fixed = _FIXED if chat else _FIXED | _FIXED_COMPLETIONS
    own = ("messages", "max_completion_tokens", "top_logprobs") if chat else ("prompt",)
    known = (*_SAMPLING, *fixed, *_IGNORED, "logprobs", "priority", *_CONSTRAINTS, *own)
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise RequestError(f"unknown field {name[:80]!r}{hint}", name[:80])
        if name in fixed and value != fixed[name]:
            raise RequestError(f"{name} {shown(value)} is not supported, only {fixed[name]!r}", name)
    values = {name: given[name] for name in _SAMPLING if name in given}
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    values["structured_outputs"] = _structured_outputs(given)
    if chat:
        if "max_completion_tokens" in given:
            limit = given["max_completion_tokens"]
            if values.setdefault("max_tokens", limit) != limit:
                raise RequestError("max_tokens and max_completion_tokens differ: give one", "max_completion_tokens")
        values["logprobs"] = _chat_logprobs(given)
    elif "logprobs" in given:
        values["logprobs"] = given["logprobs"]
    try:
        return SamplingParams(**values)
    except RequestError as error:
        theirs = {"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens"}.get(error.param or "")
        if error.param is None or theirs is None or theirs not in given:
            raise
        raise RequestError(theirs + str(error).removeprefix(error.param), theirs) from None


def _logit_bias(given: Any) -> Any:
    """Its keys, which JSON can only have as strings, as token ids; what else is wrong SamplingParams will say."""
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias must be an object of token ids and numbers, not {shown(given)}", "logit_bias")
    biases = {}
    for key, bias in ((str(token), bias) for token, bias in given.items()):
        if not (key.isascii() and key.isdigit()) or str(int(key[:20])) != key:
            raise RequestError(f"logit_bias: {shown(key)} is no token id", "logit_bias")
        biases[int(key)] = bias
    return biases


def _structured_outputs(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What response_format or structured_outputs ask for."""
    ours, theirs = given.get("structured_outputs"), given.get("response_format")
    if ours is not None and theirs is not None:
        raise RequestError("response_format and structured_outputs are both given: give one", "response_format")
    if ours is not None:
        names = [field.name for field in fields(StructuredOutputsParams)]
        if not isinstance(ours, Mapping) or not set(ours) <= set(names):
            raise RequestError(
                f"structured_outputs must be an object with one of {', '.join(names)}, not {shown(ours)}",
                "structured_outputs",
            )
        return StructuredOutputsParams(**ours)
    if theirs is None:
        return None
    kind = theirs.get("type") if isinstance(theirs, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise RequestError(
            f"response_format must have the type text, json_object or json_schema, not {shown(theirs)}",
            "response_format",
        )
    inner = theirs.get("json_schema")
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise RequestError("response_format.json_schema must be an object with a schema in it", "response_format")
    return StructuredOutputsParams(json=inner["schema"])


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    wanted, top = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise RequestError(f"logprobs must be true or false, not {shown(wanted)}", "logprobs")
    if not wanted and top is not None:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    return (0 if top is None else top) if wanted else None


def refused(error: RequestError, body: Mapping[str, Any]) -> RequestError:
    """What the engine said of a request, by the field that its body has."""
    if error.param == "structured_outputs" and body.get("response_format") is not None:
        return RequestError(f"response_format: {error}", "response_format")
    return error


def completion_prompt(body: Mapping[str, Any]) -> Any:
    """The one prompt of a completion, text or token ids. Raises RequestError."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise RequestError(f"prompt holds {len(prompt)} prompts: write a line for each", "prompt")
        prompt = prompt[0]
    if not isinstance(prompt, (str, list)):
        raise RequestError(f"prompt must be text or a list of token ids, not {shown(prompt)}", "prompt")
    return prompt


def error_body(message: str, param: str | None, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def answer_body(
    output: RequestOutput, params: SamplingParams, chat: bool, model: str, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The body of the answer to a request with these parameters."""
    choices = []
    for completion in output.outputs:
        choice: dict[str, Any] = {"index": completion.index, "finish_reason": completion.finish_reason}
        if chat:
            choice["message"] = {"role": "assistant", "content": completion.text}
            choice["logprobs"] = _logprobs_of_chat(completion, params.logprobs)
        else:
            choice["text"] = completion.text
            choice["logprobs"] = _logprobs_of_completion(completion, params, tokenizer)
        if output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [row and _by_id(row) for row in output.prompt_logprobs]
        choices.append(choice)
    prompt_tokens, output_tokens = len(output.prompt_token_ids), output.num_output_tokens
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }


def _by_id(row: Mapping[int, Logprob]) -> dict[str, Any]:
    """As vLLM writes log-probabilities of prompts."""
    return {
        str(token): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token, entry in row.items()
    }


def _logprobs_of_completion(
    completion: CompletionOutput, params: SamplingParams, tokenizer: Tokenizer
) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    entries = list(zip(completion.token_ids, completion.logprobs, strict=True))
    # Where each token begins in the text of all of them; what ended the sequence lies behind what is shown.
    stream, offsets = TextStream(tokenizer, SamplingParams(skip_special_tokens=params.skip_special_tokens)), []
    for token in completion.token_ids:
        offsets.append(len(stream.text))
        stream.push(token)
    return {
        "tokens": [row[token].decoded_token for token, row in entries],
        "token_logprobs": [row[token].logprob for token, row in entries],
        "top_logprobs": [{other.decoded_token: other.logprob for other in row.values()} for _, row in entries],
        "text_offset": offsets,
    }


def _logprobs_of_chat(completion: CompletionOutput, count: int | None) -> dict[str, Any] | None:
    """`count`: alternatives asked for; the chosen token is among them only where it ranks so high."""
    if completion.logprobs is None or count is None:
        return None

    def entry(logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # else it is a part of a character, whose bytes are not known
        return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode()) if whole else None}

    content = []
    for token, row in zip(completion.token_ids, completion.logprobs, strict=True):
        top = sorted((other for other in row.values() if other.rank <= count), key=lambda other: other.rank)
        content.append(entry(row[token]) | {"top_logprobs": [entry(logprob) for logprob in top]})
    return {"content": content}
