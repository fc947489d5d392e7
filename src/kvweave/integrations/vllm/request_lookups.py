"""Lookups of requests, some in one operation: a thread that is woken for each takes the interpreter from the scheduler
each time."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from kvweave.errors import OperationTimeout
from kvweave.store import BaseHit, BaseStore, HashedPrompt, Operation
from kvweave.store.results import GroupLoad

AT_ONCE = 16
"""Prompts in one operation, at most: all are found before the first is known."""
IDLE_WAIT_S = 0.005
"""What lookups may take of the scheduler's time, all together, before a step in which nothing runs."""


class FoundPrefix(NamedTuple):
    """The longest prefix that the engine can resume behind, and what a load of all of it reads, by group."""

    hit: BaseHit
    stored: int
    """Tokens that the store has, some of them perhaps behind the hit."""
    sizes: dict[str, GroupLoad]


class RequestLookup:
    """The lookup of one prompt: the `number`-th of an operation, when it was sent."""

    def __init__(self, prompt: HashedPrompt) -> None:
        self.prompt, self.asked_at = prompt, time.monotonic()
        self.operation: Operation[list[FoundPrefix]] | None = None
        self.number = 0


class RequestLookups:
    """The lookups of an engine, for hits at multiples of `alignment`. No call waits for longer than `IDLE_WAIT_S`."""

    def __init__(self, store: BaseStore[Any], timeout_s: float, alignment: int = 1) -> None:
        self._store, self._timeout_s, self._alignment = store, timeout_s, alignment
        self._unsent: list[RequestLookup] = []
        self._abandoned: list[RequestLookup] = []
        self._idle_s = IDLE_WAIT_S

    def begin(self, prompt: HashedPrompt) -> RequestLookup:
        """Sent along with others, by the next call of `result` or `step`."""
        self._unsent.append(lookup := RequestLookup(prompt))
        return lookup

    def result(self, lookup: RequestLookup) -> FoundPrefix | None:
        """None: it is on its way, ask again. Raises whatever a tier raised."""
        self._send()
        operation = lookup.operation
        assert operation is not None, "a lookup was not sent"
        if not operation.is_done and not self._ends_in_time(operation):
            return None
        return operation.result(0)[lookup.number]

    def _ends_in_time(self, operation: Operation[list[FoundPrefix]]) -> bool:
        """Wait while the engine has nothing else to do."""
        began = time.monotonic()
        if self._idle_s > 0:
            try:
                operation.wait(self._idle_s)
            except OperationTimeout:
                pass
            except Exception:  # `result` raises it
                return True
            self._idle_s -= time.monotonic() - began
        return operation.is_done

    def abandon(self, lookup: RequestLookup) -> None:
        """Nobody waits for it any more."""
        if lookup.operation is None:
            self._unsent.remove(lookup)
        else:
            self._abandoned.append(lookup)

    def step(self, *, is_idle: bool) -> None:
        """A step of the engine begins, in which something runs, or nothing does."""
        self._send()
        self._idle_s = IDLE_WAIT_S if is_idle else 0.0
        for lookup in [each for each in self._abandoned if each.operation and each.operation.is_done]:
            self._abandoned.remove(lookup)
            if lookup.operation and lookup.operation.error is None:
                self._store.release_later(lookup.operation.result(0)[lookup.number].hit)

    def _send(self) -> None:
        for first in range(0, len(self._unsent), AT_ONCE):
            some = self._unsent[first : first + AT_ONCE]
            prompts = [each.prompt for each in some]
            operation = self._store.submit_lookup(prompts, then=self._prefix, budget_s=self._timeout_s)
            for number, lookup in enumerate(some):
                lookup.operation, lookup.number = operation, number
        self._unsent.clear()

    def _prefix(self, hit: BaseHit) -> FoundPrefix:
        """Called in the store's thread."""
        aligned = self._store.shorten(hit, hit.position, self._alignment)
        return FoundPrefix(aligned, hit.position, self._store.load_sizes(aligned))
