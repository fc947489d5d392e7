"""The store of an engine: one for both of its sides where these are in one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from kvweave.errors import Busy, StoreError
from kvweave.integrations.open_store import open_store
from kvweave.integrations.vllm.connector_settings import ConnectorSettings
from kvweave.store import AnyStore, Schema

_LOCK = threading.Lock()
_OPEN: dict[tuple[str, bytes], tuple[AnyStore[Any], int]] = {}
"""Embedded stores of this process, and how many use each."""


def open_engine_store(settings: ConnectorSettings, schema: Schema, model: str) -> AnyStore[Any]:
    """Open the store that the settings name. An embedded one is the same object for all callers of a process."""
    if settings.socket:
        return open_store(f"unix://{settings.socket.removeprefix('unix://')}", schema, model=model)
    key = str(Path(settings.store).resolve()), schema.ids.tobytes()
    with _LOCK:
        if key not in _OPEN:
            try:
                _OPEN[key] = open_store(settings.store, schema, model=model), 0
            except Busy as error:
                raise StoreError(
                    f"{error}; this engine's scheduler and workers are several processes: run `kvweave serve --disk"
                    f' {settings.store}` and say "socket" instead of "store"'
                ) from error
        store, users = _OPEN[key]
        _OPEN[key] = store, users + 1
        return store


def close_engine_store(store: AnyStore[Any]) -> None:
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
