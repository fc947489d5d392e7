"""Text and tokens, as the endpoint needs them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

log = logging.getLogger(__name__)

UNFINISHED = "�"
"""What decoders show for bytes that are no character yet."""

ChatMessage = Mapping[str, Any]
"""As clients send them: a role, and a content."""


class ToolCall(NamedTuple):
    """A call of a tool; its arguments are JSON."""

    name: str
    arguments: str


class ToolCalls(NamedTuple):
    """An answer that calls tools, and the text beside the calls."""

    content: str | None
    calls: tuple[ToolCall, ...]


class PromptCodec(Protocol):
    """Turns prompts into tokens, and tokens into text."""

    @property
    def reads_tool_calls(self) -> bool:
        """Whether it is known how the model writes calls of tools."""
        ...

    @property
    def call_opening(self) -> str | None:
        """The text with which a call of a tool begins, if that is always the same."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: SequenceOf[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of one token, which may be a part of a character only; None if they are not known."""
        ...

    def chat(self, messages: SequenceOf[ChatMessage], tools: SequenceOf[Any] | None, opens_call: bool) -> list[int]:
        """The prompt of the next answer, which goes on from the opening of a call if `opens_call`; raises what it likes
        for messages that it cannot take."""
        ...

    def tool_calls(self, prompt: SequenceOf[int], answer: SequenceOf[int], tools: SequenceOf[Any]) -> ToolCalls | None:
        """The calls in an answer; None if there are none, or they cannot be read."""
        ...


class TokenizerCodec:
    """A tokenizer of transformers, with its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def reads_tool_calls(self) -> bool:
        return getattr(self._tokenizer, "response_template", None) is not None

    @property
    def call_opening(self) -> str | None:
        fields = (getattr(self._tokenizer, "response_template", None) or {}).get("fields", {})
        opening = fields.get("tool_calls", {}).get("open")
        text: str | None = opening[0] if isinstance(opening, list) else opening
        return text

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def decode(self, tokens: SequenceOf[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def token_bytes(self, token: int) -> bytes | None:
        name, text = self._tokenizer.convert_ids_to_tokens(token), self.decode([token])
        if name is None or UNFINISHED not in text:
            return text.encode()
        if single := re.fullmatch("<0x([0-9A-Fa-f]{2})>", name):
            return bytes.fromhex(single[1])
        with suppress(KeyError):
            return bytes(_byte_characters()[character] for character in name)
        return None

    def chat(self, messages: SequenceOf[ChatMessage], tools: SequenceOf[Any] | None, opens_call: bool) -> list[int]:
        options = {"tools": tools, "add_generation_prompt": True, "tokenize": False}
        text = self._tokenizer.apply_chat_template(list(messages), **options)
        if opens_call:
            text += self.call_opening
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def tool_calls(self, prompt: SequenceOf[int], answer: SequenceOf[int], tools: SequenceOf[Any]) -> ToolCalls | None:
        try:
            message = self._tokenizer.parse_response(list(answer), prefix=list(prompt), tools=list(tools))
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            calls = tuple(ToolCall(each["name"], _as_json(each["arguments"])) for each in functions)
        except Exception as error:  # models write what they like
            log.warning("an answer with tools was not understood, and is given as text: %s", error)
            return None
        return ToolCalls(message.get("content") or None, calls) if calls else None


@cache
def _byte_characters() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes as: printable ones of Latin-1 as they are, others, in
    order, as those from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
