"""Engine: requests in, answers out, one step at a time. Joins scheduler, executor and text; knows no tensor."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged.errors import RequestError, RequestFailed, shown
from paged.manager import KVCacheManager
from scheduler import policy
from scheduler.beam import BeamSearchParams
from scheduler.grammar import Grammar, Grammars
from scheduler.metrics import Metrics
from scheduler.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput
from scheduler.request import Family, Request, Sequence, State, TextSink
from scheduler.scheduler import Scheduler
from scheduler.text import TextStream, Tokenizer
from worker.executor import Executor, uninterrupted
from worker.step import Logprobs, SamplingParams, check_min_tokens


class Engine:
    """Serves requests over one executor.

    limits: what bounds a request; its number of pages is the executor's. eos_token_ids: end of a sequence unless
    ignore_eos. vocab_size: rows of the model's embedding. tokenizer: None where only token ids go in and out; stop
    strings are refused then. seed: draws the seeds of requests that bring none; None takes them from the system.
    rules: how requests are scheduled.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None,
        limits: policy.Limits,
        *,
        vocab_size: int,
        eos_token_ids: SequenceOf[int] = (),
        enable_prefix_caching: bool = True,
        rules: policy.Rules | None = None,
        seed: int | None = None,
    ) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.limits = limits
        self._vocab_size = vocab_size
        self._grammars = Grammars(tokenizer, vocab_size) if tokenizer else None
        self._eos_token_ids = frozenset(eos_token_ids)
        manager = KVCacheManager(executor.num_pages, limits.page_size, enable_prefix_caching, limits.windows)
        self.scheduler = Scheduler(manager, limits, rules)
        self.metrics = Metrics(stats=self.scheduler.stats)
        self._seeds = random.Random(seed)
        # Of each streaming request and sequence: tokens that were given out, None once its end was.
        self._streams: dict[str, dict[int, int | None]] = {}
        self._ready: list[RequestOutput] = []  # that no step has returned yet
        self._changed: list[Family] = []  # whose outputs are to be made
        self.failed: tuple[str, ...] = ()  # if the last step raised, the requests that it was about

    @property
    def has_work(self) -> bool:
        """Whether a step would have something to do, or to return."""
        return self.scheduler.has_work or bool(self._ready or self._changed)

    def is_live(self, request_id: str) -> bool:
        """Whether a request has not ended."""
        return self.scheduler.is_live(request_id)

    @property
    def stats(self) -> EngineStats:
        """Counters; the object is the engine's own and goes on changing."""
        return self.scheduler.stats

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that can be computed at all, in tokens."""
        return self.limits.longest_prompt

    def add(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int] | npt.NDArray[np.int32],
        params: SamplingParams | BeamSearchParams,
        *,
        prompt: str | None = None,
        chat: bool = False,
        stream: bool = False,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request. `stream` makes every step give what is new of it; else only its end is given.

        cache_salt: share pages only with requests of the same salt. priority: class from -10 to 10, the lower the
        earlier, where the policy is `priority`. Raises RequestError, which names the field, for an
        id in use and for what can never fit.
        """
        request = self.resolve(
            request_id, prompt_token_ids, params, prompt=prompt, chat=chat, cache_salt=cache_salt, priority=priority
        )
        self.queue(request, stream)

    def queue(self, request: Request, stream: bool = False) -> None:
        """`add` for what `resolve` gave."""
        if stream and request.beams:
            raise RequestError("a beam search cannot be streamed: until its end every beam may still lose", "stream")
        tokenizer = self.tokenizer
        family = self.scheduler.add(
            request, None if tokenizer is None else lambda: TextStream(tokenizer, request.params, eager=stream)
        )
        self.metrics.added(family)
        if stream:
            self._streams[request.request_id] = {}

    def resolve(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int] | npt.NDArray[np.int32],
        params: SamplingParams | BeamSearchParams,
        *,
        prompt: str | None = None,
        chat: bool = False,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Request:
        """The request with every default filled in; checks all that `add` checks but the id, and queues nothing.

        It may be called while another thread runs a step.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"a request id must be a string, not {shown(request_id)}", "request_id")
        tokens = self._checked(prompt_token_ids)
        _check_salt(cache_salt)
        most = policy.PRIORITIES
        if not isinstance(priority, int) or isinstance(priority, bool) or not -most <= priority <= most:
            raise RequestError(
                f"priority must be a whole number from -{most} to {most}, not {shown(priority)}", "priority"
            )
        if not isinstance(params, (SamplingParams, BeamSearchParams)):
            raise RequestError(f"params must be SamplingParams, not {shown(params)}")
        beams = params if isinstance(params, BeamSearchParams) else None
        sampling = params if isinstance(params, SamplingParams) else _greedy(params)
        if sampling.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, this engine has none", "stop")
        if sampling.bad_words and self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer, this engine has none", "bad_words")
        phrases = self.tokenizer.phrases(sampling.bad_words) if self.tokenizer and sampling.bad_words else ()
        phrases = tuple(ids for ids in phrases if max(ids) < self._vocab_size)  # others cannot come about
        eos_token_ids = frozenset() if sampling.ignore_eos else self._eos_token_ids
        policy.check_tokens(sampling, phrases, eos_token_ids, self._vocab_size)
        num_sequences = sampling.n if beams is None else beams.beam_width
        max_tokens = policy.resolve_max_tokens(len(tokens), sampling.max_tokens, chat, self.limits, num_sequences)
        check_min_tokens(sampling.min_tokens, max_tokens)
        return Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=tokens,
            params=sampling,
            max_tokens=max_tokens,
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            eos_token_ids=eos_token_ids,
            cache_salt=cache_salt,
            beams=beams,
            priority=priority,
            bad_phrases=phrases,
            grammar=self._grammar(sampling, eos_token_ids),
        )

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the requests that ended in it, and what is new of those that stream.

        If the worker raises, so does this: the step counts for nothing, every request goes on with the next one. Ctrl-C
        while the worker runs is such a case; it waits while tables and queues are changed, and what a step has given
        that was not returned, the next one returns. What a tokenizer raises is raised too, and ends only the request
        whose text it was. `failed` names the requests of such a step: who wants no second try aborts them.
        """
        scheduler, metrics, clock = self.scheduler, self.metrics, self.metrics.clock
        self.failed = ()
        scheduler.manager.expire(time.monotonic())
        try:
            with uninterrupted():
                began = clock()
                step = scheduler.schedule()
                metrics.admitted(scheduler.admitted)
            if step is not None:
                scheduled = clock()
                self.executor.submit(step)
                result = self.executor.result()
                with uninterrupted():
                    executed = clock()
                    scheduler.took(executed - scheduled)
                    changed = scheduler.update(result)
                    self._changed += changed
                    metrics.updated(changed)
                    updated = clock()
                    while self._changed:  # one by one: if an output cannot be made, the others are there
                        family = self._changed.pop(0)
                        if family.state is State.FINISHED or family.request.request_id in self._streams:
                            self._ready.append(self._made(family))
                    spent = scheduled - began, executed - scheduled, updated - executed, clock() - updated
                    metrics.step(*spent, step.num_tokens)
        except BaseException:
            with uninterrupted():
                self.failed = tuple(scheduler.fail())
            raise
        if scheduler.faults:
            self.failed = (scheduler.faults[0][0],)
            raise scheduler.faults.pop(0)[1]
        outputs = self._ready
        try:
            self._ready = []
            return outputs  # noqa: TRY300  Ctrl-C may come between the two
        except BaseException:
            self._ready = outputs
            raise

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request, at any moment; its last output. None if it is not known or has ended already."""
        with uninterrupted():
            family = self.scheduler.abort(request_id)
            if family is None:
                return None
            self.metrics.updated((family,))
            return self._made(family)

    def pin(self, prompt_token_ids: SequenceOf[int], seconds: float, cache_salt: str | None = None) -> int:
        """Keep what is cached of a prompt for so long, if anything else can be given up instead. Its tokens."""
        _check_salt(cache_salt)
        tokens = np.append(self._checked(prompt_token_ids), np.int32(0))  # the last token is never matched
        return self.scheduler.manager.pin(tokens, time.monotonic() + seconds, self.scheduler.namespace(cache_salt))

    def update_weights(self, path: Path, replaced: Mapping[str, Any]) -> None:
        """Go on with the weights in the folder `path`, tensors in `replaced` by name put in place of its own.

        Nothing that was computed with the old ones is used again: the prefix cache begins anew, and running requests
        keep their tokens and compute K and V again. Raises CheckpointError, and changes nothing, for what does not fit.
        """
        self.executor.update_weights(path, replaced)
        self.scheduler.new_weights()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Abort what is left and let go of the worker."""
        for request_id in self.scheduler.live_ids():
            self.abort(request_id)
        self.executor.close()

    def _checked(self, prompt_token_ids: SequenceOf[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        array = isinstance(prompt_token_ids, np.ndarray) and prompt_token_ids.ndim == 1
        if not array and not isinstance(prompt_token_ids, (list, tuple)):
            raise RequestError(f"a prompt must be a list of token ids, not {shown(prompt_token_ids)}", "prompt")
        for token in prompt_token_ids:
            if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
                raise RequestError(f"token ids must be whole numbers, not {shown(token)}", "prompt")
            if not 0 <= token < self._vocab_size:
                raise RequestError(f"token id {token} is not one of the model's, 0 to {self._vocab_size - 1}", "prompt")
        return np.asarray(prompt_token_ids, dtype=np.int32)

    def _grammar(self, params: SamplingParams, ends: Collection[int]) -> Grammar | None:
        """structured_outputs compiled, and tried at the beginning of a text."""
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise RequestError("structured_outputs need a tokenizer, this engine has none", "structured_outputs")
        grammar = self._grammars.get(params.structured_outputs)
        try:
            ended = grammar.matcher(ends).ended
        except RequestFailed as error:
            raise RequestError(f"structured_outputs: {error}", "structured_outputs") from None
        if ended:
            raise RequestError(
                "structured_outputs allow only an empty text, and no end token can say so: leave ignore_eos out",
                "structured_outputs",
            )
        return grammar

    def _made(self, family: Family) -> RequestOutput:
        """Its output. If the tokenizer cannot make one, the request has ended, with an output that holds nothing."""
        try:
            return self._output(family)
        except Exception as error:  # noqa: BLE001  whatever a tokenizer raises; the next step raises it again
            request = family.request
            if self.scheduler.abort(request.request_id) is not None:
                self.metrics.updated((family,))
            self.scheduler.faults.append((request.request_id, error))
            self._streams.pop(request.request_id, None)
            return RequestOutput(request.request_id, request.prompt, request.prompt_token_ids.tolist(), [], True)

    def _output(self, family: Family) -> RequestOutput:
        request = family.request
        given = self._streams.get(request.request_id)
        finished = family.state is State.FINISHED
        outputs = []
        for sequence in family.sequences:
            if given is None:
                outputs.append(self._completion(sequence, 0, None))
                continue
            first = given.get(sequence.index, 0)
            if first is not None and (sequence.num_output > first or sequence.finish_reason is not None):
                outputs.append(self._completion(sequence, first, sequence.text))
                given[sequence.index] = sequence.num_output if sequence.finish_reason is None else None
        if finished:
            self._streams.pop(request.request_id, None)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            outputs=outputs,
            finished=finished,
            num_cached_tokens=family.num_cached or 0,
            num_output_tokens=sum(sequence.num_output for sequence in family.sequences),
            prompt_logprobs=self._prompt_logprobs(family),
            metrics=self.metrics.request(family),
        )

    def _completion(self, sequence: Sequence, first: int, stream: TextSink | None) -> CompletionOutput:
        """The sequence from its generated token number `first` on; its text is what is new to `stream`, or all."""
        text = sequence.text
        assert text is None or isinstance(text, TextStream)
        wants_logprobs = sequence.request.params.logprobs is not None
        total = sum(entry.logprob for entry in sequence.logprobs) if wants_logprobs else sequence.cumulative_logprob
        return CompletionOutput(
            index=sequence.index,
            text="" if text is None else text.text if stream is None else text.take_delta(),
            token_ids=sequence.output_token_ids[first:].tolist(),
            logprobs=self._logprobs(sequence, first) if wants_logprobs else None,
            cumulative_logprob=total,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            score=sequence.score,
        )

    def _prompt_logprobs(self, family: Family) -> list[dict[int, Logprob] | None] | None:
        if family.request.params.prompt_logprobs is None or family.state is not State.FINISHED:
            return None
        tokens = family.request.prompt_token_ids[1 : 1 + len(family.scores)]
        return [None, *self._entries(tokens, family.scores)]

    def _logprobs(self, sequence: Sequence, first: int) -> list[dict[int, Logprob]]:
        return self._entries(sequence.output_token_ids[first:], sequence.logprobs[first:])

    def _entries(self, tokens: npt.NDArray[np.int32], entries: list[Logprobs]) -> list[dict[int, Logprob]]:
        result = []
        for token, entry in zip(tokens.tolist(), entries, strict=True):
            row = {token: Logprob(entry.logprob, entry.rank, self._token_text(token))}
            for rank, (top, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
                row.setdefault(top, Logprob(logprob, rank, self._token_text(top)))
            result.append(row)
        return result

    def _token_text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)


def _check_salt(cache_salt: object) -> None:
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError(f"cache_salt must be a string that is not empty, not {shown(cache_salt)}", "cache_salt")


def _greedy(beams: BeamSearchParams) -> SamplingParams:
    """What of a beam search concerns its worker and its text."""
    return SamplingParams(temperature=0, max_tokens=beams.max_tokens, ignore_eos=beams.ignore_eos)
