"""An event loop that looks for the next request instead of sleeping, for some time after each.

On some hosts (virtual machines with a GPU) a process that sleeps takes a third of a millisecond to wake up, in which 15
MB could have been copied. It costs a processor while requests come.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from functools import partial

Ready = list[tuple[selectors.SelectorKey, int]]


class PollingSelector(selectors.DefaultSelector):
    """Sleeps only when nothing has come for `poll_s`."""

    def __init__(self, poll_s: float) -> None:
        super().__init__()
        self._poll_s = poll_s
        self._poll_until = 0.0

    def select(self, timeout: float | None = None) -> Ready:
        until = float("inf") if timeout is None else time.monotonic() + timeout
        ready: Ready = super().select(0)
        while not ready and time.monotonic() < min(until, self._poll_until):
            ready = super().select(0)
        if ready:
            self._poll_until = time.monotonic() + self._poll_s
            return ready
        return super().select(None if timeout is None else max(0.0, until - time.monotonic()))


def runner(poll_s: float) -> asyncio.Runner:
    """Of asyncio's own loop for 0."""
    return asyncio.Runner(loop_factory=partial(_polling_loop, poll_s) if poll_s else None)


def _polling_loop(poll_s: float) -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(PollingSelector(poll_s))
