"""What can go wrong, as one tree.

    KVWeaveError
    +-- SpecError            a declaration contradicts itself
    |   +-- UnknownName      a name (dtype, reach, key) that nobody declared; says the nearest known one
    +-- ConfigError          a config.json cannot be read, or lacks what its layers need
    +-- PlanError            memory cannot be cut as asked
        +-- NeverFits        not even an empty pool of this size would hold it; says the smallest that would
        +-- DraftMismatch    a draft model's caches match no group of the target
            +-- AmbiguousDraft   ... or match several

Every message carries the numbers and the cure; an error leaves everything as it was.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVWeaveError(Exception):
    """Base of all errors that kvweave raises on purpose."""


class SpecError(KVWeaveError, ValueError):
    """A declaration contradicts itself."""


class UnknownName(SpecError):
    """A name nobody declared."""

    def __init__(self, what: str, name: object, known: Iterable[str]) -> None:
        choices = sorted(known)
        close = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(choices)}"
        super().__init__(f"unknown {what} {name!r}; {hint}")


class ConfigError(KVWeaveError, ValueError):
    """A model's config cannot be read, or lacks a field that its layers need."""


class PlanError(KVWeaveError, ValueError):
    """Memory cannot be cut as asked."""


class NeverFits(PlanError):
    """The request would not fit an empty pool; `smallest_bytes` would do."""

    def __init__(self, message: str, *, available_bytes: int, smallest_bytes: int) -> None:
        super().__init__(message)
        self.available_bytes = available_bytes
        self.smallest_bytes = smallest_bytes


class DraftMismatch(PlanError):
    """A draft model's cache has no equal among the target's groups."""


class AmbiguousDraft(DraftMismatch):
    """A draft model's cache equals several of the target's groups."""
