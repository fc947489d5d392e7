"""How a trace is to be read, and how text becomes tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvweave.errors import ConfigError, MissingExtra
from kvweave.sim.trace import Request, TokenIds, Trace, make_trace

BYTES_PER_TOKEN = 4
NO_TOKENIZER = f"no tokenizer was given: every {BYTES_PER_TOKEN} bytes of text are a token (--tokenizer names one)"

Tokenize = Callable[[str], TokenIds]
TextRequest = tuple[float, str, str, str]
"""When it arrived, its prompt, its output, its session."""


def tokens_of_bytes(text: str) -> TokenIds:
    """Every 4 bytes are a token: about as many as a tokenizer makes of English, and equal prefixes stay equal."""
    data = text.encode()
    whole = np.frombuffer(data[: len(data) // BYTES_PER_TOKEN * BYTES_PER_TOKEN], "<u4")
    return (whole & 0x7FFFFFFF).astype(np.int32)


def load_tokenizer(path: str) -> Tokenize:
    """The tokenizer in a local directory, by transformers."""
    with MissingExtra.on_import("a tokenizer", "transformers"):
        from transformers import AutoTokenizer  # noqa: PLC0415 - an extra
    if not Path(path).exists():
        raise ConfigError(f"--tokenizer: nothing is at {path!r}; it is a local directory, nothing is downloaded")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever transformers and its tokenizers raise
        said = " ".join(str(error).split())
        raise ConfigError(f"--tokenizer: no tokenizer can be loaded from {path!r}: {said[:300]}") from error
    return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


@dataclass(frozen=True, slots=True)
class Reading:
    """`way`: what is made of tails and outputs of traces of block ids. `tokenize`: None cuts text into bytes."""

    way: str = "cont"
    tokenize: Tokenize | None = None

    def text_trace(self, name: str, format: str, asked: Iterable[TextRequest], invented: Sequence[str] = ()) -> Trace:
        """A trace of texts."""
        notes = [*([] if self.tokenize else [NO_TOKENIZER]), *invented]
        return make_trace(name, format, 1, (self._request(*one) for one in asked), notes)

    def _request(self, arrival: float, prompt: str, output: str, session: str) -> Request:
        tokenize = self.tokenize or tokens_of_bytes
        prompt, output = _encodable(prompt), _encodable(output)
        num_prompt = len(tokenize(prompt))
        tokens = tokenize(prompt + output)  # as one text: the last token of the prompt may reach into the output
        return Request(arrival, tokens, num_prompt, len(tokens) - num_prompt, session)


def _encodable(text: str) -> str:
    """The text with `?` for halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
