"""A circuit breaker: a tier that keeps failing is skipped for a while, then tried with one request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed: requests pass. After `threshold` failures in a row it opens: none passes for `cool_s`, then one as a
    trial."""

    def __init__(self, threshold: int, cool_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._threshold, self._cool_s, self._clock = threshold, cool_s, clock
        self._failures = 0
        self._retry_at = 0.0
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        return self._failures >= self._threshold

    @property
    def is_cooling(self) -> bool:
        """Open, and not yet due for a trial."""
        return self.is_open and self._clock() < self._retry_at

    def passes(self) -> bool:
        """Whether to send a request now; when open, True once every `cool_s`."""
        with self._lock:
            if not self.is_open:
                return True
            if self._clock() < self._retry_at:
                return False
            self._retry_at = self._clock() + self._cool_s
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self.is_open:
                self._retry_at = self._clock() + self._cool_s
