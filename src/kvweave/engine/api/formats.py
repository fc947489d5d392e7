"""The two shapes of OpenAI's answers: completions, and chat completions; whole, and in pieces."""

from __future__ import annotations

import uuid
from typing import Any

from kvweave.engine.api.body import APIError, Body
from kvweave.engine.api.choice import TextPiece
from kvweave.engine.api.prompt_codec import PromptCodec, ToolCall
from kvweave.engine.api.tool_use import ToolUse, tool_use
from kvweave.engine.sampling import TokenLogprobs

MOST_PROMPTS = 64
LEAST_LOGPROB = -9999.0

SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "max_tokens", "logprobs", "logit_bias"}
PENALTIES = {"repetition_penalty", "frequency_penalty", "presence_penalty"}
FIELDS = {"model", "stream", "stream_options", "priority"} | SAMPLING | PENALTIES
"""Those that both take."""


class CompletionFormat:
    """`/v1/completions`: prompts are strings, or lists of token ids."""

    prefix, kind, piece_kind = "cmpl", "text_completion", "text_completion"
    fields = FIELDS | {"prompt", "best_of"}

    def __init__(self, codec: PromptCodec) -> None:
        self.codec = codec

    def prompts(self, body: Body, _: ToolUse) -> list[list[int]]:
        given = body.get("prompt", (str, list))
        if body.integer("best_of", body.num_choices) != body.num_choices:
            raise APIError("best_of is not supported, unless it is n: ask for n answers with logprobs, and choose")
        if isinstance(given, str) or (isinstance(given, list) and given and all(isinstance(t, int) for t in given)):
            given = [given]
        if not given or len(given) > MOST_PROMPTS or not all(isinstance(each, str | list) for each in given):
            raise APIError(f"prompt is a string, a list of token ids, or a list of at most {MOST_PROMPTS} of these")
        return [self._encoded(each) if isinstance(each, str) else each for each in given]

    def _encoded(self, text: str) -> list[int]:
        try:
            return self.codec.encode(text)
        except Exception as error:  # half of a surrogate pair; tokenizers may raise any exception
            raise APIError(f"the tokenizer of this model does not take this prompt: {error}") from error

    def tools(self, _: Body) -> ToolUse:
        return ToolUse()

    def max_tokens(self, body: Body) -> int | None:
        return body.integer("max_tokens", 16)

    def logprobs(self, body: Body) -> int | None:
        return body.integer("logprobs", None)

    def whole(self, index: int, piece: TextPiece) -> dict[str, Any]:
        return self.piece(index, piece, is_first=True)

    def piece(self, index: int, piece: TextPiece, is_first: bool) -> dict[str, Any]:  # noqa: ARG002
        logs = self._logprobs(piece) if piece.logprobs else None
        return {"index": index, "text": piece.text, "logprobs": logs, "finish_reason": piece.finish_reason}

    def _logprobs(self, piece: TextPiece) -> dict[str, Any]:
        return {
            "tokens": [self._token(each.token) for each in piece.logprobs],
            "token_logprobs": [_finite(each.logprob) for each in piece.logprobs],
            "top_logprobs": [{self._token(token): _finite(log) for token, log in each.top} for each in piece.logprobs],
            "text_offset": list(piece.offsets),
        }

    def _token(self, token: int) -> str:
        """As text; of tokens that are none by themselves, their bytes, as OpenAI writes them."""
        text, own = self.codec.decode([token]), self.codec.token_bytes(token)
        is_text = own is None or text.encode() == own
        return text if is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in own or b"")


class ChatFormat:
    """`/v1/chat/completions`: messages, and tools, through the chat template of the tokenizer."""

    prefix, kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    fields = FIELDS | {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    }

    def __init__(self, codec: PromptCodec) -> None:
        self.codec = codec

    def prompts(self, body: Body, tools: ToolUse) -> list[list[int]]:
        messages = body.get("messages", (list,))
        if not messages or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
            raise APIError("messages is a list of objects with a role, at least one")
        prompt = self._prompt(messages, tools.tools, tools.must_call)
        if tools.tools and prompt == self._prompt(messages, [], tools.must_call):
            raise APIError("the chat template of this model takes no tools: describe them in the messages")
        return [prompt]

    def _prompt(self, messages: list[Any], tools: list[Any], opens_call: bool) -> list[int]:
        try:
            return self.codec.chat([_plain(each) for each in messages], tools or None, opens_call)
        except Exception as error:  # templates are programs, and may raise any exception
            raise APIError(f"the chat template of this model does not take these messages: {error}") from error

    def tools(self, body: Body) -> ToolUse:
        return tool_use(body, self.codec)

    def max_tokens(self, body: Body) -> int | None:
        return body.integer("max_completion_tokens", body.integer("max_tokens", None))

    def logprobs(self, body: Body) -> int | None:
        has_logprobs = body.flag("logprobs")
        if not has_logprobs and "top_logprobs" in body.fields:
            raise APIError("top_logprobs is for logprobs=true only")
        return body.integer("top_logprobs", 0) if has_logprobs else None

    def whole(self, index: int, piece: TextPiece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if piece.tool_calls:
            message["tool_calls"] = [_shown_call(call) for call in piece.tool_calls]
        return self._choice(index, piece, "message", message)

    def piece(self, index: int, piece: TextPiece, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text or piece.finish_reason is None else {}
        if piece.tool_calls:
            delta["tool_calls"] = [{"index": n, **_shown_call(call)} for n, call in enumerate(piece.tool_calls)]
        return self._choice(index, piece, "delta", {"role": "assistant", **delta} if is_first else delta)

    def _choice(self, index: int, piece: TextPiece, name: str, content: dict[str, Any]) -> dict[str, Any]:
        logs = {"content": [self._logprob(each) for each in piece.logprobs]} if piece.logprobs else None
        return {"index": index, name: content, "logprobs": logs, "finish_reason": piece.finish_reason}

    def _logprob(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        def shown(token: int, log: float) -> dict[str, Any]:
            own = self.codec.token_bytes(token)
            return {
                "token": self.codec.decode([token]),
                "logprob": _finite(log),
                "bytes": None if own is None else list(own),
            }

        top = [shown(token, log) for token, log in logprobs.top]
        return {**shown(logprobs.token, logprobs.logprob), "top_logprobs": top}


def _shown_call(call: ToolCall) -> dict[str, Any]:
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call._asdict()}


def _finite(log: float) -> float:
    """JSON has no infinity; OpenAI says -9999 for what is impossible."""
    return max(LEAST_LOGPROB, log)


Format = CompletionFormat | ChatFormat


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a string, where it came as a list of texts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        raise ValueError("contents that are not text are not supported")
    return {**message, "content": "".join(part["text"] for part in content)}
