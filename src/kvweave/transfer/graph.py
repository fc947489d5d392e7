"""Graphs: calls on some streams recorded once, then launched as one, which takes the host as long as a single copy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kvweave.transfer.driver import POINTER, check, cuda

RELAXED = 2
"""How to record: whatever other threads do meanwhile is their own affair."""


class Graph:
    """What `issue` puts on `stream`, and on others that wait for it and that it waits for in the end.

    Nothing runs until it is launched. `owner` keeps the memory alive whose addresses it knows.
    """

    def __init__(self, stream: int, issue: Callable[[], None], owner: object) -> None:
        self._handle, self._owner = POINTER(), owner
        recorded = POINTER()
        check(cuda().cuStreamBeginCapture_v2(stream, RELAXED))
        try:
            issue()
        finally:
            code = cuda().cuStreamEndCapture(stream, ctypes.byref(recorded))
        check(code)
        try:
            check(cuda().cuGraphInstantiateWithFlags(ctypes.byref(self._handle), recorded, 0))
        finally:
            cuda().cuGraphDestroy(recorded)

    def launch(self, stream: int) -> None:
        """Do it all, after what is on `stream`. Does not block."""
        check(cuda().cuGraphLaunch(self._handle, stream))

    def __del__(self) -> None:
        if self._handle:
            cuda().cuGraphExecDestroy(self._handle)
