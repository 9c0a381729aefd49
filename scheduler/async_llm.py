"""AsyncLLM: many coroutines, one engine.

    coroutines, of any event loops                    the engine's thread
    stream, generate -> tokenise, check -> inbox ---> Engine.step, as long as there is work; asleep when there is none
           ^                                                |
           '---- a mailbox for each request <---------------'

The thread owns the engine, and nobody else touches it while it lives. After each step it wakes every event loop that
something came for, once. It waits for no consumer: what a slow one has not taken yet is joined with what comes after.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar

from paged.errors import EngineClosed, RequestFailed, shown
from scheduler.beam import BeamSearchParams
from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.llm import LLM, Prompt
from scheduler.outputs import RequestOutput, join
from scheduler.request import Request
from scheduler.text import prompt_salt, prompt_tokens
from worker.executor import WorkerLost
from worker.step import SamplingParams

T = TypeVar("T")
Params: TypeAlias = SamplingParams | BeamSearchParams | None


class AsyncLLM:
    """A loaded model behind an engine that runs in a thread of its own. Settings are those of EngineConfig, by name.

    Every method may be called from any event loop, and from several at once. Loading blocks, for seconds: make it
    before the event loop runs, or by `await asyncio.to_thread(AsyncLLM, "smollm2")`.

    A request ends once: by its last output, or by an exception in who waits for it. RequestError: it was refused.
    RequestFailed: the step that computed it raised, which is chained; other requests go on. EngineClosed; WorkerLost
    is chained to it where a worker was lost and the engine with it. A task that is cancelled, or leaves `async for`,
    aborts its request.

    Raises ConfigError for a bad setting, CheckpointError for a model that cannot be had.
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        self._start(LLM(model, **settings).engine)

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncLLM:
        return cls.from_engine(LLM.from_config(config).engine)

    @classmethod
    def from_engine(cls, engine: Engine) -> AsyncLLM:
        """Over an engine of one's own, which belongs to this object from now on. `close` closes it too."""
        made = cls.__new__(cls)
        made._start(engine)
        return made

    def _start(self, engine: Engine) -> None:
        self._engine = engine  # of which only what never changes, and `resolve`, is used outside its thread
        self._thread = _EngineThread(engine)
        # Tokenises and checks, off the event loop; one thread, so that requests keep the order in which they came.
        self._clerk = ThreadPoolExecutor(1, thread_name_prefix="paged-text")
        self._ids = itertools.count()
        weakref.finalize(self, _let_go, self._thread, self._clerk)  # at the interpreter's end at the latest

    async def generate(
        self,
        prompt: Prompt | SequenceOf[Any],
        sampling_params: Params = None,
        *,
        chat: bool = False,
        priority: int = 0,
    ) -> RequestOutput:
        """Continue one prompt, or with `chat` one conversation, and wait for the whole answer."""
        async with self._request(prompt, sampling_params, chat, priority, stream=False) as mailbox:
            return await mailbox.take()

    async def stream(
        self,
        prompt: Prompt | SequenceOf[Any],
        sampling_params: SamplingParams | None = None,
        *,
        chat: bool = False,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, but yields what is new; for who is slower than the engine, that of several steps at once.

        The request begins with the first `async for`. If a reference to the generator outlives the loop over it, end
        it by `aclose()` (or contextlib.aclosing), as Python does only when the last one is gone.
        """
        async with self._request(prompt, sampling_params, chat, priority, stream=True) as mailbox:
            while True:
                output = await mailbox.take()
                yield output
                if output.finished:
                    return

    async def call(self, function: Callable[[Engine], T]) -> T:
        """What `function` gives of the engine, run in its thread between two steps, while all else waits.

        For what is not a request: new weights, pinned prefixes, counters. It must not step the engine, add to it, or
        close it.
        """
        return await asyncio.wrap_future(self._thread.call(function))

    async def close(self) -> None:
        """End the thread after the step under way, and let go of the model. It may be called again.

        Requests that have not ended raise EngineClosed where they are awaited, and so does every later call.
        """
        self._thread.stop()
        self._clerk.shutdown(wait=False)
        await asyncio.wrap_future(self._thread.ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @asynccontextmanager
    async def _request(
        self, prompt: Any, params: Params, chat: bool, priority: int, stream: bool
    ) -> AsyncIterator[_Mailbox]:
        """A request that lives no longer than the block."""
        mailbox = _Mailbox()
        resolve = partial(self._resolve, f"async-{next(self._ids)}", prompt, params, chat, priority)
        try:
            resolving = mailbox.loop.run_in_executor(self._clerk, resolve)
        except RuntimeError:  # of the clerk, that it is shut down
            raise _closed() from None
        request = await resolving
        self._thread.add(request, stream, mailbox)
        try:
            yield mailbox
        finally:
            if not mailbox.ended:
                self._thread.abort(request.request_id)

    def _resolve(self, request_id: str, prompt: Any, params: Params, chat: bool, priority: int) -> Request:
        engine = self._engine
        text, tokens = prompt_tokens(prompt, chat, engine.tokenizer, engine.max_prompt_tokens)
        params = SamplingParams() if params is None else params
        salt = prompt_salt(prompt)
        return engine.resolve(request_id, tokens, params, prompt=text, chat=chat, cache_salt=salt, priority=priority)


class _Mailbox:
    """What one consumer has not taken yet. Everything in it belongs to the thread of the consumer's event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended = False  # the last of it was taken
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._filled = asyncio.Event()

    def put(self, item: RequestOutput | Exception) -> None:
        if isinstance(item, Exception):
            self._error = item
        elif self._output is None:
            self._output = item
        else:
            join(self._output, item)
        self._filled.set()

    async def take(self) -> RequestOutput:
        """The outputs that are here, as one, or else what the request ended with. Waits until there is something."""
        await self._filled.wait()
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None
            self.ended = True
            raise self._error
        if self._error is None:
            self._filled.clear()
        self.ended = output.finished
        return output


class _EngineThread:
    """The thread that owns an engine, and how others reach it. Methods with _ are the thread's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._condition = threading.Condition()  # guards the next two, but for taking out of the inbox
        self._inbox: deque[Callable[[], None]] = deque()
        self._closing = False
        self._mailboxes: dict[str, _Mailbox] = {}  # of the requests that have not ended
        self._outgoing: list[tuple[_Mailbox, RequestOutput | Exception]] = []
        self._doubtful = False  # requests may have ended without an output
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it for others
        # A daemon, as the interpreter would else wait for it before it calls _let_go.
        self.thread = threading.Thread(target=self._run, name="paged-engine", daemon=True)
        self.thread.start()

    def add(self, request: Request, stream: bool, mailbox: _Mailbox) -> None:
        def queue() -> None:
            self._mailboxes[request.request_id] = mailbox
            try:
                self._engine.queue(request, stream)
            except Exception as error:  # noqa: BLE001  it is raised where the request is awaited
                self._post(request.request_id, error)

        self._send(queue)

    def abort(self, request_id: str) -> None:
        def abort() -> None:
            if self._mailboxes.pop(request_id, None) is not None:
                self._engine.abort(request_id)

        with suppress(EngineClosed):  # which aborts all
            self._send(abort)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                self._doubtful = True
                try:
                    future.set_result(function(self._engine))
                except StopIteration as error:  # asyncio takes it for an end of its own, and would wait for ever
                    stopped = RuntimeError("the function raised StopIteration")
                    stopped.__cause__ = error
                    future.set_exception(stopped)
                except BaseException as error:  # noqa: BLE001  it is raised where the call is awaited
                    future.set_exception(error)

        self._send(call)
        return future

    def stop(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify()

    def _send(self, command: Callable[[], None]) -> None:
        with self._condition:
            if self._closing:
                raise _closed()
            self._inbox.append(command)
            self._condition.notify()

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while self._take_in():
                self._step()
        except BaseException as error:  # noqa: BLE001  a fault of ours: who waits must hear of it
            cause = error
        try:
            self._end(cause)
            self._engine.close()
        except BaseException as error:  # noqa: BLE001  it is raised by close()
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _take_in(self) -> bool:
        """Wait for something to do, and do what others asked for. False when the thread is to end."""
        with self._condition:
            self._condition.wait_for(lambda: self._inbox or self._closing or self._doubtful or self._engine.has_work)
            if self._closing:
                return False
            expected = len(self._inbox)
        for _ in range(expected):
            self._inbox.popleft()()
        return True

    def _step(self) -> None:
        engine = self._engine
        try:
            outputs = engine.step() if engine.has_work else []
        except WorkerLost:  # no step will ever run again: the thread ends, and with it every request
            raise
        except BaseException as error:  # noqa: BLE001  whatever a worker raises, it ends the requests of this step only
            for request_id in engine.failed or tuple(self._mailboxes):
                self._fail(request_id, f"the step that computed this request raised {shown(error)}", error)
                engine.abort(request_id)
            self._doubtful = True
        else:
            for output in outputs:
                self._post(output.request_id, output)
            if self._doubtful:  # and all that the engine had to give has been taken
                self._doubtful = False
                for request_id in [one for one in self._mailboxes if not engine.is_live(one)]:
                    self._fail(request_id, "this request was ended by a call, or by the fault of a step before", None)
        self._deliver()

    def _end(self, cause: BaseException | None) -> None:
        """Nobody waits for ever: what is in the inbox is done, and every request ends."""
        with self._condition:
            self._closing = True  # so nothing comes into the inbox any more
        while self._inbox:
            try:
                self._inbox.popleft()()
            except BaseException as error:  # noqa: BLE001  the engine is not sound; who waits must hear of it all the same
                cause = cause or error
        for request_id in tuple(self._mailboxes):
            closed = _closed()
            closed.__cause__ = cause
            self._post(request_id, closed)
        self._deliver()

    def _fail(self, request_id: str, reason: str, cause: BaseException | None) -> None:
        failed = RequestFailed(f"{reason}: others go on, and it may be sent again")
        failed.__cause__ = cause
        self._post(request_id, failed)

    def _post(self, request_id: str, item: RequestOutput | Exception) -> None:
        mailbox = self._mailboxes.get(request_id)
        if mailbox is None:
            return  # its consumer is gone, or was told of an error before
        self._outgoing.append((mailbox, item))
        if isinstance(item, Exception) or item.finished:
            del self._mailboxes[request_id]

    def _deliver(self) -> None:
        """Fill the mailboxes, each in the thread of its loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, RequestOutput | Exception]]] = {}
        for mailbox, item in self._outgoing:
            by_loop.setdefault(mailbox.loop, []).append((mailbox, item))
        self._outgoing.clear()
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, items)
            except RuntimeError:  # the loop is closed, with all who waited in it
                for request_id in [one for one, mailbox in self._mailboxes.items() if mailbox.loop is loop]:
                    del self._mailboxes[request_id]
                    self._engine.abort(request_id)


def _put_all(items: list[tuple[_Mailbox, RequestOutput | Exception]]) -> None:
    for mailbox, item in items:
        mailbox.put(item)


def _let_go(thread: _EngineThread, clerk: ThreadPoolExecutor) -> None:
    """Nobody holds the AsyncLLM any more, or the interpreter ends."""
    thread.stop()
    clerk.shutdown(wait=False)
    if thread.thread is not threading.current_thread():
        thread.thread.join()  # else it would be in native code while the interpreter is taken down


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed: make another AsyncLLM, and send the request to that")
