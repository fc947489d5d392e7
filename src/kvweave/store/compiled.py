"""The store's C (`native.c`), where it was built for this processor; else None, and Python does the same."""

from __future__ import annotations

try:
    import kvweave.store._native as native
except ImportError:
    native = None  # type: ignore[assignment]

__all__ = ["native"]
