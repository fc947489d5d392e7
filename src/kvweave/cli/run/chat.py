"""`kvweave run --chat`: a conversation with a model, on a terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import TextStreamer

from kvweave.cli.run.format_outcomes import format_reuse
from kvweave.cli.run.model_asker import ModelAsker
from kvweave.cli.run.text import Message, TextCodec

QUIT = ("/quit", "/exit")
PROMPT = "you> "


def converse(asker: ModelAsker, text: TextCodec, said: Iterable[str], tell: Callable[[str], None]) -> None:
    """Answer each line with the whole conversation as the prompt; what was reused is said after each answer.

    Ctrl-C ends the answer that is being given, and not the conversation.
    """
    messages: list[Message] = []
    for turn, line in enumerate(said, 1):
        messages.append(("user", line))
        printer = AnswerPrinter(text)
        try:
            asker.ask(f"turn {turn}", text.chat(messages), printer.add)
            about = format_reuse(asker.outcomes[-1])
        except KeyboardInterrupt:
            about = f"stopped after {len(printer.tokens)} tokens"
        printer.streamer.end()
        messages.append(("assistant", text.decode(printer.tokens).strip()))
        tell(about)


class AnswerPrinter:
    """Prints an answer token by token, and keeps its tokens."""

    def __init__(self, text: TextCodec) -> None:
        self.streamer = TextStreamer(text, skip_special_tokens=True)
        self.tokens: list[int] = []

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self.streamer.put(torch.tensor([token]))


def lines() -> Iterator[str]:
    """What is typed, or piped in, until its end, Ctrl-C or /quit."""
    ask: Any = input if sys.stdin.isatty() else _piped
    while True:
        try:
            line = ask(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            if ask is input:
                print()  # what is printed next starts on a line of its own
            return
        if line in QUIT:
            return
        if line:
            yield line


def _piped(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    print(prompt + line.rstrip("\n"))
    return line
