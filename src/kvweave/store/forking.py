"""What a forked child must not share with its parent: connections, threads, locks on directories."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """Something of which a child of `fork` has a copy that it cannot use as it is."""

    def after_fork(self) -> None:
        """In the child, before anything else runs there. Must not wait: whoever held a lock is not here any more."""
        ...


_known: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register_after_fork(something: ForkAware) -> None:
    """Call its `after_fork` in every child, as long as it lives."""
    _known.add(something)


def _tell() -> None:
    for each in [*_known]:
        each.after_fork()


os.register_at_fork(after_in_child=_tell)
