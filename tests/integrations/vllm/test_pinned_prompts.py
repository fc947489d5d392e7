"""Prompts that requests pin: in a daemon's memory from the end of their saves on, until they are unpinned."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from kvweave.integrations.vllm.connector_settings import RequestSettings
from kvweave.integrations.vllm.pinned_prompts import PinnedPrompts
from kvweave.integrations.vllm.request_state import RequestState
from kvweave.server import Daemon, RemoteStore
from kvweave.store import BaseStore, DictTier, Store, TierStack
from tests.server.models import SCHEMA, TOKENS, prompt, serving, settings, store
from tests.store.models import truth


def state(*, pin: bool = False, unpin: bool = False) -> RequestState:
    return RequestState(RequestSettings(pin=pin, unpin=unpin), TOKENS.tolist(), len(TOKENS), prompt())


def num_pinned(daemon: Daemon) -> int:
    return int(np.count_nonzero(daemon.state.arena._catalog.pins))


def until(pins: PinnedPrompts, made: RemoteStore, daemon: Daemon, *, expected: bool) -> None:
    end = time.monotonic() + 10
    while bool(num_pinned(daemon)) is not expected:
        assert time.monotonic() < end
        pins.proceed(lambda _: False)
        made.lookup(prompt(), lease=False)  # what never waits goes along with the next request
        time.sleep(0.01)


def test_a_prompt_is_pinned_when_it_is_saved_and_until_it_is_unpinned(tmp_path: Path) -> None:
    with serving(settings(tmp_path, memory=64 << 20)) as daemon, store(daemon.settings.socket) as made:
        made.save(prompt(), truth)
        counts = Counter[str]()
        pins = PinnedPrompts(made, counts)
        pins.request_ended(state())
        pins.request_ended(state(pin=True))
        pins.proceed(lambda _: True)
        assert not num_pinned(daemon)
        until(pins, made, daemon, expected=True)
        pins.request_ended(state(pin=True))  # it is pinned already
        assert not pins._wanted
        pins.request_ended(state(unpin=True))
        until(pins, made, daemon, expected=False)
        assert not counts


def test_what_cannot_be_pinned_is_counted(tmp_path: Path) -> None:
    def failed(made: BaseStore[Any]) -> int:
        counts, end = Counter[str](), time.monotonic() + 10
        pins = PinnedPrompts(made, counts)
        pins.request_ended(state(pin=True))
        while not counts and time.monotonic() < end:
            pins.proceed(lambda _: False)
            time.sleep(0.01)
        return counts["failed_pins"]

    with Store(SCHEMA, TierStack(DictTier())) as embedded:
        assert failed(embedded) == 1
    with serving(settings(tmp_path)) as daemon:
        made = store(daemon.settings.socket)
        made.save(prompt(), truth)
    assert failed(made) == 1  # the daemon is gone
    made.close()
