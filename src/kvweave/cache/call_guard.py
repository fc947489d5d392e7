"""Who may call a cache: the thread that owns it, and nobody while a function of its user is called."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any, Final

from kvweave.errors import EventLost, NotSettled, WrongThread
from kvweave.prefix import Event

IN_A_CALL: Final = -1
"""Stands for the owner while a user's function is called. No thread has this number."""


class CallGuard:
    """The thread that made it owns the cache."""

    def __init__(self) -> None:
        self._owner = get_ident()

    def bind(self) -> None:
        """The calling thread owns the cache from now on."""
        self._owner = get_ident()

    def check(self) -> None:
        """Raise `WrongThread`, or `NotSettled` for a call by a user's function."""
        if get_ident() != self._owner:
            if self._owner == IN_A_CALL:
                raise NotSettled("the cache is in the midst of a call: on_event and policies must not call it")
            raise WrongThread(f"this cache belongs to thread {self._owner}, called from {get_ident()}")

    def call_out(self, function: Callable[..., Any], *about: Any) -> Any:
        """Call a user's function, which must not call the cache: it is in the midst of a change."""
        owner, self._owner = self._owner, IN_A_CALL
        try:
            return function(*about)
        finally:
            self._owner = owner

    def tell(self, on_event: Callable[[Event], None], event: Event) -> None:
        """Call `on_event`; what it raises is a warning."""
        try:
            self.call_out(on_event, event)
        except Exception as error:  # whatever a user's code raises
            said = f"on_event failed: {type(error).__name__}: {error}; it was not told of {type(event).__name__}"
            with suppress(EventLost):  # where warnings are errors: raising here would leave a change half done
                warnings.warn(said, EventLost, stacklevel=2)
