"""What makes two prompts equal: their tokens, and the content behind tokens that only stand for something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import BadTokens
from kvweave.plan import Plan
from kvweave.prefix.events import Event, Named
from kvweave.prefix.node import Tokens
from kvweave.prefix.tree import TreeGroup

try:
    from kvweave.prefix._native import take as _take
except ImportError:  # no C compiler was there: numpy does it, ten times slower
    _take = None  # type: ignore[assignment]


class Span(NamedTuple):
    """Tokens from `start` on stand for `content` (an image, a sound), which is compared whole, not by a short hash."""

    start: int
    content: bytes


class Contents:
    """Gives each content a negative token of its own. The first token of a span is replaced by it: what follows lies
    on another path of the tree, so prompts with different images part where the image starts."""

    def __init__(self, emit: Callable[[Event], None] | None = None) -> None:
        self._names: dict[bytes, int] = {}
        self._emit = emit

    def name(self, content: bytes, token: int | None = None) -> int:
        if content not in self._names:
            self._names[content] = -1 - len(self._names) if token is None else token
            if self._emit:
                self._emit(Named(content, self._names[content]))
        return self._names[content]

    def keyed(self, tokens: Tokens, spans: Sequence[Span]) -> Tokens:
        """The tokens with each span's first one replaced."""
        if not spans:
            return tokens
        keyed = tokens.copy()
        for start, content in spans:
            if not 0 <= start < len(tokens):
                raise BadTokens(f"a span starts at {start}, outside the prompt of {len(tokens)} tokens")
            keyed[start] = self.name(bytes(content))
        return keyed


def as_tokens(tokens: object) -> Tokens:
    """Token ids as an int32 array; an int32 array is taken as it is."""
    array: NDArray[Any]
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1:
        array = tokens
    else:
        taken = _taken(tokens)
        if taken is not None:
            return taken
        array = _converted(tokens)
    if len(array) and int(np.minimum.reduce(array)) < 0:
        raise BadTokens(f"token ids must not be negative, got {int(array.min())}")
    return array.astype(np.int32, copy=False)


def _taken(tokens: object) -> Tokens | None:
    """A list of nothing but ints that are token ids. None: it is something else, for which others have the words."""
    if _take is None or not isinstance(tokens, (list, tuple)):
        return None
    array: Tokens = np.empty(len(tokens), np.int32)
    return array if _take(tokens, array) else None


def _converted(tokens: object) -> NDArray[Any]:
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError):
        raise BadTokens(f"tokens must be a list of whole numbers, got {type(tokens).__name__}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadTokens(f"tokens must be a list of whole numbers, got {array.ndim} axes of {array.dtype}")
    if array.size and int(array.max()) > np.iinfo(np.int32).max:
        raise BadTokens(f"token ids must fit 31 bits, got {int(array.max())}")
    return array


def tree_groups(plan: Plan) -> list[TreeGroup]:
    """The groups as the tree sees them. Context-parallel ranks share a block round robin, so there it is longer."""
    return [TreeGroup(g.tag, g.cache.reach, g.block_tokens * g.context_shards) for g in plan.groups]
