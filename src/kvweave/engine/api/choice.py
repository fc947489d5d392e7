"""One choice of an answer: a request of the engine, read as text while its tokens come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from kvweave.engine.api.answer_text import AnswerText
from kvweave.engine.api.body import APIError
from kvweave.engine.api.prompt_codec import PromptCodec, ToolCall
from kvweave.engine.api.tool_use import ToolUse
from kvweave.engine.engine_request import EngineRequest, Result
from kvweave.engine.sampling import TokenLogprobs


class TextPiece(NamedTuple):
    """Text, and the tokens that it was decoded from (with logprobs and offsets, if asked for); the last piece has a
    reason."""

    text: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    finish_reason: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class Choice:
    """Choice `index` of an answer, which uses tools as `tools` says. `cancel` may be called at any time."""

    def __init__(
        self,
        index: int,
        request: EngineRequest,
        codec: PromptCodec,
        stops: tuple[str, ...],
        tools: ToolUse,
    ) -> None:
        self.index, self.request = index, request
        self._codec, self._tools = codec, tools
        self._reads_calls = bool(tools.tools) and codec.reads_tool_calls
        self._text = AnswerText(codec, stops)

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """The text as it comes; with tools all at once, since only the end tells what is a call."""
        if self._reads_calls:
            yield await self.whole()
        else:
            async for piece in self._text_pieces():
                yield piece

    async def _text_pieces(self) -> AsyncIterator[TextPiece]:
        """Ends early, and cancels the request, at a stop string: tokens behind it, which came before the request was
        cancelled, do not count."""
        told = 0
        async for token in self.request:
            new = self._text.add(token)
            if self._text.is_stopped:
                self.request.cancel()
                break
            if new:
                yield TextPiece(new, *self._logprobs(told))
                told = self._text.num_tokens
        result = await self.request
        rest = new if self._text.is_stopped else self._text.end()
        if not self._text.is_stopped and result.finish_reason == "cancelled":
            raise APIError("the server has stopped before the answer ended", 503, "server_stopped")
        yield TextPiece(rest, *self._logprobs(told), "stop" if self._text.is_stopped else result.finish_reason)

    def _logprobs(self, start: int) -> tuple[tuple[TokenLogprobs, ...], tuple[int, ...]]:
        """Logprobs and offsets of the tokens from `start` on that were read."""
        logprobs = tuple(self.request.logprobs_so_far()[start : self._text.num_tokens])
        return logprobs, tuple(self._text.offsets[start:]) if logprobs else ()

    async def whole(self) -> TextPiece:
        pieces = [piece async for piece in self._text_pieces()]
        logs = tuple(each for piece in pieces for each in piece.logprobs), tuple(self._text.offsets)
        may_call = self._reads_calls and (self._tools.must_call or not self._text.is_stopped)
        if may_call and (found := self._tools.read_calls(self._codec, self.result)):
            return TextPiece(found.content, *logs, "tool_calls", found.calls)
        return TextPiece("".join(piece.text or "" for piece in pieces), *logs, pieces[-1].finish_reason)

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer that were read."""
        return self._text.num_tokens

    @property
    def result(self) -> Result:
        return self.request.result(0)


def usage(choices: list[Choice], per_prompt: int) -> dict[str, Any]:
    """Tokens of a prompt are counted once, for the first of its choices: later ones also find what that one computed.
    Those of all choices are added up."""
    firsts = [choice.result for choice in choices[::per_prompt]]
    prompt = sum(len(result.prompt) for result in firsts)
    new = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in firsts)},
    }
