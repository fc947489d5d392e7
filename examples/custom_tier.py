"""A tier of your own: blobs in an SQLite file, behind a little host memory. Needs kvweave[store].

A tier keeps bytes under keys, in batches; it may lose them, but must never give others. The store's
own checksums find what is damaged, so a tier need not. `tests/store/contract.py` says what else is asked of it.

Run: python examples/custom_tier.py [file]
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvweave as kw
from kvweave.spec import DType
from kvweave.store import MemoryTier, Namespace, Schema, Store, TierStack, TierStats, model_digest
from kvweave.store.keys import Bytes
from kvweave.store.tier import ALL, Blob, ChecksumObserver, KeyFilter, fill, joined


class SqliteTier:
    """Blobs as rows of one table; no quota, no eviction. Safe from any thread: one connection, one lock."""

    kind = "sqlite"

    def __init__(self, path: str | Path, name: str = "sqlite") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.execute("create table if not exists blobs (key blob primary key, value blob) without rowid")

    def _ask(self, words: str, *values: bytes) -> list[Any]:
        with self._lock:
            return self._database.execute(words, values).fetchall()

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        return np.array([bool(self._ask("select 1 from blobs where key = ?", key)) for key in keys], bool)

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes], observer: Sequence[ChecksumObserver] = ()) -> list[int]:
        found = (self._ask("select value from blobs where key = ?", key) for key in keys)
        return [fill(target, row[0][0] if row else None) for row, target in zip(found, into, strict=True)]

    def put(self, keys: Sequence[bytes], blobs: Sequence[Blob]) -> list[bool]:
        for key, blob in zip(keys, blobs, strict=True):  # a row is there whole or not at all: SQLite sees to that
            self._ask("insert or ignore into blobs values (?, ?)", key, joined(blob))
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(len(self._ask("delete from blobs where key = ? returning 1", key)) for key in keys)

    def clear(self, key_filter: KeyFilter = ALL) -> int:
        return self.delete([key for (key,) in self._ask("select key from blobs") if key in key_filter])

    def stats(self) -> TierStats:
        ((entries, used),) = self._ask("select count(*), coalesce(sum(length(value)), 0) from blobs")
        return TierStats(self.name, entries, used)

    def close(self) -> None:
        self._database.close()


def main(path: str) -> None:
    rows = (kw.Role("key", (4, 16), DType.BFLOAT16), kw.Role("value", (4, 16), DType.BFLOAT16))
    spec = kw.ModelSpec("example", (kw.Layer((kw.LayerCache("full", kw.Full(), rows),)),))
    schema, here = Schema.of(spec, parts=1), Namespace(model_digest(spec), weights="main@3f2a")
    tokens = list(range(2000))
    for process in ("the first process", "the next one"):
        store = Store(schema, TierStack(MemoryTier("4MiB"), SqliteTier(path)))
        prompt = store.prompt(tokens, here)
        print(f"{process} finds {store.lookup(prompt).position} of {len(tokens)} tokens")
        store.save(prompt, lambda row, chunk: np.full(row.payload_bytes, chunk, np.uint8))
        store.close()  # what is queued is written


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(Path(tempfile.mkdtemp()) / "kv.sqlite"))
