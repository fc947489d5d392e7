"""An interrupt may come anywhere in a call: what the daemon holds for it, and what is counted here, is given back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvweave.server import arena_reads, remote_store
from kvweave.server.arena_reads import fetch_to_arena
from kvweave.server.byte_limiter import ByteLimiter
from kvweave.store.tier_stack import UNLIMITED
from tests.server.models import prompt, serving, settings, store, verify
from tests.store.interrupts import Interrupt, interrupted
from tests.store.models import truth


@pytest.mark.parametrize("where", ["place", "turn"])
def test_an_interrupt_when_the_daemon_has_reserved_leaves_no_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    inbox = 1 << 20 if where == "turn" else 0
    with serving(settings(tmp_path, memory=16 << 20, inbox=inbox)) as daemon:
        client = store(daemon.settings.socket)
        turn, layout = client.client.inbox_turn, client._layout
        with monkeypatch.context() as patch:
            if where == "turn":
                patch.setattr(turn, "hold", interrupted_after(turn.hold))
            else:
                patch.setattr(layout, "job", interrupted_after(layout.job))
            with pytest.raises(Interrupt):
                client.save(prompt(), truth)
        client.report()  # what was posted before is served before
        assert not daemon.state.arena._writing
        assert not client.client.reserving.held_bytes
        assert not client.client.inbox_turn.held_bytes
        assert client.save(prompt(), truth).dropped == 0
        assert client.load(client.lookup(prompt()), verify) == 1024
        client.close()


@pytest.mark.parametrize("call", ["load", "pin"])
def test_an_interrupt_when_the_daemon_has_leased_leaves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with serving(settings(tmp_path)) as daemon:
        client = store(daemon.settings.socket)
        client.save(prompt(), truth)
        hit, module = client.lookup(prompt(), lease=False), arena_reads if call == "load" else remote_store
        with monkeypatch.context() as patch:
            patch.setattr(module, "fetch_to_arena", interrupted_after(fetch_to_arena))
            with pytest.raises(Interrupt):
                client.load(hit, verify) if call == "load" else client.pin(hit)
        assert sum(each.leases for each in client.report().clients) == 0
        assert not client.client.fetching.held_bytes
        client.close()


def test_bytes_are_held_no_longer_than_anybody_knows_of_them() -> None:
    limiter, after = ByteLimiter(), 0

    def hold() -> None:
        with limiter.holding(1, 1, 0.0, UNLIMITED):
            pass

    while interrupted(hold, after):
        gc.collect()
        assert not limiter.held_bytes, after
        after += 1
    assert after > 5


def interrupted_after(call: Callable[..., object]) -> Callable[..., object]:
    """The same call, at whose end there is an interrupt."""

    def interrupting(*args: Any, **how: Any) -> None:
        call(*args, **how)
        raise Interrupt

    return interrupting
