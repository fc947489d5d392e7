"""Prompts whose requests said `kvweave.pin`: what resuming them needs stays in the daemon's memory.

A pin ends with `kvweave.unpin` by a request of the same prompt, with this engine, or with the daemon.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvweave.errors import KVWeaveError
from kvweave.integrations.vllm.request_state import RequestState
from kvweave.store import BaseStore, HashedPrompt, Operation

log = logging.getLogger("kvweave.vllm")


class PinnedPrompts:
    """No call waits: a pin is made by a thread of the store's, once everything of its request is saved."""

    def __init__(self, store: BaseStore[Any], counts: Counter[str]) -> None:
        self._store, self._counts = store, counts
        self._wanted: list[RequestState] = []
        self._pins: dict[bytes, Operation[Any]] = {}
        self._ending: list[Operation[Any]] = []

    def request_ended(self, state: RequestState) -> None:
        if state.settings.unpin:
            self._ending += [self._pins.pop(name) for name in (_name(state.prompt),) if name in self._pins]
        elif state.settings.pin and _name(state.prompt) not in self._pins:
            self._wanted.append(state)

    def proceed(self, is_saving: Callable[[RequestState], bool]) -> None:
        """Pin what is saved now, unpin what is pinned by now, and count what came of earlier pins."""
        ready = [state for state in self._wanted if not is_saving(state)]
        self._wanted = [state for state in self._wanted if is_saving(state)]
        for state in ready:
            try:
                self._pins[_name(state.prompt)] = self._store.submit_pin(state.prompt)
            except KVWeaveError as error:
                self._failed(error)
        for name in [name for name, pin in self._pins.items() if pin.is_done and not _holds(pin)]:
            self._failed(self._pins.pop(name).error or "nothing of it is stored")
        for pin in [pin for pin in self._ending if pin.is_done]:
            self._ending.remove(pin)
            if _holds(pin):
                self._store.release_later(pin.result(timeout=0))

    def _failed(self, error: object) -> None:
        self._counts["failed_pins"] += 1
        log.warning("a prompt is not pinned: %s", error)


def _holds(pin: Operation[Any]) -> bool:
    return pin.error is None and pin.result(timeout=0).position > 0


def _name(prompt: HashedPrompt) -> bytes:
    """A prompt of less than a chunk has none, and nothing to pin."""
    return prompt.tenant_id + prompt.prefixes[-1:].tobytes()
