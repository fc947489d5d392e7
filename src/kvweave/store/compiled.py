"""The C part of the store (`native.c`); None if it was not built, in which case Python computes the same."""

from __future__ import annotations

try:
    import kvweave.store._native as native
except ImportError:
    native = None  # type: ignore[assignment]

__all__ = ["native"]
