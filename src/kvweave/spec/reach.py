"""Reaches: how far back a layer must see to go on from a position.

To go on from position `p` a layer needs the tokens of `[0, head)` and of `[tail(p), p)`:

    0        head                 tail(p)            p
    |########|....................|##################|  <- the next token is computed here

Everything else (allocation, release, hits, retention, transfers) follows from these two answers, so a new
kind of attention is a dataclass with `kind`, `per_token`, `head`, `tail` and `span`, and the line `@register_reach`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import SpecError, UnknownName

Positions = NDArray[np.int64]


@runtime_checkable
class Reach(Protocol):
    """A kind of attention, as far as a cache can tell."""

    kind: ClassVar[str]
    """The name in JSON."""
    per_token: ClassVar[bool]
    """Whether rows belong to tokens. If not, a page holds one row: a snapshot taken exactly at its end."""

    @property
    def head(self) -> int:
        """Tokens at the start that are always needed."""
        ...

    @property
    def span(self) -> int | None:
        """The most tokens a sequence ever holds while it computes its next, that one included; None: no bound.

        With a span, `p - tail(p)` repeats after `span - head` tokens, or is the same for all later positions."""
        ...

    @overload
    def tail(self, position: int) -> int: ...
    @overload
    def tail(self, position: Positions) -> Positions: ...
    def tail(self, position: int | Positions) -> int | Positions:
        """First token needed behind the head: never an earlier one for a later position. These may come as an array."""
        ...


REACHES: dict[str, type[Reach]] = {}
R = TypeVar("R", bound=type[Any])


def register_reach(reach: R) -> R:
    """Make a kind known to JSON; its `kind` must be new."""
    if reach.kind in REACHES:
        raise SpecError(f"reach {reach.kind!r} is registered already, by {REACHES[reach.kind].__qualname__}")
    REACHES[reach.kind] = reach
    return reach


def reach_class(kind: str) -> type[Reach]:
    if kind not in REACHES:
        raise UnknownName("reach", kind, REACHES)
    return REACHES[kind]


def tokens_needed(reach: Reach, position: int) -> int:
    """How many tokens' rows must be there to go on from `position`."""
    head, tail = min(reach.head, position), reach.tail(position)
    return position - tail + min(head, tail)


def _floor(position: Any) -> Any:
    """`position`, but never before the first token."""
    return np.maximum(position, 0) if isinstance(position, np.ndarray) else max(position, 0)


def _positive(reach: object, field: str) -> None:
    value = getattr(reach, field)
    if not isinstance(value, int) or value < 1:
        raise SpecError(f"reach {type(reach).__name__}: {field} must be at least 1, got {value!r}")


@register_reach
@dataclass(frozen=True, slots=True)
class Full:
    """Attends to every earlier token."""

    kind: ClassVar[str] = "full"
    per_token: ClassVar[bool] = True
    head: ClassVar[int] = 0
    span: ClassVar[None] = None

    def tail(self, position: Any) -> Any:
        return position * 0


@register_reach
@dataclass(frozen=True, slots=True)
class Window:
    """Attends to the last `tokens` tokens, itself among them, so older blocks may leave."""

    tokens: int
    kind: ClassVar[str] = "window"
    per_token: ClassVar[bool] = True
    head: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _positive(self, "tokens")

    @property
    def span(self) -> int:
        return self.tokens

    def tail(self, position: Any) -> Any:
        return _floor(position - self.tokens + 1)


@register_reach
@dataclass(frozen=True, slots=True)
class Chunk:
    """Attends to the tokens since the last multiple of `tokens`."""

    tokens: int
    kind: ClassVar[str] = "chunk"
    per_token: ClassVar[bool] = True
    head: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _positive(self, "tokens")

    @property
    def span(self) -> int:
        return self.tokens

    def tail(self, position: Any) -> Any:
        return position // self.tokens * self.tokens


@register_reach
@dataclass(frozen=True, slots=True)
class SinkWindow:
    """Attends to the first `sinks` tokens and to the last `tokens`."""

    sinks: int
    tokens: int
    kind: ClassVar[str] = "sink_window"
    per_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _positive(self, "sinks")
        _positive(self, "tokens")

    @property
    def head(self) -> int:
        return self.sinks

    @property
    def span(self) -> int:
        return self.sinks + self.tokens

    def tail(self, position: Any) -> Any:
        return _floor(position - self.tokens + 1)


@register_reach
@dataclass(frozen=True, slots=True)
class State:
    """Goes on from one snapshot, taken exactly at the position."""

    kind: ClassVar[str] = "state"
    per_token: ClassVar[bool] = False
    head: ClassVar[int] = 0
    span: ClassVar[int] = 1

    def tail(self, position: Any) -> Any:
        return _floor(position - 1)
