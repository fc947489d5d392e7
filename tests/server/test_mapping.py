"""Mapping the arena does not hold up the process that connects."""

from __future__ import annotations

import mmap
import threading
import time

import numpy as np
import pytest

from kvweave.server import mapping
from kvweave.server.mapping import POPULATE_WRITE, populate


def test_other_threads_run_while_page_tables_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 128 << 20), np.uint8)
    monkeypatch.setattr(mapping, "WARM_BYTES", memory.nbytes)  # one call, of some ten milliseconds
    thread, turns = threading.Thread(target=populate, args=(memory, POPULATE_WRITE)), 0
    thread.start()
    while thread.is_alive():
        time.sleep(0)
        turns += 1
    assert turns > 100
    assert not memory.any()


def test_a_kernel_that_cannot_do_it_is_left_alone() -> None:
    populate(np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8), 9999)
