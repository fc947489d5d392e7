"""Cleanup after `fork`: connections, threads and directory locks that a child must not share with its parent."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """An object whose copy in a forked child cannot be used as it is."""

    def after_fork(self) -> None:
        """Called in the child before anything else. Must not wait for a lock: the thread that held it does not exist
        there."""
        ...


_known: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register_after_fork(something: ForkAware) -> None:
    """Call `after_fork` of this object in every child, as long as the object lives."""
    _known.add(something)


def _tell() -> None:
    for each in [*_known]:
        each.after_fork()


os.register_at_fork(after_in_child=_tell)
