"""Interrupts at every place of a call at which Python handles signals."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

AnyLock = Any
"""A lock, or an RLock."""


class Interrupt(BaseException):
    """What a signal's handler raises."""


def interrupted(call: Callable[[], object], after: int) -> bool:
    """Call, with an interrupt at its event number `after`; returns whether it came so far. Signals are handled when a
    function begins, and when one that is written in C has returned."""
    left = after

    def interrupt(_: FrameType, event: str, __: object) -> None:
        nonlocal left
        left -= event in ("call", "c_return")
        if left < 0:
            raise Interrupt

    sys.setprofile(interrupt)
    try:
        call()
    except Interrupt:
        return True
    except RuntimeError as error:  # `Condition.wait` was interrupted when it had released its lock
        if not isinstance(error.__context__, Interrupt):
            raise
        return True
    finally:
        sys.setprofile(None)
    return False


def interrupt_everywhere(call: Callable[[], object], lock: AnyLock) -> None:
    """Interrupt a call at every event, and see that another thread gets the lock each time."""
    after = 0
    while interrupted(call, after):
        assert is_free(lock), after
        after += 1
    assert after > 2


def is_free(lock: AnyLock) -> bool:
    """Whether another thread gets a lock."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=10))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]
