"""A pinned prefix stays until it is unpinned, or its connection ends; a lease does until its time is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.errors import OverLimit, ServerGone
from kvweave.server import Client, Daemon, Disk, Limits, protocol
from tests.server.models import POINTS, prompt, prompt_bytes, serving, settings, store, verify
from tests.store.models import truth

LEASE_S = 0.2


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    wish = settings(tmp_path, memory=4 * prompt_bytes(), lease_s=LEASE_S, limits=Limits(pin_share=0.5))
    with serving(wish) as daemon:
        yield daemon


def flood(daemon: Daemon) -> None:
    """Longer than a lease, and more than there is room for."""
    other = store(daemon.settings.socket)
    until, number = time.monotonic() + 2 * LEASE_S, 100
    while time.monotonic() < until or number < 110:
        other.save(prompt(number), truth, points=POINTS)
        number += 1
    other.close()


def test_what_is_pinned_outlives_leases_and_eviction_until_it_is_unpinned(daemon: Daemon) -> None:
    client = store(daemon.settings.socket)
    client.save(prompt(), truth, points=POINTS)
    pin = client.pin(client.lookup(prompt()))
    assert pin.position == 1024
    flood(daemon)
    assert client.load(client.lookup(prompt()), verify) == 1024  # and a load gives back its own lease alone
    flood(daemon)
    assert client.lookup(prompt()).position == 1024
    client.unpin(pin)
    client.unpin(pin)
    flood(daemon)
    flood(daemon)  # what was hit stays longer than what was not
    assert client.lookup(prompt()).position == 0
    client.close()


def test_pins_end_with_their_connection(daemon: Daemon) -> None:
    client = store(daemon.settings.socket)
    client.save(prompt(), truth, points=POINTS)
    client.pin(client.lookup(prompt()))
    client.client.close()
    flood(daemon)
    assert client.lookup(prompt()).position == 0
    assert not any(each.leased_bytes for each in daemon.report().clients)
    client.close()


def test_no_connection_can_pin_more_than_its_share(daemon: Daemon) -> None:
    client = store(daemon.settings.socket)
    for number in range(3):
        client.save(prompt(number), truth, points=POINTS)
    pins = []
    with pytest.raises(OverLimit, match="would be pinned"):
        for number in range(3):
            pins.append(client.pin(client.lookup(prompt(number))))
    assert pins
    for pin in pins:
        client.unpin(pin)
    time.sleep(2 * LEASE_S)
    assert [each.leases for each in daemon.report().clients] == [0]  # the refused one was given back, too
    client.close()


def test_a_pin_brings_what_is_far(tmp_path: Path) -> None:
    with serving(settings(tmp_path, disk=Disk(tmp_path / "disk", 64 << 20))) as daemon:
        client = store(tmp_path / "kv.sock")
        client.save(prompt(), truth, points=POINTS)
        client.flush()
        daemon.state.arena.clear()
        assert client.pin(client.lookup(prompt())).position == 1024
        assert daemon.state.arena.keys()
        client.close()


def test_unknown_leases_are_not_pinned(daemon: Daemon) -> None:
    client = store(daemon.settings.socket)
    client.save(prompt(), truth, points=POINTS)
    pin = client.pin(client.lookup(prompt()))
    assert client.client.ask(protocol.PinLeases([pin.lease, 999]), protocol.Alive).leases == [pin.lease]
    flood(daemon)
    assert client.lookup(prompt()).position == 1024
    client.close()


def test_a_pin_without_a_daemon_is_an_error(tmp_path: Path) -> None:
    with serving(settings(tmp_path)):
        client = store(Client(tmp_path / "kv.sock", cool_s=0.0))  # type: ignore[arg-type]
        client.save(prompt(), truth, points=POINTS)
        hit = client.lookup(prompt())
    with pytest.raises(ServerGone):
        client.pin(hit)
