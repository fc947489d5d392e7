"""Which keys tiers have removed, by eviction, damage or clearing: for code that has announced what is stored."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

MOST = 1 << 16
"""Keys that a log remembers."""
AT_ONCE = 1 << 14
"""Keys of one answer: less than a message may have."""
FROM_NOW = -1


class Removals(NamedTuple):
    """Keys that were removed, and the number to ask with next. Not `complete`: some were forgotten meanwhile, and
    anything may be gone."""

    number: int
    keys: list[bytes]
    complete: bool


class RemovalLog:
    """The last keys that were removed, by number. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._keys: deque[bytes] = deque(maxlen=most)
        self._end = 0
        self._lock = threading.Lock()

    def add(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._keys.extend(keys)
            self._end += len(keys)

    def since(self, number: int) -> Removals:
        """The first `AT_ONCE` keys from a number on; `FROM_NOW`: none, but the number to begin with."""
        with self._lock:
            first = self._end - len(self._keys)
            if not first <= number <= self._end:
                return Removals(self._end, [], number == FROM_NOW)
            keys = [*islice(self._keys, number - first, number - first + AT_ONCE)]
            return Removals(number + len(keys), keys, complete=True)


def follow(tier: object, log: RemovalLog) -> bool:
    """Have a tier add to a log what it removes; False: it cannot know, as that of another server."""
    start = getattr(tier, "follow_removals", None)
    if start is not None:
        start(log)
    return start is not None
