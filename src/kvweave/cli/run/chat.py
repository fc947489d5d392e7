"""`kvweave run --chat`: a conversation with a model, on a terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers import TextStreamer

from kvweave.cli.run.format_outcomes import format_reuse
from kvweave.cli.run.model_asker import ModelAsker
from kvweave.cli.run.text import Message, TextCodec

QUIT = ("/quit", "/exit")
PROMPT = "you> "


def converse(engine: ModelAsker, text: TextCodec, said: Iterable[str], tell: Callable[[str], None]) -> None:
    """Answer each line with the whole conversation as the prompt; what was reused is said after each answer."""
    messages: list[Message] = []
    for turn, line in enumerate(said, 1):
        messages.append(("user", line))
        streamer = TextStreamer(text, skip_prompt=True, skip_special_tokens=True)
        answer = engine.ask(f"turn {turn}", text.chat(messages), streamer)
        messages.append(("assistant", text.decode(answer).strip()))
        tell(format_reuse(engine.outcomes[-1]))


def lines() -> Iterator[str]:
    """What is typed, or piped in, until its end or /quit."""
    ask: Any = input if sys.stdin.isatty() else _piped
    while True:
        try:
            line = ask(PROMPT).strip()
        except EOFError:
            if ask is input:
                print()  # what is said next does not belong to the prompt
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
