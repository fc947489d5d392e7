"""Mapping the arena does not hold up the process that connects."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvweave.server.mapping import POPULATE_WRITE, populate


@pytest.fixture
def no_preemption() -> Iterator[None]:
    """Threads run until they let go of the interpreter by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_preemption")
def test_other_threads_run_while_page_tables_are_made() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 16 << 20), np.uint8)
    held, ran = threading.Lock(), list[bool]()

    def other() -> None:
        with held:
            ran.append(True)

    thread, until = threading.Thread(target=other), time.monotonic() + 30
    held.acquire()
    thread.start()
    held.release()  # from here on the other thread waits for the interpreter alone
    while not ran and time.monotonic() < until:
        populate(memory, POPULATE_WRITE)
    assert ran
    thread.join()
    assert not memory.any()


def test_a_kernel_that_cannot_do_it_is_left_alone() -> None:
    populate(np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8), 9999)
