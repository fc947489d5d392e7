"""A transfer: an `operation.AnyOperation` that counts bytes and layers; its last state is final."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from kvweave.errors import TransferCancelled, TransferError, TransferFailed, TransferTimeout
from kvweave.operation import OperationState
from kvweave.transfer.copier import CopyStep, Direction

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 60.0
"""Default timeout of waits, in seconds."""
POLL_S = 20e-6
SPIN_WINDOW_S = 5e-3
"""For this many seconds after the last progress, waits for the last two steps spin: a sleep takes 70 us at least."""
SPIN_S = 1e-3
"""Seconds of one call to `Completion.spin`."""
IN_FLIGHT = 4
"""Steps in flight, in the background: as many may still run after a transfer is cancelled."""

Progress = Callable[["Transfer"], None]


class Transfer:
    """Handle of a transfer. Thread-safe.

    It is `done` only when every byte is in place; it is `failed` or `cancelled` only when nothing of it is in flight
    any more. `on_progress` is called after each step, by the thread that notices its end; an exception of the callback
    is logged, and the callback is not called again.
    """

    error: BaseException | None = None
    _state = OperationState.PENDING
    _all_issued = _cancel = _in_background = False
    _bytes_done = 0
    _ended = 0.0

    def __init__(self, direction: Direction, num_bytes: int, on_progress: Progress | None = None) -> None:
        self.direction = direction
        self.num_bytes = num_bytes
        self._on_progress = on_progress
        self._lock = threading.RLock()
        self._changed: threading.Condition | None = None
        """For threads that wait for another thread to run the transfer; made when the first one waits."""
        self._issued: list[CopyStep] = []
        self._open: deque[CopyStep] = deque()
        self._started = self._moved = time.perf_counter()

    # ---- asking

    @property
    def state(self) -> OperationState:
        self._poll()
        return self._state

    @property
    def is_done(self) -> bool:
        return self.state is not OperationState.PENDING

    @property
    def bytes_done(self) -> int:
        self._poll()
        return self._bytes_done

    @property
    def seconds(self) -> float:
        """Seconds until the end, or until now. If no thread waits for the end, it is noticed by the next call."""
        return (self._ended or time.perf_counter()) - self._started

    def __repr__(self) -> str:
        return f"<Transfer {self.direction} {self._state}, {self._bytes_done} of {self.num_bytes} bytes>"

    # ---- waiting

    def wait(self, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Block until the transfer is done. Raises if it failed, was cancelled, or takes longer than `timeout`
        seconds."""
        self._wait(lambda: self._state is not OperationState.PENDING, timeout)
        if self._state is not OperationState.DONE:
            self._raise()

    def wait_layer(self, layer: int, timeout: float = DEFAULT_TIMEOUT_S, stream: Any = None) -> None:
        """Wait until everything for `layer` and the layers before it is in place.

        On a CPU it blocks until then. On a GPU it blocks until the copy is issued, and later work on `stream` (default:
        the current one) waits for the copy. May be called repeatedly, also when the transfer is done.
        """

        def reached() -> bool:
            return self._state is not OperationState.PENDING or any(step.layers > layer for step in self._issued)

        self._wait(reached, timeout)
        self._raise()
        with self._lock:
            last = next((i for i, step in enumerate(self._issued) if step.layers > layer), len(self._issued) - 1)
            completions = [step.completion for step in self._issued[: last + 1] if step.completion is not None]
        for completion in completions:
            completion.block_stream(stream)

    def cancel(self) -> bool:
        """Stop the transfer before its next step; returns whether it will be cancelled (False: all steps were
        issued). `wait` returns when it has stopped."""
        with self._lock:
            self._cancel = self._cancel or (self._state is OperationState.PENDING and not self._all_issued)
            return self._cancel

    # ---- for the copier

    def run(self, steps: Iterator[CopyStep], *, until_done: bool) -> None:
        """Issue all steps. `until_done`: also wait for them, with few in flight at a time. An exception becomes the
        transfer's error."""
        self._in_background = until_done
        try:
            while not self._cancel:
                step = next(steps, None)
                if step is None:
                    break
                with self._lock:
                    self._issued.append(step)
                    self._open.append(step)
                    self._notify()
                if step.completion is None or until_done:
                    self._poll()
                while until_done and len(self._open) > IN_FLIGHT and self.error is None:
                    self._pause()
                    self._poll()
                if self.error is not None:
                    break
        except BaseException as error:  # of any kind: otherwise waiting threads would wait until their timeout
            self.error = error
        with self._lock:
            self._all_issued = True
        self._poll()
        while until_done and self._state is OperationState.PENDING:
            self._pause()
            self._poll()

    # ---- inside

    def _poll(self) -> None:
        """Update the state from the steps that are done."""
        if self._state is not OperationState.PENDING:
            return
        steps, moved = self._open, 0
        with self._lock:
            try:
                while steps and ((completion := steps[0].completion) is None or completion.is_done()):
                    moved += steps.popleft().num_bytes
            except Exception as error:
                self.error = self.error or error
                steps.clear()
            self._bytes_done += moved
            is_ended = self._all_issued and not steps
            if moved or is_ended:
                self._moved = time.perf_counter()
                self._notify()
            if is_ended and self._state is OperationState.PENDING:
                self._state, self._ended = self._outcome(), self._moved
            report = self._on_progress if moved else None
        if report is not None:
            try:
                report(self)
            except Exception:
                log.exception("the progress callback of %r raised; it is not called again", self)
                self._on_progress = None

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.notify_all()

    def _outcome(self) -> OperationState:
        if self.error is not None:
            return OperationState.FAILED
        if self._bytes_done < self.num_bytes:
            if not self._cancel:
                self.error = TransferFailed(f"only {self._bytes_done} of {self.num_bytes} bytes were moved")
                return OperationState.FAILED
            return OperationState.CANCELLED
        return OperationState.DONE

    def _wait(self, is_done: Callable[[], bool], timeout: float) -> None:
        deadline = time.perf_counter() + timeout
        while True:
            self._poll()
            if is_done():
                return
            left = deadline - time.perf_counter()
            if left <= 0:
                raise TransferTimeout(
                    f"{self.direction} of {self.num_bytes} bytes: {self._bytes_done} moved after {self.seconds:.3f} s;"
                    " wait again, or cancel it"
                )
            with self._lock:
                asleep = self._in_background or not self._open
                if asleep and not is_done():
                    self._changed = self._changed or threading.Condition(self._lock)
                    self._changed.wait(min(left, 0.1))
            if not asleep:
                self._pause()

    def _pause(self) -> None:
        """Wait a little: spin when the end is near, otherwise sleep."""
        with self._lock:
            completion = self._open[0].completion if 0 < len(self._open) <= 2 else None
        if completion is not None and time.perf_counter() - self._moved < SPIN_WINDOW_S:
            completion.spin(SPIN_S)
        else:
            time.sleep(POLL_S)

    def _raise(self) -> None:
        if self._state is OperationState.FAILED:
            if isinstance(self.error, TransferError):
                raise self.error
            raise TransferFailed(f"{self.direction} of {self.num_bytes} bytes failed: {self.error}") from self.error
        if self._state is OperationState.CANCELLED:
            raise TransferCancelled(
                f"{self.direction} was cancelled after {self._bytes_done} of {self.num_bytes} bytes"
            )
