"""The text of an answer as its tokens come: no half characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from kvweave.engine.api.prompt_codec import UNFINISHED, PromptCodec


class AnswerText:
    """Turns tokens into text. `add` returns what can be shown; text that may begin a stop string waits."""

    def __init__(self, codec: PromptCodec, stops: SequenceOf[str] = ()) -> None:
        self._codec, self._stops = codec, stops
        self._tokens: list[int] = []
        self._first = self._shown = 0
        self._waiting = ""
        self._length = 0
        self.offsets: list[int] = []
        """Where in the text each token begins; tokens of one character begin where it does."""
        self.is_stopped = False

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def add(self, token: int) -> str:
        """A token came. Decoding depends on the tokens before, so a few of them are decoded again."""
        self._tokens.append(token)
        self.offsets.append(self._length)
        before = self._codec.decode(self._tokens[self._first : self._shown])
        text = self._codec.decode(self._tokens[self._first :])
        if len(text) <= len(before) or text.endswith(UNFINISHED):
            return ""
        self._first, self._shown = self._shown, len(self._tokens)
        return self._cut(text[len(before) :])

    def end(self) -> str:
        """What is left when no token comes any more."""
        if self.is_stopped:
            return ""
        before = self._codec.decode(self._tokens[self._first : self._shown])
        return self._cut(self._codec.decode(self._tokens[self._first :])[len(before) :]) + self._waiting

    def _cut(self, new: str) -> str:
        self._length += len(new)
        text, self._waiting = self._waiting + new, ""
        found = [text.index(stop) for stop in self._stops if stop in text]
        if found:
            self.is_stopped = True
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._waiting = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text are the first ones of a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
