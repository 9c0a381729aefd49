"""Desk: requests of two kinds over one LLM, each answered once, whatever becomes of it.

A job hands over lines, a program prompts; both go to an LLM in this process or to the one of a replica, and what comes
back is a value that says how it went, also for what was refused: nothing that is wrong with one raises for the others.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, TypeAlias

from paged.errors import RequestError, RequestFailed, shown
from scheduler import openai
from scheduler.llm import LLM
from scheduler.outputs import RequestOutput
from scheduler.text import prompt_salt
from worker.step import SamplingParams


@dataclass(frozen=True, slots=True)
class LineRequest:
    """What of a line of OpenAI's batch format says what is wanted; `url` and `body` are as the file has them."""

    method: Any
    url: Any
    body: Any


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt or conversation, as LLM.generate and LLM.chat take them."""

    prompt: Any
    params: SamplingParams | None = None
    chat: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Response:
    """The answer to a line. body: as OpenAI writes it, with `error` in it where status is not 200.

    A line that nobody could answer has no body, and its status is a code: why.
    """

    status: int | str
    body: dict[str, Any] | None
    message: str = ""  # where there is no body
    prompt_tokens: int = 0
    output_tokens: int = 0


AnyRequest: TypeAlias = LineRequest | PromptRequest
# Of a PromptRequest the output, or the RequestError or RequestFailed that stands for it; of a LineRequest a Response.
Result: TypeAlias = RequestOutput | Response | RequestError | RequestFailed


class Desk:
    """Serves requests under keys of the caller's over `llm`, which nobody else may step meanwhile."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._keys: dict[str, tuple[str, AnyRequest, SamplingParams | None]] = {}  # by the engine's id
        self._ids: dict[str, str] = {}  # by key
        self._ended: set[str] = set()  # without an answer, and whose empty outputs are still to come
        self._results: list[tuple[str, Result]] = []  # that no step has returned yet

    def __len__(self) -> int:
        """Requests whose result no step has returned."""
        return len(self._keys) + len(self._results)

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do or to return, if only what is left of requests that failed."""
        return bool(self._keys or self._results or self._ended)

    def add(self, key: str, request: AnyRequest) -> None:
        """Queue a request; what is wrong with it is its result. A key may come again when its result was returned."""
        assert key not in self._ids, f"key {key} is in use"
        try:
            if isinstance(request, LineRequest):
                self._add_line(key, request)
            else:
                self._add_prompt(key, request)
        except RequestError as error:
            self._results.append((key, failure(request, error)))

    def abort(self, keys: SequenceOf[str]) -> None:
        """Forget these requests, wherever they are; unknown ones are none."""
        for key in keys:
            engine_id = self._ids.pop(key, None)
            if engine_id is not None:
                del self._keys[engine_id]
                self.llm.engine.abort(engine_id)
        self._results = [one for one in self._results if one[0] not in keys]

    def step(self) -> list[tuple[str, Result]]:
        """Run a step if there is something to compute; what has ended.

        Raises what the worker raises: every request goes on with the next step.
        """
        if not self._results and (self._keys or self._ended):
            self._step()
        results, self._results = self._results, []
        return results

    def _step(self) -> None:
        engine = self.llm.engine
        try:
            outputs = self.llm.collect((*self._keys, *self._ended))
        except Exception as error:
            ended = [one for one in engine.failed if one in self._keys and not engine.is_live(one)]
            if not ended:
                raise  # the step itself failed
            for engine_id in ended:
                self._ended.add(engine_id)
                key, request, _ = self._done(engine_id)
                failed = RequestFailed(f"the request ended without an answer: {error}")
                self._results.append((key, failure(request, failed)))
            return
        for output in outputs:
            if output.request_id in self._ended:
                self._ended.remove(output.request_id)  # it has its result
                continue
            key, request, params = self._done(output.request_id)
            if isinstance(request, LineRequest):
                assert params is not None
                self._results.append((key, self._response(output, request, params)))
            else:
                self._results.append((key, output))

    def _done(self, engine_id: str) -> tuple[str, AnyRequest, SamplingParams | None]:
        one = self._keys.pop(engine_id)
        del self._ids[one[0]]
        return one

    def _add_prompt(self, key: str, request: PromptRequest) -> None:
        text, tokens = self.llm.tokens(request.prompt, request.chat)
        params, salt = request.params or SamplingParams(), prompt_salt(request.prompt)
        self._queue(key, request, tokens, params, prompt=text, cache_salt=salt, priority=request.priority)

    def _add_line(self, key: str, request: LineRequest) -> None:
        url, body = request.url, request.body
        if request.method != "POST":
            raise RequestError(f"method must be POST, not {shown(request.method)}", "method")
        if url not in (openai.COMPLETIONS, openai.CHAT):
            raise RequestError(f"url must be {openai.COMPLETIONS} or {openai.CHAT}, not {shown(url)}", "url")
        if not isinstance(body, dict):
            raise RequestError("body is missing, or is no object", "body")
        name, chat = self.llm.model_name, url == openai.CHAT
        if body.get("model") not in (None, name):
            raise RequestError(f"model {shown(body['model'])} is not the one of this job, {name!r}", "model")
        params = openai.sampling_params(body, chat)
        text, tokens = self.llm.tokens(body.get("messages") if chat else openai.completion_prompt(body), chat)
        priority = 0 if body.get("priority") is None else body["priority"]
        try:
            self._queue(key, request, tokens, params, prompt=text, priority=priority)
        except RequestError as error:
            raise openai.refused(error, body) from None

    def _queue(self, key: str, request: AnyRequest, tokens: Any, params: SamplingParams, **more: Any) -> None:
        chat = request.chat if isinstance(request, PromptRequest) else request.url == openai.CHAT
        engine_id = self.llm.new_id()
        self.llm.engine.add(engine_id, tokens, params, chat=chat, **more)
        self._keys[engine_id] = key, request, params
        self._ids[key] = engine_id

    def _response(self, output: RequestOutput, request: LineRequest, params: SamplingParams) -> Response:
        chat = request.url == openai.CHAT
        body = openai.answer_body(output, params, chat, self.llm.model_name, self.llm.tokenizer)
        return Response(200, body, "", len(output.prompt_token_ids), output.num_output_tokens)


def failure(request: AnyRequest, error: RequestError | RequestFailed) -> Result:
    """What stands for the answer of a request: the error itself, or of a line its body as OpenAI writes it."""
    if isinstance(request, PromptRequest):
        return error
    if isinstance(error, RequestError):
        return Response(400, openai.error_body(str(error), error.param))
    return Response(500, openai.error_body(str(error), None, "server_error"))
