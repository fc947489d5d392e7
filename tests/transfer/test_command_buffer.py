"""Tapes are played call by call. The driver is one that only keeps a list of what it was asked: no GPU is needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("kvweave.transfer._native", reason="not built")

import kvweave.transfer._native as native
from kvweave.errors import TransferFailed
from kvweave.transfer import driver
from kvweave.transfer.command_buffer import CommandBuffer
from kvweave.transfer.driver import NOT_READY, Event, is_idle, submit

SOURCE = Path(__file__).with_name("driver.c")


class Fake:
    """The driver that is asked."""

    def __init__(self, path: Path, *flags: str) -> None:
        made = path / f"driver{''.join(flags)}.so"
        subprocess.run(["cc", "-Wall", "-shared", "-fPIC", *flags, str(SOURCE), "-o", str(made)], check=True)
        self.has_batches = native.load(str(made))
        self._library = ctypes.CDLL(str(made))
        self._library.taken.restype = ctypes.c_char_p
        self._library.set.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int]
        self.set()

    def set(self, *, busy: bool = False, context: int = 100, refuses: str = "", code: int = 0) -> None:
        """How it is from now on; the context is the thread's current one."""
        self._library.set(busy, context, refuses.encode(), code)

    def taken(self) -> list[str]:
        """What it was asked since the last time."""
        bound_copies: bytes = self._library.taken()
        return bound_copies.decode().splitlines()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(driver, "SPARE", type(driver.SPARE)(list))
    yield Fake(tmp_path, "-DBATCH")
    with suppress(OSError):
        native.load(driver.LIBRARY)


def test_a_tape_is_played_call_by_call_as_often_as_wanted(fake: Fake) -> None:
    event, completion = Event(100), Event(100)
    assert fake.taken() == ["create 2"] * 2
    commands = CommandBuffer()
    commands.wait(event, 5)
    commands.launch(9, (20, 2), 128, 64, (1, 2, 3), 6)
    commands.chain_streams(event, 6, 5)
    commands.copy(10, 11, 12, 5)
    commands.copy_rows(20, 21, 22, 23, 24, 25, 5)
    commands.copy_many(np.array([30, 31]), np.array([40, 41]), np.array([6, 7]), 5)
    commands.copy_many(np.array([50]), np.array([60]), np.array([8]), 5)
    commands.signal(5)
    for _ in range(2):
        submit(commands, 100, completion=completion)
        assert fake.taken() == [
            "wait 5 1000 0",
            "launch 9 20 2 1 128 1 1 64 6: 1 2 3 0",
            "record 1000 6",
            "wait 5 1000 0",
            "copy 10 11 12 5",
            "rows 20+21 22+23 24x25 4 4 5",
            "batch 31 41 7 2 1 0 1 5",
            "copy 50 60 8 5",
            "record 1001 5",
        ]


def test_older_drivers_copy_many_one_by_one(fake: Fake, tmp_path: Path) -> None:
    old = Fake(tmp_path)
    assert (fake.has_batches, old.has_batches) == (True, False)
    commands = CommandBuffer()
    commands.copy_many(np.array([30, 31]), np.array([40, 41]), np.array([6, 7]), 5)
    submit(commands, 100)
    assert old.taken() == ["copy 30 40 6 5", "copy 31 41 7 5"]


def test_many_copies_are_handed_over_more_and_more_at_a_time(fake: Fake) -> None:
    commands = CommandBuffer()
    commands.copy_many(np.arange(1, 51), np.arange(101, 151), np.arange(201, 251), 5)
    submit(commands, 100)
    assert fake.taken() == ["batch 4 104 204 4 1 0 1 5", "batch 36 136 236 32 1 0 1 5", "batch 50 150 250 14 1 0 1 5"]


def test_what_a_driver_refuses_ends_it_and_is_an_error_with_the_code(fake: Fake) -> None:
    commands = CommandBuffer()
    for number in range(3):
        commands.copy(number, 1, 2, 3)
    commands.launch(1, (1, 1), 1, 1, (), 1)
    fake.set(refuses="copy", code=700)
    with pytest.raises(TransferFailed, match="700"):
        submit(commands, 100)
    assert fake.taken() == ["copy 0 1 2 3"]


@pytest.mark.parametrize("refuses", ["", "copy"])
def test_a_thread_has_the_context_that_it_had_before(refuses: str, fake: Fake) -> None:
    commands = CommandBuffer()
    commands.copy(1, 2, 3, 4)
    fake.set(context=55, refuses=refuses, code=1)
    with suppress(TransferFailed):
        submit(commands, 100)
    assert fake.taken() == ["push 100", "copy 1 2 3 4", "pop 0"]


def test_what_comes_after_the_callers_stream_does_not_wait_for_an_idle_one(fake: Fake) -> None:
    event = Event(100)
    commands = CommandBuffer()
    commands.after_caller(event, 5, 6)
    fake.taken()
    submit(commands, 100, caller=8)
    assert fake.taken() == []
    fake.set(busy=True)
    submit(commands, 100, caller=8)
    assert fake.taken() == ["record 1000 8", "wait 5 1000 0", "wait 6 1000 0"]


def test_events_say_whether_they_are_over_and_what_broke_them(fake: Fake) -> None:
    event = Event(100)
    assert event.is_done()
    assert is_idle(100, 5)
    fake.set(busy=True)
    assert not event.is_done()
    assert not is_idle(100, 5)
    began = time.monotonic()
    event.spin(0.02)
    assert 0.02 <= time.monotonic() - began < 5
    fake.set(refuses="query", code=NOT_READY + 1)
    event.spin(60)
    with pytest.raises(TransferFailed, match="601"):
        event.is_done()


def test_handles_of_events_are_used_again(fake: Fake) -> None:
    first = Event(100)
    number = first.handle
    del first
    assert Event(100).handle == number
    assert fake.taken() == ["create 2"]


def test_only_the_hosts_pinned_memory_is_pinned(fake: Fake) -> None:
    assert driver.is_pinned(77)
    assert not driver.is_pinned(78)


def test_a_driver_that_is_not_there_is_an_error(fake: Fake) -> None:
    with pytest.raises(OSError, match=r"nowhere\.so"):
        native.load("/nowhere.so")
