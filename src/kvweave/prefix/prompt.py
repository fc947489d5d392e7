"""What makes two prompts equal: their tokens, and the content behind tokens that only stand for something else."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadTokens, BadType
from kvweave.prefix.events import Event, Named
from kvweave.prefix.node import Tokens


class NumpyTokens:
    """The functions of `_native`, for machines without a C compiler, and for tests to compare with."""

    @staticmethod
    def take(tokens: list[object] | tuple[object, ...], to: Tokens) -> bool:  # noqa: ARG004 - C puts them there
        """Whether all are token ids, which `to` then has. Never: numpy has nothing faster than `_converted`."""
        return False

    @staticmethod
    def has_negative(ids: Tokens) -> bool:
        """Whether one of them is negative."""
        return bool(len(ids)) and bool(np.minimum.reduce(ids) < 0)

    @staticmethod
    def num_equal(run: Tokens, other: Tokens) -> int:
        """How many ids the starts of two runs have in common."""
        size = min(len(run), len(other))
        different = run[:size] != other[:size]
        return int(different.argmax()) if different.any() else size

    @staticmethod
    def token_bytes(run: Tokens, start: int, count: int) -> bytes:
        """The bytes of `count` ids from `start` on."""
        return run[start : start + count].tobytes()

    @staticmethod
    def last_tokens(run: Tokens, start: int, block_tokens: int) -> bytes:
        """The bytes of the last id of each whole block from `start` on."""
        return run[start + block_tokens - 1 :: block_tokens].tobytes()

    @staticmethod
    def num_blocks_equal(last_tokens: bytes, prompt: Tokens, start: int, block_tokens: int) -> int:
        """How many blocks of a prompt from `start` on have these last ids. The last id of the prompt is not looked at:
        it is computed in any case."""
        return NumpyTokens.num_equal(
            np.frombuffer(last_tokens, np.int32), prompt[start + block_tokens - 1 : -1 : block_tokens]
        )


try:
    from kvweave.prefix._native import has_negative, last_tokens, num_blocks_equal, num_equal, take, token_bytes
except ImportError:  # no C compiler was there
    take, has_negative, num_equal = NumpyTokens.take, NumpyTokens.has_negative, NumpyTokens.num_equal
    token_bytes, last_tokens = NumpyTokens.token_bytes, NumpyTokens.last_tokens
    num_blocks_equal = NumpyTokens.num_blocks_equal

__all__ = [
    "ContentTokens",
    "NumpyTokens",
    "Span",
    "TokenIds",
    "as_tokens",
    "has_negative",
    "last_tokens",
    "num_blocks_equal",
    "num_equal",
    "take",
    "token_bytes",
]

TokenIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
"""What is taken for a prompt's tokens: a list, or an array of one axis of any whole type."""
MOST_CONTENTS = 1 << 16
"""Contents that are remembered; one that was forgotten is a new one when it comes again, and hits nothing old."""


class Span(NamedTuple):
    """Tokens from `start` on stand for `content` (an image, a sound), which is compared by a 256-bit digest."""

    start: int
    content: bytes


class ContentTokens:
    """Gives each content a negative token of its own. The first token of a span is replaced by it: what follows lies
    on another path of the tree, so prompts with different images part where the image starts. No token is given out
    twice, and the contents themselves are not kept."""

    def __init__(self, emit: Callable[[Event], None] | None = None) -> None:
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        self._last = 0
        self._emit = emit

    def token(self, content: bytes) -> int:
        digest = content_digest(content)
        token = self._tokens.get(digest, 0)
        if token:
            self._tokens.move_to_end(digest)
            return token
        if len(self._tokens) >= MOST_CONTENTS:
            self._name(self._tokens.popitem(last=False)[0], 0)
        self._last -= 1
        self._tokens[digest] = self._last
        self._name(digest, self._last)
        return self._last

    def _name(self, digest: bytes, token: int) -> None:
        if self._emit:
            self._emit(Named(digest, token))

    def forget(self) -> None:
        self._tokens.clear()

    def replace(self, tokens: Tokens, spans: Sequence[Span]) -> Tokens:
        """The tokens with each span's first one replaced."""
        return with_contents(tokens, spans, self.token)


def content_digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()


def with_contents(tokens: Tokens, spans: Sequence[Span], token_of: Callable[[bytes], int]) -> Tokens:
    """The tokens, with that of its content in the place of each span's first one."""
    if not spans:
        return tokens
    replaced = tokens.copy()
    for start, content in _checked(spans, len(tokens)):
        replaced[start] = token_of(content)
    return replaced


def _checked(spans: Sequence[Span], num_tokens: int) -> list[tuple[int, bytes]]:
    """Where each span starts, and its content. `bytes` of a number would be so many zeros."""
    try:
        found = [(index(start), bytes(memoryview(content))) for start, content in spans]
    except (TypeError, ValueError):
        raise BadType(f"spans are pairs of a position and bytes, not {spans!r:.80}") from None
    for start, _ in found:
        if not 0 <= start < num_tokens:
            raise BadTokens(f"a span starts at {start}, outside the prompt of {num_tokens} tokens")
    return found


def as_tokens(tokens: object) -> Tokens:
    """Token ids as an int32 array without gaps; such an array is taken as it is."""
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1 and tokens.flags.c_contiguous:
        if has_negative(tokens):
            raise BadTokens(f"token ids must not be negative, got {int(tokens.min())}")
        return tokens
    if isinstance(tokens, (list, tuple)):
        array: Tokens = np.empty(len(tokens), np.int32)
        if take(tokens, array):
            return array
    return _converted(tokens)


def _converted(tokens: object) -> Tokens:
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError):
        raise BadTokens(f"tokens must be a list of whole numbers, got {type(tokens).__name__}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadTokens(f"tokens must be a list of whole numbers, got {array.ndim} axes of {array.dtype}")
    if array.size and int(array.max()) > np.iinfo(np.int32).max:
        raise BadTokens(f"token ids must fit 31 bits, got {int(array.max())}")
    if array.size and int(array.min()) < 0:
        raise BadTokens(f"token ids must not be negative, got {int(array.min())}")
    return np.ascontiguousarray(array, np.int32)
