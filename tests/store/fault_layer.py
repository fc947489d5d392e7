"""A fault layer under the disk tier, as SQLite has one: every n-th read, write or rename fails, or hangs a while.

What it injects is counted, so that a test can say that there was something to withstand.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvweave.store import checksums

ERRORS = (errno.EIO, errno.ENOSPC)
HANG_S = 0.3


class FaultLayer:
    """Wraps what the disk tier does to its files: blobs' reads and writes, the journal's appends and renames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self._chance, self._lock = random.Random(seed), threading.Lock()
        self.every = 0
        """One in so many operations is a fault; 0: none."""
        self.kinds: tuple[str, ...] = ("fail", "hang")
        self.errors: tuple[int, ...] = ERRORS
        self.injected: Counter[str] = Counter()
        for where, name in ((checksums, "read"), (checksums, "write"), (os, "pwritev"), (os, "write"), (os, "replace")):
            monkeypatch.setattr(where, name, self._wrapped(name, getattr(where, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self._strike(name)
            return real(*args, **more)

        return call

    def _strike(self, name: str) -> None:
        with self._lock:
            if not self.every or self._chance.randrange(self.every):
                return
            kind, code = self._chance.choice(self.kinds), self._chance.choice(self.errors)
            code = errno.EIO if name == "read" else code
            self.injected[f"{name} {kind}s"] += 1
        if kind == "hang":
            time.sleep(HANG_S)
        else:
            raise OSError(code, os.strerror(code))
