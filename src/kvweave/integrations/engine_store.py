"""The store of an engine: one for all its parts that are in one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from kvweave.errors import BadOption, Busy, StoreError
from kvweave.integrations.open_store import open_store
from kvweave.store import BaseStore, Schema

_LOCK = threading.Lock()
_OPEN: dict[tuple[str, bytes], tuple[BaseStore[Any], int]] = {}
"""Embedded stores of this process, and how many use each."""


def check_place(directory: str, socket: str) -> None:
    """Raises `BadOption` unless one of them is given."""
    if bool(directory) == bool(socket):
        raise BadOption('say one of "store" (a directory of this engine) and "socket" (of `kvweave serve`)')


def open_engine_store(directory: str, socket: str, schema: Schema, model: str) -> BaseStore[Any]:
    """Open the store of a daemon's socket, or else of a directory (or URL), which is the same object for all callers
    of a process."""
    check_place(directory, socket)
    if socket:
        return open_store(f"unix://{socket.removeprefix('unix://')}", schema, model=model)
    key = str(Path(directory).resolve()), schema.ids.tobytes()
    with _LOCK:
        if key not in _OPEN:
            try:
                _OPEN[key] = open_store(directory, schema, model=model), 0
            except Busy as error:
                raise StoreError(
                    f"{error}; this engine is several processes: run `kvweave serve --disk {directory}`"
                    ' and say "socket" instead of "store"'
                ) from error
        store, users = _OPEN[key]
        _OPEN[key] = store, users + 1
        return store


def close_engine_store(store: BaseStore[Any]) -> None:
    """Close it with its last user."""
    with _LOCK:
        for key, (each, users) in _OPEN.items():
            if each is store and users > 1:
                _OPEN[key] = store, users - 1
                return
            if each is store:
                del _OPEN[key]
                break
    store.close()
