"""Engine: requests in, answers out, one step at a time. Joins scheduler, executor and text; knows no tensor."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from paged.errors import RequestError
from paged.manager import KVCacheManager
from scheduler import policy
from scheduler.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput
from scheduler.request import Request, Sequence
from scheduler.scheduler import Scheduler
from scheduler.text import TextStream, Tokenizer
from worker.executor import Executor
from worker.step import SamplingParams


class Engine:
    """Serves requests over one executor.

    eos_token_ids: end of a sequence unless ignore_eos. vocab_size: rows of the model's embedding. tokenizer: None where
    only token ids go in and out; stop strings are refused then. seed: draws the seeds of requests that bring none; None
    takes them from the system.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None,
        *,
        page_size: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: SequenceOf[int] = (),
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        seed: int | None = None,
    ) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        manager = KVCacheManager(executor.num_pages, page_size, enable_prefix_caching)
        self.scheduler = Scheduler(manager, max_num_seqs, max_num_batched_tokens)
        self._seeds = random.Random(seed)
        self._streams: dict[int, int] = {}  # of each streaming sequence, how many tokens were given out

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        """Counters; the object is the engine's own and goes on changing."""
        return self.scheduler.stats

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that can be computed at all, in tokens."""
        manager = self.scheduler.manager
        return policy.longest_prompt(self.max_model_len, manager.num_usable * manager.page_size)

    def add(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        chat: bool = False,
        stream: bool = False,
    ) -> None:
        """Queue a request. `stream` makes every step give what is new of it; else only its end is given.

        Raises RequestError, which names the field, for an id in use and for what can never fit.
        """
        request = self.resolve(request_id, prompt_token_ids, params, prompt=prompt, chat=chat)
        text = None if self.tokenizer is None else TextStream(self.tokenizer, params)
        sequence = self.scheduler.add(request, text)
        if stream:
            self._streams[sequence.seq_id] = 0

    def resolve(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        chat: bool = False,
    ) -> Request:
        """The request with every default filled in; checks all that `add` checks but the id, and queues nothing."""
        tokens = self._checked(prompt_token_ids)
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, this engine has none", "stop")
        manager = self.scheduler.manager
        max_tokens = policy.resolve_max_tokens(
            len(tokens), params.max_tokens, chat, self.max_model_len, manager.num_usable, manager.page_size
        )
        return Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=tokens,
            params=params,
            max_tokens=max_tokens,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_token_ids=frozenset() if params.ignore_eos else self._eos_token_ids,
        )

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the requests that ended in it, and what is new of those that stream.

        If the worker raises, so does this: the step counts for nothing, every request goes on with the next one.
        """
        try:
            step = self.scheduler.schedule()
            if step is None:
                return []
            self.executor.submit(step)
            changed = self.scheduler.update(self.executor.result())
        except BaseException:  # Ctrl-C may strike anywhere in here, not only in the worker
            self.scheduler.fail()
            raise
        outputs = []
        for sequence in changed:
            if sequence.finish_reason is not None or sequence.seq_id in self._streams:
                outputs.append(self._output(sequence))
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request, at any moment; its last output. None if it is not known or has ended already."""
        sequence = self.scheduler.abort(request_id)
        return None if sequence is None else self._output(sequence)

    def close(self) -> None:
        """Abort what is left and let go of the worker."""
        for request_id in self.scheduler.live_ids():
            self.abort(request_id)
        self.executor.close()

    def _checked(self, prompt_token_ids: SequenceOf[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        for token in prompt_token_ids:
            if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
                raise RequestError(f"token ids must be whole numbers, not {token!r:.80}", "prompt")
            if not 0 <= token < self._vocab_size:
                raise RequestError(f"token id {token} is not one of the model's, 0 to {self._vocab_size - 1}", "prompt")
        return np.asarray(prompt_token_ids, dtype=np.int32)

    def _output(self, sequence: Sequence) -> RequestOutput:
        request, finished = sequence.request, sequence.finish_reason is not None
        shown = self._streams.get(sequence.seq_id)
        text = sequence.text
        assert text is None or isinstance(text, TextStream)
        if shown is None:
            first, new_text = 0, "" if text is None else text.text
        else:
            first, new_text = shown, "" if text is None else text.take_delta()
            self._streams[sequence.seq_id] = sequence.num_output
        if finished:
            self._streams.pop(sequence.seq_id, None)
        wants_logprobs = request.params.logprobs is not None
        completion = CompletionOutput(
            index=sequence.index,
            text=new_text,
            token_ids=sequence.output_token_ids[first:].tolist(),
            logprobs=self._logprobs(sequence, first) if wants_logprobs else None,
            cumulative_logprob=sum(entry.logprob for entry in sequence.logprobs) if wants_logprobs else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            outputs=[completion],
            finished=finished,
            num_cached_tokens=sequence.num_cached or 0,
            num_output_tokens=sequence.num_output,
        )

    def _logprobs(self, sequence: Sequence, first: int) -> list[dict[int, Logprob]]:
        result = []
        for token, entry in zip(sequence.output_token_ids[first:].tolist(), sequence.logprobs[first:], strict=True):
            row = {token: Logprob(entry.logprob, entry.rank, self._token_text(token))}
            for rank, (top, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
                row.setdefault(top, Logprob(logprob, rank, self._token_text(top)))
            result.append(row)
        return result

    def _token_text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)

