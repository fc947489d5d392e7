"""Text and tokens: a model's own tokenizer, or bytes for models with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Message = tuple[str, str]
"""The speaker (`user`, `assistant`) and the text."""


class TextCodec(Protocol):
    """Turns text into tokens and back, and a conversation into the prompt of its next answer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...

    def chat(self, messages: Sequence[Message]) -> list[int]: ...


class ByteTokenizer:
    """A token a byte of UTF-8, behind padding, start and end. Other tokens decode to nothing."""

    name = "bytes"
    FIRST = 3

    def encode(self, text: str) -> list[int]:
        return [byte + self.FIRST for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], **_options: Any) -> str:
        known = bytes(int(token) - self.FIRST for token in token_ids if 0 <= int(token) - self.FIRST < 256)
        return known.decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Of one token: a byte, or none."""
        return bytes([token - self.FIRST]) if 0 <= token - self.FIRST < 256 else b""

    def chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode(transcript(messages))


class Tokenizer:
    """A tokenizer of transformers, with its chat template where it has one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.name = type(tokenizer).__name__

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        text: str = self.tokenizer.decode(token_ids, **{"skip_special_tokens": True, **options})
        return text

    def chat(self, messages: Sequence[Message]) -> list[int]:
        if not self.tokenizer.chat_template:
            return self.encode(transcript(messages))
        said = [{"role": who, "content": what} for who, what in messages]
        prompt = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        return self.encode(prompt)


def transcript(messages: Sequence[Message]) -> str:
    """A conversation as plain text, up to the next answer."""
    return "".join(f"{who}: {what}\n" for who, what in messages) + "assistant:"
