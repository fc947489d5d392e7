"""A daemon that polls: it answers as any other, its timers and threads are heard, and it sleeps when nobody asks."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import threading
import time
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest

from kvweave.errors import ConfigError
from kvweave.server.polling import PollingSelector, runner
from kvweave.server.settings import Settings


async def message() -> None:
    """The loop is waiting when it comes."""
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        loop.call_later(0.005, there.send, b"x")
        await loop.sock_recv(here, 1)


def test_after_a_message_it_looks_again_and_again_for_a_while_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = count(), list[float | None]()
    ready: list[Any] = [["a message"], *repeat([], 5), ["another"]]

    def select(_: object, timeout: float | None) -> Any:
        waits.append(timeout)
        return ready.pop(0) if ready else []

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))  # a second for each look at it
    with PollingSelector(10.0) as selector:
        assert selector.select(None)
        assert not selector.select(3.0)  # the caller's time is over first
        assert waits[-3:] == [0, 0, 0.0]
        assert selector.select(None)
        assert {*waits} == {0}, "it never slept"
        waits.clear()
        assert not selector.select(None)
        assert waits[-1] is None
        assert len(waits) > 5


def test_who_does_not_poll_has_the_loop_of_asyncio() -> None:
    async def selector() -> object:
        return asyncio.get_running_loop()._selector  # type: ignore[attr-defined]

    for poll_s in (0.0, 1.0):
        with runner(poll_s) as loop:
            assert isinstance(loop.run(selector()), PollingSelector) == bool(poll_s)


def test_timers_and_other_threads_are_heard_while_it_polls() -> None:
    async def heard() -> list[str]:
        loop, order = asyncio.get_running_loop(), list[str]()
        await message()
        done = asyncio.Event()
        thread = threading.Timer(0.05, lambda: loop.call_soon_threadsafe(done.set))
        thread.start()
        loop.call_later(0.01, order.append, "timer")
        await asyncio.wait_for(done.wait(), 10)
        order.append("thread")
        thread.join()
        return order

    with runner(60.0) as loop:
        assert loop.run(heard()) == ["timer", "thread"]


def test_a_wait_of_no_time_does_not_poll() -> None:
    here, there = os.pipe()
    with PollingSelector(60.0) as selector:
        selector.register(here, 1)
        os.write(there, b"x")
        assert selector.select(None)
        os.read(here, 1)
        began = time.thread_time()
        assert not selector.select(0)
        assert not selector.select(-1)
        assert time.thread_time() - began < 0.5
    os.close(here)
    os.close(there)


@pytest.mark.parametrize("seconds", [-0.1, 3601.0, float("nan"), float("inf")])
def test_a_time_to_poll_that_cannot_be_is_refused(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ConfigError, match="polling for"):
        Settings(socket=tmp_path / "kv.sock", poll_s=seconds)
