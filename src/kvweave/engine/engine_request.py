"""A request: iterate its tokens, wait for or await its result, cancel it; from any thread or event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from kvweave.engine.sampling import Sampling, TokenLogprobs
from kvweave.errors import OperationTimeout

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a request. `finish_reason`: a stop token came, the length was reached, or it was cancelled."""

    prompt: tuple[int, ...] = field(repr=False)
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    cached_tokens: int
    """Tokens of the prompt that were found in the cache or the store."""
    stored_tokens: int
    """Those of them that came from the store."""
    preemptions: int
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)


class EngineRequest:
    """A prompt on its way. Tokens can be iterated while they come, by several readers; `await request` gives the
    result, `result()` waits for it."""

    def __init__(self, prompt: tuple[int, ...], sampling: Sampling, on_cancel: Callable[[EngineRequest], None]) -> None:
        self.prompt, self.sampling = prompt, sampling
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []

    # ---- the reader's side

    @property
    def is_done(self) -> bool:
        return self._result is not None or self._error is not None

    def cancel(self) -> None:
        """Stop generating; the result has what there was. Does nothing to one that is done."""
        self._on_cancel(self)

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the answer; raises what made the request fail, or `OperationTimeout`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_done, timeout_s):
                raise OperationTimeout(f"no answer after {timeout_s} s; {len(self._tokens)} tokens have come")
        return self._outcome()

    def __iter__(self) -> Iterator[int]:
        """The tokens as they come; at the end, what made the request fail is raised."""
        given = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda given=given: self.is_done or len(self._tokens) > given)  # type: ignore[misc]
                new, is_done = self._tokens[given:], self.is_done
            yield from new
            given += len(new)
            if is_done and given == len(self._tokens):
                self._outcome()
                return

    def __await__(self) -> Generator[object, None, Result]:
        return self._awaited().__await__()

    async def _awaited(self) -> Result:
        async for _ in self:
            pass
        return self._outcome()

    async def __aiter__(self) -> AsyncIterator[int]:
        loop, wakes = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads there any more
                loop.call_soon_threadsafe(wakes.set)

        with self._changed:
            self._listeners.append(wake)
        given = 0
        try:
            while True:
                wakes.clear()
                new, is_done = self._tokens[given:], self.is_done
                for token in new:
                    yield token
                given += len(new)
                if is_done and given == len(self._tokens):
                    self._outcome()
                    return
                if given == len(self._tokens) and not self.is_done:
                    await wakes.wait()
        finally:
            with self._changed:  # another thread may be going through them
                self._listeners.remove(wake)

    def logprobs_so_far(self) -> list[TokenLogprobs]:
        """Of the tokens that have come, if they were asked for."""
        return list(self._logprobs)

    def _outcome(self) -> Result:
        if self._error is not None:
            raise self._error
        assert self._result, "it is done"
        return self._result

    # ---- the engine's side

    def put(self, token: int, logprobs: TokenLogprobs | None) -> None:
        with self._changed:
            if logprobs is not None:
                self._logprobs.append(logprobs)
            self._tokens.append(token)
            self._tell()

    def finish(self, reason: FinishReason, cached_tokens: int, stored_tokens: int, preemptions: int) -> None:
        with self._changed:
            if not self.is_done:
                found = cached_tokens, stored_tokens, preemptions
                self._result = Result(self.prompt, tuple(self._tokens), reason, *found, tuple(self._logprobs))
            self._tell()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            if not self.is_done:
                self._error = error
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()
