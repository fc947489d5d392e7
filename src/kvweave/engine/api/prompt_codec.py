"""Text and tokens, as the endpoint needs them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

ChatMessage = Mapping[str, Any]
"""As clients send them: a role, and a content."""


class PromptCodec(Protocol):
    """Turns prompts into tokens, and tokens into text."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: SequenceOf[int]) -> str: ...

    def chat(self, messages: SequenceOf[ChatMessage], tools: SequenceOf[Any] | None) -> list[int]:
        """The prompt of the next answer; raises what it likes for messages that it cannot take."""
        ...


class TokenizerCodec:
    """A tokenizer of transformers, with its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def decode(self, tokens: SequenceOf[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def chat(self, messages: SequenceOf[ChatMessage], tools: SequenceOf[Any] | None) -> list[int]:
        options = {"tools": tools, "add_generation_prompt": True, "tokenize": False}
        text = self._tokenizer.apply_chat_template(list(messages), **options)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
