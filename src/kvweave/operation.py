"""Work that goes on while its caller does something else: one idiom for lookups, loads, saves and copies.

submit   returns a handle at once      poll    the handles that have ended since, without waiting
wait     until one has ended           cancel  stop what has not begun
"""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import Protocol, runtime_checkable


class OperationState(StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@runtime_checkable
class AnyOperation(Protocol):
    """Pending, then done, failed or cancelled; that state is final. Thread-safe.

    When it has ended, no memory is read or written for it any more.
    """

    error: BaseException | None

    @property
    def state(self) -> OperationState: ...

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def wait(self, timeout: float = ...) -> None:
        """Until it is done; raises its error, `OperationCancelled`, or `OperationTimeout` after `timeout` seconds."""
        ...

    def cancel(self) -> bool:
        """Stop it as soon as possible; whether there was still something to stop. `is_done` says when it has."""
        ...


class Completions:
    """Operations under way, and those that have ended: each is reported once. Any thread may add and poll."""

    def __init__(self) -> None:
        self._operations: dict[int, AnyOperation] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._operations)

    def add(self, operation: AnyOperation) -> None:
        with self._lock:
            self._operations[id(operation)] = operation

    def discard(self, operation: AnyOperation) -> None:
        """Do not report it: its caller waits for it."""
        with self._lock:
            self._operations.pop(id(operation), None)

    def pending(self) -> list[AnyOperation]:
        """All that were added, and not reported yet."""
        with self._lock:
            return [*self._operations.values()]

    def poll(self) -> list[AnyOperation]:
        """Those that have ended since the last time, in the order in which they were added. Never waits."""
        with self._lock:
            ended = [operation for operation in self._operations.values() if operation.is_done]
            for operation in ended:
                del self._operations[id(operation)]
        return ended
