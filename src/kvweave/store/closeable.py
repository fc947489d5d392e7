"""A base class for objects with `close`: they are contexts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class ClosedAtEnd(ABC):
    """A context that calls `close` at its end."""

    @abstractmethod
    def close(self) -> object: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
